"""Stage lines: their exact form, the levels of HP_LOG_CONFIG, and silence without it."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.timing import configure_logging, current_rank, log_message, set_rank, stage, timed
from tests.support.ranks import forked_python, run_python

LOGGER = logging.getLogger("hpdcp")


@pytest.fixture(autouse=True)
def _logger_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    handlers, level = list(LOGGER.handlers), LOGGER.level
    yield
    LOGGER.handlers[:] = handlers
    LOGGER.setLevel(level)
    set_rank(None)


def test_a_stage_prints_one_line_of_the_promised_form(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("DCP:INFO")
    with stage("build_local_plan"):
        pass
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(r"\[INFO\] \[HP-DCP\]: \[rank=0\] >>> func build_local_plan cost \d\.\d{4} seconds\n", err)


def test_messages_have_the_form_of_the_stage_lines(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("DCP:INFO")
    log_message(logging.INFO, "Hit final plan and metadata cache.")
    logging.getLogger("hpdcp.anything").warning("%d tensors", 3)
    assert capfd.readouterr().err == (
        "[INFO] [HP-DCP]: [rank=0] >>> Hit final plan and metadata cache.\n[WARNING] [HP-DCP]: [rank=0] >>> 3 tensors\n"
    )


def test_the_level_decides_and_other_libraries_entries_do_not(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("FSDP:DEBUG, dcp:warning ,TP:nonsense")
    with stage("save"):
        log_message(logging.WARNING, "still here")
    assert capfd.readouterr().err == "[WARNING] [HP-DCP]: [rank=0] >>> still here\n"


def test_configuring_twice_prints_once(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("DCP:INFO")
    configure_logging("DCP:INFO")
    log_message(logging.INFO, "once")
    assert capfd.readouterr().err.count("once") == 1


@pytest.mark.parametrize("setting", ["DCP", "DCP:", "DCP:LOUD", "TP:INFO,DCP:LOUD"])
def test_a_level_that_does_not_exist_is_an_error_that_names_the_variable(setting: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"HP_LOG_CONFIG=.*expected.*DEBUG, INFO, WARNING.*found"):
        configure_logging(setting)


def test_a_failed_stage_says_so_and_lets_the_error_through(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("DCP:INFO")
    with pytest.raises(KeyError), stage("load"):
        raise KeyError("x")
    assert re.search(r">>> func load failed after \d\.\d{4} seconds: KeyError\n", capfd.readouterr().err)


def test_a_timed_function_keeps_its_signature_and_is_a_stage_at_every_call(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("DCP:INFO")

    @timed("double")
    def double(value: int, *, times: int = 1) -> int:
        """Doubles."""
        return value * 2**times

    assert (double(3), double(3, times=2)) == (6, 12)
    assert str(inspect.signature(double)) == "(value: 'int', *, times: 'int' = 1) -> 'int'"
    assert double.__doc__ == "Doubles."
    assert capfd.readouterr().err.count("func double cost") == 2


def test_the_rank_is_the_assigned_one_else_the_environment_s_else_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {})
    assert current_rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert current_rank() == 3
    set_rank(5)
    assert current_rank() == 5
    monkeypatch.setenv("RANK", "not a number")
    set_rank(None)
    assert current_rank() == 0


def test_the_rank_of_an_initialised_process_group_counts_more_than_the_environment() -> None:
    code = """
import os, torch.distributed as dist
from hpdcp._base.timing import current_rank
os.environ["RANK"] = "7"
assert current_rank() == 7
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert current_rank() == 0
dist.destroy_process_group()
"""
    forked_python(["-c", code])


def test_the_environment_switches_it_on_at_import_and_nothing_is_touched_without_it() -> None:
    code = (
        "import logging, hpdcp.timing as t\nwith t.stage('save'): pass\nprint(len(logging.getLogger('hpdcp').handlers))"
    )
    assert run_python(["-c", code], environment={"HP_LOG_CONFIG": ""}) == "0\n"
    assert "func save cost" in run_python(["-c", code], environment={"HP_LOG_CONFIG": "DCP:INFO"})


def test_warnings_are_seen_by_somebody_who_configured_no_logging() -> None:
    code = "import logging, hpdcp._base.timing as t\nt.log_message(logging.WARNING, 'look here')"
    assert "look here" in run_python(["-c", code], environment={"HP_LOG_CONFIG": ""})
