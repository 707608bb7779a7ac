"""What a prompt and a notebook show of a checkpoint's metadata: a line, and a table."""

from __future__ import annotations

import html
from typing import Final

import numpy as np

from hpdcp._format._storage_table import StorageTable
from hpdcp._format.columns import ChunkTable, EntryKind, EntryTable

_MOST_ROWS: Final = 40
"""Of the table in a notebook."""


def line_of(entries: EntryTable, storage: StorageTable, origin: str) -> str:
    """How much of what, and where it comes from."""
    kinds = np.bincount(entries.kinds, minlength=len(EntryKind)).tolist()
    parts = [
        count_of(kinds[EntryKind.TENSOR], "tensor"),
        count_of(kinds[EntryKind.OBJECT], "Python value"),
        *([count_of(kinds[EntryKind.ALIAS], "tied name")] if kinds[EntryKind.ALIAS] else []),
        f"{int(storage.length.sum()):,} bytes in {count_of(len(storage.file_names), 'file')}",
    ]
    return f"<Metadata: {', '.join(parts)}, {origin}>"


def table_of(entries: EntryTable, chunks: ChunkTable, storage: StorageTable, origin: str) -> str:
    """The line, and a row for each of the first names, as HTML."""
    nbytes = np.zeros(len(entries), dtype=np.int64)
    np.add.at(nbytes, chunks.entry[: len(storage.length)], storage.length)
    counts = np.bincount(chunks.entry, minlength=len(entries))
    rows = [
        (entries.fqns[row], *_described(entries, row), f"{int(counts[row]):,}", f"{int(nbytes[row]):,}")
        for row in range(min(len(entries), _MOST_ROWS))
    ]
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    head = "".join(f"<th>{title}</th>" for title in ("name", "kind", "shape", "chunks", "bytes"))
    left_out = len(entries) - len(rows)
    rest = f"<p>… and {count_of(left_out, 'more name')}</p>" if left_out else ""
    return f"<p>{html.escape(line_of(entries, storage, origin))}</p><table><tr>{head}</tr>{body}</table>{rest}"


def _described(entries: EntryTable, row: int) -> tuple[str, str]:
    entry = entries[row]
    whose = "" if entry.owner is None else f" of rank {entry.owner}"
    if entry.kind is EntryKind.TENSOR:
        return entry.dtype + whose, f"[{', '.join(map(str, entry.shape))}]"
    return ("Python value" if entry.kind is EntryKind.OBJECT else f"tied to {entry.target}") + whose, ""


def count_of(number: int, thing: str) -> str:
    """A number of things, in words."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
