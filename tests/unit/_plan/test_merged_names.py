"""All ranks' names as one table: worked out for the distinct tables among them, with the same answer as one by one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import StateDictError, StorageError
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, group_tables, sort_order
from hpdcp._format.metadata import Metadata, MetadataIndex, StorageInfo
from hpdcp._plan._merged_names import merge_names
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._plan.whole_plan import WholePlan, join_results
from hpdcp._plan.write_results import FileRecord, WriteResult, WriteResults

NAMES = ["a", "b", "a.b", "é", "z\0", "\udc80", "long.name.of.a.layer", "B"]


def shared(fqn: str, kind: EntryKind = EntryKind.TENSOR, target: str = "") -> Entry:
    return Entry(fqn, f'["{fqn}"]', kind, "float32" if kind is not EntryKind.OBJECT else "", (4,), None, target)


def plan(entries: Sequence[Entry]) -> SavePlan:
    items = [
        WriteItem(MetadataIndex(e.fqn, (0,), (4,), e.owner), EntryKind.TENSOR, 16)
        for e in entries
        if e.kind is EntryKind.TENSOR
    ]
    return SavePlan.build(entries, items)


@given(st.lists(st.tuples(st.lists(st.sampled_from(NAMES), unique=True), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=80)
def test_rows_lead_back_to_the_names_they_were_made_of(ranks: list[tuple[list[str], bool]]) -> None:
    plans = [
        plan([*map(shared, names), *([Entry("rng", '["rng"]', EntryKind.TENSOR, "uint8", (4,), rank)] * owns)])
        for rank, (names, owns) in enumerate(ranks)
    ]
    merged = merge_names(plans)
    entries = [merged.entries[row] for row in range(len(merged.entries))]
    expected = {(e.fqn, e.owner) for p in plans for e in (p.entries[row] for row in range(len(p.entries)))}
    keys = [(e.fqn.encode("utf-8", "surrogatepass"), -1 if e.owner is None else e.owner) for e in entries]
    assert keys == sorted(keys)
    assert {(e.fqn, e.owner) for e in entries} == expected
    assert len(entries) == len(expected)
    for given_plan, rows in zip(plans, merged.rows, strict=True):
        given_entries = [given_plan.entries[i] for i in range(len(rows))]
        assert [replace(entries[row], position=0) for row in rows.tolist()] == given_entries


def test_ranks_are_grouped_by_equal_tables_whoever_owns_what_is_per_rank() -> None:
    def table(rank: int, *names: str) -> SavePlan:
        return plan([*map(shared, names), Entry("rng", '["rng"]', EntryKind.TENSOR, "uint8", (4,), rank)])

    plans = [table(0, "a", "b"), table(1, "a", "b"), table(2, "b", "a"), table(3, "a", "b"), table(2, "a", "b")]
    group, first = group_tables([p.entries for p in plans])
    assert group == [0, 0, 1, 0, 2]
    assert first == [0, 2, 4]


def test_a_column_that_runs_into_the_next_is_not_taken_for_another_table() -> None:
    tables = [plan([shared("ab"), shared("c")]).entries, plan([shared("a"), shared("bc")]).entries]
    assert group_tables(tables)[0] == [0, 1]


def test_everybody_that_disagrees_is_named_with_who_holds_what() -> None:
    odd = replace(shared("a"), dtype="float64")
    with pytest.raises(StateDictError, match=r"'a' is a float32 .* on rank 0 and a float64 .* on rank 2"):
        merge_names([plan([shared("a")]), plan([shared("a")]), plan([odd]), plan([odd])])


def test_more_complaints_than_anybody_reads_are_counted() -> None:
    names = [f"n{i:03d}" for i in range(50)]
    plans = [plan([shared(name) for name in names]), plan([replace(shared(name), shape=(4, 1)) for name in names])]
    with pytest.raises(StateDictError, match=r"disagree on 50 keys.*and 30 more"):
        merge_names([plans[0], SavePlan(plans[1].entries, ChunkTable.from_boxes([], []), plans[1].nbytes[:0])])


def test_a_tie_that_not_all_ranks_have_is_undone_where_it_is() -> None:
    apart = plan([shared("head"), shared("embed")])
    tied = plan([shared("embed"), shared("head", EntryKind.ALIAS, "embed")])
    merged = merge_names([tied, apart, tied])
    assert [merged.entries[row].kind for row in range(2)] == [EntryKind.TENSOR] * 2
    assert merged.plans[1] is apart
    assert sorted(merged.sources) == [0, 2]
    for rank in (0, 2):
        assert [item.index.fqn for item in merged.plans[rank].items] == ["embed", "head"]
        assert merged.sources[rank].tolist() == [0, 0]


def test_a_tie_to_a_name_that_nobody_has_is_refused() -> None:
    with pytest.raises(StateDictError, match="'gone'"):
        merge_names([plan([shared("a", EntryKind.ALIAS, "gone")]), plan([shared("a")])])


def test_keys_order_boxes_as_their_coordinates_do() -> None:
    chance = random.Random(7)
    for limit in (3, 1 << 20, 1 << 61):
        boxes = []
        for _ in range(200):
            ndim = chance.choice((0, 1, 3))
            axes = range(ndim)
            boxes.append((tuple(chance.randrange(limit) for _ in axes), tuple(chance.randrange(limit) for _ in axes)))
        entry = [chance.randrange(4) for _ in boxes]
        # Rows of one entry have one number of dimensions, as a tensor has.
        ndims = {e: chance.choice((0, 1, 3)) for e in set(entry)}
        boxes = [((*o, 0, 0, 0)[: ndims[e]], (*s, 1, 1, 1)[: ndims[e]]) for e, (o, s) in zip(entry, boxes, strict=True)]
        table = ChunkTable.from_boxes(entry, boxes)
        order = sort_order(table.sort_keys()).tolist()
        assert order == sorted(range(len(boxes)), key=lambda i: (entry[i], *boxes[i]))


def saved(plans: Sequence[SavePlan], **changes: int) -> tuple[WholePlan, list[WriteResults]]:
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    results = []
    for rank, part in enumerate(written):
        infos = [
            WriteResult(StorageInfo(f"f{rank}", 100 * row, changes.get(item.index.fqn, item.nbytes), (row,)))
            for row, item in enumerate(part.items)
        ]
        results.append(WriteResults.build(infos, [FileRecord(f"f{rank}", 10**6, rank)]))
    return WholePlan.of(metadata, written, plans), results


def test_every_item_s_result_ends_up_beside_its_box() -> None:
    plans = [plan([shared(name) for name in names]) for names in (["b", "a"], ["c", "a", "d"], ["d"])]
    whole, results = saved(plans)
    again = WholePlan.from_bytes(whole.to_bytes())
    for kept in (whole, again):
        storage = join_results(kept, results).table
        metadata = kept.metadata.with_storage(storage, {})
        for rank, part in enumerate(kept.plans({})):
            for row, item in enumerate(part.items):
                found = metadata.find(item.index.fqn)
                assert found is not None
                info = metadata.storage_info(metadata.chunk_rows(found)[0])
                assert (info.key, info.offset) == (f"f{rank}", 100 * row)


def test_results_of_another_length_or_number_publish_nothing() -> None:
    plans = [plan([shared("a"), shared("b")]), plan([shared("a"), shared("c")])]
    whole, results = saved(plans, c=15)
    with pytest.raises(StorageError, match="rank 1 stored 15 bytes of 'c', planned were 16"):
        join_results(whole, results)
    with pytest.raises(StorageError, match="rank 0 reported 0 results"):
        join_results(whole, [results[0].take(np.zeros(0, dtype=np.int64)), results[1]])


def test_an_object_of_a_cached_plan_may_have_any_length_and_a_tensor_may_not() -> None:
    step = Entry("step", '["step"]', EntryKind.OBJECT)
    mixed = SavePlan.build(
        [step, shared("a")],
        [WriteItem(MetadataIndex("step"), EntryKind.OBJECT, 1), *plan([shared("a")]).items],
    )
    whole, longer = saved([mixed], step=2)
    with pytest.raises(StorageError, match="'step'"):
        join_results(whole, longer)
    assert join_results(whole.without_object_lengths(), longer).table.length.tolist() == [16, 2]
    _, shorter = saved([mixed], a=8)
    with pytest.raises(StorageError, match="'a'"):
        join_results(whole.without_object_lengths(), shorter)


def test_plans_that_the_metadata_was_not_made_of_are_refused_before_anything_is_written() -> None:
    plans = [plan([shared("a"), shared("b")])]
    written, metadata = drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False)
    with pytest.raises(StorageError, match="not the plans the metadata was made of"):
        WholePlan.of(metadata, [written[0].select(np.array([0]))], plans)
    lost = Metadata(merge_names([plan([shared("a")])]).entries, metadata.chunks.take(np.array([0])))
    with pytest.raises(StateDictError, match="lost the entry 'b'"):
        WholePlan.of(lost, written, plans)
