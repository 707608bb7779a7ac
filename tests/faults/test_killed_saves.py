"""Whatever ends a save, and whenever: the old checkpoint or the new one loads, whole, and the next save works."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.crash_points import KINDS
from tests.support.ranks import forked_python

HERE = Path(__file__).parent


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: hundreds of small saves wait for no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_a_save_killed_at_any_moment_leaves_the_old_or_the_new_step(tmp_path: Path) -> None:
    seed = 1 if os.environ.get("CI") else int.from_bytes(os.urandom(4), "little")
    output = forked_python(
        ["-W", "error", str(HERE / "kill_saves.py"), str(tmp_path / "ckpt"), "60", str(seed)], timeout=90
    )
    print(seed, output)


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_a_save_ended_before_any_of_its_system_calls_leaves_the_old_or_the_new_step(
    fast_folder: Path, kind: str
) -> None:
    """And the save after it leaves nothing of what was killed."""
    forked_python(["-W", "error", str(HERE / "crash_points.py"), str(fast_folder), kind], timeout=110)


def test_a_load_beside_a_writer_gives_one_step_or_says_that_it_was_replaced(fast_folder: Path) -> None:
    forked_python(["-W", "error", str(HERE / "replace_while_reading.py"), str(fast_folder / "ckpt"), "100"], timeout=60)


def test_one_of_three_ranks_that_save_apart_ended_before_any_of_its_calls_leaves_the_old_or_the_new_step(
    fast_folder: Path,
) -> None:
    forked_python(["-W", "error", str(HERE / "crash_rank_sets.py"), str(fast_folder)], timeout=110)
