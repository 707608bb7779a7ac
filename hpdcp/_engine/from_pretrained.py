"""From a folder of Hugging Face weights to a model that was built on the meta device and sharded, in one call."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch.distributed.tensor import DTensor

from hpdcp._base.arguments import require_flags, require_instance
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.timing import log_message
from hpdcp._comm.process_group import open_exchange
from hpdcp._engine.verbs import load
from hpdcp._files.huggingface_names import NameMapping
from hpdcp._files.huggingface_reader import HuggingFaceReader
from hpdcp._plan.standard_load_planner import StandardLoadPlanner
from hpdcp._state.mismatches import listed

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

_UNSET: Final = 0xA5
"""Every byte of new memory: what still holds it when all is loaded, nobody has set; also after a call that failed."""
_CASTS: Final = r"\d+ tensors are cast to their target's dtype"
_MOST_NAMED: Final = 5


def from_pretrained(
    model: ModelT,
    url: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    name_map: NameMapping | None = None,
    strict: bool = True,
) -> ModelT:
    """Give a model that was built on the meta device its memory, and the weights of a Hugging Face folder.

    The model may be plain or sharded (FSDP2, tensor parallelism, both); each rank makes memory for its shards and reads
    its slices of the files. Parameters that were tied are tied again. Buffers that are not in the files since the model
    computes them, such as the frequencies of rotary embeddings, are set by the module's own `_init_weights` (a model of
    transformers) or `reset_parameters`. Tensors that have memory keep it, and are filled if they are stored. Every rank
    of the default process group calls it.

    Args:
        model: filled in place. Shard it before.
        url: folder or URL with `model.safetensors`, or with an index and its shards.
        device: where memory is made; None: on the device of the tensor's mesh, or torch's default device.
        dtype: of new floating-point parameters and of persistent buffers; None: as the model was built. What is stored
            in another dtype is cast.
        name_map: stored name → the model's name: a table, or a function; see `HuggingFaceReader`.
        strict: whether a parameter or persistent buffer that is not stored is an error. False: it is set by the
            module's own `_init_weights` or `reset_parameters`, and named in a warning.

    Returns:
        `model`.

    Raises:
        MissingKeysError: on every rank: the model needs tensors that are not stored; no stored tensor was read.
        InvalidArgumentError: on every rank: names of tensors that are neither stored nor set by their module.
        LoadMismatchError, CheckpointError, StorageError: as from `load`.
    """
    exchange = open_exchange(no_dist=False, use_collectives=True)

    def prepare() -> dict[str, torch.Tensor]:
        require_instance("model", model, torch.nn.Module, instead="the model itself")
        require_flags(strict=strict)
        _make_memory(model, None if device is None else torch.device(device), dtype)
        return model.state_dict()

    # Ranks may hold different parts of a model: whatever one of them meets, the others must hear of it.
    targets = exchange.agree("making memory for the model", prepare)
    planner = StandardLoadPlanner(allow_partial_load=not strict)
    with warnings.catch_warnings():
        if dtype is not None:  # then a cast is what was asked for
            warnings.filterwarnings("ignore", _CASTS, UserWarning)
        load(targets, storage_reader=HuggingFaceReader(url, name_map=name_map), planner=planner)
    exchange.agree("setting what is not stored", lambda: _set_the_rest(model, targets.keys(), planner.not_loaded))
    return model


@dataclass(frozen=True, slots=True)
class _Slot:
    """One place in a module where a tensor is held."""

    module: torch.nn.Module
    kind: str
    """The module's own table: "_parameters" or "_buffers"."""
    key: str
    name: str
    """The whole name, from the model on."""

    @property
    def tensor(self) -> torch.Tensor:
        """What it holds now."""
        found: torch.Tensor = getattr(self.module, self.kind)[self.key]
        return found


def _slots(model: torch.nn.Module) -> Iterator[_Slot]:
    for prefix, module in model.named_modules():
        for kind in ("_parameters", "_buffers"):
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield _Slot(module, kind, key, f"{prefix}.{key}" if prefix else key)


def _make_memory(model: torch.nn.Module, device: torch.device | None, dtype: torch.dtype | None) -> None:
    """Memory, marked as unset, for whatever is on the meta device; ties are kept."""
    tied: dict[int, list[_Slot]] = {}
    computed = set()
    for slot in _slots(model):
        tied.setdefault(id(slot.tensor), []).append(slot)
        if slot.key in slot.module._non_persistent_buffers_set:
            computed.add(id(slot.tensor))

    def materialise(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        cast = dtype if tensor.is_floating_point() and id(tensor) not in computed else None
        made = torch.empty_like(tensor, device=device or _device_of(tensor), dtype=cast)
        memory = _local(made)
        memory.new_empty(0, dtype=torch.uint8).set_(memory.untyped_storage()).fill_(_UNSET)
        return made

    model._apply(materialise)  # type: ignore[no-untyped-call]  # as `to_empty` does; wrappers such as FSDP's follow what it changes
    for slots in tied.values():
        for slot in slots[1:]:
            getattr(slot.module, slot.kind)[slot.key] = slots[0].tensor


def _device_of(tensor: torch.Tensor) -> torch.device:
    if isinstance(tensor, DTensor):
        return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _set_the_rest(model: torch.nn.Module, persistent: Collection[str], not_loaded: Collection[str]) -> None:
    """Have modules set their tensors that are not stored.

    Raises:
        InvalidArgumentError: some are still unset, after what their modules offer.
    """
    missing = set(not_loaded)
    unset: dict[torch.nn.Module, list[_Slot]] = {}
    own: dict[torch.nn.Module, list[_Slot]] = {}
    for slot in _slots(model):
        own.setdefault(slot.module, []).append(slot)
        if (slot.name in missing or slot.name not in persistent) and _is_unset(slot.tensor):
            unset.setdefault(slot.module, []).append(slot)
    initialisers = _initialisers(model)
    for module, slots in unset.items():
        kept = [(slot, slot.tensor.detach().clone()) for slot in own[module] if slot not in slots]
        with torch.no_grad():
            initialisers[module]()
            for slot, value in kept:
                slot.tensor.copy_(value)
    still = [slot.name for slots in unset.values() for slot in slots if _is_unset(slot.tensor)]
    if still:
        raise InvalidArgumentError(
            f"{len(still)} tensors of the model are neither stored nor set by their modules: "
            f"{listed([*map(repr, still)], most=_MOST_NAMED)}. They hold nothing yet. Give their modules a "
            "reset_parameters() that sets them, or build them outside of the meta device."
        )
    set_here = sorted(slot.name for slots in unset.values() for slot in slots if slot.name in missing)
    if set_here:
        log_message(
            logging.WARNING,
            f"{len(set_here)} tensors are not stored and begin with what their modules set: "
            f"{listed([*map(repr, set_here)], most=_MOST_NAMED)}.",
        )


def _is_unset(tensor: torch.Tensor) -> bool:
    stored = _local(tensor.detach()).reshape(-1).view(torch.uint8)
    return stored.numel() > 0 and bool((stored == _UNSET).all())


def _initialisers(model: torch.nn.Module) -> dict[torch.nn.Module, Callable[[], None]]:
    """For each module what sets its own tensors: its model's `_init_weights`, else its own `reset_parameters`."""
    found: dict[torch.nn.Module, Callable[[], None]] = {}

    def visit(module: torch.nn.Module, init: Callable[[torch.nn.Module], None] | None) -> None:
        init = getattr(module, "_init_weights", init)
        reset = getattr(module, "reset_parameters", lambda: None)
        found[module] = reset if init is None else lambda: init(module)
        for child in module.children():
            visit(child, init)

    visit(model, None)
    return found
