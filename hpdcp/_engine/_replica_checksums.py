"""Checksums of what this rank holds and another one writes, for the coordinator to compare."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpdcp._base.config import ReplicaCheck
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import block_checksums
from hpdcp._format.columns import EntryKind
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.replica_checks import ReplicaReport, left_to_others
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.whole_plan import held_boxes
from hpdcp._state.objects import is_pickled


def replica_report(planner: SavePlanner, local: SavePlan, final: SavePlan, check: ReplicaCheck) -> ReplicaReport:
    """Of the items of `local` that `final` leaves to other ranks, those that `check` asks to compare.

    Pickled objects are left out: equal ones may be pickled to different bytes.
    """
    held = held_boxes(local, final)
    candidates = left_to_others(held, local, final, check)
    rows: list[int] = []
    checksums: list[Sequence[int]] = []
    lengths: list[int] = []
    compared = held.select(np.array(candidates, dtype=np.int64))
    for row in (candidates[number] for wave in planner.waves(compared) for number in wave.tolist()):
        item = held.item(row)
        if item.kind is EntryKind.OBJECT:
            data = planner.get_bytes(item)
            if is_pickled(data):
                continue
            pieces = iter([memoryview(data)])
            lengths.append(len(data))
        else:
            pieces = byte_pieces(planner.get_tensor(item), kept=False)
            lengths.append(item.nbytes)
        rows.append(row)
        checksums.append(block_checksums(pieces))
    return ReplicaReport.build(rows, checksums, lengths)
