"""Checksums of what this rank and others hold, for the coordinator to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._format.checksums import block_checksums
from hpdcp._format.columns import EntryKind
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.replica_checks import ReplicaReport
from hpdcp._plan.save_plan import ComparedBoxes, SavePlan
from hpdcp._state.comparable import comparable

_LONGEST_SHOWN: Final = 2 << 10
_MOST_SHOWN: Final = 16 << 10
"""Bytes of one Python value, and of all, that go with the checksums, so that an error can say how values differ."""


def replica_report(planner: SavePlanner, local: SavePlan, compared: ComparedBoxes | None) -> ReplicaReport:
    """Of the items of `local` those that the coordinator wants to compare: samples, or all bytes."""
    if compared is None or not len(compared.rows):
        return ReplicaReport.empty()
    rows: list[int] = []
    checksums: list[Sequence[int]] = []
    lengths: list[int] = []
    values: dict[int, bytes] = {}
    left = _MOST_SHOWN
    whole = compared.rows[compared.in_full]
    for row in (int(whole[number]) for wave in planner.waves(local.select(whole)) for number in wave.tolist()):
        item = local.item(row)
        rows.append(row)
        if item.kind is EntryKind.OBJECT:
            data = planner.get_bytes(item)
            compared_bytes = comparable(data)
            checksums.append(block_checksums([memoryview(compared_bytes)]))
            lengths.append(len(compared_bytes))
            if len(data) <= _LONGEST_SHOWN and len(data) <= left:
                left -= len(data)
                values[row] = data
        else:
            checksums.append(block_checksums(byte_pieces(planner.get_tensor(item), kept=False)))
            lengths.append(item.nbytes)
    in_full = len(rows)
    sampled = compared.rows[~compared.in_full]
    checksums += planner.get_checksums(local.select(sampled))
    rows += sampled.tolist()
    lengths += local.nbytes[sampled].tolist()
    return ReplicaReport.build(rows, checksums, lengths, in_full=in_full, values=values)
