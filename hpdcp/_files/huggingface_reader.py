"""Reads the weights of a model from a Hugging Face folder, each rank only its slices, nothing converted first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpdcp._base.arguments import require_text
from hpdcp._files.huggingface_folder import read_weights
from hpdcp._files.huggingface_names import NameMapping, Names, weights_metadata
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.metadata import Metadata
from hpdcp._plan.storage import RankMetadata


class HuggingFaceReader(FileSystemReader):
    """Reads Hugging Face weights under other names, or from another file, than `load(checkpoint_id=...)` would.

    Only the coordinator reads headers and maps names; the other ranks take its answer. Such folders record no
    checksums, so none are compared.

    Args:
        checkpoint_id: folder or URL; may be left out when `load` is given one.
        prefix: put before every stored name: `"model."` for a state dict `{"model": model.state_dict()}`.
        name_map: stored name → wanted name, before the prefix: a table, in which names that stay as they are may be
            left out, or a function, that returns None for a tensor to leave out. A `TensorPart` in place of a name says
            that the tensor is one box of a larger wanted one, such as an expert's matrix in all experts' stacked ones.
        tied: a name that is not stored → the stored name of the tensor that it is tied to, as in
            `{"lm_head.weight": "model.embed_tokens.weight"}`; both are mapped as stored names are.
        file: the safetensors file in the folder to read, or its index (`*.safetensors.index.json`), such as
            `"adapter_model.safetensors"`; None: `model.safetensors`, else `model.safetensors.index.json`.
        backend: a name that goes before the configuration's.
        storage_options: handed to fsspec untouched.

    Raises:
        InvalidArgumentError: from the load: names that collide, or `tied` names that do not fit what is stored.
    """

    def __init__(
        self,
        checkpoint_id: str | Path | None = None,
        *,
        prefix: str = "",
        name_map: NameMapping | None = None,
        tied: Mapping[str, str] | None = None,
        file: str | None = None,
        backend: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        require_text(prefix=prefix, file=file)
        super().__init__(checkpoint_id, backend=backend, storage_options=storage_options)
        self._names = Names(prefix, name_map, dict(tied or {}))
        self._file = file

    def load_metadata(self) -> Metadata:
        """What the folder holds, under the mapped names; a checkpoint that hpdcp saved beside is not looked at."""
        return weights_metadata(read_weights(self.backend, file=self._file), self._names)

    def load_rank_metadata(self, rank: int) -> RankMetadata | None:
        return None
