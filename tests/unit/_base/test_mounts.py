"""The mount table is read as the kernel walks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpdcp._base.mounts import UNKNOWN, file_system_type, has_local_locks, is_nfs
from tests.support.ranks import run_python

ROOT = "1 1 0:2 / / rw - rootfs rootfs rw\n20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "mountinfo"


def test_the_deepest_mount_on_the_way_holds_the_path(table: Path) -> None:
    table.write_text(
        ROOT
        + "30 20 0:40 / /data rw,relatime - nfs4 server:/export rw,vers=4.2\n"
        + "31 30 8:17 / /data/scratch rw - xfs /dev/sdb1 rw\n"
    )
    for path, expected in (
        ("/", "ext4"),
        ("/home", "ext4"),
        ("/data", "nfs4"),
        ("/data/", "nfs4"),
        ("/data/run/step_1", "nfs4"),
        ("/data/scratch", "xfs"),
        ("/data/scratch/deep/er", "xfs"),
        ("/data/scratchy", "nfs4"),
        ("/database", "ext4"),
        ("/data/scratch/../x", "nfs4"),
    ):
        assert file_system_type(path, table=table) == expected, path


def test_of_two_mounts_on_one_folder_the_later_one_counts(table: Path) -> None:
    lines = [
        "30 20 0:40 / /data rw - nfs server:/a rw\n",
        "31 30 0:41 / /data rw - tmpfs tmpfs rw\n",
    ]
    table.write_text(ROOT + "".join(lines))
    assert file_system_type("/data/x", table=table) == "tmpfs"
    table.write_text(ROOT + "".join(reversed(lines)))
    assert file_system_type("/data/x", table=table) == "tmpfs"


def test_a_mount_hides_those_below_its_folder_that_were_there_before(table: Path) -> None:
    table.write_text(ROOT + "30 20 0:40 / /a/b rw - nfs4 server:/ rw\n" + "31 20 0:41 / /a rw - tmpfs tmpfs rw\n")
    assert file_system_type("/a/b/c", table=table) == "tmpfs"


def test_a_bind_mount_has_the_type_of_what_it_shows(table: Path) -> None:
    table.write_text(ROOT + "30 20 0:40 /run/7 /mnt/here rw master:3 propagate_from:2 - nfs4 server:/export rw\n")
    assert file_system_type("/mnt/here/step", table=table) == "nfs4"


def test_escaped_names_are_read(table: Path) -> None:
    table.write_bytes(
        ROOT.encode()
        + rb"30 20 0:40 / /with\040blank\134and\011tab\043\012 rw - nfs4 server:/with\040blank rw"
        + b"\n"
        + "31 20 0:40 / /日本 rw - cifs //server/x rw\n".encode()
    )
    assert file_system_type("/with blank\\and\ttab#\n/x", table=table) == "nfs4"
    assert file_system_type("/日本/x", table=table) == "cifs"
    assert file_system_type("/with", table=table) == "ext4"


def test_lines_that_mean_nothing_are_passed_over(table: Path) -> None:
    table.write_text("\nnonsense\n1 2 3\n- - - - - - - -\n" + ROOT + "30 20 0:40 / /n rw - nfs4\n")
    assert file_system_type("/n/x", table=table) == "nfs4"


def test_locks_of_a_mount_may_be_one_host_s_own(table: Path) -> None:
    table.write_text(
        ROOT
        + "30 20 0:40 / /far rw - nfs4 server:/export rw,vers=4.2,local_lock=none\n"
        + "31 20 0:41 / /near rw - nfs server:/export rw,vers=3,nolock,local_lock=all\n"
        + "32 20 0:42 / /flock rw - nfs server:/export rw,vers=3,local_lock=flock\n"
    )
    told = {path: has_local_locks(path, table=table) for path in ("/", "/far/run", "/near/run", "/flock")}
    assert told == {"/": False, "/far/run": False, "/near/run": True, "/flock": True}
    assert not has_local_locks("/far", table=table.with_name("missing"))


def test_links_are_followed_also_to_what_is_not_there_yet(table: Path, tmp_path: Path) -> None:
    table.write_text(ROOT + f"30 20 0:40 / {tmp_path}/shared rw - nfs4 server:/ rw\n")
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    (tmp_path / "early").symlink_to(tmp_path / "shared" / "later")
    assert file_system_type(str(tmp_path / "link" / "run" / "step"), table=table) == "nfs4"
    assert file_system_type(str(tmp_path / "early"), table=table) == "nfs4"
    assert file_system_type(str(tmp_path / "link" / ".." / "x"), table=table) == "ext4"


def test_a_table_that_is_missing_or_does_not_reach_the_path_says_unknown(table: Path) -> None:
    assert file_system_type("/data", table=table) == UNKNOWN
    table.write_text("30 20 0:40 / /data rw - nfs4 server:/ rw\n")
    assert file_system_type("/elsewhere", table=table) == UNKNOWN
    assert file_system_type("/data/x", table=table) == "nfs4"


def test_which_types_get_the_backend_for_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, expected in (
        ("nfs", True), ("nfs4", True), ("cifs", True), ("smb3", True), ("lustre", True), ("gpfs", True),
        ("ceph", True), ("fuse", True), ("fuse.sshfs", True), ("fuse.juicefs", True), ("fuse.glusterfs", True),
        ("fuse.fuse-overlayfs", False), ("fuse.mergerfs", False), ("fuseblk", False), ("fusectl", False),
        ("ext4", False), ("xfs", False), ("btrfs", False), ("zfs", False), ("tmpfs", False), ("overlay", False),
        ("9p", False), ("virtiofs", False), ("nfsd", False), (UNKNOWN, False),
    ):  # fmt: skip
        monkeypatch.setattr("hpdcp._base.mounts.file_system_type", lambda path, kind=kind: kind)
        assert is_nfs("/data") is expected, kind


@pytest.mark.skipif(not os.path.exists("/proc/self/mountinfo"), reason="this system keeps no mount table")
def test_the_table_of_this_machine_is_understood() -> None:
    assert file_system_type("/proc/self") == "proc"
    assert file_system_type("/") not in (UNKNOWN, "proc", "rootfs")
    assert not is_nfs("/proc/not-there/at all")


MOUNTED = """
import sys
from pathlib import Path
from hpdcp._base.mounts import file_system_type
folder = Path(sys.argv[1])
for name, expected in (("t m p", "tmpfs"), ("bound/deep", "tmpfs"), ("covered/below", "ramfs"), ("link/x", "tmpfs")):
    assert file_system_type(str(folder / name)) == expected, (name, file_system_type(str(folder / name)))
"""


def test_mounts_bindings_and_covered_mounts_of_a_real_kernel_are_told_apart(tmp_path: Path) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
    setup = """
        cd "$1"
        mkdir "t m p" bound covered covered/below
        mount -t tmpfs none "t m p"
        mkdir "t m p/deep"
        mount --bind "t m p" bound
        mount -t tmpfs none covered/below
        mount -t ramfs none covered
        ln -s "t m p" link
        shift
        exec "$@"
    """
    if shutil.which("unshare") is None or subprocess.run([*alone, "mount -t tmpfs none /mnt"]).returncode:
        pytest.skip("this system lets no user mount a small file system of their own")
    start = "import subprocess, sys; raise SystemExit(subprocess.run(sys.argv[1:]).returncode)"
    program = tmp_path.parent / f"{tmp_path.name}.py"
    program.write_text(MOUNTED)
    run_python(["-c", start, *alone, setup, "sh", str(tmp_path), sys.executable, str(program), str(tmp_path)])
