"""Groups of zarr arrays that something else wrote, loaded as tensors; read by zarr-python over any backend."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from hpdcp._base.backend import Backend, ByteRange, KeyInfo
from hpdcp._base.errors import (
    CorruptCheckpointError,
    HpdcpError,
    KeyNotFoundError,
    NotSupportedError,
    StorageError,
    UnsupportedFormatError,
)
from hpdcp._devices import device
from hpdcp._format.checksums import head_mark
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.metadata import NO_CHECKSUMS, Metadata, StorageTable
from hpdcp._format.strings import StringColumn
from hpdcp._plan.load_plan import ReadItem
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.paths import decode_path, encode_path, fqn_of
from hpdcp_backends._zarr.metadata import NODE, ZARR_NAMES

if TYPE_CHECKING:
    import torch
    import zarr

ORIGIN: Final = "zarr"
"""The setting `origin` of metadata that was made here."""
_SLAB_BYTES: Final = 64 << 20
"""Elements that are read at a time, unless a single row of chunks is more."""
_MOST_OVERHANG: Final = 8
"""How much larger than its array a chunk may be."""
_DOCUMENTS: Final = (NODE, ".zarray")

_Made = TypeVar("_Made")


def group_metadata(backend: Backend) -> Metadata:
    """Every array below the root group, as hpdcp's own metadata of it: a tensor in one chunk, without checksums.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError: zarr cannot make sense of what is there.
        NotSupportedError: zarr is not installed.
    """
    found: list[tuple[Entry, str, bytes]] = []
    for path, array in _arrays(backend):
        about = _about(array)
        keys = decode_path(about["path"]) if isinstance(about.get("path"), str) else path.split("/")
        dtype, shape = _torch_name(array, about)
        key, document = _document(backend, path)
        found.append((Entry(fqn_of(keys), encode_path(keys), EntryKind.TENSOR, dtype, shape), key, document))
    found.sort(key=lambda each: each[0].fqn.encode("utf-8", "surrogatepass"))
    for (first, one, _), (second, other, _) in itertools.pairwise(found):
        if first.fqn == second.fqn:
            raise UnsupportedFormatError(
                f"{backend.url}: the arrays of {one!r} and {other!r} would both be called {first.fqn!r}. Rename one."
            )
    filled = [row for row, (entry, _, _) in enumerate(found) if 0 not in entry.shape]
    sizes = np.array([len(document) for _, _, document in found], dtype=np.int64)
    return Metadata(
        EntryTable.from_entries([entry for entry, _, _ in found]),
        ChunkTable.from_boxes(filled, [((0,) * len(found[row][0].shape), found[row][0].shape) for row in filled]),
        StorageTable(
            file=np.array(filled, dtype=np.int32),
            offset=np.zeros(len(filled), dtype=np.int64),
            length=sizes[filled],
            crc_ends=np.zeros(len(filled), dtype=np.int64),
            crcs=np.zeros(0, dtype=np.uint32),
            file_names=StringColumn.from_strings([key for _, key, _ in found]),
            file_sizes=sizes,
            file_marks=np.array([head_mark(data) for _, _, data in found], dtype=np.uint32),
        ),
        {
            "world_size": "1",
            "layout": "zarr",
            "origin": ORIGIN,
            "listed_in": NODE,
            "checksums": NO_CHECKSUMS,
        },
    )


def read(backend: Backend, metadata: Metadata, items: Sequence[ReadItem], targets: ReadTargets) -> None:
    """Fill every item from the arrays; a chunk that is not there is its array's fill value, as zarr has it."""
    group = _open(backend)
    for item in items:
        info = metadata.storage_info(item.storage_row)
        entry = metadata.entries[int(metadata.chunks.entry[item.storage_row])]
        dtype = dtype_of(entry.dtype, fqn=entry.fqn)
        path = info.key.rpartition("/")[0]
        array = _zarr_says(backend, path, partial(_array_at, group, path))
        _check_chunks(backend, path, array)
        target = targets.acquire_tensor(item)
        deeper = (slice(None),) * (array.ndim - len(entry.shape))
        for start, stop in _slabs(array, item.storage_offsets, item.lengths):
            begins = item.storage_offsets
            at = [slice(a, a + n) for a, n in zip(begins, item.lengths, strict=True)]
            into = target
            if at:
                at[0] = slice(begins[0] + start, begins[0] + stop)
                into = target.narrow(0, start, stop - start)
            index = (*at, *deeper)
            whole = partial(_tensor_of, array, index, dtype, tuple(into.shape))
            device.copy_into(into, _zarr_says(backend, path, whole))
        targets.apply_tensor(item, target)


def _tensor_of(
    array: zarr.Array[Any], index: tuple[slice, ...], dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """The elements as a tensor of that dtype and shape."""
    data = np.asarray(array[index])
    data = np.ascontiguousarray(data.astype(data.dtype.newbyteorder("="), copy=False))
    return device.tensor_over(data.reshape(-1).view(np.uint8).data).view(dtype).view(shape)


def _check_chunks(backend: Backend, path: str, array: zarr.Array[Any]) -> None:
    """Raise where a chunk, which zarr reads whole, is far larger than the array that it is part of."""
    chunk, whole = (math.prod(sizes) * array.dtype.itemsize for sizes in (array.chunks, array.shape))
    if chunk > max(_SLAB_BYTES, _MOST_OVERHANG * whole):
        raise CorruptCheckpointError(
            f"{path!r} in {backend.url} has chunks of {chunk} bytes, and only {whole} bytes in all: its document is "
            "damaged, or written to fill memory. Write the array again in chunks of its own size."
        )


def _array_at(group: zarr.Group, path: str) -> zarr.Array[Any]:
    node: Any = group[path]
    if not hasattr(node, "chunks"):
        raise KeyError(f"{path} is no array")
    found: zarr.Array[Any] = node
    return found


def _slabs(array: zarr.Array[Any], offsets: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of the first dimension of a wanted box, which end where chunks do."""
    if not lengths:
        yield 0, 1
        return
    row = math.prod(lengths[1:]) * array.dtype.itemsize
    step = int((array.shards or array.chunks)[0])
    rows = max(1, _SLAB_BYTES // max(1, row) // step) * step
    start = 0
    while start < lengths[0]:
        stop = min(lengths[0], (offsets[0] + start) // rows * rows + rows - offsets[0])
        yield start, stop
        start = stop


def _arrays(backend: Backend) -> list[tuple[str, zarr.Array[Any]]]:
    group = _open(backend)
    import zarr

    members = _zarr_says(backend, "", lambda: list(group.members(max_depth=None)))
    return [(path, node) for path, node in members if isinstance(node, zarr.Array)]


def _open(backend: Backend) -> zarr.Group:
    try:
        import zarr
    except ImportError as error:
        raise NotSupportedError(
            f'{backend.url} holds a group of zarr, which needs zarr: {error}. Install it: pip install "hpdcp[zarr]".'
        ) from error
    from hpdcp_backends import zarr_dtypes

    zarr_dtypes.register()
    node = _zarr_says(backend, "", lambda: zarr.open(_store(backend), mode="r"))
    if not isinstance(node, zarr.Group):
        raise UnsupportedFormatError(
            f"{backend.url} is one array of zarr; expected a group of arrays, whose names are the tensors'. "
            "Load from the group that it is in."
        )
    return node


def _zarr_says(backend: Backend, path: str, action: Callable[[], _Made]) -> _Made:
    """What zarr makes of it; its own errors as hpdcp's."""
    try:
        return action()
    except (HpdcpError, MemoryError):
        raise
    except Exception as error:
        where = f"{path!r} in {backend.url}" if path else backend.url
        raise CorruptCheckpointError(
            f"zarr cannot read {where}: {type(error).__name__}: {error}. It is damaged, or needs a newer zarr or a "
            "codec that is not installed."
        ) from error


def _about(array: zarr.Array[Any]) -> Mapping[str, Any]:
    found = array.attrs.get("hpdcp", {})
    return found if isinstance(found, Mapping) else {}


def _torch_name(array: zarr.Array[Any], about: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """torch's name of the dtype, and the shape; what hpdcp stores as bytes has one dimension more on disk."""
    name, shape = array.dtype.name, tuple(map(int, array.shape))
    said = about.get("dtype", name)
    if name == "uint8" and isinstance(said, str) and said not in ZARR_NAMES and shape:
        return said, shape[:-1]
    return str(name), shape


def _document(backend: Backend, path: str) -> tuple[str, bytes]:
    """The document that describes an array, and its key."""
    for name in _DOCUMENTS:
        key = f"{path}/{name}" if path else name
        try:
            return key, backend.read(key)
        except KeyNotFoundError:
            continue
    raise CorruptCheckpointError(f"{backend.url} has lost {path}/{NODE} while it was read.")


def _folders(found: Sequence[KeyInfo]) -> dict[str, list[str]]:
    """Folder → the folders in it, and the documents that describe it."""
    inside: dict[str, dict[str, None]] = {}
    for info in found:
        *folders, name = info.key.split("/")
        for depth, folder in enumerate(folders):
            inside.setdefault("/".join(folders[:depth]), {})[folder] = None
        if name in (NODE, ".zarray", ".zgroup", ".zattrs", ".zmetadata"):
            inside.setdefault("/".join(folders), {})[name] = None
    return {folder: list(names) for folder, names in inside.items()}


def _store(backend: Backend) -> Any:
    """The backend as a store that zarr reads from."""
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
    from zarr.core.buffer import default_buffer_prototype

    def fetch(key: str, byte_range: Any) -> bytes | bytearray | None:
        try:
            if byte_range is None:
                return backend.read(key)
            size = backend.size(key)
            start, stop = 0, size
            if isinstance(byte_range, RangeByteRequest):
                start, stop = byte_range.start, min(byte_range.end, size)
            elif isinstance(byte_range, OffsetByteRequest):
                start = byte_range.offset
            elif isinstance(byte_range, SuffixByteRequest):
                start = max(0, size - byte_range.suffix)
            data = bytearray(max(0, stop - start))
            backend.read_ranges(key, [ByteRange(start, len(data))], [memoryview(data)])
        except KeyNotFoundError:
            return None
        except StorageError as error:
            # A part of a path may be a file where zarr looks for a folder.
            if getattr(error, "errno", None) in (20, 21):
                return None
            raise
        return data

    class BackendStore(Store):
        supports_writes = False
        supports_deletes = False
        supports_listing = True

        def __init__(self) -> None:
            super().__init__(read_only=True)
            self._folders: Mapping[str, list[str]] | None = None

        def __eq__(self, other: object) -> bool:
            return self is other

        __hash__ = object.__hash__

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            data = await asyncio.to_thread(fetch, key, byte_range)
            kind = (prototype or default_buffer_prototype()).buffer
            return None if data is None else kind.from_bytes(bytes(data))

        async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
            return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

        async def exists(self, key: str) -> bool:
            return await asyncio.to_thread(fetch, key, None) is not None

        async def set(self, key: str, value: Any) -> None:
            raise NotImplementedError

        async def delete(self, key: str) -> None:
            raise NotImplementedError

        async def list(self) -> AsyncIterator[str]:
            for info in await asyncio.to_thread(backend.list_keys, recursive=True):
                yield info.key

        async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
            async for key in self.list():
                if key.startswith(prefix):
                    yield key

        async def list_dir(self, prefix: str) -> AsyncIterator[str]:
            # Once for all: zarr asks for each group. Files beside the hierarchy are none of its business.
            if self._folders is None:
                self._folders = _folders(await asyncio.to_thread(backend.list_keys, recursive=True))
            for name in self._folders.get(prefix.strip("/"), ()):
                yield name

    return BackendStore()
