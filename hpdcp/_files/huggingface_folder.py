"""What a folder of Hugging Face weights holds, from the headers of its safetensors files alone.

Such a folder has `model.safetensors`, or `model.safetensors.index.json` and the shards it names, or what each rank
saved with torch's HuggingFaceStorageWriter. Anybody may have made it, so everything is checked before a byte of a
tensor is read: what the index names, that each shard is there, whole and holds the keys the index says, that its header
fits its length, and that no link leads out of the folder. Other files beside are not looked at.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hpdcp._base.backend import Backend, ByteRange, checked_key
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    UnsupportedFormatError,
)
from hpdcp._base.timing import log_message
from hpdcp._files.links import check_links
from hpdcp._files.parallel import for_each_file
from hpdcp._format.checksums import head_mark
from hpdcp._format.container import (
    MAX_READABLE_HEADER_BYTES,
    ParsedHeader,
    header_length,
    parse_header,
)
from hpdcp._format.dtypes import TORCH_NAMES
from hpdcp._state.mismatches import listed

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

TORCH_SHARD: Final = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
"""What torch's HuggingFaceStorageWriter calls a rank's file: all of them together are the weights, without an index."""

_SHARDING_INFO: Final = "DCP_SHARDING_INFO"
_SAVED_OFFSETS: Final = "saved_offsets"
_INDEX_SUFFIX: Final = ".index.json"
_PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LFS_POINTER: Final = b"version https://git-lfs"
_AGAIN: Final = "Download or export the folder again."
_MOST_NAMED: Final = 5
_FIRST_BYTES: Final = 128 << 10
"""What is read of a file at first: the headers of most shards, so that one request is enough."""
_PACKED_TYPE: Final = ("F4", "float4_e2m1fn_x2")
"""The one dtype below a byte that torch has: it counts pairs, where safetensors counts elements."""


@dataclass(frozen=True, slots=True)
class FolderTensor:
    """One tensor of the folder."""

    key: str
    """Its name in the file."""
    file: str
    dtype_name: str
    """safetensors' name, such as "BF16"."""
    shape: tuple[int, ...]
    offset: int
    """Byte of the file where its data starts."""
    nbytes: int
    offsets: tuple[int, ...] | None = None
    """Where it begins in the tensor of that name, of which the folder may hold other parts; None: it is all of it."""

    @property
    def torch_dtype(self) -> str:
        """torch's name of the dtype; safetensors' own where torch has no such dtype or cannot shape it so."""
        if self._is_packed:
            return _PACKED_TYPE[1]
        return TORCH_NAMES.get(self.dtype_name, self.dtype_name)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in torch, which counts pairs of 4-bit elements."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self._is_packed else self.shape

    @property
    def torch_offsets(self) -> tuple[int, ...]:
        """`offsets`, counted so; empty where it is the whole tensor."""
        offsets = self.offsets or ()
        return (*offsets[:-1], offsets[-1] // 2) if offsets and self._is_packed else offsets

    @property
    def _is_packed(self) -> bool:
        return self.dtype_name == _PACKED_TYPE[0] and bool(self.shape) and self.shape[-1] % 2 == 0


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file of the folder."""

    key: str
    size: int
    """In bytes."""
    mark: int
    """crc32c of its first `checksums.HEAD_BYTES` bytes."""


@dataclass(frozen=True)
class Weights:
    """Everything a folder of weights holds, checked."""

    url: str
    listed_in: str
    """The file that says what there is: the index, or the only weights file; one of them where ranks of torch saved."""
    tensors: tuple[FolderTensor, ...]
    """Sorted by file, then in the order of their data."""
    files: tuple[WeightFile, ...]
    header_metadata: Mapping[str, Mapping[str, str]]
    """For each file, what its header says beside the tensors, such as `{"format": "pt"}`."""


def choose_file(keys: Sequence[str], url: str) -> str | None:
    """Of the files in a folder, the one that says what weights it holds; None where it holds none.

    Where both are there, `model.safetensors` goes before the index, as in transformers.

    Raises:
        UnsupportedFormatError: the only weights are pickled ones.
        IncompleteCheckpointError: shards without their index.
    """
    if WEIGHTS in keys:
        if INDEX in keys:
            log_message(
                logging.WARNING,
                f"{url} holds {WEIGHTS} and {INDEX}: {WEIGHTS} is read, as transformers does, and the shards are not. "
                "Remove the one that is out of date.",
            )
        return WEIGHTS
    if INDEX in keys:
        return INDEX
    torch_shards = list(filter(TORCH_SHARD.fullmatch, keys))
    if torch_shards:
        return min(torch_shards)
    shards = [key for key in keys if key.startswith("model-") and key.endswith(".safetensors")]
    if shards:
        raise IncompleteCheckpointError(
            f"{url} holds {len(shards)} shards of Hugging Face weights, such as {shards[0]!r}, but no {INDEX}: it was "
            f"not downloaded or exported to the end. {_AGAIN}"
        )
    pickled = next((key for key in _PICKLED if key in keys), None)
    if pickled is not None:
        raise UnsupportedFormatError(
            f"{url} holds its weights in {pickled!r}, a pickle: a rank cannot read a part of one, and it can run code. "
            "Convert it once to safetensors: AutoModel.from_pretrained(folder).save_pretrained(new_folder)."
        )
    return None


def read_weights(backend: Backend, *, file: str | None = None, sizes: Mapping[str, int] | None = None) -> Weights:
    """What the folder holds, from its index and the headers of its files.

    Args:
        backend: opened at the folder.
        file: the weights file, or the index (`*.index.json`), to read; None: as `choose_file` finds it.
        sizes: the folder's listing, where it is known already.

    Raises:
        CheckpointNotFoundError: no weights are there.
        IncompleteCheckpointError: files that are named are not there.
        CorruptCheckpointError: an index or a header that is damaged, forged, or fits neither its file nor the other;
            a link out of the folder.
        UnsupportedFormatError: pickled weights only.
        StorageError: the store failed.
    """
    if sizes is None:
        sizes = {info.key: info.size for info in backend.list_keys()}
    chosen = choose_file(list(sizes), backend.url) if file is None else _given(file)
    if chosen is None or chosen not in sizes:
        raise CheckpointNotFoundError(
            f"{backend.url} holds no Hugging Face weights: there is no {chosen or f'{WEIGHTS} and no {INDEX}'} in it. "
            "Is the path right?"
        )
    check_links(backend.url, [chosen])
    if TORCH_SHARD.fullmatch(chosen):
        return _weights(backend, chosen, _read_files(backend, filter(TORCH_SHARD.fullmatch, sizes), sizes))
    if not chosen.endswith(_INDEX_SUFFIX):
        return _weights(backend, chosen, _read_files(backend, [chosen], sizes))
    index = _Index(backend, chosen, sizes[chosen])
    absent = [name for name in index.keys_of if name not in sizes]
    if absent:
        raise IncompleteCheckpointError(
            f"{backend.url} lacks {len(absent)} of the {len(index.keys_of)} files that {chosen} names: "
            f"{_named(absent)}. {_AGAIN}"
        )
    shards = _read_files(backend, index.keys_of, sizes)
    return _weights(backend, chosen, index.choose(shards))


@dataclass(frozen=True, slots=True)
class _ReadFile:
    file: WeightFile
    header: ParsedHeader


def _given(file: str) -> str:
    if "/" in file or not file.endswith((".safetensors", _INDEX_SUFFIX)):
        raise InvalidArgumentError(
            f"file is {file!r}; expected the name of a .safetensors file, or of its {_INDEX_SUFFIX}, in the folder."
        )
    return checked_key(file)


def _weights(backend: Backend, listed_in: str, shards: Sequence[_ReadFile]) -> Weights:
    return Weights(
        backend.url,
        listed_in,
        tuple(tensor for shard in shards for tensor in _tensors(shard, backend.url)),
        tuple(shard.file for shard in shards),
        {shard.file.key: shard.header.metadata for shard in shards},
    )


def _tensors(shard: _ReadFile, url: str) -> Iterator[FolderTensor]:
    offsets = _offsets(shard, url)
    for each in shard.header.entries:
        begin = offsets.get(each.key)
        yield FolderTensor(each.key, shard.file.key, each.dtype_name, each.shape, each.offset, each.nbytes, begin)


def _read_files(backend: Backend, keys: Iterable[str], sizes: Mapping[str, int]) -> list[_ReadFile]:
    names = sorted(keys)
    check_links(backend.url, names)
    return for_each_file(backend, lambda name: _read_file(backend, name, sizes[name]), names)


def _read_file(backend: Backend, key: str, size: int) -> _ReadFile:
    """The file's header, in one request, or in two where it is long."""
    where = f"{key!r} in {backend.url}"
    head = bytearray(min(size, _FIRST_BYTES))
    backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
    if head.startswith(_LFS_POINTER):
        raise IncompleteCheckpointError(
            f"{where} is a Git LFS pointer to the weights, not the weights. Run `git lfs pull` in the folder."
        )
    first = len(head)
    length = header_length(head, size, where=where)
    if length > first:
        head += bytes(length - first)
        backend.read_ranges(key, [ByteRange(first, length - first)], [memoryview(head)[first:]])
    header = parse_header(head, size, where=where)
    return _ReadFile(WeightFile(key, size, head_mark(head)), header)


def _offsets(shard: _ReadFile, url: str) -> dict[str, tuple[int, ...]]:
    """Key → where it begins in the whole tensor, as torch's HuggingFaceStorageWriter says it of what a rank saved.

    Raises:
        CorruptCheckpointError: it says something else.
    """
    told = shard.header.metadata.get(_SHARDING_INFO)
    if told is None:
        return {}
    try:
        table = json.loads(told)
        found = {entry.key: tuple(table[entry.key][_SAVED_OFFSETS]) for entry in shard.header.entries}
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None or any(
        len(found[entry.key]) != len(entry.shape) or any(type(each) is not int or each < 0 for each in found[entry.key])
        for entry in shard.header.entries
    ):
        raise CorruptCheckpointError(
            f"{shard.file.key!r} in {url} has a table {_SHARDING_INFO} that does not say where each of its tensors "
            "begins. Save the folder again, or ask whoever wrote it."
        )
    return found


class _Index:
    """`model.safetensors.index.json`: which key lies in which file."""

    def __init__(self, backend: Backend, key: str, size: int) -> None:
        self._where = f"{key!r} in {backend.url}"
        if size > MAX_READABLE_HEADER_BYTES:
            raise CorruptCheckpointError(
                f"{self._where} is {size} bytes long, over the limit of {MAX_READABLE_HEADER_BYTES}: it is no index."
            )
        self._table = self._parsed(backend.read(key))
        self.file_of = self._weight_map()
        """Key → the name of its file."""
        self.keys_of: dict[str, set[str]] = {}
        for name, file in self.file_of.items():
            self.keys_of.setdefault(file, set()).add(name)

    def choose(self, shards: Sequence[_ReadFile]) -> list[_ReadFile]:
        """Of each file, what the index says it holds.

        The index decides, as in transformers: merged and edited models are published with shards that still hold an
        older copy of a tensor, or tensors that nobody names. These are left alone, and told of.

        Raises:
            CorruptCheckpointError: a file lacks keys that the index says it holds.
        """
        chosen, others = [], []
        for shard in shards:
            file, said = shard.file.key, self.keys_of[shard.file.key]
            named = tuple(entry for entry in shard.header.entries if entry.key in said)
            if len(named) < len(said):
                absent = said.difference(entry.key for entry in named)
                raise CorruptCheckpointError(
                    f"{file!r} lacks {len(absent)} keys that {self._where} says it holds: "
                    f"{_named(sorted(absent))}. {_AGAIN}"
                )
            others += [f"{entry.key!r} in {file!r}" for entry in shard.header.entries if entry.key not in said]
            chosen.append(_ReadFile(shard.file, replace(shard.header, entries=named)))
        if others:
            log_message(
                logging.WARNING,
                f"{self._where} does not name {len(others)} of the tensors in its files, which are left alone: "
                f"{listed(others, most=_MOST_NAMED)}.",
            )
        self._check_total(chosen, shards)
        return chosen

    def _check_total(self, *counted: Sequence[_ReadFile]) -> None:
        about = self._table.get("metadata")
        total = about.get("total_size") if isinstance(about, dict) else None
        sums = [sum(entry.nbytes for shard in shards for entry in shard.header.entries) for shards in counted]
        if total is not None and total not in sums:
            # transformers never looks at it, and tools that edit weights forget it.
            log_message(
                logging.WARNING,
                f"{self._where} gives total_size {str(total)[:40]}, but its files hold {sums[0]} bytes of tensors; the "
                "headers fit the files, so the index alone is out of date.",
            )

    def _parsed(self, data: bytes) -> dict[str, object]:
        try:
            table = json.loads(data.decode("utf-8-sig"), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{self._where} is not the JSON of an index ({error}). {_AGAIN}") from None
        if not isinstance(table, dict):
            raise CorruptCheckpointError(f"{self._where} is JSON, but not a table. {_AGAIN}")
        return table

    def _weight_map(self) -> dict[str, str]:
        found = self._table.get("weight_map")
        if not isinstance(found, dict):
            raise CorruptCheckpointError(f"{self._where} has no table weight_map, which says where each key lies.")
        sound: set[str] = set()
        for key, file in found.items():
            if isinstance(file, str) and file in sound:
                continue
            if not isinstance(file, str) or not _is_plain_name(file):
                raise CorruptCheckpointError(
                    f"{self._where} says that {key!r} lies in {file!r}; expected the name of a .safetensors file in "
                    "the same folder. Nothing else is opened."
                )
            sound.add(file)
        return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table: dict[str, object] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"{key!r} is given twice")
        table[key] = value
    return table


def _is_plain_name(name: str) -> bool:
    """Whether it names a safetensors file in the folder itself, whatever a store takes for a separator."""
    if "/" in name or "\\" in name or not name.endswith(".safetensors"):
        return False
    try:
        checked_key(name)
    except InvalidArgumentError:
        return False
    return True


def _named(keys: Sequence[str]) -> str:
    return listed([*map(repr, keys)], most=_MOST_NAMED)
