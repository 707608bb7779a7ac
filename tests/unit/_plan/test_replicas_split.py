"""A box that alone would unbalance the plan is written in parts, by those who hold it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan import replicas
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan, WriteItem

LIMIT = 1000


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SPLIT_BYTES", LIMIT)


def plan(**shapes: tuple[int, ...]) -> SavePlan:
    """A rank that holds these tensors of one byte an element, whole."""
    entries = [Entry(name, f'["{name}"]', EntryKind.TENSOR, "uint8", shape) for name, shape in shapes.items()]
    items = [
        WriteItem(MetadataIndex(name, (0,) * len(shape), shape), EntryKind.TENSOR, int(np.prod(shape)))
        for name, shape in shapes.items()
    ]
    return SavePlan.build(entries, items)


def split(plans: Sequence[SavePlan], *, lowest: bool = False) -> tuple[list[SavePlan], Metadata]:
    return drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=lowest)


def boxes(written: SavePlan, name: str) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(item.index.offsets, item.index.sizes) for item in written.items if item.index.fqn == name]


def test_it_is_split_evenly_by_rows_and_each_holder_writes_one_part() -> None:
    written, metadata = split([plan(big=(4001, 2))] * 4)
    found = sorted(box for part in written for box in boxes(part, "big"))
    assert [offsets for offsets, _ in found] == [(0, 0), (1000, 0), (2000, 0), (3000, 0)]
    assert [sizes for _, sizes in found] == [(1000, 2), (1000, 2), (1000, 2), (1001, 2)]
    assert [len(part) for part in written] == [1] * 4
    assert [metadata.chunks.box(row) for row in range(4)] == found
    assert sum(int(part.nbytes.sum()) for part in written) == 8002


def test_parts_fill_up_those_who_have_less_of_their_own() -> None:
    plans = [plan(big=(3000,), own0=(2000,)), plan(big=(3000,)), plan(big=(3000,), own2=(2500,))]
    written, _ = split(plans)
    assert boxes(written[2], "big") == []
    assert max(int(part.nbytes.sum()) for part in written) <= 3500


def test_one_dimension_of_one_row_is_passed_over() -> None:
    written, _ = split([plan(big=(1, 3000, 2))] * 3)
    assert all(sizes[0] == 1 and sizes[2] == 2 for part in written for _, sizes in boxes(part, "big"))
    assert [len(part) for part in written] == [1, 1, 1]


def test_there_are_no_more_parts_than_rows_or_than_are_worth_it() -> None:
    written, _ = split([plan(big=(2, 5000))] * 4)
    assert sorted(box for part in written for box in boxes(part, "big")) == [((0, 0), (1, 5000)), ((1, 0), (1, 5000))]
    written, _ = split([plan(big=(LIMIT + 1,))] * 8)
    assert sorted(len(part) for part in written) == [0] * 6 + [1] * 2


@pytest.mark.parametrize(
    "plans",
    [
        [plan(big=(LIMIT,))] * 4,
        [plan(a=(1500,), b=(1500,), c=(1500,), d=(1500,))] * 4,
        [plan(big=(9000,)), plan(other=(10,))],
    ],
    ids=["not above the limit", "within everybody's share", "held by one rank"],
)
def test_a_box_is_left_whole_when_it_is(plans: list[SavePlan]) -> None:
    _, metadata = split(plans)
    assert len(metadata.chunks) == len(metadata.entries)


def test_the_lowest_rank_writes_it_whole_when_asked() -> None:
    written, _ = split([plan(big=(9000,))] * 4, lowest=True)
    assert [len(part) for part in written] == [1, 0, 0, 0]


def test_a_part_travels_to_its_rank_with_what_the_others_write() -> None:
    local = [plan(big=(4000,), small=(3,)) for _ in range(4)]
    written, _ = split(local)
    for mine, part in zip(local, written, strict=True):
        again = SavePlan.from_part(part.to_part(mine), mine)
        assert list(again.items) == list(part.items)
