"""What ranks tell one another of broadcasts arrives as it was said."""

from __future__ import annotations

import pytest

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._broadcast.decision import decide_broadcasts
from hpdcp._broadcast.terms import BroadcastDecision, BroadcastOptions, BroadcastRequest, KnownGroup
from hpdcp._format.columns import ChunkTable, EntryTable
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan

EMPTY = Metadata(EntryTable.from_entries([]), ChunkTable.from_boxes([], []))


def _request(**changed: object) -> BroadcastRequest:
    fields = {
        "mode": "auto",
        "batch_bytes": 6,
        "groups": (KnownGroup((0, 2), "a group", ("cpu", "cuda")),),
        "host": "one kernel",
        "shares_page_cache": True,
        "device_kind": "cuda",
        "device_backend": "nccl",
    }
    return BroadcastRequest(**{**fields, **changed})  # type: ignore[arg-type]


def test_a_request_arrives_as_it_was_made() -> None:
    request = _request()
    assert BroadcastRequest.from_bytes(request.to_bytes()) == request
    made = BroadcastOptions("always").request(shares_page_cache=False)
    assert BroadcastRequest.from_bytes(made.to_bytes()) == made


def test_a_decision_arrives_as_it_was_made() -> None:
    for decision in (BroadcastDecision(), BroadcastDecision(((0, 1), (1, 2)), ((0, 1, 2),), "cuda:nccl", True, False)):
        assert BroadcastDecision.from_bytes(decision.to_bytes()) == decision


@pytest.mark.parametrize("mode", ["never", "auto", "always"])
def test_every_rank_gets_a_decision_whatever_it_is(mode: str) -> None:
    plans = decide_broadcasts([LoadPlan.build([])] * 2, [_request(mode=mode, groups=())] * 2, EMPTY)
    assert [BroadcastDecision.from_bytes(plan.broadcast_terms).new_groups for plan in plans] == [(), ()]


@pytest.mark.parametrize(
    ("other", "named"),
    [({"mode": "never"}, "broadcast_replicated_tensors"), ({"batch_bytes": 7}, "broadcast_batch_bytes")],
)
def test_ranks_that_ask_for_different_things_are_refused(other: dict[str, object], named: str) -> None:
    requests = [_request(), _request(), _request(**other)]
    with pytest.raises(InvalidArgumentError, match=rf"different {named}: rank 0 means .*, rank 2 means"):
        decide_broadcasts([LoadPlan.build([])] * 3, requests, EMPTY)
