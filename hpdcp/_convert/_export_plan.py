"""Which files of a folder of weights hold which tensors, and what each file begins with."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from hpdcp._base.errors import InvalidArgumentError, NotSupportedError, UnsupportedTypeError
from hpdcp._base.splitting import assign_evenly
from hpdcp._files.huggingface_folder import INDEX
from hpdcp._format.container import TensorEntry, build_header, entry_nbytes
from hpdcp._format.dtypes import SAFETENSORS_NAMES
from hpdcp._state.dtypes import dtype_name

HEADER_METADATA: Final = {"format": "pt"}
"""What transformers asks of a file's header."""

_PACKED: Final = "float4_e2m1fn_x2"
"""Counts pairs, where safetensors counts elements."""
_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(I?)B\s*", re.IGNORECASE)


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
    def tensor_sizes(self) -> dict[str, int]:
        """Every tensor that will be written, and its bytes."""
        return {tensor.name: tensor.nbytes for file in self.files for tensor in file.tensors}

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
