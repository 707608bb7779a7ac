"""Whatever boxes ranks stored, near or far away: an export holds the whole tensor, or nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, PerRank, offline_transform
from hpdcp._base import config
from hpdcp._base.errors import CorruptCheckpointError, CoverageError, UnsupportedTypeError
from hpdcp._comm.exchange import Alone
from hpdcp._convert import tensor_streams
from hpdcp._engine.save import save_state
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._files.writer import FileSystemWriter
from hpdcp._format.checksums import BLOCK_BYTES
from hpdcp._plan.standard_save_planner import StandardSavePlanner
from hpdcp._state.geometry import Box
from tests.support.backends import registered
from tests.support.data_files import data_file
from tests.unit._convert.test_round_trips import bits, differing, read_folder

FULL = bits(torch.float32, (24, 10), seed=3)


@pytest.fixture(params=["auto", "counting"], ids=["mapped", "far away"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with registered(), config.using(backend=name):
        yield name


@pytest.fixture(params=[tensor_streams.STREAM_BYTES, 256], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_streams, "STREAM_BYTES", request.param)


def part(full: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """The box of `full`, as a rank holds it."""
    found = full[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone()
    setattr(found, CHUNK_INFO, ChunkInfo(ChunkStorageMetadata(offsets, sizes), tuple(full.shape)))
    return found


def save_apart(folder: Path, states: Sequence[dict[str, object]]) -> None:
    """As so many ranks save, each for itself."""
    for rank, state in enumerate(states):
        writer = FileSystemWriter(folder)
        writer.identity = SaveIdentity("attempt", "run", 1)
        save_state(
            state,
            open_writer=lambda writer=writer: writer,
            planner=StandardSavePlanner(),
            exchange=Alone(rank, len(states)),
            collective=False,
        )


LAYOUTS = {
    "whole on every rank": [((0, 0), (24, 10))] * 2,
    "rows": [((0, 0), (7, 10)), ((7, 0), (17, 10))],
    "rows in no order": [((16, 0), (8, 10)), ((0, 0), (8, 10)), ((8, 0), (8, 10))],
    "columns": [((0, 0), (24, 3)), ((0, 3), (24, 7))],
    "grid": [((0, 0), (12, 5)), ((0, 5), (12, 5)), ((12, 0), (12, 5)), ((12, 5), (12, 5))],
    "overlapping rows": [((0, 0), (16, 10)), ((8, 0), (16, 10))],
    "a ragged row": [((0, 0), (5, 10)), ((5, 0), (1, 4)), ((5, 4), (1, 6)), ((6, 0), (18, 10))],
}


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("boxes", LAYOUTS.values(), ids=LAYOUTS)
def test_boxes_of_many_ranks_become_whole_tensors(
    tmp_path: Path, store: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    save_apart(tmp_path / "dcp", [{"w": part(FULL, *box), "b": torch.ones(3)} for box in boxes])
    expected = {"w": FULL, "b": torch.ones(3)}
    offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert differing(expected, read_folder(tmp_path / "hf")) == []
    assert differing(expected, offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")) == []
    offline_transform.convert_dcp_to_torch(tmp_path / "dcp", tmp_path / "all.pt")
    assert differing(expected, torch.load(tmp_path / "all.pt")) == []


def test_a_hole_is_named_before_anything_is_written(tmp_path: Path) -> None:
    save_apart(tmp_path / "dcp", [{"w": part(FULL, (0, 0), (9, 10))}, {"w": part(FULL, (12, 0), (12, 10))}])
    with pytest.raises(CoverageError, match=r"'w' only in part.*\[9, 0\] to \[12, 10\]"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(CoverageError, match="'w'"):
        offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")


def test_what_each_rank_kept_is_left_out_of_an_export_and_a_list_in_the_full_state(tmp_path: Path) -> None:
    states: list[dict[str, object]] = [
        {"w": torch.ones(2), "rng": PerRank({"at": rank, "t": torch.full((2,), rank)}), "n": PerRank(rank)}
        for rank in range(2)
    ]
    save_apart(tmp_path / "dcp", states)
    done = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert dict(done.tensors) == {"w": 8}
    assert set(done.skipped.values()) == {"kept by each rank for itself"}
    full = offline_transform.dcp_to_full_state_dict(tmp_path / "dcp")
    assert full["n"] == [0, 1]
    assert [(kept["at"], kept["t"].tolist()) for kept in full["rng"]] == [(0, [0, 0]), (1, [1, 1])]


@pytest.mark.parametrize("boxes", [LAYOUTS["rows"], LAYOUTS["columns"]], ids=["rows", "columns"])
def test_damage_in_the_source_is_found_and_nothing_whole_is_left(
    tmp_path: Path, store: str, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    save_apart(tmp_path / "dcp", [{"w": part(FULL, *box)} for box in boxes])
    file = data_file(tmp_path / "dcp", 1)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert list((tmp_path / "hf").iterdir()) == []
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        offline_transform.convert_dcp_to_torch(tmp_path / "dcp", tmp_path / "all.pt")
    assert not (tmp_path / "all.pt").exists()
    with config.using(verify="never"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")


def test_checksums_of_many_blocks_are_compared(tmp_path: Path, store: str) -> None:
    full = bits(torch.uint8, (3 * BLOCK_BYTES + 5,))
    hpdcp.save({"w": full}, checkpoint_id=tmp_path / "dcp")
    offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert differing({"w": full}, read_folder(tmp_path / "hf")) == []
    file = data_file(tmp_path / "dcp")
    with file.open("r+b") as opened:
        opened.seek(-BLOCK_BYTES, 2)
        opened.write(bytes([full[-BLOCK_BYTES].item() ^ 1]))
    with pytest.raises(CorruptCheckpointError, match="'w'"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf2")


def test_blocks_are_used_again_only_when_nobody_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_streams, "STREAM_BYTES", 64)
    full = torch.arange(400, dtype=torch.float32)
    hpdcp.save({"w": full}, checkpoint_id=tmp_path)
    with registered(), config.using(backend="counting"), hpdcp.FileSystemReader(tmp_path).backend as backend:
        reader = hpdcp.FileSystemReader(tmp_path)
        stored = tensor_streams.TensorStreamer(reader, reader.load_metadata())
        parts = [part for _, part in stored.stream([tensor_streams.StreamRequest(0, Box.whole((400,)))])]
        assert len(parts) > 20
        assert torch.equal(torch.cat(parts), full)
        addresses = {part.data_ptr() for part in parts}
        assert len(addresses) == len(parts)
        parts.clear()
        again = set()
        for _, one in stored.stream([tensor_streams.StreamRequest(0, Box.whole((400,)))]):
            again.add(one.data_ptr())
        assert len(again) < 10
        reader.close()
        backend.close()


@pytest.mark.usefixtures("_blocks")
def test_floating_point_tensors_are_cast_and_no_others(tmp_path: Path, store: str) -> None:
    state = {
        "w": torch.randn(30, 7), "half": torch.randn(9).half(), "same": torch.randn(5).bfloat16(),
        "ids": torch.arange(4), "mask": torch.tensor([True, False]), "c": torch.randn(3, dtype=torch.complex64),
    }  # fmt: skip
    hpdcp.save(state, checkpoint_id=tmp_path / "dcp")
    offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", dtype="bfloat16")
    expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in state.items()}
    assert differing(expected, read_folder(tmp_path / "hf")) == []


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.uint4, torch.int3])
def test_a_dtype_no_file_can_name_is_refused_by_key_before_anything_is_written(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    odd = torch.zeros(2, dtype=torch.uint8).view(torch.uint8).repeat(dtype.itemsize).view(dtype)
    hpdcp.save({"fine": torch.ones(2), "odd": odd}, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(UnsupportedTypeError, match="'odd'"):
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    done = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", exclude=["odd"])
    assert dict(done.skipped) == {"odd": "excluded by 'odd'"}
    if dtype is torch.complex128:
        offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "cast", dtype=torch.complex64)
        assert read_folder(tmp_path / "cast")["odd"].dtype is torch.complex64
