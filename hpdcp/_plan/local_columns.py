"""What a rank holds, as the columns of a plan and the addresses they are read from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpdcp._format.columns import (
    I64,
    ChunkTable,
    EntryKind,
    EntryTable,
    concat_chunks,
    ends_of,
    first_rows,
    starts_of,
    take_runs,
)
from hpdcp._format.strings import StringColumn
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.paths import encode_paths
from hpdcp._state.tensor_columns import NOT_A_TENSOR, Holding, TensorColumns
from hpdcp._state.tree import Leaf


def entry_table(
    leaves: Sequence[Leaf], holdings: Sequence[Holding], number: I64, tied: Mapping[str, str]
) -> EntryTable:
    """A row for each leaf, which is `holdings[number]`, or a Python value where that is `NOT_A_TENSOR`.

    `tied` says which names are other names' tensors.
    """
    is_object = number == NOT_A_TENSOR
    targets = [tied.get(leaf.fqn, "") for leaf in leaves]
    is_alias = np.array([target != "" for target in targets], dtype=np.bool_)
    # Of values, which are number -1, the last one: no dtype and no dimensions.
    dtypes = [*(dtype_name(holding.dtype) for holding in holdings), ""]
    dtype_names = sorted({dtypes[each] for each in np.unique(number).tolist()})
    codes = {name: code for code, name in enumerate(dtype_names)}
    shape_ends = ends_of(np.array([*(len(holding.global_shape) for holding in holdings), 0], dtype=np.int64))
    shape_dims = np.array([size for holding in holdings for size in holding.global_shape], dtype=np.int64)
    ends, positions = take_runs(shape_ends, number)
    return EntryTable(
        fqns=StringColumn.from_strings(leaf.fqn for leaf in leaves),
        paths=StringColumn.from_strings(encode_paths([leaf.path for leaf in leaves])),
        kinds=np.where(is_object, EntryKind.OBJECT, np.where(is_alias, EntryKind.ALIAS, EntryKind.TENSOR)).astype("u1"),
        dtype_codes=np.array([codes.get(name, 0) for name in dtypes], dtype=np.int32)[number],
        dtype_names=StringColumn.from_strings(dtype_names),
        owners=np.array([-1 if leaf.owner is None else leaf.owner for leaf in leaves], dtype=np.int64),
        targets=StringColumn.from_strings(targets),
        shape_ends=ends,
        shape_dims=shape_dims[positions],
        positions=np.arange(len(leaves)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LocalBoxes:
    """Boxes of tensors, one row for each."""

    chunks: ChunkTable
    """`entry` is the row of the leaf."""
    nbytes: I64
    addresses: I64
    """On the host, where it lies there in one piece; else 0."""

    @classmethod
    def of(cls, tensors: TensorColumns, holdings: Sequence[Holding], number: I64) -> LocalBoxes:
        """Of each leaf the boxes of `holdings[number]`, none where that is negative; memory as `tensors` has it."""
        counts = np.array([len(holding.boxes) for holding in holdings] + [0], dtype=np.int64)
        first = starts_of(ends_of(counts))
        boxes = [box for holding in holdings for box in holding.boxes]
        # Row -1 is the last one, which has no boxes.
        which = np.maximum(number, -1)
        entry = np.repeat(np.arange(len(number)), counts[which])
        inside = np.arange(len(entry)) - np.repeat(starts_of(ends_of(counts[which])), counts[which])
        position = first[which][entry] + inside
        table = ChunkTable.from_boxes([0] * len(boxes), [(box.offsets, box.sizes) for box in boxes])
        nbytes = [box.volume * holding.dtype.itemsize for holding in holdings for box in holding.boxes]
        starts = np.array([start for holding in holdings for start in holding.starts], dtype=np.int64)[position]
        known = tensors.readable[entry] & (starts >= 0)
        return cls(
            table.take(position).with_entry(entry),
            np.array(nbytes, dtype=np.int64)[position],
            np.where(known, tensors.memory[entry] + starts, 0),
        )

    def addresses_of(self, chunks: ChunkTable, nbytes: I64) -> I64:
        """The address of each of these boxes; 0 for one that is none of these, or of another length."""
        rows = first_rows(concat_chunks([self.chunks, chunks]))[len(self.chunks) :]
        known = np.flatnonzero(rows < len(self.chunks))
        known = known[self.nbytes[rows[known]] == nbytes[known]]
        found = np.zeros(len(chunks), dtype=np.int64)
        found[known] = self.addresses[rows[known]]
        return found
