"""In which order, under which names and saying what of themselves the items of a plan lie in safetensors files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hpdcp._base.splitting import batches
from hpdcp._format.columns import I64, EntryKind, sort_order, starts_of
from hpdcp._format.container import EntryColumns
from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._plan.save_plan import SavePlan
from hpdcp._state.dtypes import dtype_of, itemsize_of


@dataclass(frozen=True, slots=True, eq=False)
class Extents:
    """Items of a plan in the order they take in files: columns with a row for each."""

    plan: SavePlan
    """These items."""
    rows: I64
    """Of the plan that they are from."""
    entries: EntryColumns
    """As the header of their file names them."""
    about: Sequence[str]
    """JSON of what the header says of each beside that: which box of which global tensor it is."""

    def __len__(self) -> int:
        return len(self.rows)

    def files(self, most: int) -> Iterator[Extents]:
        """Parts that take a header of at most `most` bytes each, or somewhat less."""
        # No character of a key takes more than 6 bytes, none of `about`, which is ASCII inside a string, more than 2,
        # and no number more than 20.
        weights = [
            6 * len(key) + 2 * len(about) + 21 * (len(shape) + 2) + 64
            for key, about, shape in zip(self.entries.keys, self.about, self.entries.shapes, strict=True)
        ]
        for numbers in batches(range(len(self)), weights.__getitem__, most):
            yield self if len(numbers) == len(self) else self._part(slice(numbers[0], numbers[-1] + 1))

    def _part(self, which: slice) -> Extents:
        columns = self.entries
        return Extents(
            self.plan.select(np.arange(which.start, which.stop)),
            self.rows[which],
            EntryColumns(columns.keys[which], columns.dtype_names[which], columns.shapes[which], columns.nbytes[which]),
            self.about[which],
        )


def extents_of(plan: SavePlan) -> tuple[Extents, Extents]:
    """The plan's tensors and objects, each in the order they take in a file.

    Wider elements first: sizes are multiples of the width, so every tensor starts where its dtype may, without holes.
    """
    entry = plan.chunks.entry
    is_object = plan.entries.kinds[entry] == EntryKind.OBJECT
    keys = _names_in_file(plan)
    place = {fqn: number for number, fqn in enumerate(sorted(set(plan.fqns)))}
    by_name = np.array([place[fqn] for fqn in plan.fqns], dtype=np.int64)
    widths = np.array([itemsize_of(name) for name in plan.entries.dtype_names], dtype=np.int64)
    order = sort_order([-widths[plan.entries.dtype_codes[entry]], *plan.chunks.with_entry(by_name[entry]).sort_keys()])
    return (
        _tensors(plan, order[~is_object[order]], keys),
        _objects(plan, order[is_object[order]], keys),
    )


def _tensors(plan: SavePlan, rows: npt.NDArray[np.intp], keys: Sequence[str]) -> Extents:
    part, numbers = plan.select(rows), rows.tolist()
    table, chunks = plan.entries, part.chunks
    entries = chunks.entry.tolist()
    dtypes = list(table.dtype_names)
    # Of each dtype its name, safetensors', and the dimension that makes U8 of one that it has no name for.
    told = [(name, SAFETENSORS_NAMES.get(name, "U8")) for name in dtypes]
    deeper = [() if name in SAFETENSORS_NAMES else (dtype_of(name).itemsize,) if name else () for name in dtypes]
    codes = table.dtype_codes[chunks.entry].tolist()
    shapes = _runs(table.shape_dims, table.shape_ends)
    sizes, offsets = _runs(chunks.sizes, chunks.ends), _runs(chunks.offsets, chunks.ends)
    owners = table.owners.tolist()
    fqns, text = plan.fqns, _JsonText()
    about = [
        f'{{"fqn":{text.encode(fqns[row])}{_owner(owners[row])},"dtype":"{told[code][0]}",'
        f'"shape":{text.of(shapes[row])},"offsets":{text.of(box)}}}'
        for row, code, box in zip(entries, codes, offsets, strict=True)
    ]
    stored = [size + deeper[code] for size, code in zip(sizes, codes, strict=True)]
    columns = EntryColumns(
        [keys[number] for number in numbers], [told[code][1] for code in codes], stored, part.nbytes.tolist()
    )
    return Extents(part, rows.astype(np.int64), columns, about)


def _objects(plan: SavePlan, rows: npt.NDArray[np.intp], keys: Sequence[str]) -> Extents:
    part = plan.select(rows)
    nbytes = part.nbytes.tolist()
    owners, fqns, text = plan.entries.owners.tolist(), plan.fqns, _JsonText()
    about = [f'{{"fqn":{text.encode(fqns[row])}{_owner(owners[row])}}}' for row in part.chunks.entry.tolist()]
    shapes = [(length,) for length in nbytes]
    columns = EntryColumns([keys[number] for number in rows.tolist()], ["U8"] * len(part), shapes, nbytes)
    return Extents(part, rows.astype(np.int64), columns, about)


def _owner(rank: int) -> str:
    return f',"owner":{rank}' if rank >= 0 else ""


def _runs(values: I64, ends: I64) -> list[tuple[int, ...]]:
    """The runs of `values` that end there."""
    listed = values.tolist()
    return [tuple(listed[start:end]) for start, end in zip(starts_of(ends).tolist(), ends.tolist(), strict=True)]


class _JsonText:
    """JSON of names, and of shapes and offsets, of which many are alike."""

    def __init__(self) -> None:
        self.encode = json.JSONEncoder(separators=(",", ":")).encode
        self._known: dict[tuple[int, ...], str] = {}

    def of(self, sizes: tuple[int, ...]) -> str:
        text = self._known.get(sizes)
        if text is None:
            text = self._known[sizes] = self.encode(sizes)
        return text


_RESERVED: Final = frozenset({"", ".", "..", "__metadata__"})


def _names_in_file(plan: SavePlan) -> list[str]:
    """The name of each item inside a file: the fqn, made safe and unique."""
    fqns = plan.fqns
    names = [fqns[row] for row in plan.chunks.entry.tolist()]
    count = Counter(names)
    together = "".join(names)
    harmless = together.isprintable() and "/" not in together and "\\" not in together and _RESERVED.isdisjoint(count)
    if harmless and len(count) == len(names):
        return names
    taken: set[str] = set()
    unique: list[str] = []
    for row, fqn in enumerate(names):
        name = fqn if harmless else _safe(fqn)
        if count[fqn] > 1:
            name += f"@{list(plan.chunks.box(row)[0])}".replace(" ", "")
        chosen, number = name, 1
        while chosen in taken or (chosen != name and chosen in count):
            number += 1
            chosen = f"{name}#{number}"
        taken.add(chosen)
        unique.append(chosen)
    return unique


_STEPS_OUT: Final = re.compile(r"(?:\A|[/\\])\.{1,2}(?:\Z|[/\\])")
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\ud800-\udfff]")


def _safe(fqn: str) -> str:
    """`fqn` itself, unless readers of safetensors files stumble over it; then with what is unsafe as %XX."""
    if fqn in _RESERVED or _STEPS_OUT.search(fqn):
        return "%" + fqn.replace("%", "%25").replace(".", "%2E").replace("/", "%2F")
    if _UNPRINTABLE.search(fqn):
        return "".join(
            f"%{ord(char):02X}" if ord(char) < 32 or 0xD800 <= ord(char) <= 0xDFFF or char == "%" else char
            for char in fqn
        )
    return fqn
