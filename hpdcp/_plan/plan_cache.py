"""Plans of earlier saves, and the fingerprint of a state dict that says whether one is right for this save.

A training job saves the same structure again and again. What a plan depends on is small and local (names, shapes,
where each tensor lies in which mesh), so each rank can tell by itself that nothing of it has changed, and one vote of
all ranks tells that nothing has changed anywhere.
"""

from __future__ import annotations

import hashlib
import marshal
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo
from hpdcp._state.paths import encode_path
from hpdcp._state.tree import Leaf

_MOST_PLANS: Final = 8
"""Plans kept: a job saves its model, its optimizer and little else under names of their own."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """One save's plan, as bytes: nothing can change them, and they may be sent to another process.

    Holds no file names, no checksums, and -1 for the length of every object.
    """

    plan_id: int
    """Drawn by the coordinator for the plan of all ranks; parts belong together when their ids are equal."""
    local: bytes
    """What this rank holds: `SavePlan.to_bytes`."""
    part: bytes
    """What this rank writes: `SavePlan.to_part` of `local`."""
    whole: bytes | None
    """On the coordinator `WholePlan.to_bytes`: what all ranks write, and its metadata."""

    def to_bytes(self) -> bytes:
        """For another process."""
        parts = {"local": self.local, "part": self.part, "whole": self.whole or b""}
        columns = {name: np.frombuffer(data, dtype=np.uint8) for name, data in parts.items()}
        return pack_columns(columns, {"plan_id": str(self.plan_id)})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> CachedPlan:
        columns, facts = unpack_columns(data, where="a cached plan")
        local, part, whole = (columns[name].tobytes() for name in ("local", "part", "whole"))
        return cls(int(facts["plan_id"]), local, part, whole or None)


class PlanCache:
    """The plans of the last few saves of one rank, by key.

    A key may have several: a rank may hold the same, or nothing, in two saves that differ on other ranks.
    """

    def __init__(self, most: int = _MOST_PLANS) -> None:
        self._most = most
        self._plans: OrderedDict[tuple[Hashable, int], CachedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> list[CachedPlan]:
        """The plans put under `key`, last used first."""
        with self._lock:
            return [plan for (known, _), plan in reversed(self._plans.items()) if known == key]

    def put(self, key: Hashable, plan: CachedPlan) -> None:
        """Keep `plan`, as the last used; where there are too many, the one that was not used for longest goes."""
        with self._lock:
            self._plans[key, plan.plan_id] = plan
            self._plans.move_to_end((key, plan.plan_id))
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)

    def retain(self, key: Hashable, plan_ids: Collection[int]) -> None:
        """Of the plans put under `key`, forget all but these."""
        with self._lock:
            for known, plan_id in list(self._plans):
                if known == key and plan_id not in plan_ids:
                    del self._plans[known, plan_id]

    def clear(self) -> None:
        """Forget every plan: the next save of anything plans in full, on all ranks."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


PLANS: Final = PlanCache()
"""What saves of this process use."""

_Facts: TypeAlias = tuple[object, ...]

_REGULAR: Final = frozenset({Replicate, Shard, _StridedShard})


def fingerprint(leaves: Sequence[Leaf], tied: Mapping[str, str]) -> bytes | None:
    """Equal for two state dicts of one rank when they hold the same boxes under the same names; None: not told apart.

    Covers every name and path with its types, and of tensors the dtype, the global shape and what decides which boxes
    of it this rank holds. Values do not count, neither do the lengths of Python values. `tied` says which names are
    other names' tensors. None for ragged placements, for tensors that list their own chunks or wrap others, and for
    what cannot be stored at all, which planning in full refuses by name.

    One pass, some 3 us a tensor; the offsets that a plan needs are not worked out.
    """
    tensors = _TensorFacts()
    facts: list[_Facts] = []
    for leaf in leaves:
        what = tensors.of(leaf.value)
        if what is None:
            return None
        facts.append((leaf.fqn, tuple(leaf.path), leaf.path.kinds, leaf.owner, what))
    ties = tuple(tied.items())
    try:
        # Version 2 writes equal values as equal bytes; later ones mark which objects are shared.
        data = marshal.dumps((facts, ties), 2)
    except ValueError:
        # A key of a type that marshal does not know. The path's text, which is what is stored, knows some more.
        told = [(fqn, encode_path(leaf.path), *rest) for leaf, (fqn, _, _, *rest) in zip(leaves, facts, strict=True)]
        data = marshal.dumps((told, ties), 2)
    return hashlib.blake2b(data, digest_size=32).digest()


class _TensorFacts:
    """What a plan depends on, of one tensor after another; what many of them share is worked out once."""

    def __init__(self) -> None:
        self._is_tensor: dict[type, bool] = {}
        self._dtypes: dict[torch.dtype, str] = {}
        self._meshes: dict[int, tuple[tuple[int, ...], tuple[int, ...] | None]] = {}
        self._placements: dict[tuple[Placement, ...], str] = {}

    def of(self, value: object) -> _Facts | None:
        """Of a tensor what is told by `fingerprint`; () for a Python value; None where nothing can be told."""
        kind = type(value)
        if kind is DTensor:
            return self._of_dtensor(value)  # type: ignore[arg-type]  # `kind` says what it is
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._of_plain(value)  # type: ignore[arg-type]  # `kind` says what it is
        known = self._is_tensor.get(kind)
        if known is None:
            known = self._is_tensor[kind] = issubclass(kind, torch.Tensor)
        if not known:
            return ()
        return self._of_dtensor(value) if isinstance(value, DTensor) else None

    def _of_plain(self, tensor: torch.Tensor) -> _Facts | None:
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
            return None
        info = getattr(tensor, CHUNK_INFO, None)
        box: _Facts | None = None
        if info is not None:
            if not isinstance(info, ChunkInfo):
                return None
            box = tuple(tuple(map(int, p)) for p in (info.chunk.offsets, info.chunk.sizes, info.global_shape))
        return self._dtype(tensor.dtype), tuple(tensor.shape), box

    def _of_dtensor(self, tensor: DTensor) -> _Facts | None:
        local, placements, mesh = tensor._local_tensor, tensor.placements, tensor.device_mesh
        if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_meta:
            return None
        written = self._placements.get(placements) if _REGULAR.issuperset(map(type, placements)) else ""
        if written is None:
            written = self._placements[placements] = repr(placements)
        if not written or getattr(tensor, CHUNK_INFO, None) is not None:
            return None
        where = self._meshes.get(id(mesh))
        if where is None:
            coordinate = mesh.get_coordinate()
            where = tuple(mesh.shape), None if coordinate is None else tuple(coordinate)
            self._meshes[id(mesh)] = where
        return self._dtype(local.dtype), tuple(tensor.shape), tuple(local.shape), written, where

    def _dtype(self, dtype: torch.dtype) -> str:
        name = self._dtypes.get(dtype)
        if name is None:
            name = self._dtypes[dtype] = str(dtype)
        return name
