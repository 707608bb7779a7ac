"""Whether what a rank leaves to others to write is written, and is what this rank holds.

A rank reports checksums of what it holds and did not write; the coordinator compares them with what was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.config import ReplicaCheck
from hpdcp._base.errors import ReplicaMismatchError, StateDictError
from hpdcp._format.columns import I64, column, ends_of, starts_of, take_runs
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata, StorageTable
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.whole_plan import WholePlan
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box, intersect
from hpdcp._state.mismatches import listed

SMALL_REPLICA_BYTES: Final = 1 << 20
"""Up to here a replica is compared when `check_replicas` is "small"."""
_MOST_NAMED: Final = 20


def left_to_others(held: SavePlan, local: SavePlan, final: SavePlan, check: ReplicaCheck) -> list[int]:
    """Rows of `held` (a rank's `held_boxes`) that another rank writes and that `check` asks to compare.

    `final` may hold the items in another order, or parts of them: what it has no identical item for was left to others.
    A box that its holders write a part each of comes as those parts.
    """
    if check == "off" or len(local) == 0:
        return []
    left = held.entries.owners[held.chunks.entry] < 0
    if check == "small":
        left &= held.nbytes <= SMALL_REPLICA_BYTES
    rows = final.rows_in(local)
    if rows is not None:
        left[rows] = False
    else:
        left[_boxes_written_in_parts(held, len(local))] = False
        written = {item.index for item in final.items}
        left[[row for row in np.flatnonzero(left).tolist() if held.item(row).index in written]] = False
    found: list[int] = np.flatnonzero(left).tolist()
    return found


def _boxes_written_in_parts(held: SavePlan, count: int) -> list[int]:
    """Which of the first `count` boxes the boxes after them are parts of."""
    rows: set[int] = set()
    for part in range(count, len(held)):
        inside = held.item(part).index
        for row in np.flatnonzero(held.chunks.entry[:count] == held.chunks.entry[part]).tolist():
            offsets, sizes = held.chunks.box(row)
            box = Box(offsets, sizes)
            if intersect(box, Box(inside.offsets, inside.sizes)) is not None:
                rows.add(row)
    return sorted(rows)


class ReplicaReport:
    """What one rank holds and did not write: rows of its `held_boxes`, and the checksums of each."""

    def __init__(self, rows: I64, crc_ends: I64, crcs: npt.NDArray[np.uint32], nbytes: I64) -> None:
        self.rows = rows
        self.crc_ends = crc_ends
        self.crcs = crcs
        self.nbytes = nbytes

    @classmethod
    def build(cls, rows: Sequence[int], checksums: Sequence[Sequence[int]], nbytes: Sequence[int]) -> ReplicaReport:
        return cls(
            np.array(rows, dtype=np.int64),
            ends_of(np.array([len(crcs) for crcs in checksums], dtype=np.int64)),
            np.array([crc for crcs in checksums for crc in crcs], dtype=np.uint32),
            np.array(nbytes, dtype=np.int64),
        )

    def to_bytes(self) -> bytes:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "rows": self.rows,
            "crc.ends": self.crc_ends,
            "crcs": self.crcs,
            "nbytes": self.nbytes,
        }
        return pack_columns(columns, {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ReplicaReport:
        columns, _ = unpack_columns(data, where="a rank's replica report")
        return cls(
            column(columns, "rows", np.int64),
            column(columns, "crc.ends", np.int64),
            column(columns, "crcs", np.uint32),
            column(columns, "nbytes", np.int64),
        )


def check_replicas(whole: WholePlan, storage: StorageTable, reports: Sequence[ReplicaReport]) -> None:
    """Compare what ranks hold with what was written in their stead.

    Args:
        whole: what all ranks wrote.
        storage: where, with the checksums of it.
        reports: every rank's report.

    Raises:
        ReplicaMismatchError: lists the keys that differ.
    """
    stored = np.concatenate([whole.held_by(rank)[report.rows] for rank, report in enumerate(reports)])
    ranks = np.repeat(np.arange(len(reports)), [len(report.rows) for report in reports])
    lengths = np.concatenate([report.nbytes for report in reports])
    crc_lengths = np.concatenate([report.crc_ends - starts_of(report.crc_ends) for report in reports])
    crcs = np.concatenate([report.crcs for report in reports])
    # What a custom planner has others write in other boxes cannot be compared.
    known = np.flatnonzero(stored >= 0)
    wrong = np.zeros(len(stored), dtype=np.bool_)
    wrong[known] = storage.length[stored[known]] != lengths[known]
    same = np.flatnonzero(~wrong & (stored >= 0) & (crc_lengths > 0))
    ends, mine = take_runs(ends_of(crc_lengths), same)
    _, theirs = take_runs(storage.crc_ends, stored[same])
    if len(mine) != len(theirs):
        raise ReplicaMismatchError("a rank reported another number of checksums than there are blocks.")
    if len(same):
        wrong[same] = np.logical_or.reduceat(crcs[mine] != storage.crcs[theirs], starts_of(ends))
    if not wrong.any():
        return
    named: dict[str, list[int]] = {}
    for row in np.flatnonzero(wrong).tolist():
        entry = int(whole.metadata.chunks.entry[int(stored[row])])
        named.setdefault(whole.metadata.entries.fqns[entry], []).append(int(ranks[row]))
    keys = [f"{fqn!r} (rank {', '.join(map(str, who[:4]))})" for fqn, who in named.items()]
    raise ReplicaMismatchError(
        f"{len(named)} keys are not the same on all ranks: {listed(keys, most=_MOST_NAMED, separator='; ')} differ "
        "from the rank that writes them. "
        "Mark state that differs on every rank with PerRank, synchronise what should be equal, or set "
        "check_replicas=off."
    )


def check_left_out(metadata: Metadata, left_out: Sequence[SavePlan | None]) -> None:
    """Raise unless `metadata` has all that ranks left out of their local plans, counting on others to write it.

    Raises:
        StateDictError: names what would be lost.
    """
    lost: list[str] = []
    for rank, plan in enumerate(left_out):
        for item in () if plan is None else plan.items:
            row = metadata.find(item.index.fqn, item.index.owner)
            rows = () if row is None else metadata.chunk_rows(row)
            if missing(Box(item.index.offsets, item.index.sizes), [Box(*metadata.chunks.box(r)) for r in rows]):
                lost.append(f"{item.index.fqn!r} (rank {rank})")
    if lost:
        raise StateDictError(
            f"the state of some ranks has changed since the last save, and what they wrote then was staged by no other "
            f"rank: {listed(lost, most=_MOST_NAMED)}. Nothing was published; the next save stages all of it."
        )
