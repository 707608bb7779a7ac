"""Whether what several ranks hold under one name is the same, and whether what a rank leaves to others is written.

Every holder of a box reports checksums of it, unless the coordinator has them from the write; it compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import ReplicaMismatchError, StateDictError
from hpdcp._format.columns import I64, Columns, EntryKind, column, ends_of, starts_of, take_runs
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata, StorageTable
from hpdcp._plan.replica_rules import ALL, OFF, ReplicaRules
from hpdcp._plan.samples import SAMPLE_BYTES
from hpdcp._plan.save_plan import ComparedBoxes, SavePlan
from hpdcp._plan.whole_plan import TiedBoxes, WholePlan
from hpdcp._state.comparable import difference
from hpdcp._state.coverage import missing
from hpdcp._state.geometry import Box
from hpdcp._state.mismatches import listed, optimizer_advice

_MOST_NAMED: Final = 20
_MOST_EXPLAINED: Final = 5
"""Python values of which one error says how they differ."""


def boxes_to_compare(whole: WholePlan, locals_: Sequence[SavePlan], rules: ReplicaRules) -> list[ComparedBoxes]:
    """What each rank reports checksums of: boxes of its local plan that other ranks hold too.

    Python values, boxes under a name that some ranks tie to another one, and what `rules` says so of in full, the rest
    by samples. The rank that writes a box is left out where the write itself gives a checksum of all that is compared.
    """
    if rules.is_off:
        return [ComparedBoxes(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)) for _ in locals_]
    entries, held = whole.metadata.entries, whole.held
    stored = len(whole.metadata.chunks)
    ranks = np.repeat(np.arange(len(locals_)), [len(plan) for plan in locals_])
    nbytes = np.concatenate([plan.nbytes for plan in locals_])
    entry = whole.boxes.entry[held]
    modes = rules.modes(entries.fqns)[entry]
    is_object = entries.kinds[entry] == EntryKind.OBJECT
    writer = np.full(len(held), -1, dtype=np.int64)
    is_stored = held < stored
    writer[is_stored] = whole.writers()[held[is_stored]]
    # A name that is tied on its writer's rank alone: it has no box of that name to take samples of.
    writer_holds = np.zeros(stored, dtype=np.bool_)
    writer_holds[held[writer == ranks]] = True
    by_write_only = is_stored.copy()
    by_write_only[is_stored] = ~writer_holds[held[is_stored]]
    ties = _compared_ties(whole, rules)
    tied_rows, tied_boxes = _held_rows(whole, ties), ties.box
    # Samples lie elsewhere under another name.
    by_two_names = np.isin(held, np.concatenate([held[tied_rows], tied_boxes]))
    in_full = (modes == ALL) | is_object | by_write_only | by_two_names
    shared = (np.bincount(held, minlength=stored)[held] > 1) | (is_stored & (writer != ranks))
    shared |= np.isin(held, tied_boxes)
    known_by_write = _known_by_write(held, is_object, in_full, nbytes, stored) & (writer == ranks)
    wanted = shared & (modes != OFF) & (entries.owners[entry] < 0) & (nbytes != 0) & ~known_by_write
    wanted[tied_rows] = True
    found = []
    for start, end in zip(starts_of(whole.held_ends).tolist(), whole.held_ends.tolist(), strict=True):
        rows = np.flatnonzero(wanted[start:end])
        found.append(ComparedBoxes(rows, in_full[start:end][rows]))
    return found


def _compared_ties(whole: WholePlan, rules: ReplicaRules) -> TiedBoxes:
    """The boxes of names that some ranks tie, where replicas of both names are compared."""
    tied = whole.tied
    if not len(tied.box):
        return tied
    off = rules.modes(whole.metadata.entries.fqns) == OFF
    entry = whole.boxes.entry
    kept = np.flatnonzero(~off[entry[whole.held[_held_rows(whole, tied)]]] & ~off[entry[tied.box]])
    return TiedBoxes(tied.rank[kept], tied.row[kept], tied.box[kept])


def _held_rows(whole: WholePlan, ties: TiedBoxes) -> I64:
    """Where in `whole.held` is what the ranks hold under the other name."""
    return starts_of(whole.held_ends)[ties.rank] + ties.row


def _known_by_write(
    held: I64, is_object: npt.NDArray[np.bool_], in_full: npt.NDArray[np.bool_], nbytes: I64, stored: int
) -> npt.NDArray[np.bool_]:
    """Of which boxes the write gives the very checksums that are compared."""
    # Values that are equal need not be stored as equal bytes.
    found: npt.NDArray[np.bool_] = (held < stored) & (in_full | (nbytes <= SAMPLE_BYTES)) & (nbytes > 0) & ~is_object
    return found


class ReplicaReport:
    """Checksums of what one rank holds and others do too."""

    def __init__(
        self,
        rows: I64,
        in_full: npt.NDArray[np.uint8],
        nbytes: I64,
        crc_ends: I64,
        crcs: npt.NDArray[np.uint32],
        values: Mapping[int, bytes],
    ) -> None:
        self.rows = rows
        """Of the rank's local plan."""
        self.in_full = in_full
        """1 where the checksums are those of all blocks, 0 where they are of samples."""
        self.nbytes = nbytes
        """Of a Python value the length of what is compared of it."""
        self.crc_ends = crc_ends
        self.crcs = crcs
        self.values = values
        """Encodings of some small Python values, by row."""

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        checksums: Sequence[Sequence[int]],
        nbytes: Sequence[int],
        *,
        in_full: int,
        values: Mapping[int, bytes] = MappingProxyType({}),
    ) -> ReplicaReport:
        """`in_full`: of so many rows, the first ones, the checksums are of all blocks."""
        return cls(
            np.array(rows, dtype=np.int64),
            (np.arange(len(rows)) < in_full).astype(np.uint8),
            np.array(nbytes, dtype=np.int64),
            ends_of(np.array([len(crcs) for crcs in checksums], dtype=np.int64)),
            np.array([crc for crcs in checksums for crc in crcs], dtype=np.uint32),
            values,
        )

    @classmethod
    def empty(cls) -> ReplicaReport:
        return cls.build([], [], [], in_full=0)

    def to_bytes(self) -> bytes:
        columns: dict[str, npt.NDArray[np.generic]] = {
            "rows": self.rows,
            "in_full": self.in_full,
            "nbytes": self.nbytes,
            "crc.ends": self.crc_ends,
            "crcs": self.crcs,
            "value.rows": np.array([*self.values], dtype=np.int64),
            "value.ends": ends_of(np.array([len(data) for data in self.values.values()], dtype=np.int64)),
            "values": np.frombuffer(b"".join(self.values.values()), dtype=np.uint8),
        }
        return pack_columns(columns, {})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> ReplicaReport:
        columns, _ = unpack_columns(data, where="a rank's replica report")
        return cls(
            column(columns, "rows", np.int64),
            column(columns, "in_full", np.uint8),
            column(columns, "nbytes", np.int64),
            column(columns, "crc.ends", np.int64),
            column(columns, "crcs", np.uint32),
            _values_in(columns),
        )


def _values_in(columns: Columns) -> Mapping[int, bytes]:
    data = column(columns, "values", np.uint8).tobytes()
    ends = column(columns, "value.ends", np.int64)
    spans = zip(starts_of(ends).tolist(), ends.tolist(), strict=True)
    rows = column(columns, "value.rows", np.int64).tolist()
    return {row: data[start:end] for row, (start, end) in zip(rows, spans, strict=True)}


def check_replicas(
    whole: WholePlan, storage: StorageTable, reports: Sequence[ReplicaReport], rules: ReplicaRules
) -> None:
    """Compare what ranks hold, with one another and with what was written.

    Args:
        whole: what all ranks wrote.
        storage: where, with the checksums of the items themselves.
        reports: every rank's report, of what `boxes_to_compare` said by the same `rules`.

    Raises:
        ReplicaMismatchError: lists the keys that differ, the ranks, and what to do.
    """
    if not any(len(report.rows) for report in reports):
        return
    held = np.concatenate([whole.held_by(rank)[report.rows] for rank, report in enumerate(reports)])
    ranks = np.repeat(np.arange(len(reports)), [len(report.rows) for report in reports])
    rows = np.concatenate([report.rows for report in reports])
    again, boxes_again = _reported_again(_compared_ties(whole, rules), rows, ranks)
    source = np.concatenate([np.arange(len(held)), again])
    held, ranks = np.concatenate([held, boxes_again]), ranks[source]
    nbytes = np.concatenate([report.nbytes for report in reports])[source]
    in_full = np.concatenate([report.in_full for report in reports]).astype(np.bool_)[source]
    every_length = np.concatenate([report.crc_ends - starts_of(report.crc_ends) for report in reports])
    crc_ends, positions = take_runs(ends_of(every_length), source)
    crcs = np.concatenate([report.crcs for report in reports])[positions]
    crc_lengths = every_length[source]
    boxes, entries = whole.boxes, whole.metadata.entries
    stored = len(whole.metadata.chunks)
    is_object = entries.kinds[boxes.entry[held]] == EntryKind.OBJECT
    known = _known_by_write(held, is_object, in_full, nbytes, stored)
    # What each is compared with: a row of the storage table, or, past these, the first report of the same box.
    order = np.lexsort((ranks, held))
    first = np.ones(len(held), dtype=np.bool_)
    first[1:] = held[order][1:] != held[order][:-1]
    same_box = np.empty(len(held), dtype=np.int64)
    same_box[order] = order[first][np.cumsum(first) - 1]
    reference = np.where(known, held, stored + same_box)
    all_lengths = np.concatenate([storage.length, nbytes])
    all_crcs = np.concatenate([storage.crcs, crcs])
    all_ends = ends_of(np.concatenate([storage.crc_ends - starts_of(storage.crc_ends), crc_lengths]))
    counts = all_ends - starts_of(all_ends)
    wrong = (all_lengths[reference] != nbytes) | (counts[reference] != crc_lengths)
    same = np.flatnonzero(~wrong & (crc_lengths > 0))
    if len(same):
        ends, mine = take_runs(crc_ends, same)
        _, theirs = take_runs(all_ends, reference[same])
        wrong[same] = np.logical_or.reduceat(crcs[mine] != all_crcs[theirs], starts_of(ends))
    if wrong.any():
        values = {(rank, row): data for rank, report in enumerate(reports) for row, data in report.values.items()}
        said = [values.get((rank, row)) for rank, row in zip(ranks.tolist(), rows[source].tolist(), strict=True)]
        raise _mismatch(whole, held, ranks, known, same_box, wrong, said)


def _reported_again(ties: TiedBoxes, rows: I64, ranks: I64) -> tuple[I64, I64]:
    """Of what was reported (`rows` of local plans, by `ranks`) what is a box under a second name, and which box."""
    if not len(ties.box):
        return ties.row, ties.box
    span = max(int(rows.max()), int(ties.row.max())) + 1
    reported, wanted = ranks * span + rows, ties.rank * span + ties.row
    order = np.argsort(reported)
    at = np.minimum(np.searchsorted(reported, wanted, sorter=order), len(order) - 1)
    there = reported[order[at]] == wanted
    return order[at][there], ties.box[there]


def _mismatch(
    whole: WholePlan,
    held: I64,
    ranks: I64,
    known: npt.NDArray[np.bool_],
    same_box: I64,
    wrong: npt.NDArray[np.bool_],
    values: Sequence[bytes | None],
) -> ReplicaMismatchError:
    """What is `wrong` among what was reported, `values` for some of which are there."""
    boxes, names, writers = whole.boxes, whole.metadata.entries.fqns, whole.writers()
    found: dict[str, dict[int, set[int]]] = {}
    how: dict[str, str] = {}
    for row in np.flatnonzero(wrong).tolist():
        first = int(same_box[row])
        other = int(writers[held[row]]) if known[row] else int(ranks[first])
        name = names[int(boxes.entry[held[row]])]
        found.setdefault(name, {}).setdefault(other, set()).add(int(ranks[row]))
        mine, theirs = values[row], values[first]
        if mine is not None and theirs is not None and name not in how and len(how) < _MOST_EXPLAINED:
            said = difference(mine, theirs, key=name)
            how[name] = f": {said}" if said else ""
    keys = [
        f"{name!r} ({'; '.join(f'{_ranks(who)} from rank {other}' for other, who in differing.items())}"
        f"{how.get(name, '')})"
        for name, differing in found.items()
    ]
    return ReplicaMismatchError(
        f"{len(found)} {'key is' if len(found) == 1 else 'keys are'} not the same on all ranks that hold them: "
        f"{listed(keys, most=_MOST_NAMED, separator=', ')}. Nothing was published, since one rank's value would have "
        f"stood for all. {optimizer_advice(found)}{REMEDIES}"
    )


REMEDIES: Final = (
    "For state of each rank's own, put the rank into the key, or mark the value with hpdcp.PerRank; make shards of one "
    "tensor DTensors; synchronise what should be equal. Where the lowest rank's value will do, say check_replicas = "
    '{"PATTERN" = "off"} in the configuration.'
)


def _ranks(who: set[int]) -> str:
    shown = ", ".join(map(str, sorted(who)[:4]))
    more = "" if len(who) <= 4 else f" and {len(who) - 4} more"
    return f"rank{'s' if len(who) > 1 else ''} {shown}{more}"


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
