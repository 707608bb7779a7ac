"""The fingerprint of a state dict, which says whether the plan of an earlier save is right for it.

What a plan depends on is small and local (names, shapes, where each tensor lies in which mesh), so each rank can tell
by itself that nothing of it has changed, and one vote of all ranks tells that nothing has changed anywhere.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hpdcp._format.metadata import CHUNK_INFO, ChunkInfo
from hpdcp._state.paths import encode_path
from hpdcp._state.tree import Leaf

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
