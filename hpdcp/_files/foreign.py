"""Folders that another program saved a checkpoint to: which one, and what reads it.

They are told by the names in a folder and by how its `.metadata` begins; nothing in one is run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from hpdcp._base.errors import CheckpointNotFoundError, StorageError
from hpdcp._format.file_names import METADATA
from hpdcp._format.signatures import TORCH_READS, is_pickle, told_by

TORCH_ORIGIN: Final = "torch"
"""The origin of metadata that is made of a folder of torch.distributed.checkpoint."""


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """What another program saved in a folder."""

    name: str
    """With its article, such as "a checkpoint of DeepSpeed"."""
    reads: str
    """What reads it, as sentences."""
    key: str
    """The file that tells: `.metadata`, where that is what a save of hpdcp would replace."""

    def __str__(self) -> str:
        return f"{self.name} (it has {self.key!r}). {self.reads}"


_CONVERTS: Final = 'hpdcp.offline_transform.convert_full_checkpoint_to_dcp(..., src_platform="torch")'

_MEGATRON: Final = "Megatron's own tools read it, and export its weights to a folder that hpdcp.load reads."

_BY_NAME: Final[tuple[tuple[re.Pattern[str], str, str], ...]] = tuple(
    (re.compile(pattern), name, reads)
    for pattern, name, reads in (
        (
            r"latest_checkpointed_iteration\.txt|model_optim_rng\.pt|distrib_optim\.pt",
            "a checkpoint of Megatron",
            _MEGATRON,
        ),
        (
            r"__\d+_\d+\.distcp",
            "a save of torch.distributed.checkpoint that did not finish",
            "Without its .metadata nothing reads it: load an earlier checkpoint, or copy the whole folder again.",
        ),
        (
            r"zero_to_fp32\.py|.*_(model|optim)_states\.pt",
            "a checkpoint of DeepSpeed",
            f"DeepSpeed reads it; its zero_to_fp32.py makes one file, and of that {_CONVERTS} a checkpoint of hpdcp.",
        ),
        (r"_CHECKPOINT_METADATA|manifest\.ocdbt", "a checkpoint of Orbax", "Orbax reads it."),
        (
            r"pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json",
            "a folder of Hugging Face weights as pickles",
            "transformers reads it, and its save_pretrained writes safetensors, which hpdcp.load reads.",
        ),
        (
            r".*\.(pt|pth|bin|ckpt)",
            "a folder with files of torch.save",
            f"torch.load reads one, and {_CONVERTS} makes a checkpoint of hpdcp of it.",
        ),
    )
)
"""Names of files that tell a format, the more telling ones first."""


def recognise_folder(keys: Iterable[str], metadata: bytes | None = None) -> ForeignCheckpoint | None:
    """What another program saved in a folder with the files `keys` at its root; None where nothing tells.

    `metadata` is the content of `.metadata`, or its first bytes, where the folder has one: what hpdcp wrote is none of
    another program's, whatever lies beside it. Folders of Hugging Face weights that hpdcp reads are not meant here.
    """
    names = sorted(keys)
    if metadata is not None:
        if not is_pickle(metadata):
            return None
        if "common.pt" in names and "metadata.json" in names:
            return ForeignCheckpoint("a checkpoint of Megatron", _MEGATRON, METADATA)
        return ForeignCheckpoint("a checkpoint of torch.distributed.checkpoint", TORCH_READS, METADATA)
    for pattern, name, reads in _BY_NAME:
        found = next((key for key in names if pattern.fullmatch(key)), None)
        if found is not None:
            return ForeignCheckpoint(name, reads, found)
    return None


@contextlib.contextmanager
def files_explained(url: str) -> Iterator[None]:
    """A context in which a store that failed at `url` is asked whether that is a file: a checkpoint is a folder."""
    try:
        yield
    except StorageError:
        _refuse_file(url)
        raise


def _refuse_file(url: str) -> None:
    """Raise where the location is a file of this host.

    Raises:
        CheckpointNotFoundError: it is one; says of what kind, and what reads it.
    """
    if "://" in url or not os.path.isfile(url):
        return
    told = ""
    with contextlib.suppress(OSError), open(url, "rb") as file:
        told = told_by(file.read(16))
    what = f" It is {told}." if told else ""
    raise CheckpointNotFoundError(
        f"{url} is a file, and a checkpoint is a folder: give the folder.{what} Of one file of weights {_CONVERTS} "
        "makes a checkpoint; HuggingFaceReader(FOLDER, file=NAME) reads one of safetensors where it lies."
    )
