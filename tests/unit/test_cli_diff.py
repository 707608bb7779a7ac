"""`hpdcp diff`: what it prints, and the status it exits with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from tests.support.command import Command
from tests.support.huggingface import write_single

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(4)}, "step": 3}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    hpdcp.save(STATE, checkpoint_id=tmp_path / "a")
    return tmp_path / "a"


@pytest.fixture
def b(tmp_path: Path) -> Path:
    w = torch.arange(12.0).reshape(3, 4)
    w[1, 2] = torch.inf
    hpdcp.save({"model": {"w": w, "b": torch.zeros(4)}, "step": 4, "[red]\x1b[31m": 1}, checkpoint_id=tmp_path / "b")
    return tmp_path / "b"


def test_equal_checkpoints_exit_with_0(a: Path, command: Command) -> None:
    answer = command("diff", a, a)
    assert "alike (values were not compared: --values): 3 names" in answer.said
    answer = command("diff", a, a, "--values", "--json")
    assert answer.document["is_equal"] is True
    assert answer.document["differences"] == []
    assert answer.document["nbytes"] == 65
    assert "65 B by their checksums alone" in command("diff", a, a, "--trust-checksums").said


def test_differences_are_rows_and_exit_with_1(a: Path, b: Path, command: Command) -> None:
    answer = command("diff", a, b, "--values", status=1)
    rows = {line.split()[0]: line for line in answer.out.splitlines() if line.strip()}
    assert "1 of 12, first [1, 2], by up to inf" in rows["model.w"]
    assert rows["step"].split() == ["step", "values", "3", "4"]
    assert "only in B" in rows[r"[red]\x1b[31m"]
    assert "\x1b" not in answer.out
    assert "DIFFERENT: 3 names; compared were 3 names, 65 B of values" in answer.said
    answer = command("diff", a, b, "--values", "--limit", 1, status=1)
    assert "and 2 more" in answer.out


def test_the_document_is_json_whatever_the_numbers(a: Path, b: Path, command: Command) -> None:
    document = command("diff", a, b, "--values", "--json", status=1).document
    found = {each["fqn"]: each for each in document["differences"]}
    assert found["model.w"]["aspect"] == "values"
    assert found["model.w"]["elements"] == {
        "differing": 1, "elements": 12, "first": [1, 2], "max_abs": "inf", "max_rel": None, "one_nan": 0,
    }  # fmt: skip
    assert found["step"]["elements"] is None
    assert document["is_equal"] is False


def test_a_tolerance_and_patterns_are_taken(a: Path, b: Path, command: Command) -> None:
    assert command("diff", a, b, "--keys", "model.b", "--values")
    assert command("diff", a, b, "--keys", "model.*", "--values", status=1)
    assert command("diff", a, b, "--keys", "model.*", "--keys", "step")
    assert command("diff", a, b, "--keys", "step", "--rtol", "1", status=1)


def test_weights_with_a_prefix_are_compared_once_it_is_named(a: Path, tmp_path: Path, command: Command) -> None:
    folder = write_single(tmp_path / "hf", STATE["model"])  # type: ignore[arg-type]
    for first, second, flag in ((a, folder, "--prefix-a"), (folder, a, "--prefix-b")):
        assert f"try {flag} model." in command("diff", first, second, status=1).said
        assert command("diff", first, second, flag, "model.", "--values")


def test_layout_counts_when_asked_for(a: Path, tmp_path: Path, command: Command) -> None:
    hpdcp.save(
        {"model.w": STATE["model"]["w"], "model": {"b": torch.zeros(4)}, "step": 3}, checkpoint_id=tmp_path / "c"
    )  # type: ignore[index]
    answer = command("diff", a, tmp_path / "c")
    assert "1 name nested in another way, which does not count without --layout" in answer.said
    assert "nesting" in command("diff", a, tmp_path / "c", "--layout", status=1).out


def test_what_cannot_be_compared_exits_with_3_or_2(a: Path, tmp_path: Path, command: Command) -> None:
    assert "nowhere" in command("diff", a, tmp_path / "nowhere", status=3).err
    data = bytearray((a / "_rank0_.safetensors").read_bytes())
    data[-1] ^= 1
    (a / "_rank0_.safetensors").write_bytes(data)
    answer = command("diff", a, a, "--values", status=3)
    assert answer.out == ""
    assert "damaged" in answer.err
    assert "nothing is left" in command("diff", a, a, "--keys", "no", status=2).err
    assert command("diff", a, status=2)
    assert command("diff", a, a, "--atol", "-1", status=2)


def test_each_side_has_a_backend_and_options_of_its_own(a: Path, command: Command) -> None:
    options = '{"auto_mkdir": true}'
    assert command("diff", a, a, "--backend-b", "fsspec", "--storage-options-b", options)
    assert "auto_mkdir" in command("diff", a, a, "--storage-options-a", options, status=2).err


def test_a_bar_is_shown_where_something_is_read(a: Path, command: Command) -> None:
    assert "diff: 100%" in command("diff", a, a, "--values", "--progress", "always", "--json").err
    for arguments in (["--progress", "always"], ["--progress", "always", "--trust-checksums"], ["--values"]):
        assert command("diff", a, a, *arguments).err == ""
