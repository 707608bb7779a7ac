"""Folders with a zarr checkpoint in them: names are fixed there, so what is in the way decides what a save may do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import (
    CheckpointExistsError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    StateDictError,
    SupersededError,
)
from hpdcp._files.commit import Attempt
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._manage.verify import verify_checkpoint
from hpdcp_backends import zarr_layout
from hpdcp_backends.local import LocalBackend
from tests.support.ranks import ROOT


@pytest.fixture(autouse=True)
def zarr_is_the_layout() -> Iterator[None]:
    with config.using(layout="zarr"):
        yield


def state(fill: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), fill), "b": torch.full((5,), fill)}, "step": fill}


def assert_holds(folder: Path, fill: float) -> None:
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["model"]["w"], state(fill)["model"]["w"])
    assert torch.equal(target["model"]["b"], state(fill)["model"]["b"])
    assert target["step"] == fill
    assert verify_checkpoint(folder).is_sound


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


_DYING = """
import os, sys, torch, hpdcp
from hpdcp._base import config
from hpdcp_backends.local import LocalBackend
left = int(sys.argv[2])
real = LocalBackend.write
def write(self, key, buffers, *, size, exclusive):
    global left
    left -= 1
    if left < 0:
        os._exit(9)
    real(self, key, buffers, size=size, exclusive=exclusive)
LocalBackend.write = write
state = {"model": {"w": torch.full((4, 3), 7.0), "b": torch.full((5,), 7.0), "gone": torch.ones(2)}, "step": 7.0}
with config.using(layout="zarr"):
    hpdcp.save(state, checkpoint_id=sys.argv[1])
"""


def save_and_die(folder: Path, after: int) -> None:
    """A save that is ended, as by kill -9, after so many files."""
    done = subprocess.run(
        [sys.executable, "-c", _DYING, folder, str(after)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/backends"},
    )
    assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("after", [1, 6])
def test_what_a_killed_save_left_is_cleared_by_the_next_and_nothing_else_is(tmp_path: Path, after: int) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_and_die(tmp_path, after)
    with pytest.raises(IncompleteCheckpointError):
        hpdcp.load(state(0.0), checkpoint_id=tmp_path)
    metadata = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)
    there = {key for key in tree(tmp_path) if not key.startswith("_rank")}
    expected = {key for key in metadata.files if not key.startswith("_rank")}
    assert there == {*expected, ".metadata", ".attempt", "notes.txt"}


def test_the_default_layout_clears_what_a_killed_save_of_this_one_left(tmp_path: Path) -> None:
    save_and_die(tmp_path, 6)
    with config.using(layout="safetensors"):
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)
    assert not list(tmp_path.rglob("zarr.json"))


def test_saving_over_a_committed_one_changes_nothing_at_all(tmp_path: Path) -> None:
    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError, match=r"(?s)'model'.*hpdcp rm"):
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    with pytest.raises(CheckpointExistsError):
        hpdcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path)
    assert tree(tmp_path) == before
    assert_holds(tmp_path, 1.0)


def test_each_layout_may_replace_the_other_s_checkpoint(tmp_path: Path) -> None:
    with config.using(layout="safetensors"):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)
    assert not list(tmp_path.glob("*.safetensors"))
    with config.using(layout="safetensors"):
        hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 3.0)
    assert not list(tmp_path.rglob("zarr.json"))
    hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 4.0)


def test_a_save_killed_over_the_other_layout_leaves_that_checkpoint_whole(tmp_path: Path) -> None:
    with config.using(layout="safetensors"):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    save_and_die(tmp_path, 5)
    assert_holds(tmp_path, 1.0)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)


@pytest.mark.parametrize("name", ["model", "zarr.json"])
def test_what_hpdcp_did_not_write_is_never_touched(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / name
    if name == "model":
        (theirs / "deep").mkdir(parents=True)
        (theirs / "deep" / "zarr.json").write_text("precious")
    else:
        theirs.write_text("precious")
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError, match=name):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert tree(tmp_path) == before


def test_a_lease_that_names_what_is_not_its_own_loses_no_files(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("precious")
    (tmp_path / "list").write_text("precious")
    lease = {"attempt": "x" * 16, "plain": True, "began": 0.0, "superseded": [], "replaced": []}
    for made in (["photos", "list", "..", "/etc", ".metadata", "a/b"], "photos", 3, [["photos"]]):
        (tmp_path / ".attempt").write_text(json.dumps({**lease, "made": made}))
        hpdcp.save({"other": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=False)
        assert (tmp_path / "photos" / "one.jpg").read_text() == "precious"
        assert (tmp_path / "list").read_text() == "precious"
        (tmp_path / ".metadata").unlink()
        for path in [*tmp_path.rglob("zarr.json"), *tmp_path.glob("other/c/*")]:
            path.unlink()


def test_metadata_that_cannot_be_read_protects_the_arrays(tmp_path: Path) -> None:
    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    before = tree(tmp_path)
    with pytest.raises(CheckpointExistsError):
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert tree(tmp_path) == before


def test_a_chunk_that_another_save_wrote_in_the_meantime_ends_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalBackend.write
    met: list[str] = []

    def write(self: LocalBackend, key: str, buffers: Any, *, size: int, exclusive: bool) -> None:
        if key.endswith("/c/0") and not met:
            met.append(key)
            real(self, key, [memoryview(b"another's")], size=9, exclusive=False)
        real(self, key, buffers, size=size, exclusive=exclusive)

    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "write", write)
        with pytest.raises(SupersededError, match="another save is at work"):
            hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert (tmp_path / met[0]).read_bytes() == b"another's"
    assert not (tmp_path / ".metadata").exists()


def test_a_save_that_was_overtaken_removes_nothing_of_the_one_that_overtook_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = zarr_layout.ZarrLayout.finish

    def finish(self: zarr_layout.ZarrLayout, backend: Backend, *args: Any) -> Any:
        monkeypatch.setattr(zarr_layout.ZarrLayout, "finish", real)
        # While this save stands here, another clears it away, and commits under the same names.
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
        return real(self, backend, *args)

    monkeypatch.setattr(zarr_layout.ZarrLayout, "finish", finish)
    with pytest.raises(SupersededError):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 2.0)


def test_the_lease_names_what_the_save_makes(tmp_path: Path) -> None:
    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert json.loads((tmp_path / ".attempt").read_text())["made"] == ["model", "zarr.json"]
    assert Attempt.begin(LocalBackend(str(tmp_path / "other")), "a" * 16).lease.made == ()


def test_a_tensor_above_a_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(StateDictError, match=r"(?s)'1'.*'1\.x'.*safetensors"):
        hpdcp.save({1: torch.ones(2), "1": {"x": torch.ones(2)}}, checkpoint_id=tmp_path)
    assert not (tmp_path / ".metadata").exists()


def test_inspect_shows_where_escaped_names_are(tmp_path: Path) -> None:
    hpdcp.save({"a/b": {"c": torch.ones(2)}}, checkpoint_id=tmp_path)
    (entry,) = inspect_checkpoint(tmp_path).tensors
    assert entry.fqn == "a/b.c"
    assert entry.files == ("a%2Fb/%63/c/0",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "lzma"}, "compressor is 'lzma'"),
        ({"level": 11}, "level is 11"),
        ({"level": "high"}, "level is 'high'"),
        ({"shuffle": 3}, "shuffle is 3"),
        ({"compresor": "zstd"}, "Did you mean 'compressor'"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_their_origin(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with (
        config.using(layouts={"zarr": options}),
        pytest.raises(InvalidArgumentError, match=rf"(?s){message}.*|.*using.*{message}") as raised,
    ):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert "hpdcp.config.using" in str(raised.value)


def test_options_of_a_layout_that_does_not_exist_are_refused(tmp_path: Path) -> None:
    with (
        config.using(layouts={"zar": {"level": 3}}),
        pytest.raises(InvalidArgumentError, match="no layout is called 'zar'"),
    ):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)


def test_compression_without_numcodecs_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    with (
        config.using(layouts={"zarr": {"compressor": "zstd"}}),
        pytest.raises(hpdcp.errors.NotSupportedError, match=r"hpdcp\[zarr\]"),
    ):
        hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    assert_holds(tmp_path, 1.0)
