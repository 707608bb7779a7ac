"""Bytes of host memory for every dtype, copies to the host and into strided targets, and synchronisation."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._devices._npu import check_torch_npu
from hpdcp._devices.device import (
    SUB_BYTE_DTYPES,
    copy_into,
    current_device,
    device_module,
    empty_on_host,
    host_bytes,
    is_host,
    synchronize,
    to_host,
)

QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTISED,
    key=str,
)


def patterned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose memory is 1, 2, 3 … byte by byte, NaN payloads and all; booleans are 0 and 1 only."""
    tensor = torch.empty(shape, dtype=dtype)
    view = host_bytes(tensor)
    view[:] = bytes(i % 2 if dtype is torch.bool else i % 255 + 1 for i in range(len(view)))
    return tensor


def test_every_dense_dtype_of_torch_is_tried() -> None:
    names = {str(dtype) for dtype in DTYPES}
    assert {"torch.float32", "torch.bits8", "torch.complex32", "torch.float8_e8m0fnu", "torch.uint7"} <= names
    assert len(SUB_BYTE_DTYPES) == 14


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (4, 6)], ids=str)
def test_bytes_alias_the_memory_of_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, dtype=dtype)
    view = host_bytes(tensor)
    assert (view.format, view.ndim, view.readonly, view.contiguous) == ("B", 1, False, True)
    assert len(view) == tensor.numel() * tensor.element_size()
    view[:] = bytes(i % 255 + 1 for i in range(len(view)))
    assert bytes(host_bytes(tensor)) == bytes(view)
    if tensor.dim() and tensor.numel():
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == bytes(view)


def test_the_bytes_of_a_view_are_its_own_part_of_the_storage() -> None:
    whole = torch.arange(10, dtype=torch.uint8)
    assert bytes(host_bytes(whole[3:7])) == b"\3\4\5\6"


def test_writing_the_bytes_changes_a_parameter_in_place() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    host_bytes(parameter)[:] = np.array([1.5, -2.5], dtype="<f4").tobytes()
    assert parameter.tolist() == [1.5, -2.5]


def test_the_bytes_keep_the_memory_alive_and_let_it_go() -> None:
    tensor = torch.full((1 << 16,), 7, dtype=torch.uint8)
    gone = weakref.ref(tensor)
    part = host_bytes(tensor)[10:20]
    del tensor
    gc.collect()
    assert gone() is not None
    assert bytes(part) == b"\7" * 10
    del part
    gc.collect()
    assert gone() is None


def test_the_bytes_end_where_the_tensor_ends() -> None:
    view = host_bytes(torch.zeros(5, dtype=torch.uint8))
    assert (len(view), view.nbytes, np.frombuffer(view, dtype=np.uint8).shape) == (5, 5, (5,))
    with pytest.raises(IndexError):
        view[5]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(4)[::2],
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2)),
        torch.eye(2).to_sparse(),
    ],
    ids=["transposed", "strided", "meta", "conjugate", "negative", "sparse"],
)
def test_memory_that_is_not_the_value_is_refused_with_what_it_is(tensor: torch.Tensor) -> None:
    with pytest.raises(InvalidArgumentError, match=r"found.*to_host\(tensor\)"):
        host_bytes(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_host_gives_row_major_bytes_of_any_strides(dtype: torch.dtype) -> None:
    tensor = patterned((4, 6), dtype)
    size = tensor.element_size()
    rows = np.frombuffer(host_bytes(tensor), dtype=f"V{size}").reshape(4, 6)
    assert bytes(host_bytes(to_host(tensor.t()))) == rows.T.tobytes()
    assert bytes(host_bytes(to_host(tensor[1:3, 2:5]))) == rows[1:3, 2:5].tobytes()


def test_to_host_does_not_copy_what_is_fit() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert to_host(parameter).data_ptr() == parameter.data_ptr()
    assert not to_host(parameter).requires_grad


def test_to_host_carries_out_lazy_conjugation_and_negation() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert to_host(value.conj()).tolist() == [1 - 2j, 3 + 4j]
    assert to_host(value.conj().imag).tolist() == [-2.0, 4.0]
    host_bytes(to_host(value.conj()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_into_strided_targets_are_exact_for_every_dtype(dtype: torch.dtype) -> None:
    source = patterned((4, 6), dtype)
    target = torch.empty((6, 4), dtype=dtype).t()
    copy_into(target, source)
    assert bytes(host_bytes(to_host(target))) == bytes(host_bytes(source))


def test_copies_cast_and_fill_leaves_that_require_grad() -> None:
    target = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    copy_into(target, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert target.tolist() == [1.0, 2.0, 3.0]
    assert target.requires_grad
    assert target.grad_fn is None


def test_a_cast_that_torch_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match=r"torch\.float32 to torch\.int4"):
        copy_into(torch.empty(3, dtype=torch.int4), torch.zeros(3))


def test_host_tensors_are_made_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        made = empty_on_host((2, 3), torch.float16)
    assert is_host(made)
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == ((2, 3), torch.float16, True)
    assert not is_host(torch.empty(2, device="meta"))


def test_synchronising_asks_the_device_s_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    class Module:
        synchronize = staticmethod(asked.append)

    monkeypatch.setattr(torch, "get_device_module", lambda _device: Module)
    synchronize(torch.device("cpu"))
    synchronize(torch.device("meta"))
    assert asked == []
    synchronize(torch.device("xpu", 1))
    assert asked == [torch.device("xpu", 1)]


def test_a_device_that_cannot_synchronise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _device: sys)
    with pytest.raises(NotSupportedError, match=r"torch\.xpu has no synchronize"):
        synchronize(torch.device("xpu"))


@pytest.fixture
def npu_package(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a `torch_npu` of some version installed, which registers nothing."""
    check_torch_npu.cache_clear()

    def install(version: str) -> None:
        package = ModuleType("torch_npu")
        package.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torch_npu", package)

    return install


def test_a_torch_npu_for_another_torch_is_named_with_the_one_to_install(npu_package: Callable[[str], None]) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    npu_package("1.11.0.post4")
    with pytest.raises(NotSupportedError) as caught:
        check_torch_npu()
    text = str(caught.value)
    assert "torch_npu 1.11.0.post4" in text
    assert torch.__version__ in text
    assert f'pip install "hpdcp[npu]" "torch_npu=={minor}.*"' in text


def test_a_torch_npu_of_the_same_minor_version_passes(npu_package: Callable[[str], None]) -> None:
    npu_package(".".join(torch.__version__.split(".")[:2]) + ".7rc1")
    check_torch_npu()


def test_a_torch_npu_that_is_not_there_or_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_torch_npu.cache_clear()
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(NotSupportedError, match=r"need torch_npu, which could not be imported.*pip install"):
        check_torch_npu()


def test_devices_that_torch_does_not_know_are_named() -> None:
    with pytest.raises(NotSupportedError, match="no module for devices of type 'ipu'"):
        device_module(torch.device("ipu"))


def test_without_an_accelerator_no_device_is_current() -> None:
    assert torch.accelerator.is_available() or current_device() is None
