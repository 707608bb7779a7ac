"""One export to a Hugging Face folder, planned: what goes in, what lies beside it, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpdcp._base import progress as bars
from hpdcp._base.backend import Backend
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._comm.exchange import Exchange
from hpdcp._convert._auxiliary_files import copy_files, side_files
from hpdcp._convert._export import Export, ExportFile, ExportPlan
from hpdcp._convert.locations import Access, is_local, open_place
from hpdcp._convert.selection import Selected, preference
from hpdcp._convert.tensor_streams import TensorStreamer
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._files import registry
from hpdcp._state.ties import tie_key
from hpdcp._state.tree import flatten_state_dict

Progress = Callable[[int, int], None]
"""Called with the bytes of tensors written so far, and of all that this process writes."""


@dataclass(frozen=True)
class ExportJob:
    """One export of a checkpoint, planned."""

    stored: TensorStreamer
    chosen: Mapping[str, Selected]
    plan: ExportPlan
    skipped: Mapping[str, str]
    beside: Beside

    @property
    def sizes(self) -> dict[str, int]:
        return {tensor.name: tensor.nbytes for file in self.plan.files for tensor in file.tensors}

    def run(self, backend: Backend, exchange: Exchange, *, overwrite: bool, progress: Progress | None) -> None:
        mine = sum(file.nbytes for file in self.plan.shares(exchange.world_size)[exchange.rank])
        count = counter(progress, mine)
        with bars.bar("convert", mine) as shown:

            def pieces(file: ExportFile) -> Iterator[memoryview]:
                with closing(self.stored.stream([self.chosen[tensor.name].wanted for tensor in file.tensors])) as parts:
                    for _, part in parts:
                        yield from byte_pieces(part)
                        nbytes = part.numel() * part.element_size()
                        shown.add(nbytes)
                        count(nbytes)

            Export(backend, self.plan, exchange, overwrite=overwrite, beside=self.beside.copy_to(backend)).write(pieces)


class Beside:
    """The other files of a model's folder, to be copied along."""

    def __init__(self, copy_from: str | Path | None, target: str, from_: Access, to: Access) -> None:
        self._place = None if copy_from is None else registry.resolve_checkpoint_id(copy_from)
        self._target = target
        scheme = "" if self._place is None else self._place.partition("://")[0]
        # Another folder of a store whose options are known; else what is configured for it has to do.
        same = "" if self._place is None or is_local(self._place) else scheme
        self._access = next((each for each in (from_, to) if same and each.options), Access())
        self.files: dict[str, int] = {}

    def find(self) -> None:
        """Look what there is."""
        if self._place is None:
            return
        inside = self._target.removeprefix(self._place.rstrip("/") + "/")
        with closing(open_place(self._place, self._access)) as backend:
            self.files = side_files(backend, but="" if inside == self._target else inside)

    def copy_to(self, target: Backend) -> Callable[[], None]:
        """What copies the files found."""

        def copy() -> None:
            if self._place is not None and self.files:
                with closing(open_place(self._place, self._access)) as source:
                    copy_files(source, target, self.files)

        return copy


def plain_tensors(state_dict: Mapping[Any, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors to store, and which names are left out since they are tied to others."""
    flat, _ = flatten_state_dict(state_dict)
    for name, value in flat.items():
        if isinstance(value, DTensor):
            raise UnsupportedTypeError(
                f"{name!r} is a DTensor, of which this process has a part. hpdcp.save it from all ranks, and make the "
                "folder of that checkpoint with convert_dcp_to_huggingface."
            )
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
            raise UnsupportedTypeError(
                f"{name!r} is a {type(value).__name__}; Hugging Face weights are plain dense tensors. Leave it out."
            )
    first: dict[object, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    for name in sorted(flat, key=preference):
        tie = tie_key(flat[name])
        if tie is not None and tie in first:
            skipped[name] = f"tied to {first[tie]!r}, stored once"
            continue
        if tie is not None:
            first[tie] = name
        tensors[name] = flat[name]
    return tensors, skipped


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up bytes, and tells `progress`."""
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return count
