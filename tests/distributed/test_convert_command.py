"""`hpdcp convert` under torchrun: ranks share the work, and rank 0 alone prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import hpdcp
from tests.support.data_files import without_attempt
from tests.support.huggingface import read_index, same, write_shards
from tests.support.rank_group import run_forked_ranks
from tests.support.ranks import run_python

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
WEIGHTS = {f"layers.{n}.w": torch.full((64, 64), float(n)) for n in range(6)}


def documents(output: str) -> list[dict[str, object]]:
    """Every JSON document in it."""
    decoder = json.JSONDecoder()
    starts = [
        place
        for place in range(len(output))
        if output.startswith("{\n", place) and output[place - 1 : place] in ("", "\n")
    ]
    return [decoder.raw_decode(output, place)[0] for place in starts]


def test_two_ranks_convert_there_and_back_and_one_result_is_printed(tmp_path: Path) -> None:
    write_shards(tmp_path / "hf", WEIGHTS, shards=3)
    there = ["convert", "hf-to-dcp", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--json"]
    (document,) = documents(run_python([*TORCHRUN, "-m", "hpdcp", *there], timeout=120))
    assert set(without_attempt(document["files"])) == {  # type: ignore[call-overload]
        "_rank0_.safetensors",
        "_rank1_.safetensors",
    }
    assert hpdcp.FileSystemReader(tmp_path / "dcp").load_metadata().world_size == 2
    # The other way to start it, by the script that pip installs.
    script = ["--no-python", str(Path(sys.executable).with_name("hpdcp"))]
    back = ["convert", "dcp-to-hf", str(tmp_path / "dcp"), str(tmp_path / "back"), "--max-shard-size", "40KB"]
    assert run_python([*TORCHRUN, *script, *back], timeout=120).count("wrote a folder of weights") == 1
    for name, shard in read_index(tmp_path / "back")["weight_map"].items():
        assert same(WEIGHTS[name], load_file(tmp_path / "back" / shard)[name])


def test_an_error_is_told_once_and_the_job_fails(tmp_path: Path) -> None:
    arguments = ["convert", "hf-to-dcp", str(tmp_path / "nowhere"), str(tmp_path / "dcp")]
    output = run_forked_ranks(2, ["-m", "hpdcp", *arguments], timeout=120, expect=3)
    # Beside it, rank 0 may say that it waits for a rank that starts slowly.
    told = [line for line in output.splitlines() if line.startswith("hpdcp: ") and "waiting for the others" not in line]
    assert len(told) == 1, output
    assert "nowhere is not there" in told[0]


def test_what_cannot_be_shared_is_done_once(tmp_path: Path) -> None:
    hpdcp.save(WEIGHTS, checkpoint_id=tmp_path / "a")
    for arguments, said in (
        (["convert", "dcp-to-torch", str(tmp_path / "a"), str(tmp_path / "a.pt")], "wrote a file"),
        (["rm", str(tmp_path / "a"), "--yes"], "removed 3 files"),
    ):
        assert run_forked_ranks(2, ["-m", "hpdcp", *arguments], timeout=120).count(said) == 1
    assert not (tmp_path / "a").exists()
    assert torch.load(tmp_path / "a.pt")["layers.5.w"][0, 0] == 5
