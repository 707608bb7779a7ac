"""Four ranks convert together: each writes a share, all layouts come out whole, and a failure is everybody's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, PeerLostError, StorageError
from hpdcp._convert import _planner
from hpdcp._convert._export import Export
from hpdcp_backends.local import LocalBackend
from tests.support.huggingface import write_shards
from tests.support.job import Job
from tests.support.layouts import LAYOUTS, RAGGED_PAIRS, TP4_COLUMNS, Layout, differing, sample_tensors
from tests.unit._convert.test_round_trips import differing as differing_whole
from tests.unit._convert.test_round_trips import read_folder

RANKS = 4


def exported(src: Path, dst: Path, **options: Any) -> offline_transform.Conversion:
    return offline_transform.convert_dcp_to_huggingface(src, dst, **{"max_shard_size": 200, **options})


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tensors_of_every_layout_become_one_folder_that_all_ranks_write(
    ranks: Job, folder: Path, layout: Layout
) -> None:
    full = sample_tensors()
    hpdcp.save(layout.place_all(ranks, full), checkpoint_id=folder / "dcp")
    written: list[str] = []
    original = LocalBackend.write

    def noted(self: LocalBackend, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        if not exclusive:  # the lease is created so
            written.append(key)
        original(self, key, buffers, size=size, exclusive=exclusive)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalBackend, "write", noted)
        done = exported(folder / "dcp", folder / "hf")
    assert differing_whole(full, read_folder(folder / "hf")) == []
    assert len(done.files) > ranks.world_size
    shares = ranks.gather(written)
    assert all(shares)
    assert sorted(key for share in shares for key in share) == sorted(
        done.files.keys() - {"model.safetensors.index.json"}
    )


@pytest.mark.parametrize("split", [True, False])
def test_a_folder_becomes_a_checkpoint_that_any_layout_loads(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, split: bool
) -> None:
    if split:
        monkeypatch.setattr(_planner, "_LEAST_SHARE", 64)
    full = sample_tensors() | {"large": torch.randn(64, 9, generator=torch.Generator().manual_seed(1))}
    if ranks.rank == 0:
        write_shards(folder / "hf", full, shards=3)
    ranks.barrier()
    told: list[tuple[int, int]] = []
    done = offline_transform.convert_full_checkpoint_to_dcp(
        folder / "hf", folder / "dcp", progress=lambda *so_far: told.append(so_far)
    )
    assert len(done.files) == ranks.world_size
    assert all(done == total for done, total in told[-1:])
    assert sum(ranks.gather(told[-1][0] if told else 0)) == done.nbytes
    for layout in (TP4_COLUMNS, RAGGED_PAIRS):
        targets = layout.blank_all(ranks, full)
        hpdcp.load(targets, checkpoint_id=folder / "dcp")
        assert differing(layout.place_all(ranks, full), targets) == []
    saved = hpdcp.FileSystemReader(folder / "dcp").load_metadata().state_dict_metadata
    assert (len(saved["large"].chunks) > 1) is split  # type: ignore[union-attr]
    exported(folder / "dcp", folder / "back")
    assert differing_whole(full, read_folder(folder / "back")) == []


def test_a_trained_fsdp_model_leaves_as_weights_alone_in_another_dtype(ranks: Job, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 3))
    for layer in model:
        fully_shard(layer, mesh=ranks.mesh(ranks.world_size))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 1}
    hpdcp.save(state, checkpoint_id=folder / "dcp")
    hpdcp.save(state, checkpoint_id=folder / "apart", use_collectives=False)
    weights = {name: tensor.full_tensor().bfloat16() for name, tensor in model.state_dict().items()}
    for name in ("dcp", "apart"):
        done = exported(folder / name, folder / f"{name}-hf", prefix="model.", dtype="bfloat16")
        assert differing_whole(weights, read_folder(folder / f"{name}-hf")) == []
        assert "optimizer.state.0.exp_avg" in done.skipped
        ranks.barrier()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_write_makes_all_raise_and_nothing_is_left(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    hpdcp.save({f"w{n}": torch.full((40,), float(n)) for n in range(8)}, checkpoint_id=folder / "dcp")
    if ranks.rank == failing:

        def refuse(self: LocalBackend, key: str, buffers: object, *, size: int, exclusive: bool) -> None:
            raise StorageError("no space left here")

        monkeypatch.setattr(LocalBackend, "write", refuse)
    if ranks.rank == 3:
        discard = Export._discard

        def late(self: Export, error: BaseException) -> None:
            time.sleep(0.5)  # by when the coordinator would have released the lease that says whose the files are
            discard(self, error)

        monkeypatch.setattr(Export, "_discard", late)
    with pytest.raises(StorageError, match=rf"rank {failing}: no space left here"):
        exported(folder / "dcp", folder / "hf")
    ranks.barrier()
    assert list((folder / "hf").iterdir()) == []
    ranks.barrier()
    if ranks.rank == 0:
        write_shards(folder / "source", {f"w{n}": torch.full((40,), float(n)) for n in range(8)}, shards=2)
    ranks.barrier()
    with pytest.raises(StorageError, match="no space left here"):
        offline_transform.convert_full_checkpoint_to_dcp(folder / "source", folder / "new")
    ranks.barrier()
    assert {path.name for path in (folder / "new").iterdir()} <= {".attempt"}


@pytest.mark.parametrize("interrupted", [0, 2])
def test_an_interrupt_while_shards_are_written_leaves_nothing(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch, interrupted: int
) -> None:
    hpdcp.save({f"w{n}": torch.full((40,), float(n)) for n in range(8)}, checkpoint_id=folder / "dcp")
    if ranks.rank == interrupted:
        original = LocalBackend.write

        def interrupt(self: LocalBackend, key: str, buffers: Any, *, size: int, exclusive: bool) -> None:
            original(self, key, buffers, size=size, exclusive=exclusive)
            if not exclusive:  # the lease is created so
                raise KeyboardInterrupt

        monkeypatch.setattr(LocalBackend, "write", interrupt)
    with pytest.raises(KeyboardInterrupt if ranks.rank == interrupted else HpdcpError, match=r"^$|KeyboardInterrupt"):
        exported(folder / "dcp", folder / "hf")
    ranks.barrier()
    # Of what the interrupted rank had just written it does not know yet that it has.
    assert len(list((folder / "hf").iterdir())) <= 1


def test_an_export_that_was_published_stays_whole_though_its_coordinator_was_interrupted(
    ranks: Job, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{n}": torch.full((40,), float(n)) for n in range(8)}
    hpdcp.save(state, checkpoint_id=folder / "dcp")

    def interrupt(self: Export) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Export, "_remove_older", interrupt)
    with pytest.raises(PeerLostError if ranks.rank else KeyboardInterrupt):
        exported(folder / "dcp", folder / "hf")
    ranks.barrier()
    assert differing_whole(state, read_folder(folder / "hf")) == []
    ranks.barrier()


def test_ranks_that_were_told_different_things_all_raise(ranks: Job, folder: Path) -> None:
    hpdcp.save({"a": torch.ones(3), "b": torch.ones(3)}, checkpoint_id=folder / "dcp")
    with pytest.raises(InvalidArgumentError, match="given different tensors"):
        exported(folder / "dcp", folder / "hf", exclude=["a"] if ranks.rank == 1 else [])
    with pytest.raises(HpdcpError, match=r"rank 1: no tensor is left"):
        exported(folder / "dcp", folder / "hf", include=["x"] if ranks.rank == 1 else ["a"])
    with pytest.raises(HpdcpError):
        offline_transform.convert_full_checkpoint_to_dcp(folder / "nothing", folder / "new")
    assert not (folder / "hf").exists()


def test_a_file_of_torch_is_shared_out_and_one_rank_may_work_alone(ranks: Job, folder: Path) -> None:
    state = {"model": {f"w{n}": torch.full((40,), float(n)) for n in range(8)}, "step": 3}
    if ranks.rank == 0:
        torch.save(state, folder / "state.pt")
    ranks.barrier()
    done = offline_transform.convert_full_checkpoint_to_dcp(folder / "state.pt", folder / "dcp", "torch")
    assert len([name for name in done.files if name.endswith(".safetensors")]) == ranks.world_size
    full = offline_transform.dcp_to_full_state_dict(folder / "dcp")
    assert full["step"] == 3
    assert differing_whole(state["model"], full["model"]) == []  # type: ignore[arg-type]
    if ranks.rank == 1:
        exported(folder / "dcp", folder / "hf", no_dist=True)
        assert len(read_folder(folder / "hf")) == 8
    offline_transform.full_state_dict_to_dcp_format(state, folder / "again")
    assert offline_transform.dcp_to_full_state_dict(folder / "again")["step"] == 3
