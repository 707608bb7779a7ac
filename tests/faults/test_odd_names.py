"""Keys and places with names that trip others: stored exactly, or refused in one clear sentence."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import hpdcp
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, StateDictError
from hpdcp._files import registry
from hpdcp._format.file_names import LEASE, METADATA
from hpdcp._manage.inspect import inspect_checkpoint
from tests.support.s3 import S3Server

KEYS: list[Any] = [
    "",
    " ",
    ".",
    "..",
    "a/../../b",
    "/etc/passwd",
    "..\\x",
    "__metadata__",
    "nul\0nul",
    "line\nline",
    "\x1f",
    "%",
    "%00",
    "%2E%2E",
    "a@[0]",
    "a#2",
    '"quoted"\\',
    "\ud800 alone",
    "über.ключ.键.🙂",
    "x" * 10_000,
    "🙂" * 3000,
    ".metadata",
    "_rank0_.safetensors",
    7,
    -1,
    2.5,
    True,
    None,
    (1, "a"),
    ("t", ("u", 2)),
    b"bytes",
]


def test_every_odd_key_comes_back_with_its_type_and_its_value(tmp_path: Path) -> None:
    tensors = {key: torch.full((3,), float(i)) for i, key in enumerate(KEYS)}
    values = {key: i for i, key in enumerate(KEYS)}
    state = {"t": tensors, "v": dict(values), "nested": {key: {"w": torch.tensor(i)} for i, key in enumerate(KEYS)}}
    folder = tmp_path / "ckpt"
    metadata = hpdcp.save(state, checkpoint_id=folder)
    assert {path.name for path in folder.iterdir()} == {METADATA, LEASE, *metadata.files}
    assert {path.name for path in tmp_path.iterdir()} == {"ckpt"}
    target = {
        "t": {key: torch.full((3,), -1.0) for key in KEYS},
        "v": dict.fromkeys(KEYS, -1),
        "nested": {key: {"w": torch.tensor(-1)} for key in KEYS},
    }
    hpdcp.load(target, checkpoint_id=folder)
    assert target["v"] == values and [type(key) for key in target["v"]] == [type(key) for key in KEYS]
    for i, key in enumerate(KEYS):
        assert torch.equal(target["t"][key], torch.full((3,), float(i))), repr(key)[:60]
        assert int(target["nested"][key]["w"]) == i


def test_files_of_odd_keys_open_in_the_safetensors_library(tmp_path: Path) -> None:
    metadata = hpdcp.save(
        {"t": {key: torch.full((2,), float(i)) for i, key in enumerate(KEYS)}}, checkpoint_id=tmp_path
    )
    (name,) = metadata.files
    with safe_open(tmp_path / name, framework="pt") as file:
        found = sorted(float(file.get_tensor(key)[0]) for key in file.keys())  # noqa: SIM118
    assert found == [float(i) for i in range(len(KEYS))]


TOP_LEVEL = [key for key in KEYS if isinstance(key, str) and len(key) < 100]


@pytest.mark.parametrize("key", TOP_LEVEL, ids=[ascii(key) for key in TOP_LEVEL])
def test_an_odd_key_at_the_top_comes_back(tmp_path: Path, key: str) -> None:
    hpdcp.save({key: torch.arange(4.0)}, checkpoint_id=tmp_path / "a")
    hpdcp.save({key: [1, "x"]}, checkpoint_id=tmp_path / "b")
    tensor: dict[str, Any] = {key: torch.zeros(4)}
    value: dict[str, Any] = {key: None}
    hpdcp.load(tensor, checkpoint_id=tmp_path / "a")
    hpdcp.load(value, checkpoint_id=tmp_path / "b")
    assert torch.equal(tensor[key], torch.arange(4.0)) and value[key] == [1, "x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {"s": {1: torch.zeros(1), "1": torch.ones(1)}},
        {"s": {None: torch.zeros(1), "None": torch.ones(1)}},
    ],
    ids=["dots", "types", "none"],
)
def test_keys_that_would_share_one_name_are_refused_and_both_named(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(StateDictError) as caught:
        hpdcp.save(state, checkpoint_id=tmp_path / "ckpt")
    assert "a.b" in str(caught.value) or "s" in str(caught.value)
    assert not (tmp_path / "ckpt").exists()


PLACES = [
    "two words",
    "hash#mark",
    "per%20cent",
    "50%",
    "[1]",
    "a::b",
    "q?x=1&y",
    "über ключ 键 🙂",
    "trailing/",
    "a/./b/../c",
    "-dash",
    "*",
    "weird:name",
    ".hidden",
    "~",
    "plus+and&is=",
    "x" * 200,
]


def round_trip(checkpoint_id: str | Path, *, again: str | Path) -> None:
    """Save, load, look, save over it in the background, and load that, under two ways to write one place."""
    hpdcp.save({"step": 3, "w": torch.ones(2)}, checkpoint_id=checkpoint_id)
    target = {"step": 0, "w": torch.zeros(2)}
    hpdcp.load(target, checkpoint_id=again)
    assert target["step"] == 3
    report = inspect_checkpoint(checkpoint_id)
    assert report.url == registry.resolve_checkpoint_id(again)
    assert [entry.fqn for entry in report.entries] == ["step", "w"]
    hpdcp.async_save({"step": 4, "w": torch.full((2,), 4.0)}, checkpoint_id=again).get_result(120)
    hpdcp.load(target, checkpoint_id=checkpoint_id)
    assert target["step"] == 4
    assert torch.equal(target["w"], torch.full((2,), 4.0))


@pytest.mark.parametrize("place", PLACES, ids=ascii)
@pytest.mark.parametrize("kind", ["str", "path", "file"])
def test_a_place_with_an_odd_name_is_that_folder_and_no_other(tmp_path: Path, place: str, kind: str) -> None:
    text = f"{tmp_path}/{place}"
    kinds: dict[str, str | Path] = {"str": text, "path": Path(text), "file": f"file://{text}"}
    round_trip(kinds[kind], again=text)
    assert (Path(os.path.normpath(text)) / METADATA).exists()
    assert len(list(tmp_path.iterdir())) == 1


ON_S3 = [place for place in PLACES if "/./" not in place]


@pytest.mark.parametrize("place", ON_S3, ids=ascii)
def test_a_place_on_s3_with_an_odd_name_is_that_prefix_and_no_other(s3_environment: S3Server, place: str) -> None:
    prefix = s3_environment.new_prefix()
    round_trip(f"{prefix}/{place}", again=f"S3{prefix.removeprefix('s3')}//{place.rstrip('/')}/")
    folders = {key.rpartition("/")[0] for key in s3_environment.objects(prefix)}
    assert folders == {place.rstrip("/")}


def test_a_relative_place_is_resolved_where_the_call_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    reader = hpdcp.FileSystemReader("run/step_1")
    writer = hpdcp.FileSystemWriter("run/step_1")
    monkeypatch.chdir(tmp_path / "elsewhere")
    hpdcp.save({"step": 3}, storage_writer=writer)
    target = {"step": 0}
    hpdcp.load(target, storage_reader=reader)
    assert target["step"] == 3 and (tmp_path / "run" / "step_1" / METADATA).exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    "place", [Path("s3://bucket/run"), Path("file:///tmp/x"), "", "   ", "a\0b", b"bytes", 3, None]
)
def test_what_is_no_place_is_refused_as_an_argument(place: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        hpdcp.save({"step": 1}, checkpoint_id=place)
    with pytest.raises(InvalidArgumentError):
        hpdcp.load({"step": 1}, checkpoint_id=place)


@pytest.mark.parametrize("place", ["nosuch://bucket/run", "nosuch://[x/y"])
def test_a_url_that_nothing_here_serves_is_named_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HpdcpError, match=place.partition(":")[0]):
        hpdcp.save({"step": 1}, checkpoint_id=place)
    with pytest.raises(HpdcpError, match=place.partition(":")[0]):
        hpdcp.load({"step": 1}, checkpoint_id=place)
    assert not list(tmp_path.iterdir())
