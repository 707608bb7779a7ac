"""Storage that takes no more: the error names key and folder, the old checkpoint stays, nothing else is left."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base.errors import CommitUncertainError, StorageError
from hpdcp._format.file_names import LEASE, METADATA
from hpdcp_backends.local import LocalBackend
from tests.support.ranks import forked_python, run_python


def state(value: float) -> dict[str, object]:
    return {"w": torch.full((64,), value), "step": int(value)}


def loaded(folder: Path) -> object:
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=folder)
    return target["step"]


LIMITED = """
import os, sys, torch, hpdcp
from pathlib import Path
folder, what = Path(sys.argv[1]), sys.argv[2]
def state(rows, step): return {"w": torch.full((rows, 1024), float(step)), "step": step}
before = hpdcp.save(state(8, 1), checkpoint_id=folder)
kept = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".attempt"}
if what == "full":
    expected = "full"
elif what == "read-only":
    folder.chmod(0o555)
    if os.getuid() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
    expected = "permission"
try:
    hpdcp.save(state(1024, 2), checkpoint_id=folder)
except hpdcp.errors.StorageError as error:
    text = str(error)
else:
    raise SystemExit("the save went through")
assert str(folder) in text and expected in text, text
assert "_rank0_" in text or what == "read-only" and ".attempt" in text, text
now = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".attempt"}
assert now == kept, (sorted(now), sorted(kept))
target = state(8, -1)
hpdcp.load(target, checkpoint_id=folder)
assert target["step"] == 1 and bool((target["w"] == 1).all())
if what != "read-only":
    hpdcp.save(state(9, 3), checkpoint_id=folder)
    target = state(9, -1)
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 3
"""


def test_a_file_size_limit_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    before = hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(StorageError, match=rf"'_rank0_\S+' in {tmp_path}: File too large"):
            hpdcp.save({"w": torch.ones(1 << 19)}, checkpoint_id=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in tmp_path.iterdir()} == {METADATA, LEASE, *before.files}
    assert loaded(tmp_path) == 1


def test_a_folder_without_write_permission_is_named_and_stays_as_it_is() -> None:
    # Not pytest's own folder, which only its owner may enter: root gives up its rights in the program.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        forked_python(["-W", "error", "-c", LIMITED, f"{folder}/ckpt", "read-only"])


def test_a_full_disk_is_named_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*alone, mount], capture_output=True).returncode:
        pytest.skip("this system lets no user mount a small file system of their own")
    program = tmp_path.parent / f"{tmp_path.name}.py"
    program.write_text(LIMITED)
    # Through this interpreter, so that environment and time limit are the usual ones.
    start = "import subprocess, sys; raise SystemExit(subprocess.run(sys.argv[1:]).returncode)"
    command = f'{mount} && exec "$0" -W error {program} {tmp_path / "ckpt"} full'
    run_python(["-c", start, *alone, command, sys.executable])


class FailingBackend(LocalBackend):
    """Fails from the `first` operation that changes something on."""

    operations = 0
    first = 1 << 30
    only = False

    def _count(self, key: str) -> None:
        kind = type(self)
        kind.operations += 1
        if kind.operations == kind.first or (kind.operations > kind.first and not kind.only):
            raise StorageError(f"cannot write {key!r} in {self.url}: {os.strerror(errno.ENOSPC)}.")

    def write(self, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool) -> None:
        self._count(key)
        super().write(key, buffers, size=size, exclusive=exclusive)

    def publish(self, key: str, data: bytes) -> None:
        self._count(key)
        super().publish(key, data)

    def delete(self, keys: Iterable[str]) -> None:
        listed = list(keys)
        self._count(",".join(listed) or "nothing")
        super().delete(listed)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> type[FailingBackend]:
    monkeypatch.setattr("hpdcp_backends.local.LocalBackend", FailingBackend)
    monkeypatch.setattr(FailingBackend, "operations", 0)
    monkeypatch.setattr(FailingBackend, "first", 1 << 30)
    return FailingBackend


@pytest.mark.parametrize("only", [False, True], ids=["for good", "once"])
def test_whichever_operation_fails_the_old_or_the_new_checkpoint_loads(
    tmp_path: Path, failing: type[FailingBackend], monkeypatch: pytest.MonkeyPatch, only: bool
) -> None:
    monkeypatch.setattr(failing, "only", only)
    hpdcp.save(state(0.0), checkpoint_id=tmp_path)
    count = failing.operations
    assert count >= 5, "a claim, two data files, the metadata and a removal"
    old, failures = 0, 0
    for first in range(1, count + 1):
        failing.operations, failing.first = 0, first
        failed: StorageError | None = None
        try:
            hpdcp.save(state(float(first)), checkpoint_id=tmp_path)
        except StorageError as error:
            failed = error
        failing.first = 1 << 30
        # What could not be removed takes room, but the save stands.
        expected = first if failed is None else old
        assert loaded(tmp_path) == expected
        old = expected
        if failed is not None:
            failures += 1
            assert re.match(rf"cannot write '\S+' in {tmp_path}: {os.strerror(errno.ENOSPC)}", str(failed))
    assert failures >= 4
    final = hpdcp.save(state(99.0), checkpoint_id=tmp_path)
    assert loaded(tmp_path) == 99
    if only:
        assert {path.name for path in tmp_path.iterdir()} == {METADATA, LEASE, *final.files}


def test_a_publish_that_fails_after_it_took_effect_removes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalBackend.publish

    def publish(self: LocalBackend, key: str, data: bytes) -> None:
        real(self, key, data)
        if key == METADATA:
            raise StorageError(f"cannot write {key!r} in {self.url}: the folder could not be made durable.")

    hpdcp.save(state(1.0), checkpoint_id=tmp_path)
    monkeypatch.setattr(LocalBackend, "publish", publish)
    with pytest.raises(CommitUncertainError, match="none of its files were removed"):
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert loaded(tmp_path) == 2
