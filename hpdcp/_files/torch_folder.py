"""What a folder of torch.distributed.checkpoint holds, as metadata of hpdcp's own; nothing after that knows the
difference, but for the layout that reads the items (`torch_layout`).

    .metadata             a pickle: every name, every box, and in which file from which byte on each is stored
    __0.metadata          instead, one for each rank, where ranks saved without collectives
    __0_0.distcp          items of rank 0, one after another, each a whole file of `torch.save`

Anybody may have made the folder, so everything is checked before a byte of a tensor is read: names of files, that each
file is there and reaches as far as its items, that boxes lie in their tensors and not over one another. The pickle is
read by an interpreter that imports nothing (`_torch_pickle`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import crc32c
import numpy as np

from hpdcp._base.backend import Backend, checked_key
from hpdcp._base.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    UnsafePickleError,
    UnsupportedFormatError,
)
from hpdcp._files._torch_metadata import TorchChunk, TorchEntry, TorchItem, torch_entries
from hpdcp._files._torch_pickle import ForbiddenNameError, PickleError
from hpdcp._files.foreign import TORCH_ORIGIN
from hpdcp._files.parallel import for_each_file
from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable
from hpdcp._format.file_names import METADATA
from hpdcp._format.metadata import NO_CHECKSUMS, Metadata, StorageTable
from hpdcp._format.signatures import is_pickle
from hpdcp._format.strings import StringColumn
from hpdcp._plan.replicas import boxes_that_overlap, merge_rank_metadata
from hpdcp._plan.storage import RankMetadata
from hpdcp._state.dtypes import itemsize_of
from hpdcp._state.mismatches import listed
from hpdcp._state.paths import Path, encode_path

ORIGIN: Final = TORCH_ORIGIN
"""The setting `origin` of metadata that was made here, and the name of the layout that reads what it describes."""

TRANSFORMS: Final = "torch.transforms"
"""The setting that says, as JSON, what the items of a file went through, for files whose items are not as they are."""

DATA_FILE: Final = re.compile(r"__\d+_\d+\.distcp")
_RANK_METADATA: Final = re.compile(r"__(\d{1,7})\.metadata")
_MOST_PACKED: Final = 1 << 15
"""Bytes that a compressor makes of one at most."""
_MOST_NAMED: Final = 5


def folder_metadata(backend: Backend, data: bytes, *, key: str = METADATA) -> Metadata:
    """What torch's `.metadata` in the folder says, `data` being its content; `key` is what it is called there.

    Raises:
        UnsafePickleError: it names code that no description of tensors needs; nothing of it was run.
        CorruptCheckpointError: it is damaged or forged; names what does not fit.
        IncompleteCheckpointError: files that it names are not there.
        UnsupportedFormatError: another program's pickle, or items stored in a way that torch does not.
        StorageError: the store failed.
    """
    where = f"{key!r} in {backend.url}"
    try:
        entries = torch_entries(data)
    except ForbiddenNameError as error:
        raise UnsafePickleError(
            f"{where} is a pickle that {error}, which no checkpoint of torch.distributed.checkpoint needs. Nothing of "
            "it was run. If you trust whoever made it and torch loads it, load it with torch and save it with hpdcp."
        ) from None
    except PickleError as error:
        raise CorruptCheckpointError(
            f"{where} is a pickle that torch.distributed.checkpoint did not write, or that is damaged: {error}. "
            "Load another checkpoint."
        ) from None
    return _Folder(backend, where, entries).metadata(
        {"world_size": "1", "layout": ORIGIN, "origin": ORIGIN, "checksums": NO_CHECKSUMS, "listed_in": key,
         "attempt": version_of(data)}
    )  # fmt: skip


def holds_checkpoint(backend: Backend, keys: Iterable[str]) -> bool:
    """Whether a folder with these files holds what torch.distributed.checkpoint saved: together, or rank by rank."""
    names = set(keys)
    if METADATA not in names:
        return any(map(_RANK_METADATA.fullmatch, names))
    return is_pickle(backend.read(METADATA))


def version_of(data: bytes) -> str:
    """Tells one save's `.metadata` from another's."""
    return f"{crc32c.crc32c(data):08x}"


def rank_metadata(backend: Backend, keys: Iterable[str], rank: int) -> RankMetadata | None:
    """What ranks recorded each for itself in a folder with these files; None where none did.

    Raises:
        IncompleteCheckpointError: a rank's record is not there.
        Others: as `folder_metadata`.
    """
    found = {int(named[1]): key for key in keys if (named := _RANK_METADATA.fullmatch(key))}
    if not found:
        return None
    absent = next((number for number in range(len(found)) if number not in found), None)
    if absent is not None:
        raise IncompleteCheckpointError(
            f"{backend.url} holds {len(found)} records of ranks that saved each for itself, such as "
            f"{next(iter(found.values()))!r}, but none of rank {absent}: the save did not finish, or files of two were "
            "mixed. Load another checkpoint."
        )
    return _RankRecords(backend, [found[number] for number in range(len(found))], rank)


class _RankRecords(RankMetadata):
    """`__{rank}.metadata` of every rank. Nothing in them tells whether all are of one save."""

    def __init__(self, backend: Backend, keys: Sequence[str], rank: int) -> None:
        self._rank = rank
        self._parts = for_each_file(
            backend, lambda key: folder_metadata(backend, backend.read(key), key=key), list(keys)
        )

    def own(self, world_size: int) -> Metadata | None:
        return self._parts[self._rank] if len(self._parts) == world_size and self._rank < world_size else None

    def merged(self) -> Metadata:
        merged = merge_rank_metadata(self._parts)
        transforms: dict[str, list[str]] = {}
        for part in self._parts:
            transforms |= transforms_of(part)
        return replace(merged, settings={**merged.settings, **_transforms_setting(transforms)})


def transforms_of(metadata: Metadata) -> dict[str, list[str]]:
    """File → what its items went through, the last transform first; files whose items are as they are have no place."""
    found: dict[str, list[str]] = json.loads(metadata.settings.get(TRANSFORMS, "{}"))
    return found


def _transforms_setting(transforms: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {TRANSFORMS: json.dumps(transforms, separators=(",", ":"))} if transforms else {}


class _Folder:
    """The columns of one `.metadata`, checked against the files of the folder."""

    def __init__(self, backend: Backend, where: str, entries: Sequence[TorchEntry]) -> None:
        self._backend = backend
        self._where = where
        self._positions = {entry.fqn: number for number, entry in enumerate(entries)}
        self._entries = sorted(entries, key=lambda entry: entry.fqn.encode("utf-8", "surrogatepass"))
        self._chunks: list[tuple[int, TorchChunk, TorchItem]] = []
        for row, entry in enumerate(self._entries):
            for chunk in sorted(entry.chunks, key=lambda chunk: (chunk.offsets, chunk.sizes)):
                if chunk.item is None:
                    raise CorruptCheckpointError(
                        f"{where} records {_described(entry, chunk)} and does not say where it is stored: it is "
                        "damaged. Load another checkpoint."
                    )
                self._chunks.append((row, chunk, chunk.item))
        self._transforms = self._checked_transforms()
        self._sizes = self._file_sizes()
        self._check_extents()

    def metadata(self, settings: Mapping[str, str]) -> Metadata:
        """All of it; CorruptCheckpointError where boxes overlap."""
        files = {file: number for number, file in enumerate(self._sizes)}
        found = Metadata(
            EntryTable.from_entries(self._named_entries()),
            ChunkTable.from_boxes(
                [row for row, _, _ in self._chunks], [(chunk.offsets, chunk.sizes) for _, chunk, _ in self._chunks]
            ),
            StorageTable(
                file=np.array([files[item.file] for _, _, item in self._chunks], dtype=np.int32),
                offset=np.array([item.offset for _, _, item in self._chunks], dtype=np.int64),
                length=np.array([item.length for _, _, item in self._chunks], dtype=np.int64),
                crc_ends=np.zeros(len(self._chunks), dtype=np.int64),
                crcs=np.zeros(0, dtype=np.uint32),
                file_names=StringColumn.from_strings(list(files)),
                file_sizes=np.array(list(self._sizes.values()), dtype=np.int64),
                file_marks=np.zeros(len(files), dtype=np.uint32),
            ),
            {**settings, **_transforms_setting(self._transforms)},
        )
        shared = boxes_that_overlap(found)
        if shared:
            raise CorruptCheckpointError(
                f"{self._where} records boxes of {len(shared)} tensors that overlap, so that it is not known which "
                f"values count: {listed(shared, separator='; ', most=_MOST_NAMED)}. Load another checkpoint."
            )
        return found

    def _named_entries(self) -> list[Entry]:
        with_groups = (entry.path for entry in self._entries if "param_groups" in entry.path)
        optimizers = {path[: path.index("param_groups")] for path in with_groups}
        return [
            Entry(
                entry.fqn,
                encode_path(_typed_path(entry.path, optimizers)),
                EntryKind.OBJECT if entry.dtype is None else EntryKind.TENSOR,
                entry.dtype or "",
                entry.shape,
                position=self._positions[entry.fqn],
            )
            for entry in self._entries
        ]

    def _checked_transforms(self) -> dict[str, list[str]]:
        """By file; a writer of torch has one list of transforms for all that it writes."""
        by_file: dict[str, tuple[str, ...]] = {}
        for _, _, item in self._chunks:
            if by_file.setdefault(item.file, item.transforms) != item.transforms:
                raise UnsupportedFormatError(
                    f"{self._where} says that items of {item.file!r} went through different transforms, which torch's "
                    "writers do not do. Load it with what wrote it."
                )
        return {file: list(transforms) for file, transforms in by_file.items() if transforms}

    def _file_sizes(self) -> dict[str, int]:
        names = sorted({item.file for _, _, item in self._chunks})
        for name in names:
            if not _is_inside(name):
                raise CorruptCheckpointError(
                    f"{self._where} says that data lie in {name!r}; expected the name of a file in the same folder. "
                    "Nothing else is opened."
                )
        known = {info.key: info.size for info in self._backend.list_keys()}
        absent = [name for name in names if name not in known]
        if absent:
            raise IncompleteCheckpointError(
                f"{self._backend.url} lacks {len(absent)} of the {len(names)} files that {self._where} names: "
                f"{listed([*map(repr, absent)], most=_MOST_NAMED)}. Copy the whole folder again, or load another "
                "checkpoint."
            )
        return {name: known[name] for name in names}

    def _check_extents(self) -> None:
        for row, chunk, item in self._chunks:
            entry, size = self._entries[row], self._sizes[item.file]
            if item.offset > size - item.length:
                raise CorruptCheckpointError(
                    f"{self._where} says that {_described(entry, chunk)} lies in bytes {item.offset} to "
                    f"{item.offset + item.length} of {item.file!r}, which has {size}: it was cut off, or replaced. "
                    "Load another checkpoint."
                )
            nbytes = _nbytes(entry, chunk)
            most = item.length * (_MOST_PACKED if item.transforms else 1)
            if nbytes > most:
                raise CorruptCheckpointError(
                    f"{self._where} says that {_described(entry, chunk)}, of {nbytes} bytes, is stored in "
                    f"{item.length}: it is damaged. Load another checkpoint."
                )


def _described(entry: TorchEntry, chunk: TorchChunk) -> str:
    if entry.dtype is None:
        return f"the value {entry.fqn!r}"
    return f"the box at {list(chunk.offsets)} of {list(chunk.sizes)} of {entry.fqn!r}"


def _nbytes(entry: TorchEntry, chunk: TorchChunk) -> int:
    if entry.dtype is None:
        return 0
    count = itemsize_of(entry.dtype)
    for size in chunk.sizes:
        count *= size
    return count


def _is_inside(name: str) -> bool:
    """Whether it names a file in the folder itself, whatever a store takes for a separator."""
    if "/" in name or "\\" in name:
        return False
    try:
        checked_key(name)
    except InvalidArgumentError:
        return False
    return True


def _typed_path(path: tuple[Hashable, ...], optimizers: Collection[tuple[Hashable, ...]]) -> Path:
    """The keys as they were before torch wrote each key of a dict as text, as far as can be told.

    An int is an index of a list. An optimizer that has `param_groups` numbers its parameters under `state`; where it
    names them, no name is a number.
    """
    keys, kinds = list(path), ["list" if type(key) is int else "dict" for key in path]
    for at in range(1, len(path)):
        key = path[at]
        numbered = path[at - 1] == "state" and isinstance(key, str) and key.isascii() and key.isdigit()
        if numbered and path[: at - 1] in optimizers:
            keys[at] = int(str(key))
            kinds[at] = "dict"
            break
    return Path(keys, kinds)
