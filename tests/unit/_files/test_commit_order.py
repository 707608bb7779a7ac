"""The order in which a save makes things durable: data and its names first, the commit after them, removal last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp._base.backend import TEMPORARY_PREFIX


class Calls:
    """The system calls of this process that change one folder, in order, as (call, name in the folder)."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.seen: list[tuple[str, str]] = []
        for name in ("open", "pwritev", "fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            path = Path(arguments[1] if name == "replace" else self._path(arguments[0]))
            result = real(*arguments, **keywords)
            changes = name != "open" or arguments[1] & os.O_CREAT
            if changes and (path == self.folder or path.parent == self.folder):
                self.seen.append((name, "." if path == self.folder else path.name))
            return result

        return call

    @staticmethod
    def _path(where: int | str) -> str:
        return os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else where

    def last(self, call: str, name: str) -> int:
        return max(i for i, seen in enumerate(self.seen) if seen == (call, name))

    def first_after(self, position: int, call: str, name: str) -> int:
        return next(i for i, seen in enumerate(self.seen) if i > position and seen == (call, name))


def test_data_is_durable_before_the_commit_and_the_commit_before_anything_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(1000.0), "step": 3}
    old = hpdcp.save(state, checkpoint_id=tmp_path)
    calls = Calls(tmp_path, monkeypatch)
    new = hpdcp.save(state, checkpoint_id=tmp_path)
    commit = calls.last("replace", ".metadata")
    assert len(new.files) == 2 and not set(new.files) & set(old.files)
    for name in new.files:
        written = calls.last("pwritev", name)
        synced = calls.first_after(written, "fsync", name)
        assert calls.first_after(synced, "fsync", ".") < commit, name
    temporary = max(i for i, seen in enumerate(calls.seen[:commit]) if seen[1].startswith(TEMPORARY_PREFIX))
    assert calls.seen[temporary][0] == "fsync", "the metadata's own bytes are not durable when it is published"
    durable = calls.first_after(commit, "fsync", ".")
    for name in old.files:
        assert calls.last("unlink", name) > durable, name


def test_the_claim_is_durable_before_any_data_file_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(tmp_path, monkeypatch)
    metadata = hpdcp.save({"w": torch.ones(3), "step": 1}, checkpoint_id=tmp_path)
    claimed = calls.last("replace", ".attempt")
    for name in metadata.files:
        assert calls.last("open", name) > calls.first_after(claimed, "fsync", ".")


def test_folders_created_on_the_way_are_made_durable_from_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    hpdcp.save({"step": 1}, checkpoint_id=tmp_path / "run" / "step_1")
    assert synced[:2] == [tmp_path, tmp_path / "run"]
