"""The command line: what it prints, and the status it exits with."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpdcp
from hpdcp._format.metadata import FORMAT_VERSION
from tests.support.command import Command
from tests.support.data_files import data_file
from tests.support.huggingface import write_shards


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "step_3"
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(11)]), "head": nn.Linear(4, 4)})
    model["head"].weight = model["layers"][0].weight
    state = {
        "model": model.state_dict(),
        "step": 3,
        "[red]odd\x1b[31m": 1,
        "rng": hpdcp.PerRank({"cpu": torch.get_rng_state(), "worker": 2}),
    }
    hpdcp.save(state, checkpoint_id=folder)
    return folder


def rows(output: str) -> dict[str, list[str]]:
    return {cells[0]: cells[1:] for line in output.splitlines() if (cells := line.split())}


def test_inspect_shows_a_table_of_everything_and_totals(checkpoint: Path, command: Command) -> None:
    output = command("inspect", checkpoint).out
    table = rows(output)
    assert str(checkpoint) in output
    assert "saved by 1 rank · attempt" in output
    assert f"layout safetensors · format {FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}" in output
    # The tied name that comes first in the alphabet is the one that stores the bytes.
    assert table["model.head.weight"] == ["float32", "[4,", "4]", "1", "1", "64", "B"]
    assert table["model.layers.10.bias"] == ["float32", "[4]", "1", "1", "16", "B"]
    assert table["model.layers.0.weight"] == ["model.head.weight"]
    assert table["rng.cpu"][:2] == ["0", "uint8"]
    assert table["rng.worker"][:3] == ["0", "Python", "value"]
    assert table["step"] == ["1", "B"]
    assert "23 tensors, 2 Python values, 2 names per rank, 1 tied name:" in output
    names = list(table)
    assert names.index("model.layers.2.bias") < names.index("model.layers.10.bias")


def test_names_cannot_speak_to_the_terminal(checkpoint: Path, command: Command) -> None:
    for options in ([], ["--tree"]):
        output = command("inspect", checkpoint, *options).out
        assert r"[red]odd\x1b[31m" in output
        assert "\x1b" not in output


def test_a_table_can_be_cut(checkpoint: Path, command: Command) -> None:
    output = command("inspect", checkpoint, "--limit", 2).out
    assert "… and 21 more tensors" in output
    assert "model.layers.5.bias" not in output


def test_a_filter_leaves_only_names_that_match(checkpoint: Path, command: Command) -> None:
    output = command("inspect", checkpoint, "--filter", "model.layers.1*.bias").out
    assert {name for name in rows(output) if name.startswith("model.")} == {
        "model.layers.1.bias",
        "model.layers.10.bias",
    }
    assert "step" not in rows(output)


def test_a_filter_that_matches_nothing_is_told(checkpoint: Path, command: Command) -> None:
    for options in ([], ["--tree"], ["--json"]):
        assert "no name matches --filter 'nope.*'" in command("inspect", checkpoint, "--filter", "nope.*", *options).err
    assert command("inspect", checkpoint, "--filter", "model.*").err == ""


def test_the_tree_adds_up_branches(checkpoint: Path, command: Command) -> None:
    lines = command("inspect", checkpoint, "--tree").out.splitlines()
    (model,) = [line for line in lines if line.startswith("model ")]
    assert model.endswith("896 B"), "12 biases of 16 B and 11 weights of 64 B; one more is tied"
    assert any("weight  tied to model.head.weight" in line for line in lines)
    assert any("cpu  uint8 [" in line and "per rank" in line for line in lines)


def test_json_is_one_document_that_says_the_same(checkpoint: Path, command: Command) -> None:
    document: dict[str, Any] = command("inspect", checkpoint, "--json").document
    entries = {entry["fqn"]: entry for entry in document["entries"]}
    assert document["world_size"] == 1
    assert document["by_rank"] is False
    assert entries["model.layers.3.weight"] == {
        "fqn": "model.layers.3.weight", "kind": "tensor", "dtype": "float32", "shape": [4, 4], "owner": None,
        "alias_of": "", "chunks": 1, "files": [data_file(checkpoint).name], "nbytes": 64,
    }  # fmt: skip
    assert entries["model.layers.0.weight"]["alias_of"] == "model.head.weight"
    assert entries["rng.cpu"]["owner"] == 0
    sizes = {file["key"]: file["size"] for file in document["files"]}
    assert sizes == {
        key: (checkpoint / key).stat().st_size
        for key in (data_file(checkpoint).name, data_file(checkpoint, 0, ".bytes").name)
    }
    assert document["file_bytes"] == sum(sizes.values())


def test_verify_exits_with_0_for_a_sound_checkpoint(checkpoint: Path, command: Command) -> None:
    assert command("verify", checkpoint).out.startswith(f"sound: {checkpoint}: 2 files,")
    document = command("verify", checkpoint, "--json").document
    assert document["is_sound"] is True
    assert document["damages"] == []


def test_verify_exits_with_1_and_says_what_is_damaged(tmp_path: Path, command: Command) -> None:
    hpdcp.save({"w": torch.ones(100), "note": "hello"}, checkpoint_id=tmp_path)
    file = data_file(tmp_path)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    output = command("verify", tmp_path, status=1).out
    assert file.name in output
    assert "its checksum differs" in output
    assert "DAMAGED" in output
    document = command("verify", tmp_path, "--json", status=1).document
    (damage,) = document["damages"]
    assert (damage["fqn"], damage["length"]) == ("w", 400)


def test_config_show_says_where_each_value_comes_from(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("HPDCP_VERIFY", "always")
    monkeypatch.setenv("HPDCP_BACKENDS__S3__STORAGE_OPTIONS__SECRET", "tell-nobody")
    output = command("config", "show").out
    assert rows(output)["verify"] == ["'always'", "environment", "variable", "HPDCP_VERIFY"]
    assert rows(output)["layout"] == ["'safetensors'", "default"]
    assert "tell-nobody" not in output
    document = command("config", "show", "--json").document
    assert {"key": "layout", "value": "safetensors", "origin": "default"} in document


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_errors_are_one_line(verb: str, tmp_path: Path, command: Command) -> None:
    assert command(verb, tmp_path / "nowhere", status=1).err.count("\n") == 1
    (tmp_path / ".metadata").write_bytes(b"not a checkpoint at all")
    message = command(verb, tmp_path, status=1).err
    assert message.startswith("hpdcp: ")
    assert ".metadata" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("place", ["", "memory://test-cli-parent"])
@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_of_a_folder_of_checkpoints_the_last_are_named(place: str, verb: str, tmp_path: Path, command: Command) -> None:
    parent = place or str(tmp_path / "run")
    for step in (2, 3, 4, 9, 10, 11):
        hpdcp.save({"w": torch.ones(1)}, checkpoint_id=f"{parent}/step_{step}")
    if not place:
        (tmp_path / "run/zzz").mkdir()
    message = command(verb, parent, status=1).err
    assert "folders of it do: 'step_3', 'step_4', 'step_9', 'step_10', 'step_11'." in message
    assert f"such as {parent}/step_11" in message


def test_a_place_that_is_not_there_or_a_file_is_answered_with_a_next_step(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    said = command("inspect", checkpoint.parent / "stepp_3", status=1).err
    assert said == f"hpdcp: {checkpoint.parent}/stepp_3 is not there. Did you mean {checkpoint}?\n"
    assert f"Is the path right? {tmp_path} is there." in command("inspect", tmp_path / "a/b", status=1).err
    (tmp_path / "file.txt").write_text("x")
    said = command("inspect", tmp_path / "file.txt", status=1).err
    assert "is a file, and a checkpoint is a folder: give the folder." in said
    assert "`hpdcp convert torch-to-dcp` makes a checkpoint" in said


@pytest.mark.parametrize(
    "arguments",
    [["explode"], ["inspect"], ["inspect", ""], ["inspect", "x", "--wide"], ["inspect", "x", "--json", "--tree"]],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(arguments: list[str], command: Command) -> None:
    assert command(*arguments, status=2).err


def test_a_wrong_configuration_is_wrong_usage(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setenv("HPDCP_VERIFY", "sometimes")
    assert "HPDCP_VERIFY" in command("config", "show", status=2).err


def test_the_version_is_told(command: Command) -> None:
    assert command("--version").out.startswith("hpdcp ")


def test_without_the_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("hpdcp.cli.find_spec", lambda name: None if name == "typer" else object())
    monkeypatch.delitem(sys.modules, "hpdcp.commands", raising=False)
    assert command("inspect", "x", status=2).err == ('hpdcp: the command line needs typer: pip install "hpdcp[cli]"\n')


def test_inspect_shows_hugging_face_weights_and_verify_says_why_it_cannot(tmp_path: Path, command: Command) -> None:
    write_shards(tmp_path, {"layers.0.w": torch.ones(2, 3), "layers.1.w": torch.ones(2, 3)}, shards=2)
    output = command("inspect", tmp_path).out
    assert "weights from huggingface · layout safetensors · no checksums" in output
    assert rows(output)["layers.1.w"][:3] == ["float32", "[2,", "3]"]
    assert "records no checksums" in command("verify", tmp_path, status=1).err


def test_an_interruption_is_told_by_the_status_alone(
    checkpoint: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # The module: its package has the command under the same name.
    monkeypatch.setattr(import_module("hpdcp._manage.verify"), "verify_checkpoint", interrupted)
    assert command("verify", checkpoint, status=130).out == ""
