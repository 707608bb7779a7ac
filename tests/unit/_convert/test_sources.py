"""What a conversion is given: files of torch, folders, and everything else, which is refused with the right advice."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import offline_transform
from hpdcp._base import config
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    HpdcpError,
    InvalidArgumentError,
    UnsafePickleError,
    UnsupportedFormatError,
    UnsupportedTypeError,
)
from tests.support.backends import registered
from tests.support.huggingface import write_raw, write_single
from tests.unit._convert.test_round_trips import bits, differing

TENSORS = {"a.weight": bits(torch.bfloat16, (3, 5)), "b": torch.arange(4), "none": torch.empty(0, 2)}


def convert(src: Path | str, dst: Path, platform: Any = "torch", **options: Any) -> offline_transform.Conversion:
    return offline_transform.convert_full_checkpoint_to_dcp(src, dst, platform, **options)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "model.safetensors", "any name"])
def test_one_file_of_torch_or_safetensors_becomes_a_checkpoint(tmp_path: Path, name: str) -> None:
    if name.endswith(".safetensors"):
        write_single(tmp_path, TENSORS, name=name)
    else:
        torch.save(TENSORS, tmp_path / name)
    done = convert(tmp_path / name, tmp_path / "dcp")
    assert dict(done.tensors) == {key: tensor.nbytes for key, tensor in TENSORS.items()}
    assert differing(TENSORS, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []


def test_a_training_state_keeps_its_nesting_and_ties_there_and_back(tmp_path: Path) -> None:
    tied = torch.randn(3)
    state = {
        "model": {"a": tied, "b": tied},
        "optimizer": {"state": {0: {"m": torch.ones(2)}}, "lr": [0.1]},
        "epoch": 2,
    }
    torch.save(state, tmp_path / "state.pt")
    convert(tmp_path / "state.pt", tmp_path / "dcp")
    offline_transform.convert_dcp_to_torch(tmp_path / "dcp", tmp_path / "sub" / "back.pt")
    back = torch.load(tmp_path / "sub" / "back.pt")
    assert back["model"]["a"].data_ptr() == back["model"]["b"].data_ptr()
    assert torch.equal(back["model"]["a"], tied)
    assert back["optimizer"]["state"][0]["m"].tolist() == [1, 1]
    assert (back["optimizer"]["lr"], back["epoch"]) == ([0.1], 2)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["back.pt"]


def test_a_file_of_an_old_torch_is_read_as_well(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "old.pt", tmp_path / "dcp")
    assert differing(TENSORS, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch owned",)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: torch.save({"a": Evil()}, path), UnsafePickleError, r"m\.pt cannot be read.*\(posix\.system\)"),
        (lambda path: torch.save(torch.nn.Linear(1, 1), path), UnsafePickleError, r"state_dict\(\) alone"),
        (lambda path: torch.save(torch.ones(2), path), InvalidArgumentError, "holds a Tensor; expected a state dict"),
        (lambda path: path.write_bytes(b""), CorruptCheckpointError, r"m\.pt is no whole file"),
        (lambda path: path.write_bytes(b"PK\x03\x04 but nothing"), CorruptCheckpointError, r"m\.pt is no whole file"),
        (lambda path: path.write_text("hello, this is text"), CorruptCheckpointError, "begins with b'hell'"),
    ],
)
def test_a_file_that_is_no_state_dict_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, error: type[Exception], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m.pt")
    with pytest.raises(error, match=message):
        convert(tmp_path / "m.pt", tmp_path / "dcp")
    assert {path.name for path in tmp_path.iterdir()} == {"m.pt"}


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5000)}, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpointError, match=r"m\.pt is no whole file of torch\.save"):
        convert(tmp_path / "m.pt", tmp_path / "dcp")
    assert not (tmp_path / "dcp").exists()


def test_a_zip_of_something_else_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
        archive.writestr("hello", "world")
    with pytest.raises(CorruptCheckpointError, match=r"m\.pt is no whole file of torch\.save"):
        convert(tmp_path / "m.pt", tmp_path / "dcp")


def test_the_wrong_platform_is_recognised_and_the_right_one_named(tmp_path: Path) -> None:
    write_single(tmp_path / "hf", TENSORS)
    torch.save(TENSORS, tmp_path / "m.pt")
    (tmp_path / "bin").mkdir()
    torch.save(TENSORS, tmp_path / "bin" / "pytorch_model.bin")
    hpdcp.save(TENSORS, checkpoint_id=tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    new = tmp_path / "dcp"
    with pytest.raises(InvalidArgumentError, match=r"is a folder.*Hugging Face folder: src_platform='huggingface'"):
        convert(tmp_path / "hf", new)
    with pytest.raises(HpdcpError, match=r"is a file; .*: src_platform='torch'"):
        convert(tmp_path / "m.pt", new, "huggingface")
    with pytest.raises(HpdcpError, match=r"is a file; .*: src_platform='torch'"):
        convert(tmp_path / "hf" / "model.safetensors", new, "huggingface")
    with pytest.raises(UnsupportedFormatError, match=r"src_platform='torch'.*bin/pytorch_model\.bin"):
        convert(tmp_path / "bin", new, "huggingface")
    with pytest.raises(InvalidArgumentError, match=r"Give the file itself, such as .*pytorch_model\.bin"):
        convert(tmp_path / "bin", new)
    for platform in ("huggingface", "torch"):
        with pytest.raises(HpdcpError, match="checkpoint of hpdcp already"):
            convert(tmp_path / "saved", new, platform)
        with pytest.raises(CheckpointNotFoundError, match="empty"):
            convert(tmp_path / "empty", new, platform)
        with pytest.raises(CheckpointNotFoundError, match="nowhere"):
            convert(tmp_path / "nowhere", new, platform)
    with pytest.raises(InvalidArgumentError, match="src_platform is 'megatron'"):
        convert(tmp_path / "hf", new, "megatron")
    with pytest.raises(InvalidArgumentError, match="folder of Hugging Face weights, not a checkpoint"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "hf", new)
    with pytest.raises(InvalidArgumentError, match="folder of Hugging Face weights, not a checkpoint"):
        offline_transform.dcp_to_full_state_dict(tmp_path / "hf")
    assert not new.exists()


def test_source_and_destination_differ_however_they_are_written(tmp_path: Path) -> None:
    write_single(tmp_path / "hf", TENSORS)
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    for same in (tmp_path / "hf", f"file://{tmp_path}/hf/", tmp_path / "link", tmp_path / "x" / ".." / "hf"):
        with pytest.raises(InvalidArgumentError, match="src and dst are both"):
            convert(tmp_path / "hf", same, "huggingface")  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


def test_a_dtype_that_torch_lacks_is_refused_by_key_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    header = {"odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}
    write_raw(tmp_path / "hf" / "model.safetensors", header, bytes(3))
    with pytest.raises(UnsupportedTypeError, match="'odd' is stored as F6_E2M3"):
        convert(tmp_path / "hf", tmp_path / "dcp", "huggingface")
    assert not (tmp_path / "dcp").exists()


def test_a_checkpoint_at_the_destination_is_replaced_and_a_failure_leaves_it(tmp_path: Path) -> None:
    hpdcp.save({"old": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    write_single(tmp_path / "hf", TENSORS)
    damaged = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (tmp_path / "hf" / "model.safetensors").write_bytes(damaged[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        convert(tmp_path / "hf", tmp_path / "dcp", "huggingface")
    assert offline_transform.dcp_to_full_state_dict(tmp_path / "dcp").keys() == {"old"}
    (tmp_path / "hf" / "model.safetensors").write_bytes(damaged)
    convert(tmp_path / "hf", tmp_path / "dcp", "huggingface")
    assert differing(TENSORS, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []


def test_files_of_stores_that_cannot_be_mapped_go_by_way_of_temporary_ones(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "dcp")
    with registered(), config.using(backend="counting"):
        offline_transform.convert_dcp_to_torch(tmp_path / "dcp", tmp_path / "back.pt")
        full = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    assert differing(TENSORS, torch.load(tmp_path / "back.pt")) == []
    assert differing(TENSORS, full) == []
    full["b"].add_(1)


def test_full_tensors_may_be_changed_and_the_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    state = {"w": torch.arange(5000.0), "x": {"y": torch.ones(3)}}
    hpdcp.save(state, checkpoint_id=tmp_path / "dcp")
    full = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    parameter = torch.nn.Parameter(full["w"])
    (parameter * 2).sum().backward()
    torch.optim.SGD([parameter], lr=1.0).step()
    full["x"]["y"].zero_()
    assert full["w"][3].item() == 1.0
    again = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    assert torch.equal(again["w"], state["w"])
    assert again["x"]["y"].tolist() == [1, 1, 1]


def test_full_tensors_stay_when_the_checkpoint_is_replaced(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "dcp")
    full = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    hpdcp.save({"w": torch.zeros(5000)}, checkpoint_id=tmp_path / "dcp")
    assert torch.equal(full["w"], torch.arange(5000.0))


def test_no_descriptor_is_left_open_for_what_is_mapped(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.arange(5000.0)}, checkpoint_id=tmp_path / "dcp")
    before = len(os.listdir("/proc/self/fd"))
    full = [offline_transform.dcp_to_full_state_dict(tmp_path / "dcp") for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    mapped = Path("/proc/self/maps").read_text().count("_rank0_")
    full.clear()
    assert Path("/proc/self/maps").read_text().count("_rank0_") < mapped


def test_a_folder_that_changes_while_it_is_read_is_not_taken_for_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_single(tmp_path / "hf", {"a": torch.zeros(3)})
    hpdcp.save({"old": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")

    def replace_it(done: int, total: int) -> None:
        write_single(tmp_path / "new", {"a": torch.ones(3)})
        os.replace(tmp_path / "new" / "model.safetensors", tmp_path / "hf" / "model.safetensors")

    with pytest.raises(CheckpointReplacedError, match=r"'model\.safetensors' was changed while it was read"):
        convert(tmp_path / "hf", tmp_path / "dcp", "huggingface", progress=replace_it)
    assert offline_transform.dcp_to_full_state_dict(tmp_path / "dcp").keys() == {"old"}


def test_a_checkpoint_that_is_replaced_while_it_is_exported_is_said_to_be(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((5,), float(number)) for number in range(4)}
    hpdcp.save(state, checkpoint_id=tmp_path / "dcp")
    saved: list[object] = []

    def replace_it(done: int, total: int) -> None:
        if not saved:
            saved.append(hpdcp.save(state, checkpoint_id=tmp_path / "dcp"))

    with pytest.raises(CheckpointReplacedError, match="was replaced by another save while it was being read"):
        offline_transform.convert_dcp_to_huggingface(
            tmp_path / "dcp", tmp_path / "hf", max_shard_size=20, progress=replace_it
        )
    assert list((tmp_path / "hf").iterdir()) == []
