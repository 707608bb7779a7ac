"""A `.metadata` that was cut off, flipped or forged: an hpdcp error, soon; never a crash, a hang or much memory."""

from __future__ import annotations

import json
import random
import resource
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, UnsupportedFormatError
from hpdcp._format._seal import UNSEALED, sealed
from hpdcp._format.columns import EntryKind
from hpdcp._format.container import pack_columns, unpack_columns
from hpdcp._format.metadata import Metadata
from hpdcp._manage.inspect import inspect_checkpoint
from hpdcp._manage.verify import verify_checkpoint

Columns = dict[str, np.ndarray[Any, np.dtype[Any]]]


def state(value: float = 1.0) -> dict[str, Any]:
    shared = torch.full((3, 5), value)
    return {
        "model": {"w": shared, "tied": shared, "b": torch.full((4,), value, dtype=torch.bfloat16)},
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(value),
        "rng": hpdcp.PerRank({"state": torch.full((6,), int(value), dtype=torch.uint8), "seed": [1, 2]}),
        "step": int(value),
        "notes": {"a": (1, 2), 3: None},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("damaged") / "ckpt"
    hpdcp.save(state(), checkpoint_id=path)
    return path


@pytest.fixture
def sound(folder: Path) -> Iterator[bytes]:
    data = (folder / ".metadata").read_bytes()
    yield data
    (folder / ".metadata").write_bytes(data)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """An allocation of what a forged size asks for fails here, rather than on a machine with less memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def try_load(folder: Path, data: bytes) -> HpdcpError | None:
    """What a load of everything raises with this `.metadata`; anything but an hpdcp error fails the test."""
    (folder / ".metadata").write_bytes(data)
    attempts: list[Callable[[], object]] = [
        lambda: hpdcp.load(state(-1.0), checkpoint_id=folder),
        lambda: hpdcp.load({"rng": hpdcp.PerRank.all(None)}, checkpoint_id=folder),
        lambda: verify_checkpoint(folder),
        lambda: inspect_checkpoint(folder),
    ]
    errors: list[HpdcpError] = []
    with warnings.catch_warnings():
        # Damage may well turn one dtype into another that can be cast.
        warnings.simplefilter("ignore")
        for attempt in attempts:
            try:
                attempt()
            except HpdcpError as error:
                errors.append(error)
    return errors[0] if errors else None


@pytest.mark.usefixtures("little_memory")
def test_cut_off_anywhere_it_is_refused_by_name(folder: Path, sound: bytes) -> None:
    lengths = {*range(24), *range(0, len(sound), 61), len(sound) - 1}
    for length in sorted(lengths):
        error = try_load(folder, sound[:length])
        assert isinstance(error, CorruptCheckpointError), (length, error)
        assert str(folder / ".metadata") in str(error)
    assert isinstance(try_load(folder, sound + b"\0"), CorruptCheckpointError)


@pytest.mark.usefixtures("little_memory")
def test_any_flipped_byte_ends_in_an_hpdcp_error_or_in_no_harm(folder: Path, sound: bytes) -> None:
    chance = random.Random(5)
    positions = set(range(0, len(sound), 17)) | {chance.randrange(len(sound)) for _ in range(50)}
    failed = 0
    for position in sorted(positions):
        data = bytearray(sound)
        data[position] ^= chance.choice((0x01, 0x80, 0xFF, 0x10))
        failed += try_load(folder, bytes(data)) is not None
    assert failed > len(positions) // 2


def forge(sound: bytes, change: Callable[[Columns, dict[str, str]], None]) -> bytes:
    columns, settings = unpack_columns(sound, where="the sound one")
    changed: Columns = {name: np.array(column) for name, column in columns.items()}
    facts = dict(settings)
    facts["checksum"] = UNSEALED
    change(changed, facts)
    return sealed(pack_columns(changed, facts))


LARGEST = (1 << 63) - 1


def set_all(name: str, value: int) -> Callable[[Columns, dict[str, str]], None]:
    return lambda columns, _: columns[name].fill(value)


def set_one(name: str, position: int, value: int) -> Callable[[Columns, dict[str, str]], None]:
    def change(columns: Columns, _: dict[str, str]) -> None:
        columns[name][position] = value

    return change


def drop(name: str) -> Callable[[Columns, dict[str, str]], None]:
    def change(columns: Columns, _: dict[str, str]) -> None:
        del columns[name]

    return change


def setting(name: str, value: str) -> Callable[[Columns, dict[str, str]], None]:
    return lambda _, settings: settings.update({name: value})


FORGERIES: Mapping[str, Callable[[Columns, dict[str, str]], None]] = {
    "a column is missing": drop("storage.offset"),
    "ends of the strings lie": set_one("entry.fqn.ends", 0, LARGEST),
    "ends of the strings are negative": set_one("entry.fqn.ends", 0, -1),
    "ends of the shapes lie": set_one("entry.shape.ends", 0, LARGEST),
    "ends of the chunks lie": set_one("chunk.ends", 0, LARGEST),
    "ends of the checksums lie": set_all("storage.crc.ends", LARGEST),
    "shapes are huge": set_all("entry.shape.dims", 1 << 40),
    "shapes are the largest there are": set_all("entry.shape.dims", LARGEST),
    "shapes are negative": set_all("entry.shape.dims", -1),
    "offsets overflow": set_all("chunk.offsets", LARGEST),
    "sizes overflow": set_all("chunk.sizes", LARGEST),
    "sizes are negative": set_all("chunk.sizes", -1),
    "chunks belong to nobody": set_all("chunk.entry", 1 << 40),
    "chunks all belong to one": set_all("chunk.entry", 0),
    "extents start beyond the file": set_all("storage.offset", LARGEST),
    "extents start before the file": set_all("storage.offset", -8),
    "extents are huge": set_all("storage.length", LARGEST),
    "files are negative": set_all("file.size", -1),
    "files are huge": set_all("file.size", LARGEST),
    "files are out of the table": set_all("storage.file", 1 << 20),
    "everything is an alias": set_all("entry.kind", EntryKind.ALIAS),
    "everything is a tensor": set_all("entry.kind", EntryKind.TENSOR),
    "everything is a Python value": set_all("entry.kind", EntryKind.OBJECT),
    "kinds are unknown": set_all("entry.kind", 77),
    "dtypes are out of the table": set_all("entry.dtype", 9999),
    "owners are ranks that never were": set_all("entry.owner", 1 << 40),
    "owners are negative": set_all("entry.owner", -(1 << 40)),
    "the world is no number": setting("world_size", "many"),
    "the world is a superscript": setting("world_size", "²"),
    "the world is empty": setting("world_size", "0"),
    "the world is negative": setting("world_size", "-3"),
    "the world is huge": setting("world_size", "9" * 15),
    "the world is longer than python's numbers": setting("world_size", "9" * 5000),
    "the rank is no number": setting("rank", "first"),
}


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("forgery", FORGERIES)
def test_columns_that_lie_are_refused(folder: Path, sound: bytes, forgery: str) -> None:
    error = try_load(folder, forge(sound, FORGERIES[forgery]))
    assert error is not None


HARMLESS = {"files are huge"}


@pytest.mark.parametrize("forgery", [name for name in FORGERIES if name not in HARMLESS])
def test_most_lies_are_seen_before_anything_is_planned(sound: bytes, forgery: str) -> None:
    late = {"shapes are huge", "shapes are the largest there are", "everything is a tensor"}
    if forgery in late:
        Metadata.from_bytes(forge(sound, FORGERIES[forgery]), where="forged")
        return
    with pytest.raises(CorruptCheckpointError, match="forged"):
        Metadata.from_bytes(forge(sound, FORGERIES[forgery]), where="forged")


@pytest.mark.usefixtures("little_memory")
def test_a_gather_of_every_rank_s_state_never_returns_memory_that_nothing_filled(folder: Path, sound: bytes) -> None:
    """Its tensors are made from the metadata, so a shape that no chunk fills must not even be allocated."""

    def grow(columns: Columns, _: dict[str, str]) -> None:
        owned = np.flatnonzero((columns["entry.owner"] >= 0) & (columns["entry.kind"] == EntryKind.TENSOR))
        last = columns["entry.shape.ends"][owned[0]] - 1
        columns["entry.shape.dims"][last] = 1 << 38

    (folder / ".metadata").write_bytes(forge(sound, grow))
    with pytest.raises(HpdcpError, match=r"rng\.state"):
        hpdcp.load({"rng": hpdcp.PerRank.all(None)}, checkpoint_id=folder)


NAMES = ["../secret", "/etc/passwd", "a\0b", "", ".", "x/../../secret", "\ud800", "sub/../../../secret"]


@pytest.mark.parametrize("name", NAMES)
def test_files_outside_the_folder_are_neither_read_nor_removed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "ckpt"
    hpdcp.save(state(), checkpoint_id=folder)
    secret = tmp_path / "secret"
    files = sorted(path for path in folder.iterdir() if path.name.startswith("_rank"))
    secret.write_bytes(files[-1].read_bytes())

    def rename(columns: Columns, _: dict[str, str]) -> None:
        blob = name.encode("utf-8", "surrogatepass")
        count = len(columns["file.size"])
        columns["file.name.blob"] = np.frombuffer(blob * count, np.uint8)
        columns["file.name.ends"] = np.arange(1, count + 1, dtype=np.int64) * len(blob)

    error = try_load(folder, forge((folder / ".metadata").read_bytes(), rename))
    assert error is not None
    hpdcp.save(state(2.0), checkpoint_id=folder)
    assert secret.exists() and all(path.exists() for path in files)
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 2


@pytest.mark.parametrize("name", [".metadata", ".attempt"])
def test_a_metadata_that_lists_itself_as_data_does_not_take_the_next_checkpoint_with_it(
    tmp_path: Path, name: str
) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)

    def rename(columns: Columns, _: dict[str, str]) -> None:
        count = len(columns["file.size"])
        columns["file.name.blob"] = np.frombuffer(name.encode() * count, np.uint8)
        columns["file.name.ends"] = np.arange(1, count + 1, dtype=np.int64) * len(name)

    (tmp_path / ".metadata").write_bytes(forge((tmp_path / ".metadata").read_bytes(), rename))
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=tmp_path)
    assert target["step"] == 2 and (tmp_path / ".attempt").exists()


@pytest.mark.parametrize("version", ["2.0", "10", "1000000.1"])
def test_a_newer_major_version_is_refused_by_name(folder: Path, sound: bytes, version: str) -> None:
    error = try_load(folder, forge(sound, setting("version", version)))
    assert isinstance(error, UnsupportedFormatError)
    assert repr(version) in str(error) and "Upgrade" in str(error)


@pytest.mark.parametrize("version", ["", "one", "²", "-1", "9" * 5000, "."])
def test_a_version_that_is_none_is_refused(folder: Path, sound: bytes, version: str) -> None:
    assert isinstance(try_load(folder, forge(sound, setting("version", version))), UnsupportedFormatError)


def test_another_program_s_container_is_refused(folder: Path, sound: bytes) -> None:
    assert isinstance(try_load(folder, forge(sound, setting("format", "pt"))), UnsupportedFormatError)
    data = pack_columns({"w": np.zeros(3)}, {})
    assert isinstance(try_load(folder, data), UnsupportedFormatError)


def test_fields_of_a_newer_minor_version_are_ignored(folder: Path, sound: bytes) -> None:
    def add(columns: Columns, settings: dict[str, str]) -> None:
        columns["chunk.temperature"] = np.arange(5, dtype=np.float32)
        columns["future"] = np.zeros((2, 2), dtype=np.uint16)
        settings |= {"version": "1.7", "mood": "good"}

    assert try_load(folder, forge(sound, add)) is None


def test_a_pickle_is_not_opened(folder: Path, sound: bytes, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return exec, (f"open({str(trap)!r}, 'w')",)

    torch.save(Trap(), folder / "pickle")
    error = try_load(folder, (folder / "pickle").read_bytes())
    assert isinstance(error, CorruptCheckpointError)
    assert not trap.exists()


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 100_000,
        json.dumps({"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"a": {"dtype": "U8", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}).encode(),
        json.dumps({"a": {"dtype": "U8", "shape": [0] * 100, "data_offsets": [0, 0]}}).encode(),
        b'{"a":{"dtype":"U8","shape":[1' + b"0" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}',
        b"{}",
        b"\xff\xfe{}",
    ],
    ids=lambda header: header[:20].decode("latin-1"),
)
def test_a_hostile_header_is_refused(folder: Path, sound: bytes, header: bytes) -> None:
    error = try_load(folder, len(header).to_bytes(8, "little") + header)
    assert isinstance(error, (CorruptCheckpointError, UnsupportedFormatError))


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_of_a_huge_announced_length_is_not_believed(folder: Path, sound: bytes, length: int) -> None:
    error = try_load(folder, length.to_bytes(8, "little") + sound[8:])
    assert isinstance(error, CorruptCheckpointError)
