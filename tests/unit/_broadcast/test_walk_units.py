"""Which broadcasts carry which boxes: the same on all members, in one order; and reading ahead of them."""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import PeerLostError
from hpdcp._broadcast import _units
from hpdcp._broadcast._read_ahead import READ_AHEAD, ReadAhead
from hpdcp._broadcast._units import STATUS_BYTES, Unit, transport_dtype, units_of
from hpdcp._broadcast.groups import broadcast_groups_for_load
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.shared_boxes import BroadcastInfo, Group, SharedBox


def _box(number: int, count: int, group: Group = (0, 1), reader_rank: int = 0, dtype: str = "float32") -> SharedBox:
    index = MetadataIndex(f"{number:04d}", (0,), (count,))
    return SharedBox(index, (0,), (count,), dtype, BroadcastInfo(group, reader_rank, transport_dtype(dtype), True))


def _named(units: Sequence[Unit]) -> list[list[str]]:
    return [[box.index.fqn for box in unit.boxes] for unit in units]


def test_without_batches_each_box_goes_by_itself() -> None:
    boxes = [_box(n, 8) for n in range(4)]
    units = units_of(boxes, 0)
    assert _named(units) == [["0000"], ["0001"], ["0002"], ["0003"]]
    assert not any(unit.batch for unit in units)


def test_small_boxes_of_one_group_reader_rank_and_dtype_go_together_up_to_the_limit() -> None:
    boxes = [_box(0, 8), _box(1, 8, reader_rank=1), _box(2, 8), _box(3, 8, dtype="int32"), _box(4, 8), _box(5, 8)]
    units = units_of(boxes, 96)
    assert _named(units) == [["0000", "0002", "0004"], ["0001"], ["0003"], ["0005"]]
    assert [unit.nbytes for unit in units] == [96, 32, 32, 32]
    assert all(unit.batch for unit in units)


def test_a_box_as_large_as_the_limit_goes_by_itself_and_leaves_the_open_batch_open() -> None:
    units = units_of([_box(0, 4), _box(1, 16), _box(2, 4)], 64)
    assert _named(units) == [["0000", "0002"], ["0001"]]
    assert [unit.batch for unit in units] == [True, False]


def test_dtypes_that_travel_as_bytes_are_not_mixed() -> None:
    units = units_of([_box(0, 3, dtype="int16"), _box(1, 3, dtype="bool"), _box(2, 3, dtype="int16")], 100)
    assert _named(units) == [["0000", "0002"], ["0001"]]
    assert {unit.transport for unit in units} == {"uint8"}


def test_a_reader_rank_says_whether_it_failed_after_so_many_bytes_of_single_boxes() -> None:
    large = STATUS_BYTES // 4 // 2
    boxes = [_box(0, large), _box(1, large, reader_rank=1), _box(2, large), _box(3, 1), _box(4, large, group=(0, 2))]
    units = units_of(boxes, 0)
    assert _named(units) == [["0000"], ["0001"], ["0002"], [], ["0003"], ["0004"]]
    assert (units[3].group, units[3].reader_rank, units[3].transport) == ((0, 1), 0, "uint8")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_member_of_a_group_forms_the_same_broadcasts_whatever_else_it_walks(data: st.DataObject) -> None:
    groups = [(0, 1), (0, 2), (1, 2), (0, 1, 2), (1, 2, 3), (0, 3)]
    boxes = []
    for number in range(data.draw(st.integers(0, 40))):
        group = data.draw(st.sampled_from(groups))
        dtype = data.draw(st.sampled_from(["float32", "int16", "int8"]))
        boxes.append(_box(number, data.draw(st.integers(1, 40)), group, data.draw(st.sampled_from(group)), dtype))
    batch_bytes = data.draw(st.sampled_from([0, 16, 64, 1000]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_units, "STATUS_BYTES", data.draw(st.sampled_from([32, 100, 1 << 20])))
        walks = [units_of([box for box in boxes if rank in box.info.group], batch_bytes) for rank in range(4)]
        everything = units_of(boxes, batch_bytes)
    for rank, units in enumerate(walks):
        assert units == [unit for unit in everything if rank in unit.group]


def test_what_a_process_group_sends_as_it_is_and_what_as_bytes() -> None:
    assert [transport_dtype(name) for name in ("float32", "bfloat16", "int64", "uint8")] == [
        "float32",
        "bfloat16",
        "int64",
        "uint8",
    ]
    assert {transport_dtype(n) for n in ("int16", "uint16", "uint64", "float8_e4m3fn", "bool", "complex64")} == {
        "uint8"
    }


_SETTING: contextvars.ContextVar[str] = contextvars.ContextVar("_SETTING", default="outside")


@pytest.mark.parametrize("threads", [1, 3])
def test_only_so_many_units_are_read_and_not_taken_and_all_come_in_order(threads: int) -> None:
    units = units_of([_box(n, 8) for n in range(10)], 0)
    read: list[int] = []
    most = READ_AHEAD + threads - 1
    _SETTING.set("inside")

    def load(unit: Unit) -> str:  # what is read is of no concern here
        assert threading.current_thread() is not threading.main_thread()
        assert _SETTING.get() == "inside"
        read.append(1)
        time.sleep(0.01 * (len(read) % 3))
        return unit.boxes[0].index.fqn

    ahead = ReadAhead(units, load, threads=threads)  # type: ignore[arg-type]
    for taken in range(10):
        deadline = time.monotonic() + 5
        while len(read) < min(10, taken + most) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)
        assert len(read) == min(10, taken + most)
        assert ahead.next() == f"{taken:04d}"
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hpdcp-read-ahead"]


def test_units_are_read_at_the_same_time_by_several_threads() -> None:
    met = threading.Barrier(3)

    def load(unit: Unit) -> str:
        met.wait(timeout=30)
        return unit.boxes[0].index.fqn

    ahead = ReadAhead(units_of([_box(n, 8) for n in range(6)], 0), load, threads=3)  # type: ignore[arg-type]
    assert [ahead.next() for _ in range(6)] == [f"{n:04d}" for n in range(6)]
    ahead.close()


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_walk_that_is_given_up_leaves_no_thread(taken: int, threads: int) -> None:
    units = units_of([_box(n, 8) for n in range(10)], 0)
    ahead = ReadAhead(units, lambda unit: unit, threads=threads)  # type: ignore[arg-type,return-value]
    for _ in range(taken):
        ahead.next()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hpdcp-read-ahead"]


def test_nothing_to_read_starts_no_thread() -> None:
    before = threading.active_count()
    ahead = ReadAhead([], lambda unit: pytest.fail("nothing is to be read"), threads=4)
    assert threading.active_count() == before
    ahead.close()


def test_groups_made_before_one_that_fails_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Group] = []

    def make(ranks: list[int], **_: object) -> Group:
        if ranks == [1, 2]:
            raise RuntimeError("Connect timeout")
        alive.append(tuple(ranks))
        return tuple(ranks)

    monkeypatch.setattr(torch.distributed, "new_group", make)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", alive.remove)
    with (
        pytest.raises(PeerLostError, match=r"making a process group of the ranks \(1, 2\)"),
        broadcast_groups_for_load([(0, 1), (1, 2)], {}, me=1, timeout=timedelta(seconds=1)),
    ):
        pytest.fail("there are no groups to use")
    assert alive == []


def test_groups_are_made_in_order_and_kept_by_their_members_only(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, Group]] = []

    def make(ranks: list[int], **_: object) -> Group:
        steps.append(("make", tuple(ranks)))
        return tuple(ranks)

    monkeypatch.setattr(torch.distributed, "new_group", make)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda group: steps.append(("destroy", group)))
    given_group: Group = (0, 1, 2, 3)
    new = [(0, 2), (0, 1, 6, 7), (1, 3)]
    with broadcast_groups_for_load(new, {given_group: given_group}, me=0, timeout=timedelta(seconds=1)) as groups:  # type: ignore[dict-item]
        assert set(groups) == {given_group, (0, 2), (0, 1, 6, 7)}
    assert steps == [
        ("make", (0, 2)),
        ("make", (0, 1, 6, 7)),
        ("make", (1, 3)),
        ("destroy", (0, 1, 6, 7)),
        ("destroy", (0, 2)),
    ]
