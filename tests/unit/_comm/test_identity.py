"""Ids of saves, and how saves of one process are counted."""

from __future__ import annotations

from hpdcp._comm.identity import attempt_id
from hpdcp._files.save_identity import next_ordinal


def test_saves_alone_and_saves_of_all_are_counted_apart() -> None:
    assert [next_ordinal("run of a test", "location", world) for world in (1, 1, 4, 1, 4)] == [1, 2, 1, 3, 2]
    assert attempt_id("location", 1, alone=True) != attempt_id("location", 1, alone=True)
