"""Tensors and the bytes they are made of, on whatever device they are; torch's module for that device.

A device is what the tensor says it is, reached through `torch.get_device_module`, so a kind of device that registers
itself with torch needs no line of its own; the one that has some is the NPU. No other package of hpdcp names a kind of
device, and all copies here block unless told otherwise; copies beside other work are made on `streams`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Final

import numpy as np
import torch

from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._devices._npu import NPU, check_torch_npu
from hpdcp._devices.memory import memory_range

_SUB_BYTE_NAMES: Final = [f"{sign}{bits}" for sign in ("int", "uint") for bits in range(1, 8)]

SUB_BYTE_DTYPES: Final = frozenset(
    found for name in _SUB_BYTE_NAMES if isinstance(found := getattr(torch, name, None), torch.dtype)
)
"""`int1` to `int7` and `uint1` to `uint7`: one element per byte, and torch 2.13 has no copy kernel for any of them."""


def tensor_over(memory: memoryview) -> torch.Tensor:
    """The bytes as a flat uint8 tensor that shares them and keeps them alive; of read-only memory it must only be read.

    Raises:
        InvalidArgumentError: there are no bytes.
    """
    if not len(memory):
        raise InvalidArgumentError("tensor_over needs at least one byte of memory; make an empty tensor instead.")
    # By address, since torch warns about every read-only buffer; the block keeps the array, the tensor the block.
    array = np.frombuffer(memory, dtype=np.uint8)
    block = (ctypes.c_ubyte * _power_of_two(len(array))).from_address(array.ctypes.data)
    block.owner = array  # type: ignore[attr-defined]
    return torch.frombuffer(block, dtype=torch.uint8, count=len(array))


def is_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory can be read by the CPU without a copy."""
    return tensor.device.type == "cpu"


def current_device() -> torch.device | None:
    """The accelerator this process computes on; None where there is none, or none in use yet."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    module = device_module(found)
    # Asking a device that nobody uses for its number would make it take memory for this process.
    if not hasattr(module, "current_device") or not getattr(module, "is_initialized", lambda: True)():
        return None
    return torch.device(found.type, module.current_device())


def is_current(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on the accelerator this process computes on."""
    return not is_host(tensor) and tensor.device == current_device()


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory as writable bytes, row-major, without a copy; works for every dtype.

    The view keeps the tensor alive. Its length is `numel * itemsize`; 0-dim and zero-element tensors work as well.

    Raises:
        InvalidArgumentError: the tensor is not on the host, not contiguous, or has its conjugate or negative bit set,
            so that its memory is not its value. `to_host` gives one that is fit. Or its storage does not hold it.
    """
    if not is_host(tensor) or tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"host_bytes needs a contiguous strided tensor on the CPU; found {_describe(tensor)}. "
            "Call to_host(tensor) first."
        )
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidArgumentError(
            f"host_bytes needs a tensor whose memory is its value; found a lazy conjugate or negation in "
            f"{_describe(tensor)}. Call to_host(tensor) first."
        )
    length = tensor.numel() * tensor.element_size()
    if length == 0:
        return memoryview(bytearray())
    # An address and a length know every dtype; torch's numpy bridge knows some.
    block = (ctypes.c_ubyte * _power_of_two(length)).from_address(memory_range(tensor).start)
    block.owner = tensor  # type: ignore[attr-defined]  # the view keeps `block`, and this keeps the memory
    return memoryview(block).cast("B")[:length]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous host tensor with the same value: the tensor's own memory where it is fit, else a copy.

    Detached, with lazy conjugation and negation carried out. Blocks until a copy from a device is done.

    Raises:
        InvalidArgumentError: its storage does not hold it.
    """
    memory_range(tensor)
    value = tensor.detach()
    if value.dtype in SUB_BYTE_DTYPES:
        return value.view(torch.uint8).cpu().contiguous().view(value.dtype)
    return value.resolve_conj().resolve_neg().cpu().contiguous()


def empty_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised contiguous host tensor, whatever torch's default device is."""
    return torch.empty(tuple(shape), dtype=dtype, device="cpu")


def copy_into(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
    """Fill `target` in its own memory with `source`, across devices and strides, casting as `Tensor.copy_` does.

    Leaf parameters that require grad are filled without autograd noticing. Equal dtypes are copied bit for bit.
    `non_blocking`: it may return before the copy is done, on the current stream of the device.

    Raises:
        InvalidArgumentError: a cast is asked for from or to a dtype narrower than a byte, for which torch has none; or
            the storage of one of them does not hold it.
    """
    memory_range(target)
    memory_range(source)
    target, source = target.detach(), source.detach()
    if target.dtype in SUB_BYTE_DTYPES or source.dtype in SUB_BYTE_DTYPES:
        if target.dtype != source.dtype:
            raise InvalidArgumentError(
                f"torch cannot cast {source.dtype} to {target.dtype}. Make the target a {source.dtype} tensor."
            )
        target, source = target.view(torch.uint8), source.view(torch.uint8)
    target.copy_(source, non_blocking=non_blocking)


def device_module(device: torch.device) -> ModuleType:
    """torch's module for this kind of device, as `torch.cuda` is; `torch_npu` is imported for `npu` where it was not.

    Raises:
        NotSupportedError: torch has no such module here, or `torch_npu` does not fit this torch.
    """
    if device.type == NPU:
        check_torch_npu()
    try:
        module: ModuleType = torch.get_device_module(device)
    except RuntimeError as error:
        raise NotSupportedError(
            f"torch {torch.__version__} has no module for devices of type {device.type!r} here: {error} Import the "
            "package that brings it before hpdcp is asked to save or load such tensors."
        ) from error
    return module


def synchronize(device: torch.device) -> None:
    """Return when all work queued on `device` is done; at once for the CPU.

    Raises:
        NotSupportedError: the device's module in torch cannot synchronise.
    """
    if device.type in ("cpu", "meta"):
        return
    wait = getattr(device_module(device), "synchronize", None)
    if wait is None:
        raise NotSupportedError(
            f"torch.{device.type} has no synchronize(), so hpdcp cannot tell when copies to {device} are done. "
            f"Use a build of torch for {device.type} that has it, or keep this state on the CPU."
        )
    wait(device)


def _describe(tensor: torch.Tensor) -> str:
    stride = tuple(tensor.stride()) if tensor.layout is torch.strided else tensor.layout
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, stride {stride}, on {tensor.device}"


def _power_of_two(length: int) -> int:
    """The next power of two: a ctypes array type is made per size (20 us each, kept by ctypes), so these few are made
    and the view is cut to the length."""
    return 1 << (length - 1).bit_length()
