"""A DTensor's placements, and its local tensor, whichever library made them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hpdcp._base.errors import InvalidArgumentError, StateDictError
from hpdcp._state.ragged import RaggedShard, as_ragged

KNOWN_PLACEMENTS = frozenset({Replicate, Shard, _StridedShard, RaggedShard})


def normalised(placement: Placement, key: str) -> Placement:
    """Another library's ragged placement as ours, whose equality means equal geometry; others as they are."""
    if type(placement) in KNOWN_PLACEMENTS:
        return placement
    try:
        return as_ragged(placement) or placement
    except (InvalidArgumentError, TypeError, ValueError) as cause:
        raise StateDictError(f"{key}: its placement {placement!r} cannot be used: {cause}") from cause


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor itself, its values arrived.

    `to_local()` gives the same object under `no_grad` and costs 9 us more otherwise, for an autograd node.
    """
    return arrived(tensor._local_tensor)


def is_copied_view(tensor: DTensor) -> bool:
    """Whether the tensor is a view by its name only: a slice along a sharded dimension, say `weight[:10]`, is gathered
    into new memory, and what is written there never reaches `weight`.

    Autograd knows which tensor a view was taken of; `detach()` and `inference_mode` forget it, and then this is False.
    """
    base = tensor._base
    if not isinstance(base, DTensor):
        return False
    here, there = local_tensor(tensor), local_tensor(base)
    return here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr()


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of one that a collective still fills (`AsyncCollectiveTensor`) the result, waited for."""
    wait = None if type(tensor) is torch.Tensor else getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()
