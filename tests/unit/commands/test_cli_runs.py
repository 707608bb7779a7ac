"""`hpdcp ls`, `prune`, `hold`, `release`, `verify RUN`, and `RUN@STEP` in other commands."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._format.file_names import METADATA
from hpdcp._manage import retention
from hpdcp.checkpoints import Checkpoints
from tests.support.command import Command


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four steps, of which the last was torn."""
    saved = Checkpoints(tmp_path / "run", asynchronous=False, signals=())
    for step, loss in ((100, 0.5), (150, float("nan")), (200, 0.25), (300, 0.75)):
        saved.save(step, {"w": torch.full((8,), float(step)), "step": step}, metrics={"loss": loss})
    saved.close()
    (tmp_path / "run/step_00000300" / METADATA).unlink()
    return tmp_path / "run"


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the run had been saved some time before."""
    monkeypatch.setattr(retention, "JUST_SAVED_SECONDS", 0.0)


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in sorted(run.glob("step_*")) if (path / METADATA).exists()]


def test_the_examples_in_docstrings_hold() -> None:
    outcome = doctest.testmod(importlib.import_module("hpdcp.commands.ls"))
    assert outcome.attempted
    assert not outcome.failed


def test_ls_shows_the_newest_step_first_with_metrics_and_state(run: Path, command: Command) -> None:
    lines = [line.split() for line in command("ls", run).out.splitlines()]
    shown = [line for line in lines if line and line[0].isdigit()]
    assert [line[0] for line in shown[:4]] == ["300", "200", "150", "100"]
    assert shown[0][3] == "torn:"
    assert (shown[1][5:], shown[2][-1], shown[3][-1]) == (["1", "whole", "loss=0.25"], "loss=nan", "loss=0.5")
    assert "4 steps, 3 whole" in command("ls", run).said
    assert "2 more steps" in command("ls", run, "--limit", 2).said


def test_ls_as_json_is_json(run: Path, command: Command) -> None:
    out = command("ls", run, "--json").out
    document = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert [record["step"] for record in document] == [300, 200, 150, 100]
    assert [record["metrics"].get("loss") for record in document] == [None, 0.25, "nan", 0.5]
    assert all(record["nbytes"] > 0 for record in document)


def test_ls_of_what_is_no_run_says_so(tmp_path: Path, command: Command) -> None:
    assert "no folder called as 'step_{step:08d}'" in command("ls", tmp_path, status=1).err
    assert "is not there" in command("ls", tmp_path / "nothing", status=1).err


def test_steps_that_are_called_otherwise_are_found(tmp_path: Path, command: Command) -> None:
    with Checkpoints(tmp_path, asynchronous=False, signals=(), name="it-{step}.ckpt") as saved:
        saved.save(7, {"w": torch.ones(2)})
    assert command("ls", tmp_path, "--json").document[0]["step"] == 7
    assert command("ls", tmp_path, "--name", "it-{step}.ckpt", "--json").document[0]["step"] == 7
    assert "no folder called" in command("ls", tmp_path, "--name", "step_{step}", status=1).err
    assert "expected the name" in command("ls", tmp_path, "--name", "step", status=2).err
    assert command("inspect", f"{tmp_path}@latest", "--json").document["url"].endswith("it-7.ckpt")


@pytest.mark.usefixtures("long_ago")
def test_prune_says_what_would_go_and_removes_it_when_told_so(run: Path, command: Command) -> None:
    assert "no terminal to ask on" in command("prune", run, "--keep-last", 1, status=2).err
    assert "say which steps stay" in command("prune", run, "--yes", status=2).err
    options = ("--keep-last", 1, "--keep-every", 100, "--keep-lowest", "loss:1")
    said = command("prune", run, *options, "--dry-run").said
    assert "would remove 1 step" in said and "(150)" in said and "200 the newest" in said
    assert steps(run) == [100, 150, 200]
    document = command("prune", run, *options, "--yes", "--json").document
    assert document["removed"] == [150]
    assert steps(run) == [100, 200]
    assert "removed 1 step" in command("prune", run, "--keep-highest", "other", "--yes").said
    assert steps(run) == [200]
    assert "expected METRIC or METRIC:N" in command("prune", run, "--keep-lowest", "loss:x", "--yes", status=2).err
    assert "removed 0 steps" in command("prune", run, "--keep-hours", 1, "--yes").said


def test_prune_leaves_alone_what_a_job_has_just_saved(
    run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPDCP_RUN_ID", "another-one")
    said = command("prune", run, "--keep-last", 1, "--yes").said
    assert "removed 0 steps" in said and "another job just saved it" in said
    assert steps(run) == [100, 150, 200]


@pytest.mark.usefixtures("long_ago")
def test_a_held_step_stays_and_a_released_one_goes(run: Path, command: Command) -> None:
    command("hold", run, 100)
    assert "whole, held" in command("ls", run).said
    assert command("prune", run, "--keep-last", 1, "--yes", "--json").document["removed"] == [150]
    assert "is held: release it first" in command("rm", f"{run}@100", "--yes", status=3).err
    command("release", run, 100)
    command("prune", run, "--keep-last", 1, "--yes")
    assert steps(run) == [200]
    assert "no step 100" in command("hold", run, 100, status=3).err


def test_verify_of_a_run_has_a_line_for_each_step(run: Path, command: Command) -> None:
    lines = command("verify", run).out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["step 300", " torn"], ["step 200", " sound"], ["step 150", " sound"], ["step 100", " sound"],
    ]  # fmt: skip
    data = next((run / "step_00000150").glob("*.safetensors"))
    spoiled = bytearray(data.read_bytes())
    spoiled[-1] ^= 1
    data.write_bytes(spoiled)
    document = command("verify", run, "--json", status=1).document
    assert [step["state"] for step in document["steps"]] == ["torn", "sound", "damaged", "sound"]
    assert not document["is_sound"]


def test_a_step_is_named_by_its_run_and_number_or_as_the_latest(run: Path, tmp_path: Path, command: Command) -> None:
    assert command("inspect", f"{run}@latest", "--json").document["url"].endswith("step_00000200")
    assert command("verify", f"{run}@100").out.startswith("sound")
    assert command("diff", f"{run}@100", f"{run}@latest", "--values", status=1).said
    command("convert", "dcp-to-hf", f"{run}@latest", tmp_path / "hf")
    state = {"w": torch.zeros(8)}
    hpdcp.load(state, checkpoint_id=tmp_path / "hf")
    assert state["w"][0] == 200
    command("rm", f"{run}@150", "--yes")
    assert steps(run) == [100, 200]
    assert "no step 7; whole steps are 100, 200" in command("inspect", f"{run}@7", status=1).err


def test_a_folder_that_is_itself_called_so_is_meant_first(tmp_path: Path, command: Command) -> None:
    hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "run@5")
    assert command("inspect", tmp_path / "run@5", "--json").document["url"].endswith("run@5")
