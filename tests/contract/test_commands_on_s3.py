"""The command line between a bucket and this host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._files.commit import Attempt
from hpdcp._files.registry import open_backend
from tests.support.command import Command
from tests.support.huggingface import write_shards
from tests.support.s3 import S3Server

WEIGHTS = {f"layers.{n}.w": torch.full((32, 40), float(n)) for n in range(5)}


@pytest.fixture
def place(s3_environment: S3Server) -> str:
    return s3_environment.new_prefix()


def test_weights_go_to_a_bucket_and_back_and_stay_equal(place: str, tmp_path: Path, command: Command) -> None:
    folder = write_shards(tmp_path / "hf", WEIGHTS, shards=2)
    command("convert", "hf-to-dcp", folder, f"{place}/dcp")
    command("convert", "dcp-to-hf", f"{place}/dcp", f"{place}/hf", "--max-shard-size", "12KB")
    command("convert", "dcp-to-torch", f"{place}/dcp", f"{place}/all.pt")
    command("convert", "torch-to-dcp", f"{place}/all.pt", tmp_path / "dcp")
    assert command("verify", f"{place}/dcp").out
    for other in (f"{place}/dcp", f"{place}/hf", tmp_path / "dcp"):
        assert command("diff", folder, other, "--values", "--json").document["nbytes"] == 5 * 32 * 40 * 4
    changed = {**WEIGHTS, "layers.3.w": WEIGHTS["layers.3.w"] + 1}
    hpdcp.save(changed, checkpoint_id=f"{place}/changed")
    document = command("diff", f"{place}/dcp", f"{place}/changed", "--trust-checksums", "--json", status=1).document
    assert [each["fqn"] for each in document["differences"]] == ["layers.3.w"]
    assert document["nbytes"] == 32 * 40 * 4


def test_a_checkpoint_in_a_bucket_goes_and_what_lies_beside_it_stays(
    place: str, s3_environment: S3Server, command: Command
) -> None:
    hpdcp.save(WEIGHTS, checkpoint_id=place)
    with open_backend(place) as backend:
        backend.publish("notes.txt", b"mine")
        backend.publish("deep/_rank0_.safetensors", b"mine")
    assert command("rm", place, "--dry-run", "--json").document["foreign"] == ["notes.txt"]
    command("rm", place, "--yes")
    assert {key.rpartition(place.rpartition("/")[2] + "/")[2] for key in s3_environment.objects(place)} == {
        "notes.txt",
        "deep/_rank0_.safetensors",
    }


def test_of_a_bucket_of_checkpoints_the_last_are_named(place: str, command: Command) -> None:
    for step in (1, 2, 9, 10, 11, 12):
        hpdcp.save({"w": torch.ones(1)}, checkpoint_id=f"{place}/run/step_{step}")
    message = command("inspect", f"{place}/run", status=1).err
    assert "do: 'step_2', 'step_9', 'step_10', 'step_11', 'step_12'." in message
    assert f"Give one of them, such as {place}/run/step_12." in message
    assert "Is the path right?" in command("inspect", f"{place}/nowhere", status=1).err


def test_a_save_in_progress_in_a_bucket_is_left_alone(place: str, s3_environment: S3Server, command: Command) -> None:
    with open_backend(place) as backend:
        Attempt.begin(backend, "00000000deadbeef")
    assert "may be in progress" in command("rm", place, "--yes", status=3).err
    command("rm", place, "--yes", "--force")
    assert s3_environment.objects(place) == {}


def test_a_bucket_that_is_not_there_is_one_line(s3_environment: S3Server, command: Command) -> None:
    for arguments, status in ((["rm", "--yes"], 3), (["diff", "memory://a"], 3), (["inspect"], 1)):
        answer = command(arguments[0], "s3://no-such-bucket-here/x", *arguments[1:], status=status)
        assert answer.err.count("\n") == 1
        assert "no-such-bucket-here" in answer.err
