"""Writes a folder of weights as Hugging Face's own tools do, so that a reader never sees parts of two exports.

    model.safetensors                     what fits into one file, or
    model-00001-of-0000N.safetensors …    and, when all of them are there,
    model.safetensors.index.json          which says what lies where

The one file, or the index, is what makes the folder whole; it is written last and in one step. An export that is there
already stays as it is until then, and its files are removed after it. Only where both have the same number of shards
would new files take the names of old ones: that is refused, unless the old index may be removed first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from hpdcp._base.backend import Backend
from hpdcp._base.errors import (
    CheckpointExistsError,
    CommitUncertainError,
    HpdcpError,
    InvalidArgumentError,
    NotSupportedError,
    PeerLostError,
    UnsupportedTypeError,
)
from hpdcp._base.splitting import assign_evenly
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import Exchange
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.publish import publish_or_doubt, read_or_none
from hpdcp._format.container import TensorEntry, build_header, entry_nbytes
from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._state.dtypes import dtype_name
from hpdcp._state.mismatches import listed

HEADER_METADATA: Final = {"format": "pt"}
"""What transformers asks of a file's header."""

_PACKED: Final = "float4_e2m1fn_x2"
"""Counts pairs, where safetensors counts elements."""
_SHARD: Final = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(I?)B\s*", re.IGNORECASE)
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor as a safetensors file describes it."""

    name: str
    dtype_name: str
    """safetensors' name."""
    shape: tuple[int, ...]
    """safetensors' shape."""
    nbytes: int

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Sequence[int]) -> ExportTensor:
        """Of a tensor in torch.

        Raises:
            UnsupportedTypeError: safetensors has no name for its dtype.
        """
        torch_name = dtype_name(dtype)
        sizes = tuple(shape)
        if torch_name == _PACKED and sizes:
            stored_as, sizes = "F4", (*sizes[:-1], 2 * sizes[-1])
        elif torch_name in SAFETENSORS_NAMES:
            stored_as = SAFETENSORS_NAMES[torch_name]
        else:
            raise UnsupportedTypeError(
                f"{name!r} has dtype {torch_name}, which the safetensors format cannot name, so no Hugging Face file "
                "can hold it. Leave it out, or cast it with dtype= where that is a cast to one of "
                f"{', '.join(SAFETENSORS_NAMES)}."
            )
        return cls(name, stored_as, sizes, entry_nbytes(stored_as, sizes))


@dataclass(frozen=True)
class ExportFile:
    """One file of weights, its tensors in the order of their bytes."""

    key: str
    tensors: tuple[ExportTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """Its first bytes."""
        entries = [TensorEntry(t.name, t.dtype_name, t.shape, t.nbytes) for t in self.tensors]
        return build_header(entries, HEADER_METADATA)[0]

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.header) + self.nbytes

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class ExportPlan:
    """What a folder of weights will hold."""

    files: tuple[ExportFile, ...]

    @property
    def is_sharded(self) -> bool:
        """Whether there is an index."""
        return len(self.files) > 1

    @cached_property
    def index(self) -> bytes:
        """The index of shards, as transformers writes it."""
        table = {
            "metadata": {"total_size": sum(file.nbytes for file in self.files)},
            "weight_map": {tensor.name: file.key for file in self.files for tensor in file.tensors},
        }
        return (json.dumps(table, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @property
    def sizes(self) -> dict[str, int]:
        """Every file that will be written, and its length in bytes."""
        sizes = {file.key: file.size for file in self.files}
        return {**sizes, INDEX: len(self.index)} if self.is_sharded else sizes

    def shares(self, world_size: int) -> list[list[ExportFile]]:
        """The files that each rank writes, about as many bytes each."""
        found: list[list[ExportFile]] = [[] for _ in range(world_size)]
        largest_first = sorted(self.files, key=lambda file: (-file.nbytes, file.key))
        ranks = assign_evenly((file.nbytes for file in largest_first), world_size)
        for rank, file in zip(ranks, largest_first, strict=True):
            found[rank].append(file)
        return found


def plan_export(tensors: Sequence[ExportTensor], max_shard_size: int | str) -> ExportPlan:
    """Which files hold these tensors, in their order, as huggingface_hub splits them.

    Raises:
        InvalidArgumentError: no tensors, a name no file can hold, or a size that is none.
        NotSupportedError: huggingface_hub is not installed.
    """
    most = parse_size(max_shard_size)
    if not tensors:
        raise InvalidArgumentError("there is no tensor to export: a folder of weights holds at least one.")
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ImportError as error:
        raise NotSupportedError(
            f"writing Hugging Face files needs the package huggingface_hub ({error}). Install it: "
            'pip install "hpdcp[hf]".'
        ) from error
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        {name: tensor.nbytes for name, tensor in by_name.items()},
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=most,
    )
    return ExportPlan(
        tuple(
            # Wide elements first, so that each starts where its dtype may; stable, so else as given.
            ExportFile(key, tuple(sorted((by_name[name] for name in names), key=_narrowness)))
            for key, names in split.filename_to_tensors.items()
        )
    )


def _narrowness(tensor: ExportTensor) -> int:
    return -entry_nbytes(tensor.dtype_name, (8,))


def parse_size(size: int | str) -> int:
    """Bytes that `size` says, by the conventions of huggingface_hub: `MB` is 10**6, `MiB` 2**20, an int is bytes.

    >>> parse_size("5GB"), parse_size("1.5 mb"), parse_size("2MiB"), parse_size(7)
    (5000000000, 1500000, 2097152, 7)

    Raises:
        InvalidArgumentError: it is anything else, or nothing.
    """
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if found is not None:
        number, unit, binary = found.groups()
        nbytes = int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(unit.upper())))
    else:
        nbytes = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if nbytes < 1:
        raise InvalidArgumentError(
            f"max_shard_size is {size!r}; expected a number of bytes as an int, or a str with a unit: '5GB', '500MB', "
            "'2GiB' (KB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024)."
        )
    return nbytes


Pieces = Callable[[ExportFile], Iterator[memoryview]]
"""The bytes of a file's tensors, one after another."""


class Export:
    """One export to one folder, by all ranks of `exchange` together.

    Args:
        overwrite: whether an older export whose shards have the names of new ones may be taken out of use first; the
            folder then holds nothing that loads until the new one is complete.
        beside: writes what belongs beside the weights; called by the coordinator right before they become whole.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ExportPlan,
        exchange: Exchange,
        *,
        overwrite: bool = False,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._exchange = exchange
        self._overwrite = overwrite
        self._beside = beside
        self._written: list[str] = []

    def write(self, pieces: Pieces) -> None:
        """Write it all; every rank returns when the folder is whole, or raises.

        Raises:
            CheckpointExistsError: an older export is in the way; nothing was changed.
            InvalidArgumentError: ranks were given different things to export.
            HpdcpError: on every rank; what was written is removed, and an older export is as it was.
        """
        exchange = self._exchange
        least, most = exchange.min_max("comparing what is to be exported", 1, lambda: [self._digest()])
        if least != most:
            raise InvalidArgumentError(
                f"ranks were given different tensors to export to {self._backend.url}: give all of them the same "
                "arguments, and a name_map that answers alike."
            )
        exchange.agree("preparing the export", self._prepare if exchange.is_coordinator else lambda: None)
        try:
            exchange.agree("writing the export", lambda: self._write_files(pieces))
            exchange.agree("completing the export", self._complete if exchange.is_coordinator else lambda: None)
        except Exception as error:
            if not _may_be_whole(error):
                self._discard(error)
            raise

    def _digest(self) -> int:
        said = hashlib.blake2b(self._plan.index, digest_size=8)
        for file in self._plan.files:
            said.update(file.header)
        return int.from_bytes(said.digest(), "little") >> 1

    def _prepare(self) -> None:
        self._backend.prepare()
        named = self._named_by_old_index() if self._plan.is_sharded else set()
        taken = sorted(named & {file.key for file in self._plan.files})
        if taken and not self._overwrite:
            raise CheckpointExistsError(
                f"{self._backend.url} holds an export whose {INDEX} names "
                f"{listed([*map(repr, taken)], most=_MOST_NAMED)}, as the new one would: files of both would be mixed. "
                "Export to another folder, choose a max_shard_size that makes another number of files, or pass "
                "overwrite=True, which removes the old index first, so that nothing loads from there until the new "
                "export is complete."
            )
        if taken:
            self._backend.delete([INDEX])
        if not self._plan.is_sharded:
            self._beside()

    def _named_by_old_index(self) -> set[str]:
        data = read_or_none(self._backend, INDEX)
        if data is None:
            return set()
        try:
            return set(json.loads(data)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # Whatever it means, it may name any shard.
            return {info.key for info in self._backend.list_keys() if _SHARD.fullmatch(info.key)}

    def _write_files(self, pieces: Pieces) -> None:
        for file in self._plan.shares(self._exchange.world_size)[self._exchange.rank]:

            def buffers(file: ExportFile = file) -> Iterator[memoryview]:
                yield memoryview(file.header)
                yield from pieces(file)

            self._backend.write(file.key, buffers(), size=file.size, exclusive=False)
            self._written.append(file.key)

    def _complete(self) -> None:
        if self._plan.is_sharded:
            self._beside()
            publish_or_doubt(self._backend, INDEX, self._plan.index)
        try:
            self._remove_older()
        except HpdcpError as error:
            # The export is whole; but a model.safetensors that stays would be read in place of the new shards.
            if self._plan.is_sharded and read_or_none(self._backend, WEIGHTS) is not None:
                raise CommitUncertainError(
                    f"{self._backend.url} holds the new export, and the older {WEIGHTS}, which readers take first, "
                    f"could not be removed: {error}. Remove it."
                ) from error
            log_message(logging.WARNING, f"{self._backend.url}: files of an older export could not be removed: {error}")

    def _remove_older(self) -> None:
        """What readers would look at first goes first: the older file or index, then the older shards."""
        ours = self._plan.sizes
        keys = [info.key for info in self._backend.list_keys()]
        self._backend.delete([key for key in keys if key in (WEIGHTS, INDEX) and key not in ours])
        self._backend.delete([key for key in keys if _SHARD.fullmatch(key) and key not in ours])

    def _discard(self, error: Exception) -> None:
        if not self._plan.is_sharded:
            return  # its one file was written in one step or not at all
        try:
            self._backend.delete(self._written)
        except HpdcpError as left:
            error.add_note(f"What this rank had written could not be removed: {left}")


def _may_be_whole(error: Exception) -> bool:
    """Whether the coordinator may have published the index all the same."""
    return isinstance(error, CommitUncertainError) or (isinstance(error, PeerLostError) and not error.causes)
