"""Everything that several ranks do with a checkpoint, on a folder and on S3; or, from two ranks up, on the store under
`HPDCP_TEST_STORE_URL`.

The store is looked at through its backend only, so that the same cases run on a folder, over NFS and on S3.
`HPDCP_TEST_STORE_BROADCASTS` is `1` where ranks of one host should read what they share once, `0` where each should
read for itself. `HPDCP_TEST_STORE_METER` is the endpoint of a proxy that counts one load. `HPDCP_TEST_PATIENCE` says
how many times slower than usual the machine may be.
"""

from __future__ import annotations

import functools
import os
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import AsyncSaveResponse, PerRank, StandardLoadPlanner, StandardSavePlanner
from hpdcp._base import config
from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    HpdcpError,
    PeerLostError,
    RankFailedError,
    StorageError,
    WorkerDiedError,
)
from hpdcp._files import registry
from hpdcp._format.file_names import mailbox_folder
from hpdcp._format.metadata import Metadata
from hpdcp._plan.plan_cache import PLANS
from hpdcp._plan.save_plan import WriteItem
from tests.services import s3
from tests.support.job import Job
from tests.support.layouts import Layout, differing, local_of
from tests.support.planners import ToldPlanner
from tests.support.s3 import S3Server
from tests.support.stores import LOADED_ONCE, LOADED_ONCE_BYTES, layouts_of, s3_environment, tensors_of
from tests.support.workers import kill_worker, workers_of

RANKS = 4

PATIENCE = float(os.environ.get("HPDCP_TEST_PATIENCE", "1"))
SOON = 60.0 * PATIENCE
"""Seconds for what should take one; a worker's start is most of it."""
MODES: dict[str, dict[str, bool]] = {
    "gloo": {"use_gloo": True},
    "mailbox": {"use_gloo": False},
    "apart": {"use_collectives": False},
}
TOGETHER = ("gloo", "mailbox")
KINDS = [os.environ.get("HPDCP_TEST_STORE", "given")] if "HPDCP_TEST_STORE_URL" in os.environ else ["folder", "s3"]


@pytest.fixture(scope="module", autouse=True, params=KINDS)
def kind(request: pytest.FixtureRequest, ranks: Job) -> Iterator[None]:
    """What the store is; no upload to it is left open."""
    yield
    server = s3.address_from_environment()
    if server is not None and ranks.rank == 0:
        assert S3Server.at(server).open_uploads(os.environ["HPDCP_TEST_STORE_URL"]) == []


def rank_environment(request: pytest.FixtureRequest, parameters: Mapping[str, object]) -> dict[str, str]:
    """The store of that kind."""
    if parameters["kind"] == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        return s3_environment(server, _place_on(server)) | {"HPDCP_TEST_STORE": "s3"}
    folders: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    url = str(folders.getbasetemp() / "stores")
    return {"HPDCP_TEST_STORE": "folder", "HPDCP_TEST_STORE_URL": url, "HPDCP_TEST_STORE_BROADCASTS": "0"}


@functools.cache
def _place_on(server: S3Server) -> str:
    return server.new_prefix()


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    PLANS.clear()
    with config.using(mailbox_timeout=SOON / 2):
        yield
    assert hpdcp.wait_for_saves(SOON)
    PLANS.clear()


@pytest.fixture
def url(ranks: Job) -> str:
    """A place of the test's own on the store, where nothing is yet."""
    name: str = ranks.share(uuid.uuid4().hex[:12])
    return f"{os.environ['HPDCP_TEST_STORE_URL']}/{name}"


@pytest.fixture
def store(ranks: Job, url: str) -> Iterator[Backend]:
    """That place as this rank sees it, past everything that hpdcp itself keeps open."""
    with registry.open_backend(registry.resolve_checkpoint_id(url)) as backend:
        yield backend
        ranks.barrier()
        if ranks.rank == 0:
            backend.delete([info.key for info in backend.list_keys(recursive=True)])


def state_of(job: Job, layout: Layout, scale: float = 1.0) -> dict[str, Any]:
    return {
        "model": layout.place_all(job, tensors_of(scale)),
        "norm": torch.arange(9.0) * scale,
        "history": {"losses": [scale, None], ("a", 1): "text"},
        "rng": PerRank({"seed": torch.full((4,), job.rank + scale), "at": [job.rank, scale]}),
    }


def blank_of(job: Job, layout: Layout) -> dict[str, Any]:
    return {
        "model": layout.blank_all(job, tensors_of(1.0)),
        "norm": torch.full((9,), job.sentinel()),
        "history": None,
        "rng": PerRank({"seed": torch.full((4,), job.sentinel()), "at": None}),
    }


def spoil(state: dict[str, Any]) -> None:
    """What training does to a state right after a save, and more."""
    for tensor in (*state["model"].values(), state["norm"], state["rng"].value["seed"]):
        local_of(tensor).fill_(-7)
    state["history"]["losses"].append("later")
    state["rng"].value["at"].clear()


def check(job: Job, url: str, scale: float, layout: Layout, **arguments: Any) -> None:
    """Load under `layout` and compare all of it."""
    target = blank_of(job, layout)
    hpdcp.load(target, checkpoint_id=url, **arguments)
    assert differing(layout.place_all(job, tensors_of(scale)), target["model"]) == []
    assert torch.equal(target["norm"], torch.arange(9.0) * scale)
    assert target["history"] == {"losses": [scale, None], ("a", 1): "text"}
    assert torch.equal(target["rng"].value["seed"], torch.full((4,), job.rank + scale))
    assert target["rng"].value["at"] == [job.rank, scale]


def keys_of(store: Backend) -> set[str]:
    return {info.key for info in store.list_keys(recursive=True)}


def committed(store: Backend) -> Metadata:
    return Metadata.from_bytes(store.read(".metadata"), where=store.url)


def only_what_is_committed(job: Job, store: Backend) -> None:
    """Every rank finds the checkpoint's own files and nothing that a save left behind."""
    job.barrier()
    assert keys_of(store) == {".metadata", ".attempt", *committed(store).files}
    job.barrier()


def landed(job: Job, response: AsyncSaveResponse) -> None:
    """Return once the save is published on all ranks; one that failed fails the test on all."""
    errors = job.errors(lambda: response.get_result(SOON))
    failed = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in enumerate(errors) if error is not None]
    if failed:
        pytest.fail("\n".join(failed))


def fails_on_all(job: Job, action: Callable[[], object], kind: type[HpdcpError]) -> str:
    """The message that every rank's `action` raised, of one class."""
    errors = job.errors(action)
    assert [type(error) for error in errors] == [kind] * job.world_size, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.parametrize("before", ["rows", "twice on one dim", "ragged", "plain"])
def test_what_was_saved_loads_in_its_own_layout_and_in_others(
    ranks: Job, url: str, store: Backend, before: str
) -> None:
    layouts = layouts_of(ranks.world_size)
    metadata = hpdcp.save(state_of(ranks, layouts[before], 3.0), checkpoint_id=url)
    assert set(ranks.gather(metadata.to_bytes())) == {store.read(".metadata")}
    # Every pair is tried on folders; here each layout is saved or loaded, and each kind of read made, at least once.
    for after in layouts if before == "rows" else (before, "columns"):
        check(ranks, url, 3.0, layouts[after])
    only_what_is_committed(ranks, store)


def test_every_rank_sees_a_save_and_each_that_replaces_it_the_moment_the_call_returns(
    ranks: Job, url: str, store: Backend
) -> None:
    """Each looks for itself, and has looked before, so that whatever its client caches could mislead it."""
    layout = layouts_of(ranks.world_size)["rows"]
    with pytest.raises(CheckpointNotFoundError):
        hpdcp.load({"norm": torch.zeros(9)}, checkpoint_id=url, use_collectives=False)
    ranks.barrier()
    files: set[str] = set()
    for turn in (1.0, 2.0, 3.0):
        metadata = hpdcp.save(state_of(ranks, layout, turn), checkpoint_id=url)
        check(ranks, url, turn, layout, use_collectives=False)
        assert files.isdisjoint(metadata.files)
        files = set(metadata.files)
        only_what_is_committed(ranks, store)


def test_another_layout_replaces_a_checkpoint_and_is_what_loads(ranks: Job, url: str, store: Backend) -> None:
    layouts = layouts_of(ranks.world_size)
    hpdcp.save(state_of(ranks, layouts["rows"]) | {"gone": torch.zeros(5)}, checkpoint_id=url)
    hpdcp.save(state_of(ranks, layouts["columns"], 2.0), checkpoint_id=url)
    only_what_is_committed(ranks, store)
    check(ranks, url, 2.0, layouts["replicated rows"])
    assert "gone" not in committed(store).state_dict_metadata


@pytest.mark.parametrize("mode", MODES)
def test_saves_in_the_background_hold_what_was_there_at_the_call(
    ranks: Job, url: str, store: Backend, mode: str
) -> None:
    layouts = layouts_of(ranks.world_size)
    for turn, before in enumerate(("rows", "rows", "ragged"), start=1):
        state = state_of(ranks, layouts[before], float(turn))
        response = hpdcp.async_save(state, checkpoint_id=url, **MODES[mode])
        spoil(state)
        landed(ranks, response)
        check(ranks, url, float(turn), layouts["columns"])
        ranks.barrier()
    assert not [key for key in keys_of(store) if key.startswith(mailbox_folder(""))]
    if mode == "apart":
        assert store.read(f"{ranks.rank}.metadata") == response.get_result().to_bytes()
    else:
        assert store.read(".metadata") == response.get_result().to_bytes()
        only_what_is_committed(ranks, store)


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_save_in_the_background_replaces_one_that_waited_and_the_other_way_round(
    ranks: Job, url: str, store: Backend, mode: str
) -> None:
    layouts = layouts_of(ranks.world_size)
    hpdcp.save(state_of(ranks, layouts["rows"], 1.0), checkpoint_id=url)
    landed(ranks, hpdcp.async_save(state_of(ranks, layouts["columns"], 2.0), checkpoint_id=url, **MODES[mode]))
    check(ranks, url, 2.0, layouts["rows"])
    only_what_is_committed(ranks, store)
    hpdcp.save(state_of(ranks, layouts["rows"], 3.0), checkpoint_id=url)
    check(ranks, url, 3.0, layouts["plain"])
    only_what_is_committed(ranks, store)


def test_a_second_save_of_one_kind_of_state_plans_nothing(ranks: Job, url: str, store: Backend, tmp_path: Path) -> None:
    layouts = layouts_of(ranks.world_size)
    planner = ToldPlanner(tmp_path / "log")
    hpdcp.save(state_of(ranks, layouts["rows"], 1.0), checkpoint_id=f"{url}/1", planner=planner)
    told = planner.told()
    assert told == ["local"] + ["global"] * (ranks.rank == 0)
    hpdcp.save(state_of(ranks, layouts["rows"], 2.0), checkpoint_id=f"{url}/2", planner=planner)
    for number, mode in enumerate(TOGETHER, start=3):
        state = state_of(ranks, layouts["rows"], float(number))
        response = hpdcp.async_save(state, checkpoint_id=f"{url}/{number}", planner=planner, **MODES[mode])
        spoil(state)
        landed(ranks, response)
    assert planner.told() == told
    for number in (1, 2, 3, 4):
        check(ranks, f"{url}/{number}", float(number), layouts["ragged"])


def test_ranks_that_save_apart_load_together_and_apart(ranks: Job, url: str, store: Backend) -> None:
    layouts = layouts_of(ranks.world_size)
    for turn in (1.0, 2.0):
        metadata = hpdcp.save(state_of(ranks, layouts["rows"], turn), checkpoint_id=url, use_collectives=False)
        ranks.barrier()
        assert store.read(f"{ranks.rank}.metadata") == metadata.to_bytes()
        listed = set().union(*ranks.gather(set(metadata.files)))
        assert keys_of(store) == listed | {f"{rank}.metadata" for rank in range(ranks.world_size)}
        for after in ("rows", "columns", "replicated"):
            check(ranks, url, turn, layouts[after])
            check(ranks, url, turn, layouts[after], use_collectives=False)
        ranks.barrier()
    hpdcp.save(state_of(ranks, layouts["columns"], 3.0), checkpoint_id=url)
    check(ranks, url, 3.0, layouts["rows"])
    only_what_is_committed(ranks, store)


def test_a_partial_load_takes_what_is_there_and_names_the_rest(ranks: Job, url: str, store: Backend) -> None:
    layouts = layouts_of(ranks.world_size)
    hpdcp.save(state_of(ranks, layouts["rows"], 2.0), checkpoint_id=url)
    targets: dict[str, Any] = {"model": layouts["columns"].blank_all(ranks, tensors_of(1.0)), "norm": torch.zeros(9)}
    targets["model"].pop("even")
    targets["new"] = torch.full((2,), -7.0)
    planner = StandardLoadPlanner(allow_partial_load=True)
    hpdcp.load(targets, checkpoint_id=url, planner=planner)
    assert planner.not_loaded == ("new",)
    assert targets["new"].tolist() == [-7, -7]
    assert torch.equal(targets["norm"], torch.arange(9.0) * 2)
    expected = layouts["columns"].place_all(ranks, tensors_of(2.0))
    expected.pop("even")
    assert differing(expected, targets["model"]) == []


def test_every_engine_of_the_store_loads_what_any_of_them_saved(ranks: Job, url: str, store: Backend) -> None:
    layouts = layouts_of(ranks.world_size)
    # Settings of the store that must not show in what is stored.
    engines: list[dict[str, Any]] = [{}]
    if url.startswith("s3://"):
        engines = [{"backends": {"s3": {"engine": engine}}} for engine in ("obstore", "botocore")]
    for turn, saving in enumerate(engines, start=1):
        with config.using(**saving):
            hpdcp.save(state_of(ranks, layouts["rows"], float(turn)), checkpoint_id=url)
        for loading in engines:
            with config.using(**loading):
                check(ranks, url, float(turn), layouts["columns"])
        only_what_is_committed(ranks, store)


class _Traffic:
    """Bytes of data files that this rank asked its backend for, beside the first ones, which tell what a file is."""

    def __init__(self, kind: type[Backend], patch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        read_ranges, map_range = kind.read_ranges, kind.map_range

        def counted(backend: Backend, key: str, ranges: Sequence[ByteRange], into: Sequence[memoryview]) -> None:
            self.nbytes += sum(range_.length for range_ in ranges if range_.offset > 0)
            read_ranges(backend, key, ranges, into)

        def mapped(backend: Backend, key: str, range_: ByteRange) -> memoryview | None:
            view = map_range(backend, key, range_)
            self.nbytes += range_.length if view is not None else 0
            return view

        patch.setattr(kind, "read_ranges", counted)
        patch.setattr(kind, "map_range", mapped)


def test_what_all_ranks_want_is_read_once_by_default_where_that_is_cheaper(
    ranks: Job, url: str, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layouts_of(ranks.world_size)["replicated"]
    full = {f"layer{n}": torch.arange(4096.0) + n for n in range(8)}
    once = sum(tensor.nbytes for tensor in full.values())
    hpdcp.save(layout.place_all(ranks, full), checkpoint_id=url)
    traffic = _Traffic(type(store), monkeypatch)

    def read(**arguments: Any) -> int:
        traffic.nbytes = 0
        targets = layout.blank_all(ranks, full)
        hpdcp.load(targets, checkpoint_id=url, **arguments)
        assert differing(layout.place_all(ranks, full), targets) == []
        return sum(ranks.gather(traffic.nbytes))

    each = once * ranks.world_size
    assert read() == (once if os.environ["HPDCP_TEST_STORE_BROADCASTS"] == "1" else each)
    assert read(broadcast_replicated_tensors=True) == once
    assert read(broadcast_replicated_tensors=False) == each
    assert read(use_collectives=False) == each


def test_a_replicated_model_loaded_once_where_requests_are_counted(ranks: Job) -> None:
    """Whoever started the ranks may have put a meter before the store, which sees one save and one load."""
    meter = os.environ.get("HPDCP_TEST_STORE_METER")
    options = {"backends": {"s3": {"storage_options": {"endpoint_url": meter}}}} if meter else {}
    url = f"{os.environ['HPDCP_TEST_STORE_URL']}/{LOADED_ONCE}"
    layout = layouts_of(ranks.world_size)["replicated"]
    full = {f"layer{n}": torch.arange(LOADED_ONCE_BYTES / 16) + n for n in range(4)}
    targets = layout.blank_all(ranks, full)
    with config.using(**options):
        hpdcp.save(layout.place_all(ranks, full), checkpoint_id=url)
        hpdcp.load(targets, checkpoint_id=url)
    assert differing(layout.place_all(ranks, full), targets) == []


class _BreaksOnTheLastRank(StandardSavePlanner):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self._breaks = breaks

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        if self._breaks and item.index.fqn.endswith("half"):
            raise ZeroDivisionError("the device fell off the bus")
        return super().get_tensor(item)


def test_a_rank_that_breaks_while_it_writes_fails_the_save_on_all(ranks: Job, url: str, store: Backend) -> None:
    rows = layouts_of(ranks.world_size)["rows"]
    hpdcp.save(state_of(ranks, rows, 1.0), checkpoint_id=url)
    last = ranks.rank == ranks.world_size - 1
    planner = _BreaksOnTheLastRank(last)

    def save() -> None:
        hpdcp.save(state_of(ranks, rows, 2.0), checkpoint_id=url, planner=planner)

    text = fails_on_all(ranks, save, RankFailedError)
    assert f"rank {ranks.world_size - 1}: ZeroDivisionError: the device fell off the bus" in text
    check(ranks, url, 1.0, rows)
    only_what_is_committed(ranks, store)


def test_a_rank_whose_store_fails_fails_the_save_and_the_load_on_all(
    ranks: Job, url: str, store: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = layouts_of(ranks.world_size)["rows"]
    last = ranks.rank == ranks.world_size - 1
    hpdcp.save(state_of(ranks, rows, 1.0), checkpoint_id=url)

    def refuse(backend: Backend, key: str, *_: object, **__: object) -> None:
        raise StorageError(f"cannot move {key!r}: the cable is cut")

    def fails(*methods: str, action: Callable[[], object]) -> None:
        with monkeypatch.context() as patched:
            for method in methods if last else ():
                patched.setattr(type(store), method, refuse)
            text = fails_on_all(ranks, action, StorageError)
        assert f"rank {ranks.world_size - 1}: cannot move" in text

    fails("write", action=lambda: hpdcp.save(state_of(ranks, rows, 2.0), checkpoint_id=url))
    fails("read_ranges", "map_range", action=lambda: hpdcp.load(blank_of(ranks, rows), checkpoint_id=url))
    check(ranks, url, 1.0, rows)
    only_what_is_committed(ranks, store)


def test_a_worker_killed_while_its_peers_wait_for_it_in_the_mailbox_fails_the_save_on_all(
    ranks: Job, url: str, store: Backend
) -> None:
    rows = layouts_of(ranks.world_size)["rows"]
    last = ranks.rank == ranks.world_size - 1
    landed(ranks, hpdcp.async_save(state_of(ranks, rows, 1.0), checkpoint_id=url))
    if last:
        workers_of()[0].send_signal(signal.SIGSTOP)
    ranks.barrier()
    response = hpdcp.async_save(state_of(ranks, rows, 2.0), checkpoint_id=url)
    ranks.barrier()
    if last:
        kill_worker()
    errors = ranks.errors(lambda: response.get_result(SOON))
    expected = [PeerLostError] * (ranks.world_size - 1) + [WorkerDiedError]
    assert [type(error) for error in errors] == expected, errors
    ranks.barrier()
    check(ranks, url, 1.0, rows)
    landed(ranks, hpdcp.async_save(state_of(ranks, rows, 3.0), checkpoint_id=url))
    check(ranks, url, 3.0, rows)
    only_what_is_committed(ranks, store)
