"""End one of three ranks that save each for itself before each of its calls that change the disk.

    python crash_rank_sets.py FOLDER

The ranks save one after the other, so that those before it have published and those after it have not, and none of
them hears that all have: as where a job is killed, or saves in the background.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

import hpdcp
from tests.faults.crash_points import Disk
from tests.faults.forking import fork, loaded_step, state, wait
from tests.support.runs import begin_run

RANKS = 3
_ROWS = 2


def save(folder: Path, step: int, ranks: range, meeting: Path, *, ended: bool = False) -> None:
    """What these ranks do in one save; `ended`: it returned on all of them, so that what was replaced may go."""
    from hpdcp._comm.exchange import Alone
    from hpdcp._engine.save import save_state

    for rank in ranks:
        begin_run()
        dist.init_process_group("fake", store=dist.FileStore(str(meeting), RANKS), rank=rank, world_size=RANKS)
        writer = hpdcp.FileSystemWriter(folder)
        save_state(
            state(step, rows=_ROWS),
            open_writer=lambda writer=writer: writer,  # type: ignore[misc]
            planner=hpdcp.StandardSavePlanner(),
            exchange=Alone(rank, RANKS),
            collective=False,
        )
        if ended:
            writer.all_published()
        dist.destroy_process_group()


def forked(folder: Path, step: int, ranks: range, meeting: Path, *, ended: bool = False) -> None:
    assert wait(fork(lambda: save(folder, step, ranks, meeting, ended=ended))) == 0


def end_before(folder: Path, step: int, rank: int, meeting: Path, point: int | None) -> int:
    """Save as this rank until that call; its exit status, or without a `point` how many calls there are."""

    def work() -> None:
        disk = Disk(folder)
        disk.end_before = point
        disk.install()
        save(folder, step, range(rank, rank + 1), meeting)
        os._exit(77 if point is not None else disk.calls)

    return wait(fork(work))


def main(root: Path) -> None:
    os.environ["HPDCP_RUN_ID"] = "named"
    first = root / "first"
    forked(first, 1, range(RANKS), root / "meet first")
    assert loaded_step(first, rows=_ROWS) == 1
    forked(shutil.copytree(first, root / "counted"), 2, range(1), root / "meet counted")
    folder = root / "ckpt"
    outcomes: set[tuple[int, int]] = set()
    for rank in range(RANKS):
        shutil.rmtree(root / "counted")
        total = end_before(shutil.copytree(first, root / "counted"), 2, rank, root / f"meet count {rank}", None)
        assert total > 10, total
        for point in range(total + 1):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(first, folder)
            meeting = root / f"meet {rank} {point}"
            forked(folder, 2, range(rank), meeting)
            assert end_before(folder, 2, rank, meeting, point) == 77
            step = loaded_step(folder, rows=_ROWS)
            assert step == 1 or (step == 2 and rank == RANKS - 1), (rank, point, step)
            outcomes.add((rank, step))
            if point % 3 == rank:
                # A second one that is ended too, on another rank.
                forked(folder, 3, range(1), root / f"meet again {rank} {point}")
                assert loaded_step(folder, rows=_ROWS) == step
            forked(folder, 9, range(RANKS), root / f"meet 9 {rank} {point}", ended=True)
            assert_holds_only(folder, 9)
    assert outcomes == {(0, 1), (1, 1), (2, 1), (2, 2)}, outcomes
    background(folder, first, root)
    print(outcomes)


def background(folder: Path, first: Path, root: Path) -> None:
    """Saves of which no rank hears that they have ended leave one replaced save at most."""
    shutil.rmtree(folder)
    shutil.copytree(first, folder)
    for step in range(2, 7):
        forked(folder, step, range(RANKS), root / f"meet {step}")
        assert loaded_step(folder, rows=_ROWS) == step
        kept = [path.name for path in folder.iterdir() if path.name.endswith(".metadata") and path.name.count(".") == 2]
        assert len(kept) == RANKS, kept


def assert_holds_only(folder: Path, step: int) -> None:
    assert loaded_step(folder, rows=_ROWS) == step
    records = [f"{rank}.metadata" for rank in range(RANKS)]
    listed = [hpdcp.Metadata.from_bytes((folder / key).read_bytes(), where=key).files for key in records]
    expected = {*records, *(name for files in listed for name in files)}
    assert {path.name for path in folder.iterdir()} == expected, sorted(path.name for path in folder.iterdir())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
