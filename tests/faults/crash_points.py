"""End a save before each of its system calls that change the disk, with and without losing what was not yet durable.

    python crash_points.py FOLDER KIND

A simulated power failure is harsher than a kill: bytes that were not fsynced are gone, and names of a folder that was
not fsynced since (created, replaced, removed) may each be as they were, in any combination.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpdcp
from tests.faults.forking import fork, loaded_step, state, wait

_CHANGING = ("open", "pwritev", "ftruncate", "fsync", "close", "replace", "unlink", "mkdir")
_ROWS = 4


class Disk:
    """What a folder would hold after a power failure, followed through the calls that change it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0
        self.end_before: int | None = None
        self._real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _CHANGING}
        self._bytes = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        self._names = self._names_now()

    def install(self) -> None:
        for name in _CHANGING:
            setattr(os, name, self._wrapper(name))

    def _wrapper(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **keywords)
            if self.calls == self.end_before:
                os._exit(77)
            self.calls += 1
            result = real(*arguments, **keywords)
            if name == "fsync":
                self._synced(arguments[0])
            return result

        return call

    def _synced(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path == self.folder:
            self._names = self._names_now()
        elif path.parent == self.folder:
            self._bytes[path.stat().st_ino] = path.read_bytes()

    def _names_now(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.folder.iterdir()}

    def lose_power(self, chance: random.Random) -> None:
        """Leave in the folder what was durable; of names in doubt, any combination."""
        now = self._names_now()
        kept: dict[str, int] = {}
        for name in sorted({*self._names, *now}):
            before, after = self._names.get(name), now.get(name)
            inode = after if before == after or chance.random() < 0.5 else before
            if inode is not None:
                kept[name] = inode
        contents = {name: self._bytes.get(inode, b"") for name, inode in kept.items()}
        for name in now:
            os.unlink(self.folder / name)
        for name, content in contents.items():
            (self.folder / name).write_bytes(content)


@dataclass(frozen=True)
class Kind:
    """A way to save."""

    name: str
    arguments: dict[str, Any]
    metadata: str
    lease: str | None
    """Which stays after the save; None where it goes with it."""

    def save(self, folder: Path, step: int) -> None:
        hpdcp.save(state(step, rows=_ROWS), checkpoint_id=folder, **self.arguments)

    def assert_holds_only(self, folder: Path, step: int) -> None:
        """The step, and nothing that a save has left."""
        assert loaded_step(folder, rows=_ROWS) == step
        listed = hpdcp.Metadata.from_bytes((folder / self.metadata).read_bytes(), where=self.metadata).files
        found = {path.name for path in folder.iterdir()}
        assert found == {self.metadata, *([self.lease] if self.lease else []), *listed}, (self, found)


KINDS = (
    Kind("all ranks", {}, ".metadata", ".attempt"),
    Kind("no_dist", {"no_dist": True}, "0.metadata", None),
)


def main(root: Path, kind: Kind) -> None:
    first, second = root / "first", root / "second"
    kind.save(first, 1)
    shutil.copytree(first, second)
    kind.save(second, 2)
    total = count_calls(root, first, kind)
    assert total > 15, f"one save makes {total} calls; the hooks do not see it"
    outcomes: dict[str, set[int]] = {}
    for start, old, power in ((first, 1, None), (second, 2, 1)):
        for point in range(total + 1):
            step = crash(root / "ckpt", start, old + 1, point, power, kind)
            assert step in (old, old + 1), f"step {step} loads after a crash before call {point}"
            outcomes.setdefault("kill" if power is None else "power failure", set()).add(step - old)
    assert all(found == {0, 1} for found in outcomes.values()), outcomes
    crash_an_empty_folder(root, total, kind)
    print(f"{kind.name}: {total} calls; {outcomes}")


def count_calls(root: Path, start: Path, kind: Kind) -> int:
    folder = shutil.copytree(start, root / "counted")
    disk = Disk(folder)

    def work() -> None:
        disk.install()
        kind.save(folder, 2)
        os._exit(disk.calls)

    return wait(fork(work))


def crash(folder: Path, start: Path, step: int, point: int, power: int | None, kind: Kind) -> int:
    """Save `step` over a copy of `start`, end it before call number `point`, and load.

    A later save must work, and leave nothing of the one that was killed. After a power failure there is nobody to ask
    whether a process has ended: there its leftovers stay for a day.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    end_save(folder, step, point, power, kind)
    found = loaded_step(folder, rows=_ROWS)
    if power is None:
        kind.save(folder, 9)
        kind.assert_holds_only(folder, 9)
    return found


def end_save(folder: Path, step: int, point: int, power: int | None, kind: Kind) -> None:
    disk = Disk(folder)
    disk.end_before = point

    def work() -> None:
        if power is not None:
            ending = os._exit

            def exit_without_power(status: int) -> None:
                for name in _CHANGING:
                    setattr(os, name, disk._real[name])
                disk.lose_power(random.Random(f"{point} {power}"))
                ending(status)

            os._exit = exit_without_power  # type: ignore[assignment]
        disk.install()
        kind.save(folder, step)
        disk.end_before = disk.calls
        os.fsync(-1)

    assert wait(fork(work)) == 77


def crash_an_empty_folder(root: Path, total: int, kind: Kind) -> None:
    """Where there was no checkpoint there is still none, called incomplete at most, or the new one, whole."""
    seen: set[str] = set()
    for point in range(1, total + 1):
        folder = root / f"new-{point}"
        folder.mkdir()
        end_save(folder, 1, point, None, kind)
        try:
            assert loaded_step(folder, rows=_ROWS) == 1
            seen.add("whole")
        except (hpdcp.errors.IncompleteCheckpointError, hpdcp.errors.CheckpointNotFoundError) as error:
            seen.add(type(error).__name__)
        kind.save(folder, 9)
        kind.assert_holds_only(folder, 9)
    assert {"whole", "IncompleteCheckpointError"} <= seen, seen


if __name__ == "__main__":
    main(Path(sys.argv[1]), next(kind for kind in KINDS if kind.name == sys.argv[2]))
