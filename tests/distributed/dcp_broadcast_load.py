"""What several ranks want is read by one of them and broadcast: right values, each byte once, failures on all."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, StandardLoadPlanner
from hpdcp._base import config
from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, InvalidArgumentError, RankFailedError, StorageError
from hpdcp._broadcast import _facts, _stripes, reader_choice
from hpdcp._format.metadata import Metadata
from hpdcp._plan import replicas
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from tests.support.backends import Traffic, registered
from tests.support.job import Job
from tests.support.layouts import (
    CHUNKED,
    CUBE,
    DP2_TP2,
    DP2_TP2_COLUMNS,
    HSDP,
    ODD_RANKS,
    ONE_RANK,
    PLAIN,
    RAGGED_PAIRS,
    REPLICATED,
    TP2,
    TP4,
    Layout,
    differing,
    local_of,
    sample_tensors,
)

RANKS = 4

_SOON = 20.0
"""Seconds; the process group's own timeout, which ends a hang, is three times as long."""
_BATCHES = (0, 200, 6 << 20)
_SHARED = (REPLICATED, DP2_TP2, HSDP, DP2_TP2_COLUMNS, PLAIN, RAGGED_PAIRS, CUBE)
"""Layouts in which every chunk is wanted by at least two ranks."""
_NOT_SHARED = (TP4, TP2, ODD_RANKS, ONE_RANK, CHUNKED)
PAIRS = Layout("pairs of neighbours", (2, 2), (Shard(0), Replicate()))


@pytest.fixture(scope="module", autouse=True)
def _stores() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    """What this rank reads, from a store that is far away."""
    with registered() as counted, config.using(backend="counting"):
        counted.reads.clear()
        yield counted
        counted.fails = None


def _full(job: Job, tensors: Mapping[str, torch.Tensor], layouts: tuple[Layout, ...]) -> dict[str, torch.Tensor]:
    return {f"{layout}/{key}": full for layout in layouts for key, full in layout.place_all(job, tensors).items()}


def _blank(job: Job, tensors: Mapping[str, torch.Tensor], layouts: tuple[Layout, ...]) -> dict[str, torch.Tensor]:
    return {f"{layout}/{key}": blank for layout in layouts for key, blank in layout.blank_all(job, tensors).items()}


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _fails_on_all(job: Job, action: Callable[[], object], kind: type[HpdcpError]) -> str:
    """The message that every rank's `action` raised, of one class, before long."""
    began = time.monotonic()
    errors = job.errors(action)
    assert time.monotonic() - began < _SOON
    assert [type(error) for error in errors] == [kind] * job.world_size, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()


@contextlib.contextmanager
def _new_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The process groups that are made, and a check that they are gone at the end."""
    made: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def noted(ranks: list[int], **options: Any) -> Any:
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    before = set(dist.distributed_c10d._world.pg_map)
    with monkeypatch.context() as patched:
        patched.setattr(dist, "new_group", noted)
        yield made
    assert set(dist.distributed_c10d._world.pg_map) == before


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_every_byte_that_several_ranks_want_is_read_once(
    ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int
) -> None:
    tensors = sample_tensors()
    layouts = _SHARED + _NOT_SHARED
    hpdcp.save(_full(ranks, tensors, layouts), checkpoint_id=folder)
    targets = _blank(ranks, tensors, layouts)
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert differing(_full(ranks, tensors, layouts), targets) == []
    read = ranks.gather(traffic.nbytes)
    # Plain tensors whose rows do not divide are whole on every rank, and so shared as well.
    assert sum(read) == len(layouts) * _nbytes(tensors)
    assert max(read) < sum(read) / 2


def test_without_broadcasts_every_rank_reads_its_own(ranks: Job, folder: Path, traffic: Traffic) -> None:
    tensors = sample_tensors()
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    for settings in ({"broadcast_replicated_tensors": False}, {"use_collectives": False}):
        traffic.reads.clear()
        targets = REPLICATED.blank_all(ranks, tensors)
        hpdcp.load(targets, checkpoint_id=folder, **settings)
        assert differing(REPLICATED.place_all(ranks, tensors), targets) == []
        assert traffic.nbytes == _nbytes(tensors)


def test_ranks_of_one_host_that_share_its_page_cache_read_for_themselves(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample_tensors()
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    with config.using(backend="counting-here"), _new_groups(monkeypatch) as made:
        hpdcp.load(REPLICATED.blank_all(ranks, tensors), checkpoint_id=folder)
        assert sum(ranks.gather(traffic.nbytes)) == 4 * _nbytes(tensors)
        assert made == []
        traffic.reads.clear()
        with config.using(broadcast="always"):
            hpdcp.load(REPLICATED.blank_all(ranks, tensors), checkpoint_id=folder)
        assert sum(ranks.gather(traffic.nbytes)) == _nbytes(tensors)


def test_a_group_that_spans_hosts_broadcasts_and_one_within_a_host_does_not(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"w": torch.arange(64.0).reshape(8, 8)}
    layouts = (DP2_TP2, PAIRS, REPLICATED)
    hpdcp.save(_full(ranks, tensors, layouts), checkpoint_id=folder)
    monkeypatch.setattr(_facts, "host_id", lambda: f"host {ranks.rank // 2}")
    targets = _blank(ranks, tensors, layouts)
    with config.using(backend="counting-here"), _new_groups(monkeypatch) as made:
        hpdcp.load(targets, checkpoint_id=folder)
    assert differing(_full(ranks, tensors, layouts), targets) == []
    assert made == [(0, 2), (1, 3)]
    # Once across hosts, twice within them, once for all ranks.
    assert sum(ranks.gather(traffic.nbytes)) == (1 + 2 + 1) * _nbytes(tensors)


def _odd_targets(job: Job, full: torch.Tensor) -> torch.Tensor:
    """A target for all of `full` that is made differently on every rank."""
    blank = job.sentinel()
    if job.rank == 0:
        return torch.full(full.shape[::-1], blank).t() if full.ndim == 2 else torch.full(full.shape, blank)
    if job.rank == 1:
        return torch.full(full.shape, blank, dtype=torch.float64)
    if job.rank == 2:
        return torch.nn.Parameter(torch.full(full.shape, blank))
    roomy = torch.full((2, *(size + 3 for size in full.shape)), blank)
    for axis, size in enumerate(full.shape):
        roomy = roomy.narrow(axis + 1, 2, size)
    return roomy[1]


@pytest.mark.parametrize("batch_bytes", _BATCHES)
def test_members_whose_targets_differ_are_filled_alike(
    ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int
) -> None:
    tensors = sample_tensors()
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    targets = {key: _odd_targets(ranks, full) for key, full in tensors.items()}
    memory = {key: target.data_ptr() for key, target in targets.items()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert [str(w.message)[:15] for w in caught] == (["8 tensors are c"] if ranks.rank == 1 else [])
    for key, full in tensors.items():
        assert torch.equal(targets[key].detach().to(torch.float32), full), key
        assert targets[key].data_ptr() == memory[key]
        assert targets[key].requires_grad == (ranks.rank == 2)
    assert sum(ranks.gather(traffic.nbytes)) == _nbytes(tensors)


def _all_dtypes() -> list[torch.dtype]:
    found = {value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return sorted((d for d in found if not str(d).startswith(("torch.q", "torch.bits"))), key=str)


@pytest.mark.parametrize("batch_bytes", [0, 6 << 20])
def test_dtypes_that_a_process_group_cannot_send_arrive_bit_for_bit(
    ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int
) -> None:
    def bits(dtype: torch.dtype, first: int) -> torch.Tensor:
        raw = (torch.arange(7 * dtype.itemsize) * 37 + first).to(torch.uint8)
        return raw.view(torch.uint8) % 2 == 0 if dtype is torch.bool else raw.view(dtype)

    dtypes = _all_dtypes()
    assert {torch.int16, torch.uint64, torch.float8_e4m3fn, torch.bool, torch.complex128} <= set(dtypes)
    state = {str(dtype): bits(dtype, number) for number, dtype in enumerate(dtypes)}
    hpdcp.save(state, checkpoint_id=folder)
    targets = {str(dtype): bits(dtype, 200 + ranks.rank) for dtype in dtypes}
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    for key, tensor in state.items():
        assert torch.equal(targets[key].view(torch.uint8), tensor.view(torch.uint8)), key
    assert sum(ranks.gather(traffic.nbytes)) == sum(tensor.nbytes for tensor in state.values())


def test_given_groups_are_used_and_left_alone_and_the_missing_ones_made(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample_tensors()
    layouts = (DP2_TP2, PAIRS, REPLICATED)
    hpdcp.save(_full(ranks, tensors, layouts), checkpoint_id=folder)
    given = {members: dist.new_group(list(members)) for members in ((0, 2), (2, 3))}
    expected = _full(ranks, tensors, layouts)

    def made_for(groups: Mapping[tuple[int, ...], Any]) -> list[tuple[int, ...]]:
        targets = _blank(ranks, tensors, layouts)
        with _new_groups(monkeypatch) as made:
            hpdcp.load(targets, checkpoint_id=folder, broadcast_groups=groups)
        assert differing(expected, targets) == []
        return made

    assert made_for({}) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    # As torch hands them out: a stand-in where this rank is no member.
    assert made_for(given) == [(0, 1), (1, 3)]
    assert made_for({members[::-1]: group for members, group in given.items()}) == [(0, 1), (1, 3)]
    assert made_for({k: v for k, v in given.items() if ranks.rank in k}) == [(0, 1), (1, 3)]
    # Given by one of its members only, a group is of no use.
    assert made_for({(0, 2): given[0, 2]} if ranks.rank == 0 else {}) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    for members, group in given.items():
        if ranks.rank in members:
            number = torch.tensor([ranks.rank])
            dist.all_reduce(number, group=group)
            assert int(number) == sum(members)
            dist.destroy_process_group(group)


def test_a_group_of_all_ranks_that_only_some_were_given_is_not_used(ranks: Job, folder: Path, traffic: Traffic) -> None:
    tensors = sample_tensors()
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    everybody = dist.new_group([0, 1, 2, 3])
    other = dist.new_group([0, 1, 2, 3])
    key = (0, 1, 2, 3)
    for given in (
        {key: everybody},
        {key: everybody} if ranks.rank == 1 else {},
        {key: (everybody, other)[ranks.rank % 2]},
    ):
        targets = REPLICATED.blank_all(ranks, tensors)
        began = time.monotonic()
        hpdcp.load(targets, checkpoint_id=folder, broadcast_groups=given)
        assert time.monotonic() - began < _SOON
        assert differing(REPLICATED.place_all(ranks, tensors), targets) == []
    dist.destroy_process_group(everybody)
    dist.destroy_process_group(other)


def test_a_group_that_is_not_of_its_ranks_is_refused_on_all(ranks: Job, folder: Path) -> None:
    hpdcp.save({"a": 1}, checkpoint_id=folder)
    pair = dist.new_group([0, 1])
    groups = {(0, 1, 2): pair} if ranks.rank == 0 else {}
    text = _fails_on_all(
        ranks, lambda: hpdcp.load({"a": 0}, checkpoint_id=folder, broadcast_groups=groups), InvalidArgumentError
    )
    assert "(0, 1, 2)" in text and "(0, 1)" in text and "rank 0" in text
    if ranks.rank < 2:
        dist.destroy_process_group(pair)


def test_of_too_many_new_groups_the_smallest_read_for_themselves(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = torch.arange(640.0).reshape(8, 80), torch.arange(64.0).reshape(8, 8)

    def state(place: Callable[[Layout, torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        kinds = {"small": (PAIRS, small), "large": (DP2_TP2, large), "everybody": (REPLICATED, small)}
        return {key: place(*kind) for key, kind in kinds.items()}

    expected = state(lambda layout, full: layout.place(ranks, full))
    hpdcp.save(expected, checkpoint_id=folder)
    targets = state(lambda layout, full: layout.blank_all(ranks, {"": full})[""])
    monkeypatch.setattr(reader_choice, "MOST_NEW_GROUPS", 2)
    with _new_groups(monkeypatch) as made:
        hpdcp.load(targets, checkpoint_id=folder)
    assert made == [(0, 2), (1, 3)]
    assert differing(expected, targets) == []
    assert sum(ranks.gather(traffic.nbytes)) == large.nbytes + 2 * small.nbytes + small.nbytes


@pytest.mark.parametrize("batch_bytes", [0, 1000])
def test_a_large_shard_is_read_in_parts_by_its_members(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    tensors = {"embedding": torch.arange(4096.0).reshape(64, 64), "long row": torch.arange(4096.0).reshape(1, 4096)}
    hpdcp.save(TP4.place_all(ranks, tensors), checkpoint_id=folder)
    targets: dict[str, torch.Tensor] = REPLICATED.blank_all(ranks, tensors)
    if ranks.rank == 2:
        targets["embedding"] = torch.full((64, 64), ranks.sentinel()).t()
    monkeypatch.setattr(_stripes, "STRIPE_BYTES", 4096)
    hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    for key, full in tensors.items():
        assert torch.equal(local_of(targets[key]), full), key
    read = ranks.gather(traffic.nbytes)
    assert sum(read) == _nbytes(tensors)
    assert max(read) == min(read)


def test_names_that_were_tied_when_saved_are_read_once_for_all_that_want_one(
    ranks: Job, folder: Path, traffic: Traffic
) -> None:
    weight = torch.arange(32.0)
    hpdcp.save({"embed": weight, "head": weight}, checkpoint_id=folder)
    wanted = ("embed",) if ranks.rank < 2 else ("head",) if ranks.rank == 2 else ("head", "embed")
    targets = {name: torch.full((32,), ranks.sentinel()) for name in wanted}
    hpdcp.load(targets, checkpoint_id=folder)
    assert all(torch.equal(target, weight) for target in targets.values())
    # The last rank wants it twice, in two places; that is one more read, of its own.
    assert sum(ranks.gather(traffic.nbytes)) == 2 * weight.nbytes


def _without_second_half(folder: Path, fqn: str) -> Metadata:
    """The metadata of the folder, as if only the first half of a tensor's rows were stored."""
    metadata = Metadata.from_bytes((folder / ".metadata").read_bytes(), where="the test's own save")
    row = metadata.chunk_rows(metadata.rows_of(fqn)[0])[0]
    sizes, length = metadata.chunks.sizes.copy(), metadata.storage.length.copy()
    sizes[int(metadata.chunks.ends[row]) - len(metadata.chunks.box(row)[1])] //= 2
    length[row] //= 2
    return replace(
        metadata, chunks=replace(metadata.chunks, sizes=sizes), storage=replace(metadata.storage, length=length)
    )


def test_a_hole_in_what_several_ranks_want_stays_as_each_of_them_had_it(
    ranks: Job, folder: Path, traffic: Traffic
) -> None:
    full = torch.arange(32.0).reshape(8, 4)
    hpdcp.save({"w": full, "b": torch.ones(4)}, checkpoint_id=folder)
    if ranks.rank == 0:
        (folder / ".metadata").write_bytes(_without_second_half(folder, "w").to_bytes())
    ranks.barrier()
    targets = {"w": torch.full((8, 4), ranks.sentinel()), "b": torch.zeros(4)}
    planner = StandardLoadPlanner(allow_partial_load=True)
    with config.using(verify="never"):
        hpdcp.load(targets, checkpoint_id=folder, planner=planner)
    assert planner.not_loaded == ("w",)
    assert torch.equal(targets["w"][:4], full[:4])
    assert bool((targets["w"][4:] == ranks.sentinel()).all())
    assert targets["b"].tolist() == [1] * 4


@pytest.mark.parametrize("batch_bytes", [0, 6 << 20])
def test_boxes_that_overlap_on_storage_fill_what_is_shared(
    ranks: Job, folder: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    # No save writes such boxes any more; what was written by earlier versions is still read.
    monkeypatch.setattr(replicas, "check_exact_cover", lambda *_: None)
    full = torch.arange(48.0).reshape(12, 4)
    start, stop = ((0, 6), (0, 8), (8, 12), (6, 12))[ranks.rank]
    mine = full[start:stop].clone()
    setattr(mine, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata((start, 0), (stop - start, 4)), (12, 4)))
    hpdcp.save({"w": mine}, checkpoint_id=folder)
    target = torch.full((12, 4), ranks.sentinel())
    hpdcp.load({"w": target}, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)
    assert torch.equal(target, full)


@pytest.mark.parametrize(
    "odd",
    [
        {"broadcast_batch_bytes": 100},
        {"broadcast_batch_bytes": -1},
        {"broadcast_replicated_tensors": False},
        {"broadcast_replicated_tensors": False, "broadcast_groups": {}},
        {"broadcast_groups": {"0,1": None}},
    ],
    ids=str,
)
def test_arguments_that_differ_on_one_rank_are_refused_on_all(ranks: Job, folder: Path, odd: dict[str, Any]) -> None:
    tensors = sample_tensors()
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    targets = REPLICATED.blank_all(ranks, tensors)
    usual = {"broadcast_replicated_tensors": True}
    arguments = usual | odd if ranks.rank == 2 else usual
    if odd.keys() == {"broadcast_groups"} and ranks.rank == 2:
        arguments = odd
    text = _fails_on_all(ranks, lambda: hpdcp.load(targets, checkpoint_id=folder, **arguments), InvalidArgumentError)
    assert "rank 2" in text
    assert "broadcast_" in text
    assert all(bool((local_of(target) == ranks.sentinel()).all()) for target in targets.values())


def _extent(folder: Path, fqn: str) -> tuple[str, int]:
    """(file, first byte) of a tensor that is stored in one piece."""
    metadata = Metadata.from_bytes((folder / ".metadata").read_bytes(), where="the test's own save")
    info = metadata.storage_info(metadata.chunk_rows(metadata.rows_of(fqn)[0])[0])
    return info.key, info.offset


def _numbered(count: int) -> dict[str, torch.Tensor]:
    return {f"layer{number:02d}": torch.full((64,), float(number)) for number in range(count)}


@pytest.mark.parametrize("batch_bytes", [0, 1024, 6 << 20])
@pytest.mark.parametrize("broken", ["layer00", "layer11", "layer23"])
def test_a_source_that_cannot_read_makes_every_rank_raise(
    ranks: Job, folder: Path, traffic: Traffic, batch_bytes: int, broken: str
) -> None:
    tensors = _numbered(24)
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    key, offset = _extent(folder, broken)
    traffic.fails = lambda read, range_: read == key and range_.offset <= offset < range_.stop
    targets = REPLICATED.blank_all(ranks, tensors)

    def load() -> None:
        hpdcp.load(targets, checkpoint_id=folder, broadcast_batch_bytes=batch_bytes)

    text = _fails_on_all(ranks, load, StorageError)
    assert "failed on 1 of 4 ranks" in text
    assert f"cannot read {key!r} at {offset}: the cable is cut" in text
    assert "undefined" in text
    traffic.fails = None
    load()
    assert differing(REPLICATED.place_all(ranks, tensors), targets) == []


class _Breaks(StandardLoadPlanner):
    """Raises in one of its methods, for one tensor."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def _maybe(self, method: str, fqn: str = "layer07") -> None:
        if method == self._method and fqn == "layer07":
            raise ZeroDivisionError(f"cannot {method}")

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        self._maybe("finalize_plan")
        return super().finalize_plan(plan)

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        self._maybe("acquire_tensor", item.dest_index.fqn)
        found = super().acquire_tensor(item)
        return found[1:] if self._method == "give another shape" and item.dest_index.fqn == "layer07" else found

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        self._maybe("apply_tensor", item.dest_index.fqn)


@pytest.mark.parametrize("batch_bytes", [0, 6 << 20])
@pytest.mark.parametrize("method", ["finalize_plan", "acquire_tensor", "apply_tensor", "give another shape"])
def test_a_rank_that_cannot_take_what_it_is_sent_makes_every_rank_raise(
    ranks: Job, folder: Path, traffic: Traffic, method: str, batch_bytes: int
) -> None:
    tensors = _numbered(24)
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    targets = REPLICATED.blank_all(ranks, tensors)
    planner = _Breaks(method if ranks.rank == 3 else "nothing")

    def load() -> None:
        hpdcp.load(targets, checkpoint_id=folder, planner=planner, broadcast_batch_bytes=batch_bytes)

    if method == "give another shape":
        text = _fails_on_all(ranks, load, InvalidArgumentError)
        assert "'layer07'" in text and "[63]" in text and "[64]" in text
    else:
        text = _fails_on_all(ranks, load, RankFailedError)
        assert f"rank 3: ZeroDivisionError: cannot {method}" in text


def test_checksums_are_compared_where_a_block_of_the_program_asks_for_it(
    ranks: Job, folder: Path, traffic: Traffic
) -> None:
    tensors = _numbered(8)
    hpdcp.save(REPLICATED.place_all(ranks, tensors), checkpoint_id=folder)
    key, offset = _extent(folder, "layer05")
    if ranks.rank == 0:
        with (folder / key).open("r+b") as file:
            file.seek(offset + 8)
            file.write(b"\xff\xff")
    ranks.barrier()

    def load() -> None:
        hpdcp.load(REPLICATED.blank_all(ranks, tensors), checkpoint_id=folder, broadcast_replicated_tensors=True)

    with config.using(backend="local"):
        load()
        with config.using(verify="always"):
            assert "'layer05'" in _fails_on_all(ranks, load, CorruptCheckpointError)
    with config.using(verify="never"):
        load()
    assert "'layer05'" in _fails_on_all(ranks, load, CorruptCheckpointError)


def test_a_sub_mesh_shares_among_its_own_ranks(ranks: Job, folder: Path, traffic: Traffic) -> None:
    full = torch.arange(60.0).reshape(12, 5)
    both = Layout("whole on ranks 1 and 3", (2,), (Replicate(),), ranks=(1, 3))
    hpdcp.save({"w": TP4.place(ranks, full), "rng": hpdcp.PerRank(torch.full((4,), ranks.rank))}, checkpoint_id=folder)
    targets = {**both.blank_all(ranks, {"w": full}), "rng": hpdcp.PerRank(torch.zeros(4, dtype=torch.int64))}
    hpdcp.load(targets, checkpoint_id=folder)
    assert isinstance(targets["w"], DTensor)
    if ranks.rank in (1, 3):
        assert torch.equal(local_of(targets["w"]), full)
    assert targets["rng"].value.tolist() == [ranks.rank] * 4
    read = ranks.gather(traffic.nbytes)
    own = math.prod((4, 8))
    assert sum(read) == full.nbytes + 4 * own
    assert (read[0], read[2]) == (own, own)
