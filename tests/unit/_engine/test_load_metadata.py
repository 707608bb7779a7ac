"""The coordinator reads and parses the metadata once; the other ranks are sent the file's own bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import FileSystemReader, Metadata
from hpdcp._comm.exchange import Alone
from hpdcp._engine.load import find_metadata


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hpdcp.save({"w": torch.arange(6.0), "step": 3}, checkpoint_id=tmp_path)
    return tmp_path


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is called from here on of parsing and encoding."""
    calls: list[str] = []
    parse, encode = Metadata.from_bytes, Metadata.to_bytes
    monkeypatch.setattr(Metadata, "from_bytes", lambda *a, **k: calls.append("parse") or parse(*a, **k))
    monkeypatch.setattr(Metadata, "to_bytes", lambda self: calls.append("encode") or encode(self))
    return calls


def test_the_coordinator_keeps_what_it_parsed_and_sends_the_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bytes] = []

    def broadcast(step: str, make: Callable[[], bytes]) -> bytes:
        sent.append(make())
        return sent[0]

    calls = _counted(monkeypatch)
    exchange: Any = SimpleNamespace(rank=0, broadcast=broadcast)
    reader = FileSystemReader(checkpoint)
    metadata, _ = find_metadata(lambda: reader, exchange)
    assert calls == ["parse"]
    assert sent[0][1:] == (checkpoint / ".metadata").read_bytes()
    other: Any = SimpleNamespace(rank=1, broadcast=lambda step, make: sent[0])
    received, _ = find_metadata(lambda: reader, other)
    assert metadata is not None and received is not None
    assert received.to_bytes() == metadata.to_bytes()


def test_a_rank_alone_encodes_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _counted(monkeypatch)
    reader = FileSystemReader(checkpoint)
    assert find_metadata(lambda: reader, Alone())[0] is not None
    assert calls == ["parse"]
