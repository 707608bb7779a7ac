"""Where a tensor lies: inside its storage, or nowhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._devices import device
from hpdcp._devices.memory import ReadOnlyMemory, memory_range


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_range_holds_every_element_and_storages_that_do_not_are_refused(data: st.DataObject) -> None:
    """Against the addresses of all elements, for windows of any shape and strides over a storage that shrinks."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.float32, torch.complex128]))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [data.draw(st.integers(0, 5)) for _ in shape]
    base = torch.zeros(80, dtype=dtype)
    view = base.as_strided(shape, strides, data.draw(st.integers(0, 10)))
    last = max(
        (sum(i * s for i, s in zip(at, strides, strict=True)) for at in itertools.product(*map(range, shape))),
        default=None,
    )
    kept = data.draw(st.integers(0, 80))
    base.untyped_storage().resize_(kept * dtype.itemsize)
    if last is None:
        assert memory_range(view).start == memory_range(view).stop == 0
    elif view.storage_offset() + last < kept:
        found = memory_range(view)
        assert (found.start, found.stop) == (view.data_ptr(), view.data_ptr() + (last + 1) * dtype.itemsize)
    else:
        with pytest.raises(InvalidArgumentError, match="freed or shrunk"):
            memory_range(view)


def test_freed_memory_is_neither_read_nor_written_by_any_copy() -> None:
    freed, good = torch.ones(1000), torch.ones(1000)
    strided = freed[::2]
    freed.untyped_storage().resize_(0)
    for touch in (
        lambda: device.host_bytes(freed),
        lambda: device.to_host(freed),
        lambda: device.to_host(strided),
        lambda: device.copy_into(freed, good),
        lambda: device.copy_into(good, freed),
    ):
        with pytest.raises(InvalidArgumentError, match="freed"):
            touch()


def test_a_tensor_of_elements_without_memory_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no memory"):
        memory_range(torch._efficientzerotensor((3,)))
    torch.func.vmap(_refuses)(torch.ones(2, 3))


def _refuses(tensor: torch.Tensor) -> torch.Tensor:
    with pytest.raises(InvalidArgumentError, match="memory"):
        memory_range(tensor)
    return tensor


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_maps_of_files_that_are_open_for_reading_are_told_from_others(tmp_path: Path) -> None:
    path = tmp_path / "array"
    np.arange(5000, dtype=np.float32).tofile(path)
    read_only = np.memmap(path, np.float32, mode="r")
    over = torch.from_numpy(read_only)
    memory = ReadOnlyMemory()
    for target in (over, over[7:9], over.view(torch.int32), over.detach().requires_grad_(), over[::2]):
        assert memory.holds(target)
    for mode in ("r+", "c"):
        assert not ReadOnlyMemory().holds(torch.from_numpy(np.memmap(path, np.float32, mode=mode)))  # type: ignore[call-overload]
    for target in (torch.ones(3), torch.from_numpy(np.ones(3)), torch.ones(3).share_memory_(), torch.empty(0)):
        assert not memory.holds(target)
