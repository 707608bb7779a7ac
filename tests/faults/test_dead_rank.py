"""A rank killed in the middle of a save: the others raise soon, nothing is published, the old checkpoint loads."""

from __future__ import annotations

from pathlib import Path

from tests.support.ranks import forked_python


def test_the_other_ranks_raise_soon_and_the_old_checkpoint_loads(tmp_path: Path) -> None:
    program = Path(__file__).with_name("dead_rank.py")
    print(forked_python(["-W", "error", str(program), str(tmp_path)], timeout=110))
