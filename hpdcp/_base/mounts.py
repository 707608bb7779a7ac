"""What kind of file system a path stands on, as the kernel's mount table tells."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNKNOWN: Final = "unknown"
"""The type where the system keeps no mount table, or none that reaches the path (some chroots)."""

_NETWORK: Final = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "ceph", "beegfs", "afs", "kafs", "orangefs",
    "pvfs2", "glusterfs", "ocfs2", "gfs2", "wekafs", "panfs", "quobyte", "juicefs", "3fs", "yrfs",
})  # fmt: skip
"""Types whose files other hosts change at the same moment."""

_LOCAL_FUSE: Final = frozenset({
    "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.unionfs", "fuse.bindfs", "fuse.encfs", "fuse.gocryptfs",
    "fuse.cryfs", "fuse.lxcfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.squashfuse", "fuse.portal",
})  # fmt: skip
"""FUSE types that put another face on folders, or on a disk, of this host."""

_LOCAL_LOCKS: Final = frozenset({"nolock", "local_lock=all", "local_lock=flock"})
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def is_nfs(path: str) -> bool:
    """Whether the folder at `path` wants the backend `nfs`: its files come from other machines.

    - NFS itself, and CIFS: each client keeps names and attributes for seconds, so a new file is looked for by listing,
      and a mapped file that somebody replaces is a bus error.
    - Lustre, GPFS, Ceph, BeeGFS, shared-disk file systems and the like keep their clients coherent, but each rank that
      reads still pays the network: what is `remote` is broadcast between hosts and verified, and large parallel reads
      are right for them too.
    - FUSE (`fuse`, `fuse.*`): network file systems of every sort, which answer to no common rule, so the careful
      backend; except those known to stand on this host's own disks.
    - Everything else is `local`: disks, tmpfs, overlays, and the folders that a virtual machine shares with its host
      (9p, virtiofs), which only that host's disk is behind.
    """
    kind = file_system_type(path)
    return kind in _NETWORK or ((kind == "fuse" or kind.startswith("fuse.")) and kind not in _LOCAL_FUSE)


def file_system_type(path: str, *, table: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that holds `path` (`ext4`, `nfs4`, …), or would once its missing folders are made.

    Symbolic links are followed. `UNKNOWN` where no mount table says so.
    """
    mount = _mount_of(path, table)
    return UNKNOWN if mount is None else mount.type


def has_local_locks(path: str, *, table: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether locks of files there are this host's alone, as options of an NFS mount say (`nolock`, `local_lock`)."""
    mount = _mount_of(path, table)
    return mount is not None and not _LOCAL_LOCKS.isdisjoint(mount.options)


def _mount_of(path: str, table: Path) -> _Mount | None:
    """What `path` lies on, or would; None where no mount table says so."""
    real = os.path.realpath(path)
    _mount_on_demand(real)
    try:
        lines = table.read_bytes().splitlines()
    except OSError:
        return None
    return _reached(real, [mount for line in lines if (mount := _parse(line)) is not None])


@dataclass(frozen=True, slots=True)
class _Mount:
    """One line of the table."""

    number: int
    parent: int
    """The mount it hangs in; its own number, or one not in the table, for what has none."""

    point: str
    type: str
    options: frozenset[str]
    """Of the file system, such as `vers=3` and `nolock`."""

    def covers(self, path: str) -> bool:
        return path == self.point or path.startswith(self.point.rstrip("/") + "/")


def _parse(line: bytes) -> _Mount | None:
    """A line of mountinfo (proc(5)); None where it is not one."""
    # Optional fields, any number of them, end with a lone dash.
    head, dash, tail = line.partition(b" - ")
    fields, rest = head.split(), tail.split()
    if not dash or len(fields) < 6 or not rest or not (fields[0].isdigit() and fields[1].isdigit()):
        return None
    options = frozenset(_unescaped(rest[-1]).split(","))
    return _Mount(int(fields[0]), int(fields[1]), _unescaped(fields[4]), _unescaped(rest[0]), options)


def _unescaped(field: bytes) -> str:
    """The table writes blanks, tabs, newlines, backslashes and number signs as three octal digits."""
    return os.fsdecode(_ESCAPE.sub(lambda found: bytes([int(found[1], 8)]), field))


def _reached(path: str, mounts: list[_Mount]) -> _Mount | None:
    """Walk down from the root as the kernel does.

    The longest mount point alone is not the answer: one that is mounted over a folder hides the mounts below it, and
    they stay in the table.
    """
    numbers = {mount.number for mount in mounts}
    entered = [mount for mount in mounts if mount.parent not in numbers or mount.parent == mount.number]
    found: _Mount | None = None
    while on_the_way := [mount for mount in entered if mount.covers(path)]:
        # What is reached first; of two mounts on one folder the later one hangs in the earlier one.
        current = min(on_the_way, key=lambda mount: len(mount.point))
        found = current
        entered = [mount for mount in mounts if mount.parent == current.number != mount.number]
    return found


def _mount_on_demand(path: str) -> None:
    """Let an automounter mount what it would mount at the first use."""
    while True:
        try:
            # With a slash at the end: the name alone would not be entered.
            os.stat(os.path.join(path, ""))
        except OSError:
            parent = os.path.dirname(path)
            if parent == path:
                return
            path = parent
        else:
            return
