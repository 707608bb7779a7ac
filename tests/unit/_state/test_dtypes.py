from __future__ import annotations

import pytest
import torch

from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._format.dtypes import DTYPE_BITS, SAFETENSORS_NAMES, TORCH_NAMES
from hpdcp._state.dtypes import dtype_name, dtype_of, find_dtype, itemsize_of
from hpdcp._state.views import view_of_box


@pytest.mark.parametrize("name", TORCH_NAMES.values())
def test_names_that_safetensors_shares_come_back_and_take_as_many_bytes(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype_name(dtype) == name
    assert itemsize_of(name) * 8 == dtype.itemsize * 8 == DTYPE_BITS[SAFETENSORS_NAMES[name]]


def test_a_dtype_that_torch_does_not_have_is_refused_with_the_tensors_name() -> None:
    assert find_dtype("float17") is None
    with pytest.raises(UnsupportedTypeError, match=r"'layer.weight' is stored as float17, a dtype that torch .* newer"):
        dtype_of("float17", fqn="layer.weight")
    with pytest.raises(UnsupportedTypeError, match="'save' is a dtype that torch"):
        dtype_of("save")


def test_a_view_of_a_box_shares_the_tensors_memory() -> None:
    tensor = torch.zeros(3, 4)
    view_of_box(tensor, (1, 2), (2, 1)).fill_(1)
    assert tensor.tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    assert view_of_box(tensor, (0, 0), (3, 4)) is tensor
    scalar = torch.ones(())
    assert view_of_box(scalar, (), ()) is scalar
