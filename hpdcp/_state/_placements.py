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


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself; of one that a collective still fills (`AsyncCollectiveTensor`) the result, waited for."""
    wait = None if type(tensor) is torch.Tensor else getattr(tensor, "trigger_wait", None)
    return tensor if wait is None else wait()
