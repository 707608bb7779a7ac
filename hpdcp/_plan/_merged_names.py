"""What all ranks mean by each name: their tables of names as one.

Runs on the coordinator over all ranks' plans. Most ranks have the same names on record, so everything is worked out
for the distinct tables among theirs, as columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hpdcp._base.errors import StateDictError
from hpdcp._format.columns import (
    I64,
    EntryKind,
    EntryTable,
    concat_chunks,
    ends_of,
    group_tables,
    starts_of,
    take_runs,
    take_strings,
)
from hpdcp._format.strings import StringColumn
from hpdcp._plan.save_plan import SavePlan
from hpdcp._state.mismatches import optimizer_advice
from hpdcp._state.paths import decode_path
from hpdcp._state.wrappers import leads_into_wrapper, rows_in_wrappers

_Rows: TypeAlias = npt.NDArray[np.integer]
_MOST_NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class MergedNames:
    """All ranks' names once, and their plans in terms of them."""

    entries: EntryTable
    """Sorted by fqn, then owner."""
    plans: list[SavePlan]
    """As given; a name that is tied to another on some ranks, but not on all, is a tensor of its own in all of them."""
    rows: list[I64]
    """For each plan, the row of `entries` of each of its entries."""
    sources: Mapping[int, I64]
    """For each plan that is not as it was given: for each of its items, the given item that has its bytes."""


def merge_names(plans: Sequence[SavePlan]) -> MergedNames:
    """All ranks' names as one table, once it is known that all mean the same by each.

    Raises:
        StateDictError: ranks disagree on a key's kind, dtype or global shape; lists them.
    """
    tables = _Tables(plans)
    names = _Names(tables, world_size=len(plans))
    _check_agreement(tables, names)
    contested = _contested_aliases(tables, names)
    entries = take_entries(tables.every, names.position[names.witness])
    entries = replace(entries, owners=names.owner_of_row)
    merged, sources = list(plans), dict[int, I64]()
    if len(contested):
        entries = _untied(entries, contested)
        for rank in range(len(plans)):
            changed = _store_contested(plans[rank], tables.rows_of(rank, names), names, contested)
            if changed is not None:
                merged[rank], sources[rank] = changed
    return MergedNames(entries, merged, [tables.rows_of(rank, names) for rank in range(len(plans))], sources)


class _Tables:
    """The distinct tables among the plans', one after another, and which plan has which."""

    def __init__(self, plans: Sequence[SavePlan]) -> None:
        self.plans = plans
        self.group, self.first = group_tables([plan.entries for plan in plans])
        tables = [plans[rank].entries for rank in self.first]
        self.ends = ends_of(np.array([len(table) for table in tables], dtype=np.int64))
        self.starts = starts_of(self.ends)
        self.every = concat_entries(tables)
        self.owned = [np.flatnonzero(table.owners == rank) for table, rank in zip(tables, self.first, strict=True)]
        """For each table, its rows that stand for state of the very rank that has the table."""

    @cached_property
    def holds(self) -> npt.NDArray[np.bool_]:
        """For each row, whether some rank has items of it, or a name that is tied to another's."""
        holds: npt.NDArray[np.bool_] = self.every.kinds == EntryKind.ALIAS
        for plan, table in zip(self.plans, self.group, strict=True):
            holds[plan.chunks.entry + self.starts[table]] = True
        return holds

    def others_owned(self) -> tuple[I64, I64]:
        """(row, rank) of what is owned by ranks that share their table with a rank before them, in order of rank."""
        rows, ranks = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for rank, table in enumerate(self.group):
            owned = self.owned[table]
            if len(owned) and self.first[table] != rank:
                rows.append(owned + self.starts[table])
                ranks.append(np.full(len(owned), rank, dtype=np.int64))
        return np.concatenate(rows), np.concatenate(ranks)

    def rows_of(self, rank: int, names: _Names) -> I64:
        """The merged row of each entry of a rank's plan."""
        table = self.group[rank]
        rows = names.rows[self.starts[table] : self.ends[table]]
        owned = self.owned[table]
        if len(owned) and self.first[table] != rank:
            rows = rows.copy()
            rows[owned] = names.owned_rows_of(rank)
        return rows

    def holder(self, row: int) -> int:
        """The first rank that holds something of a row; the first that has it on record where none does."""
        table = int(np.searchsorted(self.ends, row, side="right"))
        local = row - int(self.starts[table])
        ranks = [rank for rank, other in enumerate(self.group) if other == table]
        return next((rank for rank in ranks if (self.plans[rank].chunks.entry == local).any()), ranks[0])


class _Names:
    """Each (fqn, owner) among the tables once, sorted: these are the merged rows."""

    def __init__(self, tables: _Tables, *, world_size: int) -> None:
        every = tables.every
        named = every.names()
        self._number = dict(zip(sorted(dict.fromkeys(named)), itertools.count(), strict=False))
        """fqn, as `EntryTable.names` spells it → its number among all, sorted."""
        number = np.fromiter(map(self._number.__getitem__, named), dtype=np.int64, count=len(named))
        others, self._other_ranks = tables.others_owned()
        self.position = np.concatenate([np.arange(len(every)), others])
        """Rows of the tables: each of them, then again what further ranks own."""
        owners = np.concatenate([every.owners, self._other_ranks])
        self._span = max(world_size, int(owners.max(initial=0)) + 1) + 1
        codes = number[self.position] * self._span + owners + 1
        # Whoever holds something of a name is asked first what it is.
        order = np.lexsort((~tables.holds[self.position], codes))
        starts = np.ones(len(order), dtype=np.bool_)
        starts[1:] = codes[order][1:] != codes[order][:-1]
        self.witness = order[starts]
        """For each merged row, the first in `position` that tells what the name stands for."""
        self._codes = codes[self.witness]
        found = np.empty(len(order), dtype=np.int64)
        found[order] = np.cumsum(starts) - 1
        self.rows = found[: len(every)]
        """The merged row of each row of the tables."""
        self._other_rows = found[len(every) :]

    @property
    def owner_of_row(self) -> I64:
        """-1 where the state is shared."""
        owners: I64 = self._codes % self._span - 1
        return owners

    def owned_rows_of(self, rank: int) -> I64:
        """Merged rows of what `rank` owns, where an earlier rank has its table."""
        start, stop = np.searchsorted(self._other_ranks, [rank, rank + 1]).tolist()
        return self._other_rows[start:stop]

    def find(self, fqn: str) -> int | None:
        """The merged row of `fqn` as shared state."""
        number = self._number.get(fqn.encode("utf-8", "surrogatepass").decode("latin-1"))
        if number is None:
            return None
        code = number * self._span
        row = int(np.searchsorted(self._codes, code))
        return row if row < len(self._codes) and int(self._codes[row]) == code else None


def _check_agreement(tables: _Tables, names: _Names) -> None:
    """Every rank that holds a key must mean the same tensor by it, or the same kind of thing."""
    if len(tables.first) == 1:
        return
    every = tables.every
    theirs = names.position[names.witness][names.rows]
    tensor = every.kinds != EntryKind.OBJECT
    # A rank without any of a tensor's elements may not know its dtype (a wrapper of no shards says float32).
    wrong = (tensor != tensor[theirs]) | _other_shape(every, theirs)
    wrong |= (every.dtype_codes != every.dtype_codes[theirs]) & tables.holds
    wrong |= _other_class(every, theirs)
    complaints = []
    for row in np.flatnonzero(wrong).tolist():
        other = int(theirs[row])
        complaints.append(
            f"{every.fqns[row]!r} is {_describe(every, other)} on rank {tables.holder(other)} and "
            f"{_describe(every, row)} on rank {tables.holder(row)}"
        )
        if len(complaints) == _MOST_NAMED:
            break
    if complaints:
        count = int(wrong.sum())
        more = f"; and {count - len(complaints)} more" if count > len(complaints) else ""
        advice = optimizer_advice(every.fqns[row] for row in np.flatnonzero(wrong)[:_MOST_NAMED].tolist())
        raise StateDictError(
            f"ranks disagree on {count} keys: {'; '.join(complaints)}{more}. {advice}Give different things "
            "different keys, or mark state that differs on every rank with PerRank."
        )


def _other_shape(table: EntryTable, theirs: I64) -> npt.NDArray[np.bool_]:
    """For each row, whether its global shape is another than that of the row in `theirs`."""
    ndims = table.ndims()
    differs: npt.NDArray[np.bool_] = ndims != ndims[theirs]
    rows = np.flatnonzero(~differs & (ndims > 0))
    if len(rows):
        ends, mine = take_runs(table.shape_ends, rows)
        _, other = take_runs(table.shape_ends, theirs[rows])
        unequal = table.shape_dims[mine] != table.shape_dims[other]
        differs[rows] = np.logical_or.reduceat(unequal, starts_of(ends))
    return differs


def _other_class(table: EntryTable, theirs: I64) -> npt.NDArray[np.bool_]:
    """For each row, whether it is inside of another class of tensors than the row in `theirs`, or only one of them."""
    inside = np.zeros(len(table), dtype=np.bool_)
    inside[rows_in_wrappers(table.paths)] = True
    differs = np.zeros(len(table), dtype=np.bool_)
    for row in np.flatnonzero(inside | inside[theirs]).tolist():
        differs[row] = table.paths[row] != table.paths[int(theirs[row])]
    return differs


def _describe(table: EntryTable, row: int) -> str:
    if table.kinds[row] == EntryKind.OBJECT:
        return "a Python value"
    wrapper = leads_into_wrapper(decode_path(table.paths[row]))
    inside = "" if wrapper is None else f" inside a {wrapper}"
    return f"a {table.dtype(row)} tensor of global shape {list(table.shape(row))}{inside}"


def _contested_aliases(tables: _Tables, names: _Names) -> I64:
    """Merged rows that are tied on some ranks, but not on all that hold them, or not to the same name."""
    every = tables.every
    aliases = every.kinds == EntryKind.ALIAS
    if not aliases.any():
        return np.zeros(0, dtype=np.int64)
    suspects = np.zeros(len(names.witness), dtype=np.bool_)
    suspects[names.rows[aliases]] = True
    target: dict[int, str] = {}
    contested: set[int] = set()
    for position in np.flatnonzero(suspects[names.rows] & (every.kinds != EntryKind.OBJECT)).tolist():
        row, tied = int(names.rows[position]), every.targets[position]
        if target.setdefault(row, tied) != tied:
            contested.add(row)
    # A target that itself became an alias elsewhere would be a chain of names; storing it costs little and ends it.
    contested.update(row for row, tied in target.items() if tied and target.get(_target_row(names, tied)))
    return np.array(sorted(contested), dtype=np.int64)


def _target_row(names: _Names, fqn: str) -> int:
    row = names.find(fqn)
    if row is None:
        raise StateDictError(f"a plan ties a name to {fqn!r}, which no plan has on record.")
    return row


def _untied(table: EntryTable, rows: _Rows) -> EntryTable:
    """The table with `rows` as tensors that store their own bytes."""
    kinds, targets = table.kinds.copy(), list(table.targets)
    kinds[rows] = EntryKind.TENSOR
    for row in rows.tolist():
        targets[row] = ""
    return replace(table, kinds=kinds, targets=StringColumn.from_strings(targets))


def _store_contested(plan: SavePlan, rows: I64, names: _Names, contested: I64) -> tuple[SavePlan, I64] | None:
    """The plan with its contested aliases stored, and for each item the item whose bytes it has; None: it has none.

    `rows` are the merged rows of the plan's entries.
    """
    table = plan.entries
    changed = np.flatnonzero((table.kinds == EntryKind.ALIAS) & np.isin(rows, contested))
    if not len(changed):
        return None
    sources, entry = [np.arange(len(plan), dtype=np.int64)], [plan.chunks.entry]
    for row in changed.tolist():
        tied = np.flatnonzero(rows == _target_row(names, table.targets[row]))
        items = np.flatnonzero(np.isin(plan.chunks.entry, tied))
        sources.append(items)
        entry.append(np.full(len(items), row, dtype=np.int64))
    source = np.concatenate(sources)
    copied = plan.chunks.take(source[len(plan) :]).with_entry(np.concatenate(entry[1:]))
    chunks = concat_chunks([plan.chunks, copied])
    return SavePlan(_untied(table, changed), chunks, plan.nbytes[source], plan.storage_data), source


def concat_entries(tables: Sequence[EntryTable]) -> EntryTable:
    """The rows of all tables, one after another."""
    if not tables:
        return EntryTable.from_entries([])
    names = sorted({name for table in tables for name in table.dtype_names})
    code = {name: i for i, name in enumerate(names)}
    codes = [
        np.array([code[name] for name in table.dtype_names], dtype=np.int32)[table.dtype_codes] for table in tables
    ]

    def strings(columns: Sequence[StringColumn]) -> StringColumn:
        shift = starts_of(ends_of(np.array([len(text.blob) for text in columns], dtype=np.int64)))
        ends = [text.ends + start for text, start in zip(columns, shift, strict=True)]
        return StringColumn(np.concatenate([text.blob for text in columns]), np.concatenate(ends))

    shapes = np.concatenate([table.ndims() for table in tables])
    return EntryTable(
        fqns=strings([table.fqns for table in tables]),
        paths=strings([table.paths for table in tables]),
        kinds=np.concatenate([table.kinds for table in tables]),
        dtype_codes=np.concatenate(codes),
        dtype_names=StringColumn.from_strings(names),
        owners=np.concatenate([table.owners for table in tables]),
        targets=strings([table.targets for table in tables]),
        shape_ends=ends_of(shapes),
        shape_dims=np.concatenate([table.shape_dims for table in tables]),
        # What only later tables have comes after all that the first one has, in its own order.
        positions=np.concatenate(
            [
                table.positions + start
                for table, start in zip(tables, itertools.accumulate(map(len, tables), initial=0), strict=False)
            ]
        ),
    )


def take_entries(table: EntryTable, order: _Rows) -> EntryTable:
    """The rows of `table` in `order`."""
    shape_ends, positions = take_runs(table.shape_ends, order)
    return EntryTable(
        fqns=take_strings(table.fqns, order),
        paths=take_strings(table.paths, order),
        kinds=table.kinds[order],
        dtype_codes=table.dtype_codes[order],
        dtype_names=table.dtype_names,
        owners=table.owners[order],
        targets=take_strings(table.targets, order),
        shape_ends=shape_ends,
        shape_dims=table.shape_dims[positions],
        positions=table.positions[order],
    )
