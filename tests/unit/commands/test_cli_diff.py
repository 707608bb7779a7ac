"""`hpdcp diff`: what it prints, and the status it exits with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from tests.support.command import Command
from tests.support.data_files import data_file
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
    assert "DIFFERENT: 3 names; compared: 3 names, 65 B of values" in answer.said
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


def test_numbers_are_compared_across_dtypes_when_dtypes_are_ignored(tmp_path: Path, command: Command) -> None:
    numbers = torch.tensor([1.0, 1.001, 300.7, float("nan")])
    for name, w, n in (
        ("wide", numbers, torch.tensor(3)),
        ("cast", numbers.bfloat16(), torch.tensor(3, dtype=torch.int32)),
        ("exact", numbers.double(), torch.tensor(3)),
    ):
        hpdcp.save({"w": w, "n": n}, checkpoint_id=tmp_path / name)
    wide, cast, exact = tmp_path / "wide", tmp_path / "cast", tmp_path / "exact"
    rows = command("diff", wide, cast, "--values", status=1).out
    assert rows.count("values not compared: --ignore-dtype") == 2
    rows = command("diff", wide, cast, "--rtol", "0.01", status=1).out
    assert rows.count("values are the same, or within the tolerance") == 2
    said = command("diff", wide, cast, "--ignore-dtype", "--rtol", "0.01").said
    assert "2 names of another dtype, which does not count with --ignore-dtype" in said
    assert "equal: 2 names" in said
    answer = command("diff", wide, cast, "--ignore-dtype", status=1)
    assert "2 of 4, first [1], by up to" in answer.out
    assert "DIFFERENT: 1 name" in answer.said
    assert command("diff", wide, exact, "--ignore-dtype")
    assert command("diff", wide, cast, "--ignore-dtype", "--keys", "n")


def test_whole_numbers_of_two_dtypes_are_compared_to_the_last_digit(tmp_path: Path, command: Command) -> None:
    for name, numbers in (("a", torch.tensor([2**53 + 1, 5])), ("b", torch.tensor([2**53, 5], dtype=torch.uint64))):
        hpdcp.save({"n": numbers}, checkpoint_id=tmp_path / name)
    hpdcp.save({"n": torch.tensor([7, 5], dtype=torch.int8)}, checkpoint_id=tmp_path / "c")
    assert "1 of 2, first [0]" in command("diff", tmp_path / "a", tmp_path / "c", "--ignore-dtype", status=1).out
    assert "1 of 2, first [0]" in command("diff", tmp_path / "a", tmp_path / "b", "--ignore-dtype", status=1).out


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
    data = bytearray(data_file(a).read_bytes())
    data[-1] ^= 1
    data_file(a).write_bytes(data)
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
