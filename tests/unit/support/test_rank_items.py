"""Tests on forked ranks: every rank's word counts, and ranks that die or hang cost one test, with all that is known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import rank_group
from tests.support.rank_group import RankGroup, RanksLostError
from tests.support.rank_items import run_test

FILE = """
import os, signal, time
import pytest
import torch.distributed as dist

RANK = int(os.environ["RANK"])

@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()

def test_ranks_meet():
    everyone = [None] * 2
    dist.all_gather_object(everyone, RANK)
    assert everyone == [0, 1]
    print("met on", RANK)

def test_one_rank_fails():
    assert RANK != 1, "the odd one"

@pytest.mark.parametrize("who", [[1], [0, 1]], ids=str)
def test_ranks_skip(who):
    if RANK in who:
        pytest.skip("not here")

def test_one_rank_dies():
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_one_rank_hangs():
    if RANK == 1:
        time.sleep(600)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RankGroup]:
    file = tmp_path / "dcp_it.py"
    file.write_text(textwrap.dedent(FILE))
    with rank_group.started(file, 2, {}, tmp_path / "ranks") as started:
        yield started


def test_ranks_meet_fail_and_skip_and_go_on_together(group: RankGroup, pytestconfig: pytest.Config) -> None:
    for _ in range(2):
        run_test(pytestconfig, group, "dcp_it.py::test_ranks_meet")
    with pytest.raises(Exception, match=r"rank 1, call(.|\n)*the odd one") as failed:
        run_test(pytestconfig, group, "dcp_it.py::test_one_rank_fails")
    assert "rank 0" not in str(failed.value)
    run_test(pytestconfig, group, "dcp_it.py::test_ranks_skip[[1]]")
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_test(pytestconfig, group, "dcp_it.py::test_ranks_skip[[0, 1]]")
    run_test(pytestconfig, group, "dcp_it.py::test_ranks_meet")
    assert group.end() == []


def test_what_ranks_print_is_printed(
    group: RankGroup, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test(pytestconfig, group, "dcp_it.py::test_ranks_meet")
    printed = capsys.readouterr().out
    assert "met on 0" in printed
    assert "met on 1" in printed


def test_a_rank_that_dies_is_told_and_the_others_end(group: RankGroup, pytestconfig: pytest.Config) -> None:
    with pytest.raises(RanksLostError, match="rank 1 ended with -9"):
        run_test(pytestconfig, group, "dcp_it.py::test_one_rank_dies")
    assert group.lost


def test_ranks_that_hang_show_where_and_are_killed(group: RankGroup) -> None:
    with pytest.raises(RanksLostError, match=r"ranks \[1\] were not through after 1 s(.|\n)*in test_one_rank_hangs"):
        group.run("dcp_it.py::test_one_rank_hangs", 1)
    assert not any(psutil.pid_exists(pid) for pid in group.pids)
