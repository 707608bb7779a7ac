"""A whole checkpoint as one state dict: merged, on the CPU, nesting and Python values as they were saved.

Where the backend maps files, a tensor is a view of a private map: its bytes are fetched when touched, and a page that
is written to is copied then, so that the tensor may be changed like any other and the file never is. A read-only map
would end the process at the first write in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpdcp._base import progress
from hpdcp._convert.stored_objects import object_rows, read_objects
from hpdcp._convert.tensor_streams import StreamRequest, TensorStreamer
from hpdcp._devices import device
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._state import objects
from hpdcp._state.geometry import Box
from hpdcp._state.paths import Path, build_tree, build_value, decode_path
from hpdcp._state.wrappers import refuse_wrappers

Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def full_state(
    reader: FileSystemReader,
    metadata: Metadata,
    *,
    rows: Sequence[int] | None = None,
    allocate: Allocate = device.empty_on_host,
    check_all: bool = False,
) -> dict[Any, Any]:
    """Everything the checkpoint holds. Tied names are one tensor; state that each rank kept is a list, rank by rank.

    Args:
        rows: of `metadata.entries`, which alone are read; None: all.
        allocate: makes the memory of tensors that cannot be mapped.
        check_all: compare all checksums, not only those that a load would.

    Raises:
        CoverageError, UnsupportedTypeError, CorruptCheckpointError, UnsafePickleError: naming the key.
        LoadMismatchError: some tensors were made of others; only targets of their class take these.
    """
    refuse_wrappers(metadata.entries)
    streamer = TensorStreamer(reader, metadata, as_a_load=not check_all)
    entries = metadata.entries
    rows = range(len(entries)) if rows is None else rows
    read = sorted({metadata.resolve(row) for row in rows})
    requests = {
        row: StreamRequest(row, Box.whole(entries.shape(row))) for row in read if entries.kinds[row] == EntryKind.TENSOR
    }
    stored_objects = set(object_rows(metadata)).intersection(read)
    streamer.check(requests.values())
    values: dict[int, Any] = {
        row: objects.decode(data, key=entries.fqns[row], allow_pickle=reader.allow_pickle)
        for row, data in read_objects(reader, metadata, sorted(stored_objects)).items()
    }
    views = functools.cache(reader.backend.map_private)
    left: list[StreamRequest] = []
    for row, each in requests.items():
        mapped = streamer.mapped_privately(each, views)
        if mapped is None:
            mapped = allocate(each.box.sizes, streamer.dtype(row))
            left.append(each)
        values[row] = mapped
    if left:
        with progress.bar("read", sum(values[each.row].nbytes for each in left)) as shown:
            streamer.fill([(each, values[each.row]) for each in left], shown.add)
    return build_tree(_merged_paths(metadata, {row: values[metadata.resolve(row)] for row in rows}))


def _merged_paths(metadata: Metadata, values: Mapping[int, Any]) -> Iterator[tuple[Sequence[Hashable], Any]]:
    """(path, value) of all that is shared, and for each rank's own, at the top of it, a list of the ranks' values."""
    paths = [decode_path(text) for text in metadata.entries.paths]
    owners = metadata.entries.owners.tolist()
    shared = {
        tuple(path[:depth])
        for path, owner in zip(paths, owners, strict=True)
        if owner < 0
        for depth in range(len(path) + 1)
    }
    gathered: dict[Path, list[list[tuple[Path, Any]]]] = {}
    for row in np.argsort(metadata.entries.positions, kind="stable").tolist():
        if row not in values:
            continue
        path, owner = paths[row], owners[row]
        if owner < 0:
            yield path, values[row]
            continue
        depth = next((n for n in range(1, len(path)) if tuple(path[:n]) not in shared), len(path))
        top = Path(path[:depth], path.kinds[:depth])
        ranks = gathered.setdefault(top, [[] for _ in range(metadata.world_size)])
        ranks[owner].append((Path(path[depth:], path.kinds[depth:]), values[row]))
    for top, ranks in gathered.items():
        yield top, [_value(parts) for parts in ranks]


def _value(parts: Sequence[tuple[Path, Any]]) -> Any:
    """One rank's value, from what it kept below the top; None where it kept nothing."""
    if not parts:
        return None
    return build_value(parts)
