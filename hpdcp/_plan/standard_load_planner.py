"""The planner that `load` uses unless it is given another."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._base.timing import log_message
from hpdcp._devices import device
from hpdcp._devices.memory import ReadOnlyMemory
from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan._load_targets import LoadTargets
from hpdcp._plan._stored_names import StoredNames
from hpdcp._plan._unnamed_values import Parts, UnnamedValues
from hpdcp._plan._wanted_values import Take, WantedValues, check_length, fill_number, is_setting
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.stored_index import StoredIndex
from hpdcp._plan.straight_reads import straight_reads, wanted_tensors
from hpdcp._state import objects
from hpdcp._state.coverage import missing
from hpdcp._state.dtypes import dtype_name, dtype_of, find_dtype
from hpdcp._state.geometry import Box
from hpdcp._state.mismatches import Mismatch, Problems, listed
from hpdcp._state.overlaps import has_shared_elements
from hpdcp._state.paths import Keys, Path, decode_path, path_below
from hpdcp._state.scales import scale_beside, separated_codes
from hpdcp._state.sharding import LocalShards, is_copied_view, local_shards
from hpdcp._state.ties import tie_key
from hpdcp._state.tree import Container, Leaf, StateTree
from hpdcp._state.wrappers import check_wrappers, leads_into_wrapper


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
        self._targets = LoadTargets(metadata)
        self._values = WantedValues(metadata, self._decode)
        self._unnamed = UnnamedValues(metadata, self._tree, self._names, self._values)
        self._casts: list[str] = []
        self._read_only = ReadOnlyMemory()
        self._absent: dict[str, Hashable] = {}
        self._tied: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
        self._separated = separated_codes(metadata.settings)
        self._wanted = {leaf.fqn for leaf in self._tree.leaves}
        self._keeps_per_rank = bool((metadata.entries.owners >= 0).any())
        self.not_loaded = ()

    def build_local_plan(self) -> LoadPlan:
        check_wrappers(self._tree, self._metadata, rank=self._context.rank)
        straight = self._plan_straight_reads()
        for leaf in self._tree.every_rank:
            self._plan_gather(leaf)
        gathered = [leaf.path for leaf in self._tree.every_rank]
        for leaf in self._tree.leaves:
            if leaf.fqn in straight:
                continue
            if leaf.owner is None or not any(leaf.path[: len(path)] == tuple(path) for path in gathered):
                self._plan_leaf(leaf)
        self._check_apart()
        self._plan_containers(gathered)
        self._settle_absent()
        if self._allow_partial_load:
            self.not_loaded = self._problems.forgive(Mismatch.MISSING, Mismatch.HOLE)
        self._problems.raise_if_any()
        return self._targets.plan(self._values.items)

    @property
    def complete(self) -> bool:
        return not self.not_loaded

    def _plan_straight_reads(self) -> Set[str]:
        """Plan all tensors at once that are stored as they are wanted; their names."""
        wanted = wanted_tensors(self._tree.leaves)
        fillable = ~wanted.runs.foreign
        for row in np.flatnonzero(wanted.runs.foreign).tolist():
            fillable[row] = not self._read_only.holds(wanted.memory[row])
        reads = straight_reads(wanted.take(np.flatnonzero(fillable)), self._metadata)
        self._targets.add_straight(reads)
        return {leaf.fqn for leaf in reads.wanted.leaves}

    def _plan_leaf(self, leaf: Leaf) -> None:
        if leaf.owner is not None and self._keeps_per_rank and self._metadata.world_size != self._context.world_size:
            self._problems.add(
                Mismatch.WORLD,
                leaf.fqn,
                f"{leaf.fqn!r} (stored by {self._metadata.world_size} ranks, wanted by {self._context.world_size})",
            )
        elif isinstance(leaf.value, torch.Tensor):
            self._plan_tensor(leaf, leaf.value)
        else:
            self._plan_object(leaf)

    def _plan_tensor(self, leaf: Leaf, target: torch.Tensor) -> None:
        try:
            if type(target) is DTensor and is_copied_view(target):
                raise UnsupportedTypeError(
                    f"{leaf.fqn!r} is a slice or view of a DTensor that torch made a copy for, since it goes along a "
                    "sharded dimension: the whole tensor would not change. Load into the whole one, or into a clone() "
                    "of the slice where the copy is what you want"
                )
            shards = local_shards(target, key=leaf.fqn)
            for tensor in shards.tensors:
                self._check_fillable(tensor, leaf.fqn)
        except UnsupportedTypeError as error:
            self._problems.add(Mismatch.REFUSED, leaf.fqn, str(error))
            return
        row = self._stored.find(leaf.fqn, leaf.owner)
        inside = self._stored.enclosing_value(leaf.path, leaf.owner) if row is None else None
        if inside is not None and is_setting(leaf, shards.global_shape):
            self._values.want(*_at(inside, leaf.fqn), fill_number(leaf.fqn, target))
            return
        if row is None:
            # Of a rank that holds nothing of it, nobody can tell what it is tied to; ranks that hold something know.
            if shards.chunks or 0 in shards.global_shape:
                self._absent[leaf.fqn] = tie_key(target)
                self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))
            return
        if self._metadata.entries.kinds[row] == EntryKind.OBJECT:
            if is_setting(leaf, shards.global_shape):
                self._values.want(row, leaf.fqn, (), fill_number(leaf.fqn, target))
                return
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
            # Tied targets share memory: filling it once is enough, where the stored tensors are the same.
            first, stored = self._targets.first_of_tie(tie, leaf.fqn, row)
            if self._metadata.resolve(stored) != self._metadata.resolve(row):
                self._compare_tied(leaf, first, stored, row, shards)
            if first != leaf.fqn:
                return
        self._targets.note_filled(leaf.fqn, shards)
        for chunk in shards.chunks:
            index = MetadataIndex(leaf.fqn, chunk.box.offsets, chunk.box.sizes, leaf.owner)
            overlaps = list(self._stored.overlaps(row, chunk.box))
            self._targets.add(index, shards.view(chunk), chunk.box, overlaps)
            if self._note_hole(leaf.fqn, chunk.box, overlaps):
                break
            if leaf.owner is None:
                # Only what is filled all over: what a hole leaves as it was is each rank's own.
                self._targets.share(index, shards.dtype)

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
        for one, other in self._targets.overlapping():
            self._problems.add(
                Mismatch.REFUSED,
                one,
                f"{one!r} and {other!r} overlap in memory, and one would be filled over the other. Give "
                "each its own memory, or name one of them only",
            )

    def _compare_tied(self, leaf: Leaf, first: str, first_row: int, row: int, shards: LocalShards) -> None:
        """One memory is wanted from two stored tensors: they must be equal, by their checksums or else once read."""
        equal = self._stored.equal_by_checksums(first_row, row)
        if equal is False:
            self._problems.add(Mismatch.TIED, leaf.fqn, f"{leaf.fqn!r} (the same memory as {first!r})")
        if equal is not None:
            return
        for chunk in shards.chunks:
            copy = device.empty_on_host(chunk.box.sizes, shards.dtype)
            index = MetadataIndex(leaf.fqn, chunk.box.offsets, chunk.box.sizes, leaf.owner)
            overlaps = list(self._stored.overlaps(row, chunk.box))
            self._targets.add(index, copy, chunk.box, overlaps)
            if self._note_hole(leaf.fqn, chunk.box, overlaps):
                return
            self._tied.append((leaf.fqn, first, shards.view(chunk), copy))

    def _settle_absent(self) -> None:
        """A name that is not stored is no loss where its memory is another target's, which is filled: of weights that a
        model ties, Hugging Face's files hold one."""
        tied = {fqn for fqn, tie in self._absent.items() if tie is not None and self._targets.is_filled(tie)}
        self._problems.withdraw(Mismatch.MISSING, tied)
        cause = self._names.cause(self._problems.keys(Mismatch.MISSING))
        if cause is not None:
            self._problems.explain(Mismatch.MISSING, f"are stored {cause.how}", cause.stored)

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
        take = functools.partial(self._tree.assign, leaf.path)
        row = self._stored.find(leaf.fqn, leaf.owner)
        if row is not None:
            if self._metadata.entries.kinds[row] != EntryKind.OBJECT:
                self._problems.add(
                    Mismatch.SHAPE, leaf.fqn, f"{leaf.fqn!r} (stored as a tensor, wanted as a Python value)"
                )
                return
            if not (self._names.below(leaf.fqn) and self._unnamed.rebuild(leaf.fqn, leaf.owner, take, exact=row)):
                self._values.want(row, leaf.fqn, (), take)
            return
        below = self._names.below(leaf.fqn)
        if below and self._unnamed.rebuild(leaf.fqn, leaf.owner, take):
            return
        children = self._tree.children(leaf)
        if children and below:
            # Stored value by value, since it held tensors then; this target has none.
            if not isinstance(leaf.value, (list, tuple)) or self._has_stored_length(leaf.fqn, len(leaf.value)):
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
            self._want_inside(leaf, take)

    def _want_inside(self, leaf: Leaf, take: Take) -> None:
        """The wanted value may be stored inside a larger one, that was stored whole."""
        found = self._stored.enclosing_value(leaf.path, leaf.owner)
        if found is None:
            self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))
        else:
            self._values.want(found[0], leaf.fqn, found[1], take)

    def _plan_containers(self, gathered: Sequence[Path]) -> None:
        """What is stored in the containers of the target and that no leaf of it names."""

        def concerns(container: Container) -> bool:
            if container.owner is None:
                return True
            return self._metadata.world_size == self._context.world_size and not any(
                container.path[: len(path)] == tuple(path) for path in gathered
            )

        for container in self._tree.containers.values():
            if isinstance(container.value, (list, tuple)) and concerns(container):
                self._check_length(container)
        named = {leaf.fqn for leaf in self._tree.leaves}
        for root in self._tree.open_roots:
            if concerns(root.container):
                self._unnamed.plan(root, named, self._plan_gathered)

    def _check_length(self, sequence: Container) -> None:
        if not self._has_stored_length(sequence.fqn, len(sequence.value)):
            return
        found = self._stored.enclosing_value(sequence.path, sequence.owner)
        if found is not None:
            take = check_length(sequence.fqn, len(sequence.value))
            self._values.want(*_at(found, sequence.fqn), take, at_once=True, optional=True)

    def _has_stored_length(self, fqn: str, count: int) -> bool:
        """Whether no more than `count` items are stored of a sequence; else it is noted."""
        stored = self._names.items_from(fqn, count)
        if stored > count:
            self._problems.add(
                Mismatch.SHAPE,
                fqn,
                f"{fqn!r} (stored with {stored} items, wanted with {count}; for some of them, a dict of their indices "
                "is a target)",
            )
        return stored <= count

    def _plan_gather(self, leaf: Leaf) -> None:
        """`PerRank.all`: every saved rank's value, rebuilt from scratch on the host; None for one that has none."""
        parts = [Parts() for _ in range(self._metadata.world_size)]
        entries = self._metadata.entries
        for row in self._stored.owned_at_or_below(leaf.path):
            entry = entries[row]
            assert entry.owner is not None
            tail = path_below(decode_path(entry.path), leaf.fqn)
            assert tail is not None
            wrapper = leads_into_wrapper(tail)
            if wrapper is not None:
                text = f"{entry.fqn!r} (inside a {wrapper}, wanted by PerRank.all, which makes plain tensors)"
                self._problems.add(Mismatch.CLASS, entry.fqn, text)
                continue
            take = parts[entry.owner].at(entries.position_key(row), tail)
            if entries.kinds[self._metadata.resolve(row)] == EntryKind.OBJECT:
                self._values.want(row, leaf.fqn, (), take)
            else:
                tensor = self._plan_gathered(row, entry)
                if tensor is not None:
                    take(tensor)
        if not any(part.expected for part in parts):
            self._problems.add(Mismatch.MISSING, leaf.fqn, self._names.hint(leaf.fqn))
        self._values.when_taken(lambda: self._tree.assign(leaf.path, [part.build() for part in parts]))

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
            self._targets.add(index, shards.view(chunk), chunk.box, overlaps)
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
        return self._targets.acquire(item)

    def acquire_tensors(self, items: Sequence[ReadItem]) -> Sequence[torch.Tensor]:
        if type(self).acquire_tensor is not StandardLoadPlanner.acquire_tensor:
            return super().acquire_tensors(items)  # a subclass has its say about each item
        return self._targets.acquire_all(items)

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        # Filled by address, which autograd does not see: a backward pass that still needs the old values must fail.
        torch.autograd.graph.increment_version(tensor)

    def apply_tensors(self, items: Sequence[ReadItem], tensors: Sequence[torch.Tensor]) -> None:
        if type(self).apply_tensor is not StandardLoadPlanner.apply_tensor:
            super().apply_tensors(items, tensors)
            return
        for tensor in tensors:
            torch.autograd.graph.increment_version(tensor)

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        self.not_loaded += tuple(self._values.apply(item.dest_index, data, partial=self._allow_partial_load))

    def _decode(self, index: MetadataIndex, data: bytes) -> Any:
        return objects.decode(data, key=index.fqn, allow_pickle=self._context.allow_pickle)

    def finish_load(self) -> None:
        differ = {fqn: first for fqn, first, memory, copy in self._tied if not _same_bits(memory, copy)}
        if differ:
            problems = Problems()
            for fqn, first in differ.items():
                problems.add(Mismatch.TIED, fqn, f"{fqn!r} (the same memory as {first!r})")
            problems.raise_if_any()
        self._values.finish()
        self._tree.finish()


def _same_bits(memory: torch.Tensor, copy: torch.Tensor) -> bool:
    here = memory.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return torch.equal(here.reshape(-1).view(torch.uint8), copy.reshape(-1).view(torch.uint8))


def _at(found: tuple[int, Keys], fqn: str) -> tuple[int, str, Keys]:
    return found[0], fqn, found[1]


def _castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=wanted).copy_(torch.zeros(1, dtype=stored))
    except (RuntimeError, TypeError):
        return False
    return True
