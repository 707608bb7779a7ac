"""Where many tensors lie, found in one pass over them.

Nearly every tensor is one run of memory, dense and its own. What has to be known of such a one takes a dozen questions
to torch, 0.1 to 0.3 us each; the rest is arithmetic on columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hpdcp._format.columns import I64, ends_of, take_runs

_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_QUANTISED: Final = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRuns:
    """Tensors that are one run of memory each, row by row."""

    tensors: I64
    """The number of each among the tensors that were looked at, ascending."""
    addresses: npt.NDArray[np.uint64]
    """Of the first byte, on the tensor's device."""
    lengths: I64
    """Bytes, from 1."""
    dtypes: Sequence[torch.dtype]
    shape_ends: I64
    """Where each one's sizes end in `shape_dims`."""
    shape_dims: I64
    devices: Sequence[torch.device]
    """All there are; `device_codes` says which of them each is on."""
    device_codes: npt.NDArray[np.int32]
    foreign: npt.NDArray[np.bool_]
    """Whether the memory is not torch's own allocation, so that it may be anything, a map of a file too."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def stops(self) -> npt.NDArray[np.uint64]:
        """Of the first byte after each."""
        return self.addresses + self.lengths.astype(np.uint64)

    def take(self, rows: npt.NDArray[np.integer]) -> MemoryRuns:
        """These rows alone."""
        if len(rows) == len(self):
            return self
        shape_ends, places = take_runs(self.shape_ends, rows)
        return MemoryRuns(
            self.tensors[rows],
            self.addresses[rows],
            self.lengths[rows],
            [self.dtypes[row] for row in rows.tolist()],
            shape_ends,
            self.shape_dims[places],
            self.devices,
            self.device_codes[rows],
            self.foreign[rows],
        )


def memory_runs(tensors: Sequence[torch.Tensor]) -> MemoryRuns:
    """Those of `tensors` that are one run of memory each, whose bytes in order are the values in row-major order.

    They are plain tensors or parameters (any other class may mean anything by its memory), strided, contiguous, not
    quantised, with no lazy conjugation or negation, of at least one byte, and inside a storage that holds them.
    """
    numbers: list[int] = []
    addresses: list[int] = []
    lengths: list[int] = []
    dtypes: list[torch.dtype] = []
    ndims: list[int] = []
    dims: list[int] = []
    codes: dict[torch.device, int] = {}
    device_codes: list[int] = []
    foreign: list[bool] = []
    strided = torch.strided
    for number, tensor in enumerate(tensors):
        if type(tensor) not in _PLAIN or tensor.layout is not strided or tensor.is_nested:
            continue
        dtype = tensor.dtype
        if (
            not tensor.is_contiguous()
            or dtype in _QUANTISED
            or tensor.is_neg()
            or (dtype.is_complex and tensor.is_conj())
        ):
            continue
        try:
            storage, address = tensor.untyped_storage(), tensor.data_ptr()
        except RuntimeError:  # it has no memory of its own that can be told
            continue
        length = tensor.nbytes
        if not (address and length) or tensor.storage_offset() * dtype.itemsize + length > storage.nbytes():
            continue
        numbers.append(number)
        addresses.append(address)
        lengths.append(length)
        dtypes.append(dtype)
        # Numbers, and no object per tensor that the garbage collector would look at.
        ndims.append(tensor.dim())
        dims.extend(tensor.shape)
        device_codes.append(codes.setdefault(tensor.device, len(codes)))
        foreign.append(not storage.resizable())
    return MemoryRuns(
        np.array(numbers, dtype=np.int64),
        np.array(addresses, dtype=np.uint64),
        np.array(lengths, dtype=np.int64),
        dtypes,
        ends_of(np.array(ndims, dtype=np.int64)),
        np.array(dims, dtype=np.int64),
        list(codes),
        np.array(device_codes, dtype=np.int32),
        np.array(foreign, dtype=np.bool_),
    )
