"""The planner that `load` uses unless it is given another."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import (
    MissingKeysError,
    UnsupportedTypeError,
)
from hpdcp._base.timing import log_message
from hpdcp._devices import device
from hpdcp._devices.memory import ReadOnlyMemory
from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan._stored_names import StoredNames
from hpdcp._plan.load_plan import LoadPlan, LoadTarget, ReadItem
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.stored_index import StoredIndex
from hpdcp._state import objects
from hpdcp._state.coverage import missing
from hpdcp._state.dtypes import dtype_name, dtype_of, find_dtype
from hpdcp._state.geometry import Box, relative
from hpdcp._state.mismatches import Mismatch, Problems, listed
from hpdcp._state.overlaps import has_shared_elements, shared_elements
from hpdcp._state.paths import Path, build_tree, decode_path
from hpdcp._state.scales import scale_beside, separated_codes
from hpdcp._state.sharding import LocalChunk, LocalShards, local_shards
from hpdcp._state.ties import tie_key
from hpdcp._state.tree import Leaf, StateTree, pick
from hpdcp._state.views import view_of_box


@dataclass(frozen=True, slots=True)
class _ObjectTarget:
    """Where a stored Python value goes."""

    path: Path
    subpath: tuple[Any, ...]
    """What of the stored value is wanted; empty: all of it."""


class StandardLoadPlanner(LoadPlanner):
    """Fills every target of the state dict from whatever stored boxes overlap it.

    Args:
        allow_partial_load: load what is there; what is not, stays as it is, is logged, and is listed in `not_loaded`.
        allow_dtype_cast: cast where stored and target dtype differ, as `Tensor.copy_` does, with one warning.
    """

    def __init__(self, *, allow_partial_load: bool = False, allow_dtype_cast: bool = True) -> None:
        require_flags(allow_partial_load=allow_partial_load, allow_dtype_cast=allow_dtype_cast)
        self._allow_partial_load = allow_partial_load
        self._allow_dtype_cast = allow_dtype_cast
        self.not_loaded: tuple[str, ...] = ()
        """After a partial load: the name of each key that was wanted and is not stored, or only in part."""

    def configure_planner(self, state_dict: Mapping[Any, Any], metadata: Metadata, context: PlannerContext) -> None:
        self._metadata = metadata
        self._context = context
        self._tree = StateTree(state_dict, rank=context.rank)
        self._stored = StoredIndex(metadata)
        self._names = StoredNames(metadata)
        self._problems = Problems()
        self._items: list[ReadItem] = []
        self._targets: dict[MetadataIndex, tuple[LocalShards, LocalChunk]] = {}
        self._objects: dict[MetadataIndex, list[_ObjectTarget]] = {}
        self._values: list[tuple[_ObjectTarget, Any]] = []
        self._gathers: list[_Gather] = []
        self._casts: list[str] = []
        self._read_only = ReadOnlyMemory()
        self._filled_memory: list[tuple[str, LocalShards, torch.Tensor]] = []
        self._shareable: list[LoadTarget] = []
        self._absent: dict[str, Hashable] = {}
        self._separated = separated_codes(metadata.settings)
        self._wanted = {leaf.fqn for leaf in self._tree.leaves}
        self._keeps_per_rank = bool((metadata.entries.owners >= 0).any())
        self.not_loaded = ()

    def build_local_plan(self) -> LoadPlan:
        filled: set[Any] = set()
        for leaf in self._tree.every_rank:
            self._plan_gather(leaf)
        gathered = [leaf.path for leaf in self._tree.every_rank]
        for leaf in self._tree.leaves:
            if leaf.owner is None or not any(leaf.path[: len(path)] == tuple(path) for path in gathered):
                self._plan_leaf(leaf, filled)
        self._check_apart()
        self._settle_absent({tie for tie, _ in filled})
        if self._allow_partial_load:
            self.not_loaded = self._problems.forgive(Mismatch.MISSING, Mismatch.HOLE)
        self._problems.raise_if_any()
        return LoadPlan.build(self._items, self._shareable)

    @property
    def complete(self) -> bool:
        return not self.not_loaded

    def _plan_leaf(self, leaf: Leaf, filled: set[Any]) -> None:
        if leaf.owner is not None and self._keeps_per_rank and self._metadata.world_size != self._context.world_size:
            self._problems.add(
                Mismatch.WORLD,
                leaf.fqn,
                f"{leaf.fqn!r} (stored by {self._metadata.world_size} ranks, wanted by {self._context.world_size})",
            )
        elif isinstance(leaf.value, torch.Tensor):
            self._plan_tensor(leaf, leaf.value, filled)
        else:
            self._plan_object(leaf)

    def _plan_tensor(self, leaf: Leaf, target: torch.Tensor, filled: set[Any]) -> None:
        try:
            shards = local_shards(target, key=leaf.fqn)
            for tensor in shards.tensors:
                self._check_fillable(tensor, leaf.fqn)
        except UnsupportedTypeError as error:
            self._problems.add(Mismatch.REFUSED, leaf.fqn, str(error))
            return
        row = self._stored.find(leaf.fqn, leaf.owner)
        if row is None:
            # Of a rank that holds nothing of it, nobody can tell what it is tied to; ranks that hold something know.
            if shards.chunks or 0 in shards.global_shape:
                self._absent[leaf.fqn] = tie_key(target)
                self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))
            return
        if self._metadata.entries.kinds[row] == EntryKind.OBJECT:
            self._problems.add(Mismatch.SHAPE, leaf.fqn, f"{leaf.fqn!r} (stored as a Python value, wanted as a tensor)")
            return
        shape = self._metadata.entries.shape(row)
        if shape != shards.global_shape:
            self._problems.add(
                Mismatch.SHAPE, leaf.fqn, f"{leaf.fqn!r} (stored {list(shape)}, wanted {list(shards.global_shape)})"
            )
            return
        if not self._check_dtype(leaf, row, shards.dtype):
            return
        tie = tie_key(target)
        if tie is not None:
            # Tied targets share memory: filling it once from the same stored tensor is enough.
            if (tie, self._metadata.resolve(row)) in filled:
                return
            filled.add((tie, self._metadata.resolve(row)))
        if shards.chunks:
            self._filled_memory += [(leaf.fqn, shards, tensor) for tensor in shards.tensors]
        for chunk in shards.chunks:
            index = MetadataIndex(leaf.fqn, chunk.box.offsets, chunk.box.sizes, leaf.owner)
            self._targets[index] = (shards, chunk)
            overlaps = list(self._stored.overlaps(row, chunk.box))
            self._items += [_read_item(index, chunk.box, *overlap) for overlap in overlaps]
            if self._note_hole(leaf.fqn, chunk.box, overlaps):
                break
            if leaf.owner is None:
                # Only what is filled all over: what a hole leaves as it was is each rank's own.
                memory = shards.view(chunk)
                on_device = device.is_current(memory)
                reached = on_device or device.is_host(memory)
                direct = reached and memory.is_contiguous() and not (memory.is_conj() or memory.is_neg())
                self._shareable.append(LoadTarget(index, dtype_name(shards.dtype), direct, on_device))

    def _check_fillable(self, tensor: torch.Tensor, fqn: str) -> None:
        if has_shared_elements(tensor):
            raise UnsupportedTypeError(
                f"{fqn!r} is an expanded or overlapping view, several elements of which share memory"
            )
        if self._read_only.holds(tensor):
            raise UnsupportedTypeError(
                f"{fqn!r} lies in memory that may only be read, such as a file mapped by numpy with mode 'r'. Load "
                "into a copy of it, or map the file with mode 'r+'"
            )

    def _check_apart(self) -> None:
        """Note targets that overlap in memory, of which the one that is filled last would win."""
        for pair in shared_elements([tensor for _, _, tensor in self._filled_memory]):
            (one, shards, tensor), (other, other_shards, other_tensor) = (self._filled_memory[n] for n in pair)
            # The same memory for the same boxes is a tie, whatever placements it has.
            if shards.chunks == other_shards.chunks and tie_key(tensor) == tie_key(other_tensor):
                continue
            self._problems.add(
                Mismatch.REFUSED,
                one,
                f"{one!r} and {other!r} overlap in memory, and one would be filled over the other. Give "
                "each its own memory, or name one of them only",
            )

    def _settle_absent(self, filled: set[Any]) -> None:
        """A name that is not stored is no loss where its memory is another target's, which is filled: of weights that a
        model ties, Hugging Face's files hold one."""
        tied = {fqn for fqn, tie in self._absent.items() if tie is not None and tie in filled}
        self._problems.withdraw(Mismatch.MISSING, tied)
        self._problems.note(Mismatch.MISSING, self._names.prefix_hint([fqn for fqn in self._absent if fqn not in tied]))

    def _note_hole(self, fqn: str, want: Box, overlaps: Sequence[tuple[int, Box, Box]]) -> bool:
        hole = missing(want, [part for _, _, part in overlaps])
        if hole is not None:
            stop = tuple(a + b for a, b in zip(hole.offsets, hole.sizes, strict=True))
            self._problems.add(Mismatch.HOLE, fqn, f"{fqn!r} (nothing stored for {list(hole.offsets)} to {list(stop)})")
        return hole is not None

    def _check_dtype(self, leaf: Leaf, row: int, wanted: torch.dtype) -> bool:
        fqn, stored = leaf.fqn, self._metadata.entries.dtype(row)
        if stored == dtype_name(wanted):
            return True
        scale = self._scale_of(leaf, row, wanted)
        if scale is not None:
            text = f"{fqn!r} (stored {stored}, wanted {dtype_name(wanted)}, scaled by {scale!r})"
            self._problems.add(Mismatch.CODES, fqn, text)
            return False
        found = find_dtype(stored)
        described = f"{fqn!r} (stored {stored}, wanted {dtype_name(wanted)})"
        if not self._allow_dtype_cast or found is None or not _castable(found, wanted):
            self._problems.add(Mismatch.DTYPE, fqn, described)
            return False
        self._casts.append(described)
        return True

    def _scale_of(self, leaf: Leaf, row: int, wanted: torch.dtype) -> str | None:
        """What scales the stored tensor, or would scale the wanted one; None where both hold values."""
        stored = self._metadata.entries.dtype(row)
        for name in dict.fromkeys((leaf.fqn, self._metadata.entries.fqns[self._metadata.resolve(row)])):
            scale = self._separated.get(name)
            if scale is None:
                scale = scale_beside(name, stored, lambda other: self._stored.find(other, leaf.owner) is not None)
            if scale is not None:
                return scale
        return scale_beside(leaf.fqn, dtype_name(wanted), self._wanted.__contains__)

    def _plan_object(self, leaf: Leaf) -> None:
        row = self._stored.find(leaf.fqn, leaf.owner)
        if row is not None:
            if self._metadata.entries.kinds[row] != EntryKind.OBJECT:
                self._problems.add(
                    Mismatch.SHAPE, leaf.fqn, f"{leaf.fqn!r} (stored as a tensor, wanted as a Python value)"
                )
                return
            self._want_object(row, leaf, leaf.path, ())
            return
        children = self._tree.children(leaf)
        below = self._names.below(leaf.fqn)
        if children and below:
            # Stored value by value, since it held tensors then; this target has none.
            for child in children:
                self._plan_object(child)
        elif below:
            self._problems.add(
                Mismatch.MISSING,
                leaf.fqn,
                f"{leaf.fqn!r} (stored with tensors in it, such as {below[0]!r}, but the target has no place for them; "
                "for an optimizer call hpdcp.allocate_optimizer_state first)",
            )
        else:
            self._plan_part_of_object(leaf)

    def _plan_part_of_object(self, leaf: Leaf) -> None:
        """The wanted value may be stored inside a larger one, that had no tensor beside it when it was saved."""
        for depth in range(len(leaf.path) - 1, 0, -1):
            fqn = ".".join(map(str, leaf.path[:depth]))
            row = self._stored.find(fqn, leaf.owner)
            if row is not None and self._metadata.entries.kinds[row] == EntryKind.OBJECT:
                self._want_object(row, leaf, leaf.path, tuple(leaf.path[depth:]))
                return
        self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))

    def _want_object(self, row: int, leaf: Leaf, path: Path, subpath: tuple[Any, ...]) -> None:
        entry = self._metadata.entries[row]
        index = MetadataIndex(entry.fqn, owner=entry.owner)
        if index not in self._objects:
            self._items.append(ReadItem(index, self._metadata.chunk_rows(row)[0], (), (), (), EntryKind.OBJECT))
        self._objects.setdefault(index, []).append(_ObjectTarget(path, subpath))

    def _plan_gather(self, leaf: Leaf) -> None:
        """`PerRank.all`: every saved rank's value, rebuilt from scratch on the host."""
        gather = _Gather(leaf.path, [[] for _ in range(self._metadata.world_size)])
        for row in self._stored.owned_at_or_below(leaf.path):
            entry = self._metadata.entries[row]
            assert entry.owner is not None
            path = decode_path(entry.path)
            if self._metadata.entries.kinds[self._metadata.resolve(row)] == EntryKind.OBJECT:
                index = MetadataIndex(entry.fqn, owner=entry.owner)
                self._items.append(ReadItem(index, self._metadata.chunk_rows(row)[0], (), (), (), EntryKind.OBJECT))
                gather.objects[index] = path
                self._objects.setdefault(index, [])
            else:
                tensor = self._plan_gathered(row, entry)
                if tensor is not None:
                    gather.parts[entry.owner].append((path, tensor))
        if not gather.objects and not any(gather.parts):
            self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))
        self._gathers.append(gather)

    def _plan_gathered(self, row: int, entry: Entry) -> torch.Tensor | None:
        """A tensor for all of the entry; None, and the reason noted, where that cannot be had."""
        whole = Box((0,) * len(entry.shape), entry.shape)
        overlaps = list(self._stored.overlaps(row, whole))
        # Before memory is taken: here the checkpoint alone says how much.
        if self._note_hole(entry.fqn, whole, overlaps):
            return None
        try:
            tensor = device.empty_on_host(entry.shape, dtype_of(entry.dtype, fqn=entry.fqn))
        except (UnsupportedTypeError, RuntimeError) as error:
            self._problems.add(Mismatch.REFUSED, entry.fqn, f"{entry.fqn!r} of shape {list(entry.shape)}: {error}")
            return None
        shards = local_shards(tensor, key=entry.fqn)
        for chunk in shards.chunks:
            index = MetadataIndex(entry.fqn, chunk.box.offsets, chunk.box.sizes, entry.owner)
            self._targets[index] = (shards, chunk)
            self._items += [_read_item(index, chunk.box, *overlap) for overlap in overlaps]
        return tensor

    def build_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        return list(plans)

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        # Here, not in the local plan: that one may be given up for another checkpoint or for all ranks' records.
        if self.not_loaded:
            log_message(
                logging.WARNING,
                f"partial load: {len(self.not_loaded)} keys stay as they are: {listed([*map(repr, self.not_loaded)])}",
            )
        if self._casts:
            warnings.warn(
                f"{len(self._casts)} tensors are cast to their target's dtype: {listed(self._casts)}.",
                stacklevel=2,
            )
        return plan

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        shards, chunk = self._targets[item.dest_index]
        return view_of_box(shards.view(chunk), item.dest_offsets, item.lengths)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        # Filled by address, which autograd does not see: a backward pass that still needs the old values must fail.
        torch.autograd.graph.increment_version(tensor)

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        index = item.dest_index
        for gather in self._gathers:
            if index in gather.objects:
                assert index.owner is not None
                value = self._decode(index, data)
                gather.parts[index.owner].append((gather.objects[index], value))
        for target in self._objects[index]:
            # Decoded once for each target, so that no two places share one mutable value.
            value = self._decode(index, data)
            try:
                self._values.append((target, pick(value, target.subpath)))
            except MissingKeysError as error:
                if not self._allow_partial_load:
                    raise MissingKeysError(f"{index.fqn!r}: {error}") from error
                self.not_loaded += (".".join(map(str, target.path)),)

    def _decode(self, index: MetadataIndex, data: bytes) -> Any:
        return objects.decode(data, key=index.fqn, allow_pickle=self._context.allow_pickle)

    def finish_load(self) -> None:
        for target, value in self._values:
            self._tree.assign(target.path, value)
        for gather in self._gathers:
            self._tree.assign(gather.path, gather.values())
        self._tree.finish()


class _Gather:
    """Every rank's value under one `PerRank.all`."""

    def __init__(self, path: Path, parts: list[list[tuple[Path, Any]]]) -> None:
        self.path = path
        self.parts = parts
        self.objects: dict[MetadataIndex, Path] = {}

    def values(self) -> list[Any]:
        """One value for each rank that saved; None for one that stored nothing here."""
        return [self._value(part) for part in self.parts]

    def _value(self, part: list[tuple[Path, Any]]) -> Any:
        if not part:
            return None
        tree: Any = build_tree(sorted(part, key=lambda pair: len(pair[0])))
        return pick(tree, tuple(self.path))


def _read_item(index: MetadataIndex, dest: Box, storage_row: int, have: Box, part: Box) -> ReadItem:
    return ReadItem(
        index, storage_row, relative(part, dest).offsets, relative(part, have).offsets, part.sizes, EntryKind.TENSOR
    )


def _castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=wanted).copy_(torch.zeros(1, dtype=stored))
    except (RuntimeError, TypeError):
        return False
    return True
