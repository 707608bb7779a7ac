"""`hpdcp convert`: every option reaches the library, and what is printed says what was written."""

from __future__ import annotations

import json
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hpdcp
from hpdcp.commands.wording import WORDS
from tests.support.command import Command
from tests.support.huggingface import read_index, same, write_shards

WEIGHTS = {"layers.0.w": torch.arange(12.0).reshape(3, 4), "layers.1.w": torch.ones(3, 4), "embed": torch.randn(5, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "hf", WEIGHTS, shards=2)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"model": WEIGHTS, "optimizer": {"state": {"m": torch.zeros(3)}, "param_groups": [{"lr": 0.1}]}, "step": 3}
    hpdcp.save(state, checkpoint_id=tmp_path / "step_3")
    return tmp_path / "step_3"


def loaded(place: Path) -> dict[str, Any]:
    metadata = hpdcp.FileSystemReader(place).load_metadata()
    return {name: entry.dtype for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "dtype")}


def test_there_and_back(folder: Path, tmp_path: Path, command: Command) -> None:
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "dcp")
    assert f"wrote a checkpoint: {tmp_path / 'dcp'}: 3 tensors, 176 B in 1 file" in answer.said
    answer = command("convert", "dcp-to-hf", tmp_path / "dcp", tmp_path / "back")
    assert f"wrote a folder of weights: {tmp_path / 'back'}: 3 tensors, 176 B in 1 file" in answer.said
    back = load_file(tmp_path / "back/model.safetensors")
    assert set(back) == set(WEIGHTS)
    assert all(same(WEIGHTS[name], back[name]) for name in WEIGHTS)


def test_every_option_of_an_export_has_an_effect(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    names = tmp_path / "names.toml"
    names.write_text('"layers.0.w" = "first"\n')
    out = tmp_path / "out"
    answer = command(
        "convert", "dcp-to-hf", checkpoint, out, "--prefix", "model.", "--dtype", "bfloat16", "--max-shard-size",
        "0.03KB", "--include", "layers.*", "--include", "embed", "--exclude", "*.1.w",
        "--name-map", names, "--copy-from", config, "--json",
    )  # fmt: skip
    document = answer.document
    assert document["tensors"] == {"embed": 40, "first": 24}
    assert document["copied"] == ["config.json"]
    assert document["skipped"]["model.layers.1.w"] == "excluded by '*.1.w'"
    assert document["skipped"]["step"] == "a Python value"
    assert (document["nbytes"], document["dry_run"]) == (64, False)
    assert document["files"] == {path.name: path.stat().st_size for path in out.glob("model*")}
    assert (out / "config.json").read_text() == "{}"
    found = {}
    for shard in set(read_index(out)["weight_map"].values()):
        found |= load_file(out / shard)
    assert same(WEIGHTS["layers.0.w"].bfloat16(), found["first"])
    assert set(found) == {"embed", "first"}


def test_an_export_in_the_way_stays_unless_overwrite_is_given(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    arguments = ["convert", "dcp-to-hf", checkpoint, tmp_path / "out", "--max-shard-size", "0.05KB"]
    command(*arguments)
    assert "pass --overwrite" in command(*arguments, status=3).err
    command(*arguments, "--overwrite")


def test_what_is_replaced_is_told(folder: Path, checkpoint: Path, tmp_path: Path, command: Command) -> None:
    torch.save(WEIGHTS, tmp_path / "weights.pt")
    cases = [
        ("hf-to-dcp", folder, "checkpoint"),
        ("torch-to-dcp", tmp_path / "weights.pt", "checkpoint"),
        ("dcp-to-dcp", checkpoint, "checkpoint"),
        ("dcp-to-hf", checkpoint, "folder of weights"),
        ("dcp-to-torch", checkpoint, "file"),
    ]
    for kind, src, what in cases:
        arguments = ["convert", kind, src, tmp_path / kind]
        assert "that was there" not in command(*arguments).said
        assert f"; would replace the {what} that was there" in command(*arguments, "--dry-run").said
        assert f"; replaced the {what} that was there" in command(*arguments).said
        assert command(*arguments, "--json").document["replaced"] is True


def test_a_file_of_torch_needs_a_name(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    for dst in (tmp_path, f"{tmp_path}/new/", f"file://{tmp_path}", "memory://root"):
        message = command("convert", "dcp-to-torch", checkpoint, dst, status=2).err
        assert "is a folder; expected the name of the file to write, such as " in message
        assert "/checkpoint.pt" in message


def test_names_of_dtypes_of_other_tools_are_answered_with_those_of_torch(
    checkpoint: Path, tmp_path: Path, command: Command
) -> None:
    for given, meant in (("bf16", "bfloat16"), ("FP32", "float32"), ("bfloat_16", "bfloat16")):
        message = command("convert", "dcp-to-hf", checkpoint, tmp_path / "out", "--dtype", given, status=2).err
        assert f"--dtype is {given!r}" in message
        assert f"Did you mean {meant!r}?" in message


def test_every_phrase_that_the_command_line_puts_in_other_words_is_one_of_the_library() -> None:
    folder = Path(hpdcp.__file__).parent
    source = "".join(path.read_text("utf-8") for path in folder.rglob("*.py"))
    assert [phrase for phrase in WORDS if phrase not in source] == []


def test_a_dry_run_says_what_would_be_written_and_writes_nothing(
    checkpoint: Path, folder: Path, tmp_path: Path, command: Command
) -> None:
    out = tmp_path / "out"
    answer = command(
        "convert", "dcp-to-hf", checkpoint, out, "--prefix", "model.", "--max-shard-size", "0.09KB", "--dry-run"
    )
    assert "would write a folder of weights" in answer.said
    assert "model-00001-of-00003.safetensors" in answer.out
    assert "optimizer state" in answer.out
    assert not out.exists()
    said = command(
        "convert",
        "dcp-to-hf",
        checkpoint,
        out,
        "--prefix",
        "model.",
        "--max-shard-size",
        "0.09KB",
        "--dry-run",
        "--json",
    )
    command("convert", "dcp-to-hf", checkpoint, out, "--prefix", "model.", "--max-shard-size", "0.09KB")
    assert said.document["files"] == {path.name: path.stat().st_size for path in out.iterdir()}
    for kind, src in (("hf-to-dcp", folder), ("dcp-to-torch", checkpoint)):
        answer = command("convert", kind, src, tmp_path / "never", "--dry-run")
        assert "would write a" in answer.said
        assert not (tmp_path / "never").exists()


def test_a_file_of_torch_there_and_back(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    answer = command("convert", "dcp-to-torch", checkpoint, tmp_path / "all.pt")
    assert "wrote a file" in answer.said
    state = torch.load(tmp_path / "all.pt")
    assert state["step"] == 3
    assert same(WEIGHTS["embed"], state["model"]["embed"])
    command("convert", "torch-to-dcp", tmp_path / "all.pt", tmp_path / "again")
    command("diff", checkpoint, tmp_path / "again", "--values")
    save_file(WEIGHTS, tmp_path / "one.safetensors")
    command("convert", "torch-to-dcp", tmp_path / "one.safetensors", tmp_path / "one", "--prefix", "model.")
    assert set(loaded(tmp_path / "one")) == {f"model.{name}" for name in WEIGHTS}


def test_a_table_of_names_may_leave_out_and_put_together(folder: Path, tmp_path: Path, command: Command) -> None:
    names = tmp_path / "names.json"
    names.write_text(json.dumps({
        "embed": None,
        "layers.0.w": {"name": "stacked", "offsets": [0, 0, 0]},
        "layers.1.w": {"name": "stacked", "offsets": [1, 0, 0]},
        "layer.7.w": "typing error",
    }))  # fmt: skip
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "dcp", "--name-map", names)
    assert "1 name of --name-map met no tensor of" in answer.err
    assert "'layer.7.w'" in answer.err
    target = {"stacked": torch.zeros(2, 3, 4)}
    hpdcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert same(target["stacked"], torch.stack([WEIGHTS["layers.0.w"], WEIGHTS["layers.1.w"]]))
    assert list(loaded(tmp_path / "dcp")) == ["stacked"]
    assert (
        "part of a larger tensor"
        in command("convert", "dcp-to-hf", tmp_path / "dcp", tmp_path / "x", "--name-map", names, status=2).said
    )


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("names.json", "{", "neither JSON nor"),
        ("names.toml", "a = ", "neither JSON nor"),
        ("names.json", "[1]", "holds a list"),
        ("names.json", '{"embed": 3}', "'embed' to 3"),
        ("names.toml", "layers.0.w = 'x'", "a name with dots is quoted"),
        ("names.json", '{"embed": {"name": "x", "offsets": ["0"]}}', "'embed' to"),
    ],
)
def test_a_table_that_makes_no_sense_is_wrong_usage(
    name: str, text: str, says: str, folder: Path, tmp_path: Path, command: Command
) -> None:
    (tmp_path / name).write_text(text)
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "dcp", "--name-map", tmp_path / name, status=2)
    assert says in answer.said
    assert not (tmp_path / "dcp").exists()
    assert "cannot be read" in command("convert", "hf-to-dcp", "a", "b", "--name-map", "/no/such", status=2).said


def test_backends_and_options_of_both_places_are_taken(folder: Path, tmp_path: Path, command: Command) -> None:
    options = ["--src-backend", "fsspec", "--src-storage-options", '{"auto_mkdir": true}']
    command("convert", "hf-to-dcp", folder, tmp_path / "dcp", *options)
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "x", *options[2:], status=2)
    assert "auto_mkdir" in answer.err
    options = ["--dst-backend", "fsspec", "--dst-storage-options", '{"auto_mkdir": true}']
    command("convert", "dcp-to-hf", tmp_path / "dcp", tmp_path / "back", *options)
    command("convert", "dcp-to-torch", tmp_path / "dcp", f"file://{tmp_path}/all.pt", *options)
    answer = command("convert", "dcp-to-hf", tmp_path / "dcp", tmp_path / "y", "--dst-backend", "nosuch", status=2)
    assert "known are" in answer.err


def test_errors_are_one_line_and_leave_no_document(folder: Path, tmp_path: Path, command: Command) -> None:
    answer = command("convert", "dcp-to-hf", tmp_path / "nowhere", tmp_path / "out", "--json", status=3)
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert answer.err.startswith("hpdcp: ")
    for kind, place in (("torch-to-dcp", folder), ("hf-to-dcp", folder / "model-00001-of-00002.safetensors")):
        message = command("convert", kind, place, tmp_path / "out", status=2).err
        assert f"`hpdcp convert {'hf-to-dcp' if kind == 'torch-to-dcp' else 'torch-to-dcp'}` converts" in message
        assert "src_platform" not in message
    assert command("convert", status=2).said
    assert command("convert", "hf-to-dcp", folder, status=2).said


def test_bars_go_to_stderr_alone(folder: Path, checkpoint: Path, tmp_path: Path, command: Command) -> None:
    for number, arguments in enumerate(
        [["hf-to-dcp", folder], ["dcp-to-hf", checkpoint], ["dcp-to-torch", checkpoint]]
    ):
        answer = command("convert", *arguments, tmp_path / f"out{number}", "--json", "--progress", "always")
        assert answer.document["nbytes"]
        assert "100%" in answer.err
    assert command("convert", "hf-to-dcp", folder, tmp_path / "quiet", "--progress", "never").err == ""


def test_odd_names_cannot_speak_to_the_terminal(tmp_path: Path, command: Command) -> None:
    hpdcp.save({"model": WEIGHTS, "[red]\x1b[31m": 1}, checkpoint_id=tmp_path / "a")
    answer = command("convert", "dcp-to-hf", tmp_path / "a", tmp_path / "out")
    assert "\x1b" not in answer.out
    assert r"[red]\x1b[31m" in answer.out


def test_a_checkpoint_is_written_again_in_another_layout(checkpoint: Path, tmp_path: Path, command: Command) -> None:
    planned = command("convert", "dcp-to-dcp", checkpoint, tmp_path / "arrays", "--layout", "zarr", "--dry-run")
    assert "would write a checkpoint" in planned.said
    assert not (tmp_path / "arrays").exists()
    done = command("convert", "dcp-to-dcp", checkpoint, tmp_path / "arrays", "--layout", "zarr", "--json")
    assert "zarr.json" in done.document["files"]
    command("diff", checkpoint, tmp_path / "arrays", "--values")
    command("verify", tmp_path / "arrays")
    command("rm", tmp_path / "arrays", "--yes")
    assert not list(tmp_path.glob("arrays/**/zarr.json"))


@pytest.fixture
def inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a command that a rank of a training job starts: torchrun's variables, and nobody to meet."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**told, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("inherited")
def test_a_rank_that_converts_by_itself_hears_what_is_waited_for_and_not_for_ever(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpdcp.commands.convert._LONGEST_WAIT", timedelta(seconds=2))
    monkeypatch.setattr("hpdcp.commands.convert._PATIENCE", timedelta(seconds=0.5))
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "dcp", status=3)
    assert "process 1 of 2 that torchrun started, by its environment: waiting for the others" in answer.said
    assert "the others did not come" in answer.said
    assert "--no-dist" in answer.said
    assert not (tmp_path / "dcp").exists()


@pytest.mark.usefixtures("inherited")
def test_no_dist_converts_in_this_process_alone_and_prints_what_it_did(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    answer = command("convert", "hf-to-dcp", folder, tmp_path / "dcp", "--no-dist")
    assert "wrote a checkpoint" in answer.said
    assert command("convert", "dcp-to-torch", tmp_path / "dcp", tmp_path / "a.pt", "--no-dist").said
