"""A rank that dies, or falls silent, while tensors are broadcast: the others raise soon, and say so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.apart import started

PROGRAM = Path(__file__).with_name("dead_loader.py")
SOON = 30.0


@pytest.mark.parametrize(("victim", "moment"), [(2, "read"), (0, "read"), (3, "receive"), (1, "stop")])
def test_the_other_ranks_raise_soon(tmp_path: Path, victim: int, moment: str) -> None:
    with started(4, PROGRAM, str(tmp_path / "ckpt"), str(victim), moment) as ranks:
        for rank in ranks:
            assert rank.readline() == "ready\n"
        began = time.monotonic()
        endings = [
            rank.rest(max(0.1, SOON - (time.monotonic() - began)))
            for number, rank in enumerate(ranks)
            if number != victim
        ]
    assert [ending.split()[0] for ending in endings] == ["PeerLostError"] * 3, endings
    assert all("A rank died or took longer than" in ending for ending in endings), endings
