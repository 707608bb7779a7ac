"""`RaggedShard`: ranks own unequal runs of a tensor's leading dimensions, each held flat."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from hpdcp._base.errors import InvalidArgumentError, UnsupportedTypeError
from hpdcp._state._runs import Split, owned_runs


# A dataclass would write the obvious; one that derives from Placement crashes the interpreter in torch 2.13.
class RaggedShard(Placement):
    """Divides the cells of leading dimensions among a mesh dimension's ranks in given proportions.

    The other placements are applied first; what they leave has a shape, and its leading dimensions `dims` have
    `cells = prod(shape[:len(dims)])` cells in row-major order. Rank i of the mesh dimension owns
    `cells / sum(local_units) * local_units[i]` of them, those after its predecessors', each with everything behind it.
    Its local tensor is that run of elements, flat. A rank with 0 units owns nothing. With `dims=()` the whole
    tensor lies on the one rank that has units.

    Only `Replicate` may stand before it among a tensor's placements, and there may be one. hpdcp understands every
    placement that has the attributes `dims` and `local_units`, not this class alone.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __init__(self, dims: Sequence[int], local_units: Sequence[int]) -> None:
        """Raises `InvalidArgumentError` for dims that are no prefix (0, 1, ...) or for units that divide nothing."""
        super().__init__()
        self.dims = tuple(int(dim) for dim in dims)
        self.local_units = tuple(int(unit) for unit in local_units)
        if self.dims != tuple(range(len(self.dims))):
            raise InvalidArgumentError(
                f"RaggedShard divides leading dimensions: its dims must be (0,), (0, 1) and so on; found {self.dims}."
            )
        if any(unit < 0 for unit in self.local_units) or not any(self.local_units):
            raise InvalidArgumentError(
                f"RaggedShard needs one unit count per rank, none negative and not all 0; found {self.local_units}."
            )
        if not self.dims and sum(unit > 0 for unit in self.local_units) != 1:
            raise InvalidArgumentError(
                f"RaggedShard with dims=() puts the whole tensor on one rank, so exactly one may have units; "
                f"found {self.local_units}."
            )

    def interval(self, shape: Sequence[int], index: int) -> tuple[int, int]:
        """The elements [start, stop) that rank `index` of the mesh dimension owns of a row-major block of `shape`.

        `shape` is what the other placements leave of the tensor. Raises `InvalidArgumentError` where it has fewer
        dimensions than `dims`, or cells that the units do not divide evenly.

        >>> RaggedShard((0,), (1, 0, 2)).interval((6, 4), 2)
        (8, 24)
        """
        if len(self.dims) > len(shape):
            raise InvalidArgumentError(
                f"{self} needs {len(self.dims)} dimensions; the tensor has shape {tuple(shape)}."
            )
        if not self.dims:
            return (0, math.prod(shape)) if self.local_units[index] else (0, 0)
        cells, units = math.prod(shape[: len(self.dims)]), sum(self.local_units)
        if cells % units:
            raise InvalidArgumentError(
                f"{self} divides {cells} cells (dimensions {self.dims} of the shape {tuple(shape)} that the other "
                f"placements leave) into {units} units, which leaves {cells % units} over. "
                "Choose units whose sum divides the cells."
            )
        per_unit = cells // units * math.prod(shape[len(self.dims) :])
        before = sum(self.local_units[:index])
        return before * per_unit, (before + self.local_units[index]) * per_unit

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaggedShard):
            return NotImplemented
        return (self.dims, self.local_units) == (other.dims, other.local_units)

    def __hash__(self) -> int:
        return hash((RaggedShard, self.dims, self.local_units))

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[tuple[int, ...], tuple[int, ...]]]:
        return RaggedShard, (self.dims, self.local_units)

    def __repr__(self) -> str:
        return f"RaggedShard(dims={self.dims}, local_units={self.local_units})"


def as_ragged(placement: object) -> RaggedShard | None:
    """`placement` as hpdcp's own class, where it is a ragged one of any library; None otherwise."""
    if isinstance(placement, RaggedShard):
        return placement
    dims, units = getattr(placement, "dims", None), getattr(placement, "local_units", None)
    return None if dims is None or units is None else RaggedShard(dims, units)


def divisions(
    placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], ndim: int
) -> tuple[list[Split], tuple[RaggedShard, int] | None]:
    """What the placements of a tensor of `ndim` dimensions do for the rank at `coordinate` of a mesh.

    Returns the axis divisions in the order in which DTensor applies them, and the ragged placement with the rank's
    index on its mesh dimension, which comes after all of them. Raises `UnsupportedTypeError` for `Partial` and for
    placements that are not known here, `InvalidArgumentError` for a combination that has no meaning.
    """
    splits: list[Split] = []
    ragged: tuple[RaggedShard, int] | None = None
    for placement, parts, index in zip(placements, mesh_shape, coordinate, strict=True):
        kind = type(placement)
        if isinstance(placement, Partial):
            raise UnsupportedTypeError(
                f"it is placed as {placement!r}: every rank holds a summand, not the value. Reduce it first, as "
                "with tensor.redistribute(placements=[Replicate()])."
            )
        if kind is Replicate:
            continue
        # A class derived from Shard may divide in a way of its own, so only the classes themselves are understood.
        if isinstance(placement, _StridedShard) and kind is _StridedShard:
            splits.append(Split(_checked_dim(placement.dim, ndim), parts, index, int(placement.split_factor)))
        elif isinstance(placement, Shard) and kind is Shard:
            splits.append(Split(_checked_dim(placement.dim, ndim), parts, index))
        elif (own := as_ragged(placement)) is not None:
            _check_ragged(own, parts, alone=ragged is None, first=not splits)
            ragged = own, index
        else:
            raise UnsupportedTypeError(
                f"its placement {placement!r} ({kind.__module__}.{kind.__qualname__}) is not one that hpdcp knows: "
                "Replicate, Shard, _StridedShard and placements with dims and local_units."
            )
    return splits, ragged


def _checked_dim(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise InvalidArgumentError(f"it is sharded on dimension {dim}, and has {ndim} dimensions.")
    return dim % ndim


def _check_ragged(ragged: RaggedShard, parts: int, *, alone: bool, first: bool) -> None:
    if not alone:
        raise InvalidArgumentError("it has two ragged placements; there may be one.")
    if not first:
        raise InvalidArgumentError(f"only Replicate may stand before {ragged} among its placements.")
    if len(ragged.local_units) != parts:
        raise InvalidArgumentError(
            f"{ragged} has {len(ragged.local_units)} local_units for a mesh dimension of {parts} ranks."
        )


def from_local(
    local_flat: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], global_shape: Sequence[int]
) -> DTensor:
    """A DTensor that holds this rank's run of a tensor of `global_shape`, for `save` and `load`.

    `local_flat` is 1-D, with as many elements as the placements give this rank, and its memory is shared; it has no
    elements on a rank outside `mesh`. The result is a leaf that requires grad where `local_flat` does. Nothing is sent
    between ranks. The DTensor carries the shard and its place and can be a Parameter; torch has no operators for ragged
    placements, so compute with `to_local()` under `torch.no_grad()`, which gives the flat tensor back.

    Raises `InvalidArgumentError` where the placements have no meaning for that shape and mesh, where the number of
    elements or the device is another than expected, and for 0-dim tensors, whose shape torch takes for one not given.
    """
    shape = tuple(int(size) for size in global_shape)
    if not shape:
        raise InvalidArgumentError("A 0-dim tensor has nothing to divide; keep it replicated.")
    expected = _expected_elements(mesh, placements, shape)
    if local_flat.ndim != 1 or local_flat.numel() != expected:
        raise InvalidArgumentError(
            f"A tensor of shape {shape} placed as {list(placements)} leaves this rank a flat tensor of {expected} "
            f"elements; found one of shape {tuple(local_flat.shape)}."
        )
    if local_flat.device.type != mesh.device_type:
        raise InvalidArgumentError(
            f"The local tensor is on {local_flat.device} and the mesh is of {mesh.device_type} devices. "
            f"Move it there first: a copy made here would not share its memory."
        )
    strides = [*itertools.accumulate(reversed(shape[1:]), lambda stride, size: stride * max(size, 1), initial=1)]
    carrier = DTensor.from_local(
        local_flat.detach(),
        mesh,
        list(placements),
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(reversed(strides)),
    )
    carrier.requires_grad_(local_flat.requires_grad)
    return carrier


def _expected_elements(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> int:
    if len(placements) != mesh.ndim:
        raise InvalidArgumentError(
            f"A mesh of {mesh.ndim} dimensions needs as many placements; found {list(placements)}."
        )
    coordinate = mesh.get_coordinate()
    here = coordinate if coordinate is not None else [0] * mesh.ndim
    try:
        splits, ragged = divisions(placements, mesh.shape, here, len(shape))
    except InvalidArgumentError as cause:
        raise InvalidArgumentError(f"A tensor of shape {shape} cannot be placed so: {cause}") from cause
    if ragged is None:
        raise InvalidArgumentError(
            f"None of the placements {list(placements)} is ragged; use DTensor.from_local for regular ones."
        )
    block = [sum(length for _, length in runs) for runs in owned_runs(shape, splits)]
    start, stop = ragged[0].interval(block, ragged[1])
    return 0 if coordinate is None else stop - start
