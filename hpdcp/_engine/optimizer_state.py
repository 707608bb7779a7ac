"""Optimizer states that a checkpoint holds and a fresh optimizer does not have yet, made without a step.

A load fills tensors that exist. Most optimizers create theirs in the first `step()`, so a job that resumes would have
to run one on throw-away gradients first; the checkpoint's metadata already says what that step would create.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError, LoadMismatchError, MissingKeysError
from hpdcp._base.timing import timed
from hpdcp._comm.process_group import open_exchange
from hpdcp._engine.load import find_metadata
from hpdcp._files.reader import open_reader
from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import CHUNK_INFO, Metadata
from hpdcp._plan.storage import StorageReader
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.paths import Path, build_tree, decode_path, fqn_of
from hpdcp._state.sharding import LocalShards, local_shards
from hpdcp._state.wrappers import leads_into_wrapper

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_STEP: Final = "step"
_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Modules that wrap another one and leave no trace in the names that torch's state dict helpers give."""

_ParameterKey: TypeAlias = int | str
"""How a checkpoint names a parameter: by its position in the optimizer, or by its fqn."""


@timed("allocate_optimizer_state")
def allocate_optimizer_state(
    optimizer: torch.optim.Optimizer,
    *,
    checkpoint_id: str | FilePath | None = None,
    storage_reader: StorageReader | None = None,
    prefix: str = "optimizer",
    model: torch.nn.Module | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> int:
    """Create, from a checkpoint's metadata alone, the states that `optimizer` needs before they can be loaded.

        optimizer = torch.optim.AdamW(model.parameters())
        hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=path)
        hpdcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    Tensors are zeros of the stored dtype. One with its parameter's global shape is laid out as the parameter is: same
    mesh, placements and device, whatever the layout it was saved under. Any other is replicated. Python values are
    None. The load fills all of them. States that exist are left as they are. Every rank of the default process group
    calls it.

    Args:
        optimizer: over the model as it is to be trained, sharded already.
        checkpoint_id, storage_reader, no_dist, use_collectives: as `hpdcp.load` takes them.
        prefix: where the checkpoint holds the optimizer, as keys joined by dots; "" where the saved dict is the
            optimizer's own. Known there: an optimizer, its `state_dict()`, and what torch's `get_optimizer_state_dict`
            makes of it, flattened or not.
        model: needed for the last kind, which names parameters, unless the optimizer was made from
            `model.named_parameters()`. Names that it does not have (another pipeline stage's) are passed over.

    Returns:
        How many states were created on this rank.

    Raises:
        InvalidArgumentError: neither `checkpoint_id` nor `storage_reader`; or states by name and no names to match.
        MissingKeysError: no optimizer is stored under `prefix`; names what is.
        LoadMismatchError: the stored optimizer has other parameters, or states of a tensor class (8-bit ones).
        CheckpointError, StorageError, RankFailedError: on every rank.
    """
    with contextlib.ExitStack() as opened:

        @functools.cache
        def reader() -> StorageReader:
            return open_reader(checkpoint_id, storage_reader, opened)

        exchange = open_exchange(no_dist=no_dist, use_collectives=use_collectives)
        metadata, by_rank = find_metadata(reader, exchange)

        def allocate() -> int:
            found = metadata if metadata is not None or by_rank is None else by_rank.merged()
            assert found is not None
            return _Allocation(optimizer, model, _stored_states(found, prefix), prefix).run()

        return exchange.agree("allocating the optimizer's state", allocate)


_SMALL_STATE: Final = 1 << 20
"""Elements that a state may have whatever its parameter and its data are."""
_MOST_PACKED: Final = 1 << 15
"""Bytes that a compressor makes of one at most."""


@dataclass(frozen=True, slots=True)
class _StoredState:
    """One state on record."""

    entry: Entry
    path: Path
    """What follows "state": the parameter and the state, or both in one string where torch flattened them."""
    flattened: bool
    most_bytes: int
    """What the data on record can be at most."""


def _most_bytes(metadata: Metadata, row: int) -> int:
    """What the data of an entry can be when it is read: as long as what is stored, unless that is compressed."""
    if metadata.origin:
        return 0  # its lengths are those of documents
    packed = any(name.endswith(".compressor") for name in metadata.settings)
    rows = metadata.chunk_rows(row)
    return int(metadata.storage.length[rows.start : rows.stop].sum()) * (_MOST_PACKED if packed else 1)


def _stored_states(metadata: Metadata, prefix: str) -> list[_StoredState]:
    """Every shared state under `prefix`; MissingKeysError where there is no optimizer."""
    states: list[_StoredState] = []
    is_optimizer = False
    for row, fqn in enumerate(metadata.entries.fqns):
        if prefix and fqn != prefix and not fqn.startswith(f"{prefix}."):
            continue
        entry = metadata.entries[row]
        rest = _below(decode_path(entry.path), prefix)
        if rest is None or entry.owner is not None:
            continue
        head = rest[0] if rest else None
        if not rest:
            # An optimizer without any tensor is one value.
            is_optimizer |= entry.kind is EntryKind.OBJECT
        elif head in (_STATE, _GROUPS) or (isinstance(head, str) and head.startswith(f"{_GROUPS}.")):
            is_optimizer = True
        if len(rest) > 1 and head == _STATE:
            states.append(_StoredState(entry, _tail(rest, 1), False, _most_bytes(metadata, row)))
        elif isinstance(head, str) and head.startswith(f"{_STATE}."):
            is_optimizer = True
            flat = Path((head.removeprefix(f"{_STATE}."), *rest[1:]), rest.kinds)
            states.append(_StoredState(entry, flat, True, _most_bytes(metadata, row)))
    if not is_optimizer:
        raise MissingKeysError(_nothing_there(metadata, prefix))
    return states


def _below(path: Path, prefix: str) -> Path | None:
    """What follows the keys that spell `prefix`; None where none do."""
    depths = range(len(path) + 1) if prefix else range(1)
    return next((_tail(path, depth) for depth in depths if fqn_of(path[:depth]) == prefix), None)


def _tail(path: Path, start: int) -> Path:
    return Path(path[start:], path.kinds[start:])


def _nothing_there(metadata: Metadata, prefix: str) -> str:
    prefixes: dict[str, None] = {}
    top: dict[str, None] = {}
    for fqn in metadata.entries.fqns:
        top[fqn.partition(".")[0]] = None
        before, found, _ = f"{fqn}.".partition(f".{_GROUPS}.")
        if found:
            prefixes[before] = None
    near = difflib.get_close_matches(prefix, [*prefixes, *top], n=1)
    candidates = list(dict.fromkeys([*near, *prefixes])) or list(top)[:10]
    listed = ", ".join(map(repr, candidates))
    kind = "optimizers are stored under" if prefixes or near else "the checkpoint's top level has"
    return f"no optimizer is stored under {prefix!r}; {kind} {listed}. Pass it as prefix=."


class _Allocation:
    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        stored: Sequence[_StoredState],
        prefix: str,
    ) -> None:
        self._optimizer = optimizer
        self._stored = stored
        self._prefix = prefix
        self._by_index = list(_numbered(optimizer))
        self._by_name = _named(optimizer, model)
        self._on_device = {
            id(parameter): bool(group.get("capturable") or group.get("fused"))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def run(self) -> int:
        """Create what is missing; the number of states created."""
        wanted: dict[_ParameterKey, list[tuple[Path, Entry]]] = {}
        for stored in self._stored:
            found = self._flattened_key(stored.path) if stored.flattened else self._key(stored.path)
            if found is not None:
                key, rest = found
                _check_size(stored, self._parameter(key))
                self._check_class(stored.entry.fqn, rest, self._parameter(key))
                wanted.setdefault(key, []).append((rest, stored.entry))
        if self._stored and not wanted:
            raise LoadMismatchError(
                f"none of the parameters whose states are stored under {self._prefix!r} (such as "
                f"{self._stored[0].entry.fqn!r}) belongs to this optimizer. Check prefix=, model= and the optimizer."
            )
        return sum(self._create(self._parameter(key), states) for key, states in wanted.items())

    def _check_class(self, fqn: str, path: Path, parameter: torch.Tensor) -> None:
        """Raise where a missing state is a tensor of a class, of which the record has only the name."""
        wrapper = leads_into_wrapper(path)
        if wrapper is not None and path[0] not in self._optimizer.state.get(parameter, {}):
            raise LoadMismatchError(
                f"{fqn!r} is inside a {wrapper}, which cannot be made of what is on record. Have the optimizer make "
                "its states before you load: set all gradients to zero and call its step() with a learning rate of 0."
            )

    def _key(self, path: Path) -> tuple[_ParameterKey, Path] | None:
        key = path[0]
        if isinstance(key, int) and not isinstance(key, bool):
            if not 0 <= key < len(self._by_index):
                raise LoadMismatchError(
                    f"{self._prefix!r} holds states of parameter {key}, and this optimizer has {len(self._by_index)} "
                    "parameters. Build the model and the optimizer as they were when they were saved."
                )
            return key, _tail(path, 1)
        if not isinstance(key, str):
            return None
        self._need_names(key)
        return (key, _tail(path, 1)) if key in self._by_name else None

    def _flattened_key(self, path: Path) -> tuple[_ParameterKey, Path] | None:
        joined = str(path[0])
        self._need_names(joined)
        name, _, state = joined.rpartition(".")
        while name and name not in self._by_name:
            name, _, more = name.rpartition(".")
            state = f"{more}.{state}"
        return (name, Path((state, *path[1:]), path.kinds)) if name else None

    def _need_names(self, example: str) -> None:
        if not self._by_name:
            raise InvalidArgumentError(
                f"{self._prefix!r} holds states by the names of parameters (such as {example!r}), and this optimizer "
                "does not know them. Pass model=."
            )

    def _parameter(self, key: _ParameterKey) -> torch.Tensor:
        return self._by_index[key] if isinstance(key, int) else self._by_name[key]

    def _create(self, parameter: torch.Tensor, states: Sequence[tuple[Path, Entry]]) -> int:
        there = self._optimizer.state[parameter]
        missing = [(path, entry) for path, entry in states if path and path[0] not in there]
        if not missing:
            # All of the parameter's state is one Python value, which takes the place of this empty dict.
            return 0
        shards = _ParameterShards.of(parameter, on_device=self._on_device[id(parameter)])
        there.update(build_tree((path, shards.zeros_for(entry, path)) for path, entry in missing))
        return len(missing)


@dataclass(frozen=True, slots=True)
class _ParameterShards:
    """How a parameter is laid out, and so what belongs to it."""

    parameter: torch.Tensor
    shards: LocalShards
    on_device: bool
    """Whether the optimizer keeps its step counts beside the parameter instead of on the host."""

    @classmethod
    def of(cls, parameter: torch.Tensor, *, on_device: bool) -> _ParameterShards:
        return cls(parameter, local_shards(parameter, key="a parameter of the optimizer"), on_device)

    def zeros_for(self, entry: Entry, path: Sequence[Hashable]) -> torch.Tensor | None:
        """The target for one state; None for a Python value."""
        if entry.kind is EntryKind.OBJECT:
            return None
        dtype = dtype_of(entry.dtype, fqn=entry.fqn)
        if path[-1] == _STEP:
            # Counted on the host and never sharded, even for a 0-dim parameter; as torch's own optimizers do.
            device = self.parameter.device if self.on_device else torch.device("cpu")
            return torch.zeros(entry.shape, dtype=dtype, device=device)
        if entry.shape == self.shards.global_shape:
            return self._like_parameter(dtype)
        return self._replicated(entry.shape, dtype)

    def _like_parameter(self, dtype: torch.dtype) -> torch.Tensor:
        parameter = self.parameter.detach()
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            if type(local) is torch.Tensor:
                # From the local tensor: torch has no zeros_like for ragged placements.
                return DTensor.from_local(
                    torch.zeros_like(local, dtype=dtype),
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        zeros = torch.zeros_like(parameter, dtype=dtype)
        info = getattr(self.parameter, CHUNK_INFO, None)
        if info is not None:
            setattr(zeros, CHUNK_INFO, info)
        return zeros

    def _replicated(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        zeros = torch.zeros(shape, dtype=dtype, device=self.parameter.device)
        if shape and isinstance(self.parameter, DTensor):
            # What an optimizer makes by `grad.new_zeros(shape)`; it could not compute with a plain one.
            mesh = self.parameter.device_mesh
            return DTensor.from_local(zeros, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return zeros


def _check_size(stored: _StoredState, parameter: torch.Tensor) -> None:
    """Raise where a state is larger than its data, and than its parameter: nothing could fill it."""
    entry = stored.entry
    if entry.kind is EntryKind.OBJECT:
        return
    volume = math.prod(entry.shape)
    nbytes = volume * dtype_of(entry.dtype, fqn=entry.fqn).itemsize
    if volume > max(parameter.numel(), _SMALL_STATE) and nbytes > stored.most_bytes:
        raise CorruptCheckpointError(
            f"{entry.fqn!r} is recorded with the shape {entry.shape}, and its data are {stored.most_bytes} bytes long: "
            "the metadata is damaged. Load another checkpoint."
        )


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters in the order in which the optimizer's `state_dict()` numbers them."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _named(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> Mapping[str, torch.Tensor]:
    """fqn → parameter of the optimizer, by the model or else by the names the optimizer was given."""
    if model is not None:
        mine = {id(parameter) for parameter in _numbered(optimizer)}
        names = model.named_parameters(remove_duplicate=False)
        return {_clean(model, name): parameter for name, parameter in names if id(parameter) in mine}
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=False)
    }


def _clean(model: torch.nn.Module, name: str) -> str:
    """`name` without the steps into wrappers, as torch's state dict helpers give it."""
    kept: list[str] = []
    module: Any = model
    for part in name.split("."):
        if part not in _WRAPPERS and not (isinstance(module, DistributedDataParallel) and part == "module"):
            kept.append(part)
        module = getattr(module, part)
    return ".".join(kept)
