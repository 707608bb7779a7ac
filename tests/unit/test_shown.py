"""What a prompt and a notebook show of records: a line that says what it is, and nothing secret."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import FileSystemReader, FileSystemWriter, PerRank
from hpdcp._background.response import AsyncSaveResponse


def test_metadata_is_a_line_and_in_a_notebook_a_table(tmp_path: Path) -> None:
    w = torch.ones(300, 7)
    state = {"<b>": w, "tied": w, "step": 3, "rng": PerRank(5), **{f"n{i}": torch.ones(1) for i in range(60)}}
    metadata = hpdcp.save(state, checkpoint_id=tmp_path)
    nbytes = sum(metadata.storage.length.tolist())
    said = f"61 tensors, 2 Python values, 1 tied name, {nbytes:,} bytes in 2 files, saved by 1 rank"
    assert repr(metadata) == f"<Metadata: {said}>"
    assert repr(metadata.state_dict_metadata) == f"<64 names of <Metadata: {said}>>"
    page = metadata._repr_html_()
    assert said in page
    assert "<td>&lt;b&gt;</td><td>float32</td><td>[300, 7]</td><td>1</td><td>8,400</td>" in page
    assert "… and 24 more names" in page
    assert page.count("<tr>") == 41
    planned = hpdcp.FileSystemReader(tmp_path).load_metadata()
    assert repr(planned) == repr(metadata)


def test_readers_and_writers_name_their_location_without_what_is_secret(tmp_path: Path) -> None:
    assert repr(FileSystemReader()) == "<FileSystemReader: no location yet>"
    assert repr(FileSystemWriter(tmp_path)) == f"<FileSystemWriter: {tmp_path}>"
    assert "secret" not in repr(FileSystemReader("sftp://me:secret@host/run"))
    assert "secret" not in repr(AsyncSaveResponse("sftp://me:secret@host/run"))


def test_a_response_says_how_far_the_save_is_and_has_not_been_asked(tmp_path: Path) -> None:
    response = AsyncSaveResponse(str(tmp_path))
    assert repr(response) == f"<AsyncSaveResponse of {tmp_path}: in flight>"
    response.future.set_exception(hpdcp.errors.StorageError("no space"))
    assert repr(response) == f"<AsyncSaveResponse of {tmp_path}: failed: StorageError>"
    assert not response.asked
    with pytest.raises(hpdcp.errors.StorageError):
        response.get_result()
    done = AsyncSaveResponse(str(tmp_path))
    done.future.set_result(hpdcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path))
    assert repr(done) == f"<AsyncSaveResponse of {tmp_path}: published>"
