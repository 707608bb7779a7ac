"""What a folder of Hugging Face weights holds, from the headers of its safetensors files alone.

Such a folder has `model.safetensors`, or `model.safetensors.index.json` and the shards it names. Anybody may have made
it, so everything is checked before a byte of a tensor is read: what the index names, that each shard is there, whole
and holds exactly the keys the index says, and that its header fits its length. Other files beside are not looked at.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """The file that says what there is: the index, or the only weights file."""
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
        CorruptCheckpointError: an index or a header that is damaged, forged, or fits neither its file nor the other.
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
    if not chosen.endswith(_INDEX_SUFFIX):
        return _weights(backend, chosen, [_read_file(backend, chosen, sizes[chosen])])
    index = _Index(backend, chosen, sizes[chosen])
    absent = [name for name in index.keys_of if name not in sizes]
    if absent:
        raise IncompleteCheckpointError(
            f"{backend.url} lacks {len(absent)} of the {len(index.keys_of)} files that {chosen} names: "
            f"{_named(absent)}. {_AGAIN}"
        )
    shards = for_each_file(backend, lambda name: _read_file(backend, name, sizes[name]), sorted(index.keys_of))
    index.check(shards)
    return _weights(backend, chosen, shards)


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
        tuple(
            FolderTensor(entry.key, shard.file.key, entry.dtype_name, entry.shape, entry.offset, entry.nbytes)
            for shard in shards
            for entry in shard.header.entries
        ),
        tuple(shard.file for shard in shards),
        {shard.file.key: shard.header.metadata for shard in shards},
    )


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

    def check(self, shards: Sequence[_ReadFile]) -> None:
        """Raise CorruptCheckpointError unless each file holds exactly the keys the index says."""
        for shard in shards:
            file, said = shard.file.key, self.keys_of[shard.file.key]
            held = {entry.key for entry in shard.header.entries}
            for key in sorted(held - said):
                if key in self.file_of:
                    raise CorruptCheckpointError(
                        f"{key!r} lies in {file!r}, but {self._where} says that it lies in {self.file_of[key]!r}. "
                        f"Files of two exports are mixed. {_AGAIN}"
                    )
            if said - held:
                raise CorruptCheckpointError(
                    f"{file!r} lacks {len(said - held)} keys that {self._where} says it holds: "
                    f"{_named(sorted(said - held))}. {_AGAIN}"
                )
            if held - said:
                raise CorruptCheckpointError(
                    f"{file!r} holds {len(held - said)} keys that {self._where} does not name: "
                    f"{_named(sorted(held - said))}. {_AGAIN}"
                )
        about = self._table.get("metadata")
        total = about.get("total_size") if isinstance(about, dict) else None
        nbytes = sum(entry.nbytes for shard in shards for entry in shard.header.entries)
        if total is not None and total != nbytes:
            # transformers never looks at it, and tools that edit weights forget it.
            log_message(
                logging.WARNING,
                f"{self._where} gives total_size {str(total)[:40]}, but its files hold {nbytes} bytes of tensors; the "
                "headers fit the files, so the index alone is out of date.",
            )

    def _parsed(self, data: bytes) -> dict[str, object]:
        try:
            table = json.loads(data.decode("utf-8"), object_pairs_hook=_once)
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
