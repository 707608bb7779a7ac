"""What the coordinator sends a rank of the global plan of a load, and what is left to read after broadcasts."""

from __future__ import annotations

from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, LoadTarget, ReadItem


def _plan(*names: str) -> LoadPlan:
    indexes = [MetadataIndex(name, (0,), (8,)) for name in names]
    items = [ReadItem(index, row, (0,), (0,), (8,)) for row, index in enumerate(indexes)]
    return LoadPlan.build(items, [LoadTarget(index, "float32", True) for index in indexes])


def test_what_is_only_marked_keeps_its_revision_and_is_sent_without_items() -> None:
    local = _plan("a", "b")
    arrived = LoadPlan.from_bytes(local.to_bytes())
    decided = arrived.with_storage_data({"url": "there"}).with_broadcast_terms(b"terms")
    assert decided.revision == arrived.revision != local.revision
    part = decided.to_part(arrived)
    assert len(part) < len(decided.to_bytes())
    mine = LoadPlan.from_part(part, local)
    assert (mine.items, mine.storage_data, mine.broadcast_terms) == (local.items, {"url": "there"}, b"terms")
    assert mine.revision == local.revision


def test_a_plan_of_other_items_is_sent_whole() -> None:
    local = _plan("a", "b")
    other = _plan("b")
    assert other.revision != local.revision
    assert LoadPlan.from_part(other.to_part(local), local).items == other.items
