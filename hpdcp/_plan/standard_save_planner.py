"""The planner that `save` uses unless it is given another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hpdcp._base import config
from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._format.columns import I64, ChunkTable, EntryKind, concat_chunks
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan._fingerprint import fingerprint
from hpdcp._plan.local_columns import LocalBoxes, entry_table
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replica_rules import ReplicaRules
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan, WriteItem
from hpdcp._state import objects
from hpdcp._state.geometry import Box, intersect, relative
from hpdcp._state.sharding import LocalChunk, LocalShards, local_shards
from hpdcp._state.tensor_columns import NOT_A_TENSOR, UNUSUAL, Holding, TensorColumns, tensor_columns
from hpdcp._state.ties import tie_key
from hpdcp._state.tree import Leaf, walk
from hpdcp._state.views import view_of_box


class StandardSavePlanner(SavePlanner):
    """Stores everything in the state dict, each box once.

    Args:
        enable_plan_caching: whether a later save of the same structure may skip planning.
        remove_redundancy: whether a box that several ranks hold is written by one of them only. Without collectives
            each rank writes what it holds.
        save_to_minimum_rank: give such a box to the lowest rank, rather than to the one with the least to write.
    """

    def __init__(
        self, *, enable_plan_caching: bool = True, remove_redundancy: bool = True, save_to_minimum_rank: bool = False
    ) -> None:
        require_flags(
            enable_plan_caching=enable_plan_caching,
            remove_redundancy=remove_redundancy,
            save_to_minimum_rank=save_to_minimum_rank,
        )
        self._enable_plan_caching = enable_plan_caching
        self._remove_redundancy = remove_redundancy
        self._save_to_minimum_rank = save_to_minimum_rank

    def options(self) -> dict[str, bool]:
        """What makes a planner that plans alike."""
        return {
            "enable_plan_caching": self._enable_plan_caching,
            "remove_redundancy": self._remove_redundancy,
            "save_to_minimum_rank": self._save_to_minimum_rank,
        }

    def configure_planner(self, state_dict: Mapping[Any, Any], context: PlannerContext) -> None:
        self._context = context
        self._leaves = walk(state_dict, rank=context.rank)
        self._tensors = tensor_columns([leaf.value for leaf in self._leaves])
        self._tied = tied_names(self._leaves, self._tensors)
        self._row_of = {(leaf.fqn, leaf.owner): row for row, leaf in enumerate(self._leaves)}
        self._boxes: LocalBoxes | None = None
        self._shards: dict[tuple[str, int | None], LocalShards] = {}
        self._objects: dict[tuple[str, int | None], bytes] = {}
        self._chunk_of: dict[MetadataIndex, tuple[LocalShards, LocalChunk]] = {}

    def cache_key(self) -> Hashable | None:
        """As the contract says; None also for a subclass that does not override this, since what it adds is unknown."""
        if type(self).cache_key is StandardSavePlanner.cache_key and type(self) is not StandardSavePlanner:
            return None
        if not self._enable_plan_caching or not self._context.collective:
            return None
        held = fingerprint(self._leaves, self._tensors, self._tied)
        if held is None:
            return None
        options = (self._remove_redundancy, self._save_to_minimum_rank)
        return (type(self).__qualname__, options, self._context.world_size, self._context.rank, held)

    def build_local_plan(self) -> SavePlan:
        holdings, number = self._all_holdings()
        entries = entry_table(self._leaves, holdings, number, self._tied)
        stored = np.where(entries.kinds == EntryKind.TENSOR, number, NOT_A_TENSOR)
        boxes = LocalBoxes.of(self._tensors, holdings, stored)
        objects = np.flatnonzero(entries.kinds == EntryKind.OBJECT).tolist()
        values = ChunkTable.from_boxes(objects, [((), ())] * len(objects))
        lengths = np.array([len(self._bytes_of(self._leaves[row])) for row in objects], dtype=np.int64)
        both = concat_chunks([boxes.chunks, values])
        order = np.argsort(both.entry, kind="stable")
        return SavePlan(entries, both.take(order), np.concatenate([boxes.nbytes, lengths])[order])

    def _all_holdings(self) -> tuple[list[Holding], I64]:
        """What this rank holds of each leaf: the holdings, and which it is; -1 for a Python value."""
        holdings, number = list(self._tensors.holdings), self._tensors.number.copy()
        for row in self._tensors.unusual:
            number[row] = len(holdings)
            holdings.append(Holding.of((), self._shards_of(self._leaves[row])))
        return holdings, number

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return drop_duplicates(
            plans,
            remove_redundancy=self._remove_redundancy,
            to_minimum_rank=self._save_to_minimum_rank,
            whole=self._context.collective or self._context.world_size == 1,
            may_differ=ReplicaRules(config.current().check_replicas).exempt,
        )

    def finalize_plan(self, plan: SavePlan) -> SavePlan:
        unknown = np.flatnonzero(plan.nbytes < 0)
        if not len(unknown):
            return plan
        nbytes = plan.nbytes.copy()
        nbytes[unknown] = [len(self.get_bytes(plan.item(row))) for row in unknown.tolist()]
        return plan.with_nbytes(nbytes)

    def get_addresses(self, plan: SavePlan) -> I64:
        kind = type(self)
        if kind.get_tensor is not StandardSavePlanner.get_tensor or kind.get_parts is not StandardSavePlanner.get_parts:
            # What they give need not be what is in the state.
            return super().get_addresses(plan)
        if self._boxes is None:
            self._boxes = LocalBoxes.of(self._tensors, self._tensors.holdings, self._tensors.number)
        rows = self._rows_of(plan)
        return self._boxes.addresses_of(plan.chunks.with_entry(rows[plan.chunks.entry]), plan.nbytes)

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        index = item.index
        shards = self._shards_of(self._leaf_of(item))
        found = self._chunk_of.get(index)
        if found is not None:
            return shards.view(found[1])
        wanted = Box(index.offsets, index.sizes)
        for chunk in shards.chunks:
            if intersect(wanted, chunk.box) == wanted:
                return view_of_box(shards.view(chunk), relative(wanted, chunk.box).offsets, wanted.sizes)
        raise InvalidArgumentError(f"the plan has an item that this rank does not hold: {index}.")

    def get_bytes(self, item: WriteItem) -> bytes:
        return self._bytes_of(self._leaf_of(item))

    def _leaf_of(self, item: WriteItem) -> Leaf:
        return self._leaves[self._row_of[item.index.fqn, item.index.owner]]

    def _rows_of(self, plan: SavePlan) -> I64:
        """For each entry of the plan the row of its leaf; past them all where it is none of this rank's."""
        owners = (None if owner < 0 else owner for owner in plan.entries.owners.tolist())
        names = zip(plan.fqns, owners, strict=True)
        return np.array([self._row_of.get(name, len(self._leaves)) for name in names], dtype=np.int64)

    def _shards_of(self, leaf: Leaf) -> LocalShards:
        """Worked out when it is asked for: on a cached plan, only for what this rank writes."""
        shards = self._shards.get((leaf.fqn, leaf.owner))
        if shards is None:
            shards = self._shards[leaf.fqn, leaf.owner] = local_shards(leaf.value, key=leaf.fqn)
            for chunk in shards.chunks:
                index = MetadataIndex(leaf.fqn, chunk.box.offsets, chunk.box.sizes, leaf.owner)
                self._chunk_of[index] = (shards, chunk)
        return shards

    def _bytes_of(self, leaf: Leaf) -> bytes:
        data = self._objects.get((leaf.fqn, leaf.owner))
        if data is None:
            encoded = objects.encode(leaf.value, key=leaf.fqn, tensors=leaf.owner is not None)
            data = self._objects[leaf.fqn, leaf.owner] = encoded.data
        return data


def tied_names(leaves: Sequence[Leaf], tensors: TensorColumns) -> dict[str, str]:
    """fqn → the name it is tied to, for tensors that are the same memory; that name is the first in order.

    `tensors` has a row for each leaf.
    """
    # Same memory starts at the same address; telling more of every tensor would cost several times as much. Of unusual
    # ones no address is known, so they are all looked at.
    _, inverse, often = np.unique(tensors.memory, return_inverse=True, return_counts=True)
    candidates = (often[inverse] > 1) & (tensors.memory != 0) | (tensors.number == UNUSUAL)
    groups: dict[Hashable, list[str]] = {}
    for row in np.flatnonzero(candidates).tolist():
        leaf = leaves[row]
        tie = tie_key(leaf.value) if leaf.owner is None else None
        if tie is not None:
            groups.setdefault(tie, []).append(leaf.fqn)
    return {name: min(names) for names in groups.values() if len(names) > 1 for name in names if name != min(names)}
