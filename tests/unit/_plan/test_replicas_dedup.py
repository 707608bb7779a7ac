"""Who writes what several ranks hold, worked out from their plans alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import StateDictError
from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import MetadataIndex, StorageInfo
from hpdcp._plan.replicas import drop_duplicates, merge_rank_metadata
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tensor(fqn: str, shape: tuple[int, ...], dtype: str = "float32") -> Entry:
    return Entry(fqn, f'["{fqn}"]', EntryKind.TENSOR, dtype, shape)


def item(fqn: str, box: Box, nbytes: int | None = None, owner: int | None = None) -> WriteItem:
    volume = int(np.prod(box[1], dtype=np.int64))
    index = MetadataIndex(fqn, box[0], box[1], owner)
    return WriteItem(index, EntryKind.TENSOR, volume * 4 if nbytes is None else nbytes)


def whole(fqn: str, elements: int) -> tuple[Entry, WriteItem]:
    return tensor(fqn, (elements,)), item(fqn, ((0,), (elements,)))


def plan(*pairs: tuple[Entry, WriteItem | None]) -> SavePlan:
    entries = list(dict.fromkeys(entry for entry, _ in pairs))
    return SavePlan.build(entries, [write for _, write in pairs if write is not None])


def writers(written: Sequence[SavePlan]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, part in enumerate(written):
        for write in part.items:
            found.setdefault(write.index.fqn, []).append(rank)
    return found


def test_a_box_that_one_rank_holds_is_its_own_and_one_that_all_hold_is_written_once() -> None:
    plans = [plan(whole("shared", 10), whole(f"own{rank}", 5)) for rank in range(3)]
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    found = writers(written)
    assert found.pop("shared") in ([0], [1], [2])
    assert found == {"own0": [0], "own1": [1], "own2": [2]}
    assert list(metadata.entries.fqns) == ["own0", "own1", "own2", "shared"]
    assert metadata.world_size == 3


def test_what_is_unique_counts_before_anything_shared_is_given_away() -> None:
    """Rank 0 has much of its own, so every shared box goes to rank 1, though rank 0 comes first."""
    shared = [whole(f"s{i}", 10) for i in range(5)]
    plans = [plan(*shared, whole("own", 1000)), plan(*shared)]
    written, _ = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert all(ranks == [1] for fqn, ranks in writers(written).items() if fqn != "own")


def test_shared_boxes_go_largest_first_to_the_rank_with_the_fewest_bytes() -> None:
    sizes = {"a": 10, "b": 70, "c": 30, "d": 60, "e": 20, "f": 50}
    shared = [whole(name, size) for name, size in sizes.items()]
    written, _ = drop_duplicates([plan(*shared)] * 2, remove_redundancy=True, to_minimum_rank=False)
    # 70 | 60, 50 | 70+30, 20 | ... by hand: b→0, d→1, f→1, c→0, e→0, a→1
    assert writers(written) == {"b": [0], "c": [0], "e": [0], "d": [1], "f": [1], "a": [1]}


def test_bytes_are_those_of_the_chunk_and_not_of_the_whole_tensor() -> None:
    """Two ranks hold a thin slice of a huge tensor; that must not count as the huge tensor."""
    huge = tensor("huge", (1000, 1000))
    slices = [(huge, item("huge", ((row, 0), (1, 1000)))) for row in range(1000)]
    shared = whole("shared", 900)
    plans = [plan(slices[0], shared), plan(*slices[1:3]), plan(*slices[3:], shared)]
    written, _ = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert writers(written)["shared"] == [0]


def test_the_lowest_rank_writes_when_asked() -> None:
    shared = [whole(f"s{i}", 10) for i in range(4)]
    plans = [plan(), plan(*shared), plan(*shared)]
    written, _ = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=True)
    assert set(map(tuple, writers(written).values())) == {(1,)}


def test_every_holder_writes_its_copy_when_redundancy_is_kept() -> None:
    plans = [plan(whole("s", 10))] * 3
    written, metadata = drop_duplicates(plans, remove_redundancy=False, to_minimum_rank=False)
    assert writers(written) == {"s": [0, 1, 2]}
    assert len(metadata.chunks) == 3


def test_state_of_each_rank_s_own_is_never_given_to_another() -> None:
    plans = []
    for rank in range(3):
        entry = Entry("rng", '["rng"]', EntryKind.TENSOR, "uint8", (8,), owner=rank)
        plans.append(plan((entry, item("rng", ((0,), (8,)), 8, owner=rank))))
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=True)
    assert writers(written) == {"rng": [0, 1, 2]}
    assert metadata.entries.owners.tolist() == [0, 1, 2]


def test_the_answer_does_not_depend_on_the_order_of_the_items() -> None:
    chance = random.Random(4)
    pairs = [whole(f"s{i}", chance.randrange(1, 50)) for i in range(30)]
    expected: dict[str, list[int]] | None = None
    for _ in range(5):
        plans = []
        for _ in range(4):
            chance.shuffle(pairs)
            plans.append(plan(*pairs))
        written, _ = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
        assert expected is None or writers(written) == expected
        expected = writers(written)


def test_no_rank_writes_more_than_its_share_and_the_largest_box() -> None:
    chance = random.Random(8)
    sizes = [chance.randrange(1, 200) for _ in range(60)]
    pairs = [whole(f"s{i:02}", size) for i, size in enumerate(sizes)]
    written, _ = drop_duplicates([plan(*pairs)] * 4, remove_redundancy=True, to_minimum_rank=False)
    loads = [int(part.nbytes.sum()) for part in written]
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) - min(loads) <= 4 * max(sizes)


def disagreeing() -> list[tuple[str, list[tuple[Entry, WriteItem | None]]]]:
    value = Entry("k", '["k"]', EntryKind.OBJECT)
    write_value = WriteItem(MetadataIndex("k"), EntryKind.OBJECT, 3)
    box = ((0,), (4,))
    return [
        ("float64", [(tensor("k", (4,)), item("k", box)), (tensor("k", (4,), "float64"), item("k", box, 32))]),
        (r"\[8\]", [(tensor("k", (4,)), item("k", box)), (tensor("k", (8,)), item("k", ((0,), (8,))))]),
        ("a Python value", [(tensor("k", (4,)), item("k", box)), (value, write_value)]),
    ]


@pytest.mark.parametrize(("named", "pairs"), disagreeing(), ids=["dtype", "shape", "kind"])
@pytest.mark.parametrize("turned", [False, True])
def test_ranks_that_mean_different_things_by_one_key_are_refused_with_both_named(
    named: str, pairs: list[tuple[Entry, WriteItem | None]], turned: bool
) -> None:
    plans = [plan(pair) for pair in (reversed(pairs) if turned else pairs)]
    with pytest.raises(StateDictError, match=named) as caught:
        drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert "'k'" in str(caught.value) and "rank 0" in str(caught.value) and "rank 1" in str(caught.value)


def test_a_rank_without_any_element_may_not_know_the_dtype() -> None:
    plans = [
        plan((tensor("k", (4,), "float32"), None)),
        plan((tensor("k", (4,), "bfloat16"), item("k", ((0,), (4,)), 8))),
    ]
    _, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert metadata.entries[0].dtype == "bfloat16"


def test_a_tensor_without_elements_is_on_record_without_chunks() -> None:
    _, metadata = drop_duplicates(
        [plan((tensor("e", (0, 3)), None))] * 2, remove_redundancy=True, to_minimum_rank=False
    )
    assert metadata.entries[0] == tensor("e", (0, 3)) and len(metadata.chunks) == 0


HOLES: dict[str, tuple[tuple[int, ...], list[Box], tuple[int, ...]]] = {
    "nothing": ((4,), [], (0,)),
    "the end": ((4,), [((0,), (3,))], (3,)),
    "the middle": ((9,), [((0,), (3,)), ((6,), (3,))], (3,)),
    "a corner": ((2, 2), [((0, 0), (1, 2)), ((1, 0), (1, 1))], (1, 1)),
    "projections cover": ((2, 2), [((0, 0), (1, 1)), ((1, 1), (1, 1))], (0, 1)),
    "overlap of the same volume": ((4,), [((0,), (2,)), ((1,), (2,))], (3,)),
    "overlap of the same volume in two dimensions": ((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 2))], (0, 3)),
}


@pytest.mark.parametrize("case", HOLES)
def test_a_hole_is_refused_with_the_key_and_where_it_begins(case: str) -> None:
    shape, boxes, begins = HOLES[case]
    entry = tensor("k", shape)
    plans = [plan((entry, None)), *(plan((entry, item("k", box))) for box in boxes)]
    with pytest.raises(StateDictError, match="'k'") as caught:
        drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert f"lacks {list(begins)}" in str(caught.value)


def test_a_rank_s_own_part_may_have_holes() -> None:
    pair = (tensor("k", (4,)), item("k", ((0,), (2,))))
    drop_duplicates([plan(pair)], remove_redundancy=True, to_minimum_rank=False, whole=False)


def test_boxes_that_overlap_and_cover_everything_are_refused_unless_they_are_one_box() -> None:
    entry = tensor("k", (4, 6))
    boxes = [((0, 0), (3, 6)), ((1, 0), (3, 6)), ((0, 0), (4, 1)), ((0, 0), (4, 6))]
    for some in itertools.chain(itertools.combinations(boxes, 3), [boxes]):
        plans = [plan((entry, item("k", box))) for box in some]
        with pytest.raises(StateDictError, match=r"'k' of shape \[4, 6\]: \[\d, 0\] to \[4, \d\] and |'k' of shape"):
            drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    drop_duplicates([plan((entry, item("k", boxes[3])))] * 3, remove_redundancy=True, to_minimum_rank=False)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_boxes_are_accepted_exactly_where_they_hold_every_element_once(data: st.DataObject) -> None:
    """Against counting every element, for cells of a grid of which some are taken out, moved or made larger."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    boxes: list[Box] = [
        (tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        for cell in itertools.product(*([*itertools.pairwise(along)] for along in cuts))
    ]
    for _ in range(data.draw(st.integers(0, 2))):
        number = data.draw(st.integers(0, len(boxes) - 1))
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(data.draw(st.integers(1, size - low)) for low, size in zip(offsets, shape, strict=True))
        boxes[number] = (offsets, sizes)
    counts = np.zeros(shape, dtype=np.int64)
    for offsets, sizes in set(boxes):
        counts[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))] += 1
    plans = [plan((tensor("k", shape), item("k", box))) for box in boxes]
    if (counts == 1).all():
        drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    else:
        with pytest.raises(StateDictError, match="lacks" if (counts == 0).any() else "two different shards"):
            drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)


def test_an_overlap_is_found_far_out_and_among_many_axes() -> None:
    far = 1 << 58
    for shape, boxes in (
        ((far + 4,), [((0,), (far,)), ((far - 1,), (5,))]),
        ((2,) * 40, [((0,) * 40, (1, *(2,) * 39)), ((0,) * 40, (2,) * 40)]),
    ):
        plans = [plan((tensor("k", shape), item("k", box))) for box in boxes]
        with pytest.raises(StateDictError, match="two different shards"):
            drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)


def test_boxes_that_ranks_saved_alone_and_that_overlap_are_told_when_they_are_put_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = []
    for name, box in (("f", ((0,), (5,))), ("g", ((3,), (5,)))):
        entry, write = tensor("k", (8,)), item("k", box)
        kept = plan((entry, write))
        _, metadata = drop_duplicates([kept], remove_redundancy=True, to_minimum_rank=False, whole=False)
        results = WriteResults.build([WriteResult(StorageInfo(name, 0, 20, (7,)))], [FileRecord(name, 20, 0)])
        parts.append(metadata.with_storage(results.table, {}))
    assert len(merge_rank_metadata(parts).chunks) == 2
    assert "'k' of shape [8]: [0] to [5] and [3] to [8]" in caplog.text


def test_a_grid_with_one_box_gone_is_refused_whichever_it_is() -> None:
    entry = tensor("k", (6, 6))
    grid: list[Box] = [((a, b), (2, 3)) for a in (0, 2, 4) for b in (0, 3)]
    drop_duplicates([plan((entry, item("k", box))) for box in grid], remove_redundancy=True, to_minimum_rank=False)
    for gone in grid:
        rest = [plan((entry, item("k", box))) for box in grid if box != gone]
        with pytest.raises(StateDictError, match=rf"lacks \[{gone[0][0]}, {gone[0][1]}\]"):
            drop_duplicates(rest, remove_redundancy=True, to_minimum_rank=False)


def tied(fqn: str, target: str, shape: tuple[int, ...] = (4,)) -> tuple[Entry, None]:
    return Entry(fqn, f'["{fqn}"]', EntryKind.ALIAS, "float32", shape, target=target), None


def test_names_tied_on_all_ranks_are_stored_once() -> None:
    plans = [plan(whole("a", 4), tied("b", "a"))] * 2
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert list(writers(written)) == ["a"]
    assert metadata.entries[1].kind is EntryKind.ALIAS and metadata.entries[1].target == "a"
    assert list(metadata.chunk_rows(1)) == list(metadata.chunk_rows(0))


@pytest.mark.parametrize("turned", [False, True])
def test_a_name_tied_on_some_ranks_only_stores_its_own_bytes(turned: bool) -> None:
    plans = [plan(whole("a", 4), tied("b", "a")), plan(whole("a", 4), whole("b", 4))]
    if turned:
        plans.reverse()
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert {fqn: len(ranks) for fqn, ranks in writers(written).items()} == {"a": 1, "b": 1}
    assert metadata.entries[1].kind is EntryKind.TENSOR and metadata.entries[1].target == ""


def test_a_name_tied_to_different_names_stores_its_own_bytes() -> None:
    plans = [
        plan(whole("a", 4), whole("b", 4), tied("c", "a")),
        plan(whole("a", 4), whole("b", 4), tied("c", "b")),
    ]
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    assert {fqn: len(ranks) for fqn, ranks in writers(written).items()} == {"a": 1, "b": 1, "c": 1}
    assert metadata.entries[2].kind is EntryKind.TENSOR


def test_a_chain_of_ties_across_ranks_ends_in_stored_bytes() -> None:
    """Rank 0 ties b to a, rank 1 ties c to b: no name may point at a name that is itself tied."""
    plans = [plan(whole("a", 4), tied("b", "a"), whole("c", 4)), plan(whole("a", 4), whole("b", 4), tied("c", "b"))]
    _, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    for row in range(len(metadata.entries)):
        stored = metadata.resolve(row)
        assert metadata.entries[stored].kind is EntryKind.TENSOR and len(metadata.chunk_rows(row)) == 1
