"""Folders of other programs are named as what they are, and what reads them is said; never "damaged"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._files.foreign import recognise_folder
from hpdcp.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError
from hpdcp.inspect import inspect_checkpoint
from hpdcp.verify import verify_checkpoint

dcp = pytest.importorskip("torch.distributed.checkpoint")

QUESTIONS: dict[str, Callable[[Path], object]] = {
    "load": lambda folder: hpdcp.load({"w": torch.ones(2)}, checkpoint_id=folder),
    "inspect": lambda folder: inspect_checkpoint(folder),
    "verify": lambda folder: verify_checkpoint(folder),
}


def fill(folder: Path, names: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"PK\x03\x04")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_torch_is_none_of_these(question: str, tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "step": 1}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    QUESTIONS[question](tmp_path / "theirs")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["latest_checkpointed_iteration.txt", "iter_0000100/common.pt"], "Megatron"),
        (["latest", "zero_to_fp32.py", "global_step5/mp_rank_00_model_states.pt"], "DeepSpeed"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["__0_0.distcp"], "torch.distributed.checkpoint"),
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "Orbax"),
        (["pytorch_model-00001-of-00002.bin", "config.json"], "pickles"),
        (["consolidated.00.pth"], "torch.save"),
    ],
)
def test_folders_of_others_are_named(question: str, names: list[str], what: str, tmp_path: Path) -> None:
    fill(tmp_path / "theirs", names)
    with pytest.raises(CheckpointNotFoundError, match=f"holds no checkpoint of hpdcp, but a .*{what}"):
        QUESTIONS[question](tmp_path / "theirs")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_file_of_torch_is_named(question: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"is a file.*zip file, as torch.save writes"):
        QUESTIONS[question](tmp_path / "weights.pt")


def test_megatron_is_told_from_torch_whose_metadata_it_writes() -> None:
    found = recognise_folder([".metadata", "common.pt", "metadata.json", "__0_0.distcp"], b"\x80\x04\x95")
    assert found is not None and "Megatron" in found.name and found.key == ".metadata"


def test_a_checkpoint_of_ours_is_no_foreign_one_whatever_lies_beside_it(tmp_path: Path) -> None:
    hpdcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=False)
    metadata = (tmp_path / ".metadata").read_bytes()
    assert recognise_folder([".metadata", "weights.pt", "zero_to_fp32.py"], metadata) is None


@pytest.mark.parametrize("head", [b"", b"\x80", b"\x80\x04" + bytes(6) + b"{", bytes(64)])
def test_what_is_damaged_or_ours_is_not_taken_for_a_pickle(head: bytes) -> None:
    assert recognise_folder([".metadata"], head) is None


def test_a_pickle_in_place_of_a_ranks_metadata_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "0.metadata").write_bytes(b"\x80\x04\x95\x88\x03\x00\x00\x00\x00\x00\x00\x8c")
    with pytest.raises(CheckpointError, match="not written by hpdcp"):
        hpdcp.load({"w": torch.ones(2)}, checkpoint_id=tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "options", [{}, {"use_collectives": False}, {"no_dist": True}], ids=["all", "by rank", "alone"]
)
def test_a_save_replaces_no_checkpoint_of_torch(tmp_path: Path, options: dict[str, bool]) -> None:
    kept = {"w": torch.arange(6.0)}
    dcp.save(kept, checkpoint_id=tmp_path, no_dist=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CheckpointExistsError, match=r"whose \.metadata this save would replace"):
        hpdcp.save({"w": torch.zeros(6)}, checkpoint_id=tmp_path, **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    target = {"w": torch.zeros(6)}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(target["w"], kept["w"])
