"""Tensors whose values are dense memory of their own; all others are refused, with what to do instead."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from hpdcp._base.errors import InvalidArgumentError, UnsupportedTypeError
from hpdcp._devices.memory import memory_range


def dense(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """`tensor` detached, in its own memory; raises for everything that is not dense memory of its own."""
    kind = type(tensor)
    standard = kind is torch.Tensor or kind is torch.nn.Parameter
    if not standard:
        _check_class(tensor, key)
    if (
        tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        raise UnsupportedTypeError(_refusal(tensor, key))
    try:
        memory_range(tensor)
    except InvalidArgumentError as error:
        raise UnsupportedTypeError(f"{key}: {error}") from None
    return tensor.detach() if standard else tensor.as_subclass(torch.Tensor).detach()


def _check_class(tensor: torch.Tensor, key: str) -> None:
    kind = type(tensor)
    if is_lazy(tensor):
        raise UnsupportedTypeError(
            f"{key}: the parameter of a lazy module has no shape yet. Run the module once, then save or load."
        )
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedTypeError(
            f"{key}: a {kind.__module__}.{kind.__qualname__} holds its values in other tensors, so it has no memory "
            "to store. Use a DTensor, or put the tensors inside it into the state dict, with a ChunkInfo that says "
            "which box of the whole it is where ranks hold different shards, since under one name plain tensors are "
            "taken for the same on all ranks."
        )


def _refusal(tensor: torch.Tensor, key: str) -> str:
    if tensor.is_meta:
        return f"{key}: the tensor is on the meta device and has no values. Materialise it first, as with to_empty()."
    if tensor.is_quantized:
        return f"{key}: quantised tensors ({tensor.dtype}) are not stored. Store int_repr() and the scales instead."
    if tensor.is_nested:
        return f"{key}: nested tensors are not stored. Store values() and offsets() instead."
    if tensor.layout is not torch.strided:
        return f"{key}: tensors of layout {tensor.layout} are not stored. Store its parts, or to_dense()."
    lazy, resolved = ("conjugate", "resolve_conj()") if tensor.is_conj() else ("negative", "resolve_neg()")
    return f"{key}: the tensor is a lazy {lazy} view, whose memory holds other values. Use {resolved} instead."
