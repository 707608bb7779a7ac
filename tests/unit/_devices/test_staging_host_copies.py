"""Host tensors are copied into shared memory exactly, by several threads."""

from __future__ import annotations

import threading

import pytest
import torch

from hpdcp._devices import staging
from hpdcp._devices.staging import copy_all

SOURCES = {
    "contiguous": torch.arange(60.0).reshape(5, 12),
    "transposed": torch.arange(60.0).reshape(5, 12).t(),
    "stepped": torch.arange(120.0).reshape(5, 24)[:, ::2],
    "expanded": torch.arange(5.0).reshape(5, 1).expand(5, 12),
    "conjugate": torch.complex(torch.arange(6.0), torch.ones(6)).conj(),
    "negated": torch.complex(torch.arange(6.0), torch.ones(6)).conj().imag,
    "one row": torch.arange(4096.0).reshape(1, 1, 4096),
    "0-dim": torch.tensor(3.5),
    "empty": torch.empty(0, 3),
    "needs grad": torch.nn.Parameter(torch.arange(4.0)),
}


@pytest.mark.parametrize("piece_bytes", [16 << 20, 64], ids=["whole", "in pieces"])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_exact_whatever_the_strides(threads: int, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "spare_cores", lambda: threads)
    monkeypatch.setattr(staging, "_COPY_BYTES", piece_bytes)
    targets = {
        name: torch.full_like(source.detach().resolve_conj().contiguous(), -1) for name, source in SOURCES.items()
    }
    copy_all([(targets[name], source) for name, source in SOURCES.items()])
    assert [name for name, source in SOURCES.items() if not torch.equal(targets[name], source)] == []


def test_a_copy_that_fails_in_a_helper_fails_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    caller = threading.get_ident()
    failed = threading.Event()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if threading.get_ident() != caller:
            failed.set()
            raise RuntimeError("the device has gone")
        failed.wait(10)

    monkeypatch.setattr(staging, "spare_cores", lambda: 2)
    monkeypatch.setattr(staging, "copy_into", copy)
    with pytest.raises(RuntimeError, match="device has gone"):
        copy_all([(torch.zeros(1), torch.ones(1))] * 3)
