"""A job's state dict, in all the forms people have it, saved and loaded in place by four ranks."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import hpdcp
from hpdcp import PerRank, StandardLoadPlanner
from hpdcp._base.errors import (
    DtypeMismatchError,
    HpdcpError,
    MissingKeysError,
    ReplicaMismatchError,
    StateDictError,
    UnsupportedTypeError,
    WorldSizeError,
)
from tests.support.data_files import without_attempt
from tests.support.job import Job
from tests.support.layouts import (
    CHUNKED,
    FSDP_TP,
    PLAIN,
    RAGGED,
    TP2,
    TP4,
    differing,
    local_of,
    sample_tensors,
)

RANKS = 4


class Counter:
    """State in an object, as a data loader or a scheduler keeps it."""

    def __init__(self, count: int, weights: torch.Tensor) -> None:
        self.count = count
        self.weights = weights
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.loads += 1


def _job_state(job: Job, *, filled: bool) -> dict[Any, Any]:
    """One of everything; not `filled`: targets that hold nothing of it, yet have places for all its tensors."""
    tensors = sample_tensors()

    def tensor(layout: Any) -> dict[str, torch.Tensor]:
        placed: dict[str, torch.Tensor] = (layout.place_all if filled else layout.blank_all)(job, tensors)
        return placed

    def full(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32) if filled else torch.full((len(values),), job.sentinel())

    mine = 10.0 * job.rank
    return {
        "model": {"tp": tensor(TP4), "fsdp.tp": tensor(FSDP_TP), "chunked": tensor(CHUNKED)},
        "ragged": tensor(RAGGED),
        "plain": tensor(PLAIN),
        "optimizer": {
            "state": {0: {"step": 3.0 if filled else -1.0, "exp_avg": full([1, 2])}, 1: {"exp_avg": full([3])}},
            "param_groups": [{"lr": 0.1 if filled else 0.0, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "counter": Counter(7 if filled else 0, full([4, 5, 6])),
        "list": [full([7]), "text" if filled else "", (full([8, 9]), None)],
        ("a", 1): "a key that is a tuple" if filled else "",
        5: {"an int key": filled, "5": full([5])},
        "empty": {"dict": {}, "list": [], "tuple": ()} if filled else {"dict": {}, "list": [0], "tuple": (0,)},
        "numpy": {"array": np.arange(6).reshape(2, 3) if filled else None, "scalar": np.float32(1.5) if filled else 0},
        "step": 3 if filled else None,
        "ordered": OrderedDict(a=1) if filled else 0,
        "rng": PerRank(
            {"python": random.Random(job.rank).getstate() if filled else None, "torch": full([mine, mine + 1])}
        ),
        "loader": PerRank({"position": job.rank * 100 if filled else -1, "shards": [job.rank] if filled else []}),
    }


def _flat(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value of the state dict with its path and, beside containers, their types."""
    if isinstance(state, PerRank):
        yield from _flat(state.value, path)
    elif isinstance(state, Counter):
        yield from _flat(state.state_dict(), path)
    elif isinstance(state, (dict, list, tuple)):
        yield path, (type(state), list(state) if isinstance(state, dict) else len(state))
        items = state.items() if isinstance(state, dict) else enumerate(state)
        for key, value in items:
            yield from _flat(value, (*path, (type(key), key)))
    else:
        yield path, state


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(local_of(a), local_of(b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def _unequal(expected: Any, found: Any) -> list[Any]:
    wanted, got = dict(_flat(expected)), dict(_flat(found))
    return [path for path in wanted.keys() | got.keys() if path not in got or not _same(wanted.get(path), got[path])]


def test_a_whole_job_comes_back_in_place_with_its_keys_types_and_nesting(ranks: Job, folder: Path) -> None:
    metadata = hpdcp.save(_job_state(ranks, filled=True), checkpoint_id=folder)
    targets = _job_state(ranks, filled=False)
    memory = {path: local_of(value).data_ptr() for path, value in _flat(targets) if isinstance(value, torch.Tensor)}
    counter = targets["counter"]
    assert hpdcp.load(targets, checkpoint_id=folder) is None
    assert _unequal(_job_state(ranks, filled=True), targets) == []
    after = {path: local_of(value).data_ptr() for path, value in _flat(targets) if isinstance(value, torch.Tensor)}
    assert after == memory
    assert targets["counter"] is counter
    assert counter.loads == 1
    assert metadata.world_size == 4


def test_every_rank_returns_the_same_metadata_and_the_file_says_the_same(ranks: Job, folder: Path) -> None:
    metadata = hpdcp.save(_job_state(ranks, filled=True), checkpoint_id=str(folder))
    published = (folder / ".metadata").read_bytes()
    assert set(ranks.gather(metadata.to_bytes())) == {published}
    assert sorted(metadata.files) == sorted(p.name for p in folder.iterdir() if p.name.startswith("_rank"))


def test_a_replicated_tensor_is_stored_once_and_its_bytes_are_spread_over_the_ranks(ranks: Job, folder: Path) -> None:
    state = {f"layer{n}": torch.full((1000,), float(n)) for n in range(8)}
    metadata = hpdcp.save(state, checkpoint_id=folder)
    keys = [metadata.storage_info(row).key for row in range(len(metadata.chunks))]
    assert len(keys) == 8
    assert sorted(without_attempt(keys)) == sorted([f"_rank{rank}_.safetensors" for rank in range(4)] * 2)


def test_replicas_that_differ_are_refused_before_the_commit_and_named(ranks: Job, folder: Path) -> None:
    hpdcp.save({"same": torch.zeros(3)}, checkpoint_id=folder)
    before = (folder / ".metadata").read_bytes()
    state = {"same": torch.ones(3), "seed": torch.tensor([ranks.rank // 3]), "name": f"rank {ranks.rank // 3}"}
    with pytest.raises(ReplicaMismatchError, match="PerRank") as caught:
        hpdcp.save(state, checkpoint_id=folder)
    assert "'seed'" in str(caught.value)
    assert "'name'" in str(caught.value)
    assert "'same'" not in str(caught.value)
    ranks.barrier()
    assert (folder / ".metadata").read_bytes() == before
    target = {"same": torch.full((3,), ranks.sentinel())}
    hpdcp.load(target, checkpoint_id=folder)
    assert target["same"].tolist() == [0, 0, 0]


def test_replicas_may_differ_where_the_check_is_off(ranks: Job, folder: Path) -> None:
    with hpdcp.config.using(check_replicas="off"):
        hpdcp.save({"seed": ranks.rank}, checkpoint_id=folder)
    target = {"seed": -1}
    hpdcp.load(target, checkpoint_id=folder)
    assert ranks.gather(target["seed"]) == [ranks.share(target["seed"])] * 4


def test_ranks_that_disagree_on_a_shape_are_told_so(ranks: Job, folder: Path) -> None:
    with pytest.raises(
        StateDictError, match=r"'w' is a float32 tensor of global shape \[3\] on rank 0 and .*\[4\] on rank 2"
    ):
        hpdcp.save({"w": torch.zeros(4 if ranks.rank == 2 else 3)}, checkpoint_id=folder)
    assert not (folder / ".metadata").exists()


def test_per_rank_state_of_every_rank_is_handed_over_at_another_world_size(ranks: Job, folder: Path) -> None:
    state = {
        "loader": PerRank({"at": ranks.rank, "cache": torch.full((2,), float(ranks.rank)), "pair": (ranks.rank, {})})
    }
    hpdcp.save(state, checkpoint_id=folder)
    alone = {"loader": PerRank({"at": -1, "cache": torch.zeros(2), "pair": None})}
    with pytest.raises(WorldSizeError, match=r"stored by 4 ranks, wanted by 1.*PerRank\.all"):
        hpdcp.load(alone, checkpoint_id=folder, no_dist=True)
    assert alone["loader"].value["at"] == -1
    everyone = {"loader": PerRank.all()}
    hpdcp.load(everyone, checkpoint_id=folder, no_dist=True)
    values = everyone["loader"].value
    assert [value["at"] for value in values] == [0, 1, 2, 3]
    assert [value["cache"].tolist() for value in values] == [[rank, rank] for rank in range(4)]
    assert [value["pair"] for value in values] == [(rank, {}) for rank in range(4)]
    together = {"loader": PerRank.all()}
    hpdcp.load(together, checkpoint_id=folder)
    assert [value["at"] for value in together["loader"].value] == [0, 1, 2, 3]


def test_per_rank_state_need_not_be_on_every_rank_or_of_one_shape(ranks: Job, folder: Path) -> None:
    state: dict[str, Any] = {} if ranks.rank == 1 else {"own": PerRank(torch.full((ranks.rank,), 1.0 + ranks.rank))}
    hpdcp.save(state, checkpoint_id=folder)
    everyone = {"own": PerRank.all()}
    hpdcp.load(everyone, checkpoint_id=folder)
    assert everyone["own"].value[1] is None
    assert everyone["own"].value[0].shape == (0,)
    assert everyone["own"].value[3].tolist() == [4, 4, 4]


def test_tied_tensors_are_stored_once_stay_tied_and_either_name_loads_alone(ranks: Job, folder: Path) -> None:
    weight = TP4.place(ranks, sample_tensors()["even"])
    metadata = hpdcp.save({"embedding": weight, "head": weight}, checkpoint_id=folder)
    assert len(metadata.chunks) == 4
    expected = {"head": weight}
    target = {"head": FSDP_TP.blank_all(ranks, {"head": sample_tensors()["even"]})["head"]}
    hpdcp.load(target, checkpoint_id=folder)
    assert differing({"head": FSDP_TP.place(ranks, sample_tensors()["even"])}, target) == []
    tied = TP4.blank_all(ranks, {"w": sample_tensors()["even"]})["w"]
    both = {"embedding": tied, "head": tied}
    hpdcp.load(both, checkpoint_id=folder)
    assert both["embedding"] is both["head"]
    assert differing(expected, both) == []


def test_all_ranks_are_told_every_key_that_does_not_fit_and_no_target_was_touched(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    hpdcp.save({"model": TP4.place_all(ranks, tensors)}, checkpoint_id=folder)
    targets: dict[str, Any] = {"model": TP4.blank_all(ranks, tensors), "step": -1}
    if ranks.rank == 2:
        targets["model"] |= {"evn": torch.full((2,), -5.0), "other": {"x": torch.zeros(1)}}
        targets["model"]["vector"] = torch.full((11,), -5.0)
    errors = ranks.errors(lambda: hpdcp.load(targets, checkpoint_id=folder))
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    text = texts.pop()
    assert all(isinstance(error, HpdcpError) for error in errors)
    for named in (
        "model.evn",
        "did you mean 'model.even'",
        "model.other.x",
        "model.vector",
        "step",
        "rank 2",
        "[12]",
        "[11]",
    ):
        assert named in text, text
    for name, tensor in targets["model"].items():
        if name not in ("evn", "other"):
            assert bool((local_of(tensor) < 0).all()), name
    assert targets["step"] == -1


def test_a_key_missing_on_one_rank_alone_keeps_its_class_on_all(ranks: Job, folder: Path) -> None:
    hpdcp.save({"a": 1}, checkpoint_id=folder)
    wanted = {"a": 0, "b": 0} if ranks.rank == 3 else {"a": 0}
    with pytest.raises(MissingKeysError, match=r"rank 3: .*'b'"):
        hpdcp.load(wanted, checkpoint_id=folder)
    assert wanted["a"] == 0


def test_a_partial_load_takes_what_is_there_and_reports_the_rest_rank_by_rank(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    hpdcp.save(TP4.place_all(ranks, tensors), checkpoint_id=folder)
    targets: dict[str, Any] = TP2.blank_all(ranks, tensors)
    extra = f"new on rank {ranks.rank}"
    targets[extra] = torch.full((2,), -7.0)
    planner = StandardLoadPlanner(allow_partial_load=True)
    hpdcp.load(targets, checkpoint_id=folder, planner=planner)
    assert planner.not_loaded == (extra,)
    assert targets.pop(extra).tolist() == [-7, -7]
    assert differing(TP2.place_all(ranks, tensors), targets) == []


def test_a_cast_warns_once_with_a_count_and_can_be_refused(ranks: Job, folder: Path) -> None:
    tensors = sample_tensors()
    hpdcp.save(TP4.place_all(ranks, tensors), checkpoint_id=folder)
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    targets = FSDP_TP.blank_all(ranks, halves)
    with pytest.raises(DtypeMismatchError, match=r"'vector' \(stored float32, wanted bfloat16\)"):
        hpdcp.load(targets, checkpoint_id=folder, planner=StandardLoadPlanner(allow_dtype_cast=False))
    assert all(bool((local_of(tensor) < 0).all()) for tensor in targets.values())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hpdcp.load(targets, checkpoint_id=folder)
    assert [str(w.message).partition(":")[0] for w in caught] == ["8 tensors are cast to their target's dtype"]
    assert differing(FSDP_TP.place_all(ranks, halves), targets) == []


def test_meta_targets_are_refused_by_name_on_all_ranks(ranks: Job, folder: Path) -> None:
    hpdcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=folder)
    targets = {"a": torch.zeros(2), "b": torch.zeros(2, device="meta" if ranks.rank == 1 else "cpu")}
    with pytest.raises(UnsupportedTypeError, match=r"rank 1: .*b.*meta"):
        hpdcp.load(targets, checkpoint_id=folder)
    assert targets["a"].tolist() == [0, 0]


def test_a_dtensor_target_may_require_grad_and_lie_strided_in_memory(ranks: Job, folder: Path) -> None:
    full = sample_tensors()["even"]
    hpdcp.save({"w": TP4.place(ranks, full)}, checkpoint_id=folder)
    mesh = ranks.mesh(2, 2)
    placed = FSDP_TP.place(ranks, full)
    assert isinstance(placed, DTensor)
    base = torch.full((20, 9), ranks.sentinel(), device=ranks.device)
    rows, columns = placed.to_local().shape
    local = base.t()[1 : 1 + rows, 2 : 2 + columns]
    assert not local.is_contiguous()
    target = torch.nn.Parameter(DTensor.from_local(local, mesh, placed.placements, run_check=False))
    hpdcp.load({"w": target}, checkpoint_id=folder)
    assert target.requires_grad
    assert target.is_leaf
    assert torch.equal(local_of(target), placed.to_local())
    base.t()[1 : 1 + rows, 2 : 2 + columns] = ranks.sentinel()
    assert bool((base == ranks.sentinel()).all()), "something beside the target was written"


def test_a_slice_that_torch_copied_is_refused_and_one_of_the_tensor_s_own_memory_is_filled(
    ranks: Job, folder: Path
) -> None:
    rows, columns = torch.arange(40.0).reshape(8, 5), torch.arange(40.0).reshape(5, 8)
    hpdcp.save({"rows": rows[:6].clone(), "columns": columns[:3].clone()}, checkpoint_id=folder)
    mesh = ranks.mesh(4)

    def blank(full: torch.Tensor, placement: Placement) -> DTensor:
        return distribute_tensor(torch.full_like(full, -1.0, device=ranks.device), mesh, [placement])

    for grad in (False, True):
        big, other = blank(rows, Shard(0)).requires_grad_(grad), blank(columns, Shard(1)).requires_grad_(grad)
        for stray in (big[:6], big.narrow(0, 0, 6), torch.split(big, [6, 2])[0]):
            with pytest.raises(UnsupportedTypeError, match=r"'rows' is a slice or view of a DTensor .* clone\(\)"):
                hpdcp.load({"columns": other[:3], "rows": stray}, checkpoint_id=folder)
            assert bool((local_of(other) == -1).all())
        hpdcp.load({"columns": other[:3]}, checkpoint_id=folder)
        mine = slice(2 * ranks.rank, 2 * ranks.rank + 2)
        assert torch.equal(local_of(other)[:3].cpu(), columns[:3, mine]) and bool((local_of(other)[3:] == -1).all())
    replicated = blank(rows, Replicate())
    hpdcp.load({"rows": replicated[:6]}, checkpoint_id=folder)
    assert torch.equal(local_of(replicated)[:6].cpu(), rows[:6])
    copied = blank(rows, Shard(0))[:6].clone()
    hpdcp.load({"rows": copied}, checkpoint_id=folder)
    assert torch.equal(local_of(copied).cpu(), rows[:6])
