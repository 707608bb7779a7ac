"""`.metadata` of torch.distributed.checkpoint as plain records, each fact in it checked before it is used.

Whoever wrote the file may mean harm, so besides types and numbers what is visited is bounded: one list of chunks may
stand under a million names, but only as many chunks are taken as there are places on record for them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hpdcp._files._torch_pickle import Name, PickleError, Record, Vocabulary, read_pickle
from hpdcp._state.dtypes import find_dtype

MOST_DIMENSIONS: Final = 64
"""As many as torch itself lets a tensor have in most of its operations."""
_MOST_ELEMENTS: Final = 1 << 60

_Size: TypeAlias = tuple[int, ...]

_METADATA: Final = "torch.distributed.checkpoint.metadata."
_SHARDED: Final = "torch.distributed._shard.sharded_tensor.metadata."
_MEGATRON: Final = "megatron.core.dist_checkpointing.strategies.torch."
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_ROOTS: Final = (f"{_METADATA}Metadata", f"{_MEGATRON}MCoreMetadata")
_TENSOR: Final = f"{_METADATA}TensorStorageMetadata"
_BYTES: Final = f"{_METADATA}BytesStorageMetadata"
_CHUNK: Final = f"{_METADATA}ChunkStorageMetadata"
_INDEX: Final = f"{_METADATA}MetadataIndex"
_PROPERTIES: Final = (f"{_METADATA}TensorProperties", f"{_SHARDED}TensorProperties")
_PATHS: Final = frozenset(
    f"{module}.{kind}"
    for module in ("pathlib", "pathlib._local")  # the latter in Python 3.13
    for kind in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
)
_SIZE: Final = "torch.Size"
_LAYOUT: Final = "torch.serialization._get_layout"
_ORDERED: Final = "collections.OrderedDict"
_KNOWN: Final = frozenset({
    *_ROOTS, _TENSOR, _BYTES, _CHUNK, _INDEX, *_PROPERTIES, *_PATHS, _SIZE, _LAYOUT, _ORDERED, _STORAGE_INFO,
    f"{_METADATA}StorageMeta", f"{_METADATA}_MEM_FORMAT_ENCODING",
    f"{_SHARDED}MEM_FORMAT_ENCODING",  # before torch 2.3
    f"{_MEGATRON}MCoreSavePlan",
})  # fmt: skip
"""Everything that the metadata of torch names, and of Megatron, which adds fields to it; and torch's dtypes."""


@dataclass(frozen=True, slots=True)
class TorchItem:
    """Where one chunk, or one Python value, is stored: a file of `torch.save` inside of a file."""

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]
    """What its bytes went through, such as "stream.zstd/1"; the last one first."""


@dataclass(frozen=True, slots=True)
class TorchChunk:
    """One stored box of a tensor."""

    offsets: _Size
    sizes: _Size
    item: TorchItem | None
    """None where no place is on record."""


@dataclass(frozen=True, slots=True)
class TorchEntry:
    """One name on record."""

    fqn: str
    path: tuple[Hashable, ...]
    """The keys of the state dict that lead to it, as text; an int is an index of a list."""
    dtype: str | None
    """torch's name; None for a Python value."""
    shape: _Size
    chunks: tuple[TorchChunk, ...]
    """Without those that are empty; of a Python value the only one, without coordinates."""


def torch_entries(data: bytes) -> list[TorchEntry]:
    """What a `.metadata` says is stored, in its order.

    Raises:
        ForbiddenNameError: it names something else than the classes and functions that describe tensors.
        PickleError: it is none of torch's, or damaged; says where.
    """
    root, _ = read_pickle(data, _VOCABULARY)
    if not isinstance(root, Record) or root.name not in _ROOTS:
        raise PickleError("it does not hold the Metadata of torch.distributed.checkpoint")
    fields = _fields(root, "Metadata")
    names = _dict(fields.get("state_dict_metadata"), "state_dict_metadata")
    places = _places(_dict(fields.get("storage_data"), "storage_data"))
    paths = fields.get("planner_data")
    path_of = paths.get if isinstance(paths, dict) else {}.get
    left = itertools.count(len(places) + len(names), -1)
    return [_entry(_text(fqn, "a name"), value, path_of, places, left) for fqn, value in names.items()]


def _entry(
    fqn: str,
    value: Any,
    path_of: Callable[[str], Any],
    places: Mapping[tuple[str, _Size | None], TorchItem],
    left: Iterator[int],
) -> TorchEntry:
    path = _path(fqn, path_of(fqn))
    if not isinstance(value, Record) or value.name not in (_TENSOR, _BYTES):
        raise PickleError(f"{fqn!r} is recorded as neither tensor nor value")
    if value.name == _BYTES:
        return TorchEntry(fqn, path, None, (), (TorchChunk((), (), places.get((fqn, None))),))
    fields = _fields(value, fqn)
    shape = _size(fields.get("size"), fqn)
    if math.prod(size or 1 for size in shape) > _MOST_ELEMENTS:
        raise PickleError(f"{fqn!r} has the shape {list(shape)}, which is more than any storage holds")
    recorded = fields.get("chunks")
    if not isinstance(recorded, list):
        raise PickleError(f"{fqn!r} has no list of chunks")
    chunks: dict[tuple[_Size, _Size], TorchChunk] = {}
    for each in recorded:
        if next(left) <= 0:
            raise PickleError(f"{fqn!r} has more chunks than there are places on record for all of them")
        offsets, sizes = _box(each, shape, fqn)
        if 0 not in sizes:
            chunks[offsets, sizes] = TorchChunk(offsets, sizes, places.get((fqn, offsets)))
    return TorchEntry(fqn, path, _dtype(fields.get("properties"), fqn), shape, tuple(chunks.values()))


def _box(chunk: Any, shape: _Size, fqn: str) -> tuple[_Size, _Size]:
    if not isinstance(chunk, Record) or chunk.name != _CHUNK:
        raise PickleError(f"{fqn!r} has a chunk that is none")
    fields = _fields(chunk, fqn)
    offsets, sizes = _size(fields.get("offsets"), fqn), _size(fields.get("sizes"), fqn)
    if not len(offsets) == len(sizes) == len(shape) or any(
        offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    ):
        raise PickleError(
            f"{fqn!r} of shape {list(shape)} has a chunk beyond it, from {list(offsets)} of {list(sizes)}"
        )
    return offsets, sizes


def _dtype(properties: Any, fqn: str) -> str:
    state = properties.state if isinstance(properties, Record) and properties.name in _PROPERTIES else None
    # Since torch 2.0 `TensorProperties` hands over a tuple; a dict is what a class without __getstate__ does.
    found = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    name = found.text.removeprefix("torch.") if isinstance(found, Name) else ""
    if find_dtype(name) is None:
        raise PickleError(f"{fqn!r} has no dtype")
    return name


def _path(fqn: str, recorded: Any) -> tuple[Hashable, ...]:
    """The recorded keys where they spell the name; else the name is the only key."""
    sound = type(recorded) is tuple and 0 < len(recorded) <= len(fqn) + 1 and type(recorded[0]) is str
    if sound and all(type(key) in (str, int) for key in recorded):
        length = sum(len(str(key)) for key in recorded) + len(recorded) - 1
        if length == len(fqn) and ".".join(map(str, recorded)) == fqn:
            return tuple(recorded)
    return (fqn,)


def _places(storage_data: Mapping[Any, Any]) -> dict[tuple[str, _Size | None], TorchItem]:
    """(name, offsets of its chunk; None for a value) → where it is stored."""
    found: dict[tuple[str, _Size | None], TorchItem] = {}
    for index, info in storage_data.items():
        if not isinstance(index, Record) or index.name != _INDEX:
            raise PickleError("storage_data has a key that is no MetadataIndex")
        fields = _fields(index, "a MetadataIndex")
        fqn = _text(fields.get("fqn"), "the name in a MetadataIndex")
        offsets = fields.get("offset")
        found[fqn, None if offsets is None else _size(offsets, fqn)] = _item(info, fqn)
    return found


def _item(info: Any, fqn: str) -> TorchItem:
    if not isinstance(info, Record) or info.name != _STORAGE_INFO:
        raise PickleError(f"where {fqn!r} is stored is not recorded as torch's FileSystemWriter does")
    fields = _fields(info, fqn)
    file = _text(fields.get("relative_path"), f"the file of {fqn!r}")
    transforms = fields.get("transform_descriptors") or []
    if not isinstance(transforms, list) or not all(isinstance(each, str) for each in transforms):
        raise PickleError(f"{fqn!r} went through transforms that have no names")
    return TorchItem(file, _count(fields.get("offset"), fqn), _count(fields.get("length"), fqn), tuple(transforms))


def _fields(record: Record, what: str) -> dict[Any, Any]:
    if isinstance(record.state, dict):
        return record.state
    if record.state is None:
        return {}
    raise PickleError(f"{what} has no fields")


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise PickleError(f"its {what} is no dict")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise PickleError(f"{what} is no text")
    return value


def _count(value: Any, fqn: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise PickleError(f"{fqn!r} has a number of bytes that is none")
    return value


def _size(value: Any, fqn: str) -> _Size:
    if (
        not isinstance(value, tuple)
        or len(value) > MOST_DIMENSIONS
        or not all(type(each) is int and 0 <= each < _MOST_ELEMENTS for each in value)
    ):
        raise PickleError(f"{fqn!r} has a shape or an offset that is none")
    return value


def _known(module: str, name: str) -> str | None:
    text = f"{module}.{name}"
    if text in _KNOWN or (module == "torch" and find_dtype(name) is not None):
        return text
    return None


def _called_size(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments else ()


_VOCABULARY: Final = Vocabulary(
    _known,
    {_SIZE: _called_size, _ORDERED: lambda _: {}, _LAYOUT: lambda _: None, **dict.fromkeys(_PATHS, lambda _: "")},
)
