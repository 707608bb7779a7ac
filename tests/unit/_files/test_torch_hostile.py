"""Folders of torch.distributed.checkpoint that a stranger made to do harm: refused by name, nothing of them run."""

from __future__ import annotations

import builtins
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import hpdcp
from hpdcp.errors import HpdcpError
from hpdcp.inspect import inspect_checkpoint
from hpdcp.verify import verify_checkpoint
from tests.support.pickled import START, Save, call, name, text

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MOST_BYTES = 256 << 20
HARMLESS = ("hpdcp", "torch", "zipfile", "numpy", "encodings")
"""Modules that a load may import late, whatever is in the folder."""


class Watch:
    """What the interpreter was asked to do."""

    def __init__(self) -> None:
        self.on = False
        self.events: list[tuple[str, tuple[Any, ...]]] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in ("open", "import", "os.system", "subprocess.Popen", "exec", "pickle.find_class"):
            self.events.append((event, arguments))


WATCH = Watch()


@pytest.fixture(scope="module", autouse=True)
def what_is_imported_late(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Modules of hpdcp's own that reading such a folder, and refusing one, imports."""
    save = Save.make(tmp_path_factory.mktemp("sound"))
    hpdcp.load(state(), checkpoint_id=save.folder)
    inspect_checkpoint(save.folder)
    verify_checkpoint(save.folder)
    with pytest.raises(HpdcpError):
        hpdcp.load({"w": torch.zeros(1), "x": None}, checkpoint_id=save.folder)


@contextmanager
def nothing_done(folder: Path) -> Iterator[None]:
    """Fails where code of the folder was run, a module imported, a file outside of it opened, or memory filled."""
    WATCH.events.clear()
    tracemalloc.start()
    WATCH.on = True
    try:
        yield
    finally:
        WATCH.on = False
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES
    for event, arguments in WATCH.events:
        if event == "import":
            assert str(arguments[0]).partition(".")[0] in HARMLESS, arguments
        elif event == "open" and isinstance(arguments[0], str):
            path = arguments[0]
            assert path.startswith((str(folder), "/proc/")) or path.endswith((".py", ".pyc")), path
        else:
            assert event == "open", (event, arguments)


def state() -> dict[str, Any]:
    return {"w": torch.zeros(3, 4), "step": None}


# Pickles that are none of torch's.

BOMB = b"]" + b"\x94" + b"".join(b"]" + b"(" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(120))
TUPLES = b")\x94" + b"".join(b"h" + bytes([n]) + b"\x86\x94" for n in range(100))

NAMES = [
    ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("subprocess", "check_output"),
    ("builtins", "eval"), ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "__import__"),
    ("builtins", "bytearray"), ("builtins", "open"), ("__builtin__", "eval"), ("importlib", "import_module"),
    ("torch", "load"), ("torch.hub", "load"), ("torch", "zeros"), ("torch", "ones"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch.serialization", "load"), ("torch.distributed.checkpoint.metadata", "os.system"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__class__"), ("pathlib", "Path.home"), ("shutil", "rmtree"),
    ("collections", "defaultdict"), ("functools", "partial"), ("operator", "attrgetter"), ("copyreg", "_reconstructor"),
    ("antigravity", "x"), ("numpy", "load"), ("pickle", "loads"), ("runpy", "run_path"), ("ctypes", "CDLL"),
]  # fmt: skip

PICKLES: dict[str, tuple[bytes, str]] = {
    **{f"names {m}.{a}": (START + call(m, a, text("id") + b"\x85") + b".", f"names '{m}.{a}'") for m, a in NAMES},
    "nested reduce": (
        START + name("builtins", "getattr") + call("builtins", "__import__", text("os") + b"\x85") + b"R.",
        "names 'builtins.getattr'",
    ),
    "a name from the stack": (START + text("os") + text("system") + b"\x93.", "names 'os.system'"),
    "a name that is no text": (START + b"K\x01K\x02\x93.", "names something by no text"),
    "a call of what is no name": (START + b"K\x01)R.", "calls something that is no name"),
    "an instance of what is no name": (START + b"K\x01)\x81.", "calls something that is no name"),
    "an extension of copyreg": (START + b"\x82\x01.", "has the instruction"),
    "INST": (START + b"(ios\nsystem\n.", "has the instruction"),
    "OBJ": (START + b"(" + name("pathlib", "PosixPath") + b"o.", "has the instruction"),
    "NEWOBJ_EX": (START + name("pathlib", "PosixPath") + b")}\x92.", "has the instruction"),
    "a persistent id as text": (START + b"Pos.system\n.", "has the instruction"),
    "a persistent id": (START + b"K\x01Q.", "refers to something outside"),
    "a buffer from outside": (START + b"\x97.", "has the instruction"),
    "a number as text": (START + b"I" + b"9" * 100_000 + b"\n.", "has the instruction"),
    "a long number as text": (START + b"L" + b"9" * 100_000 + b"L\n.", "has the instruction"),
    "a number of 2 GiB": (START + b"\x8b\xff\xff\xff\x7f.", "has the instruction"),
    "a number of 255 bytes": (START + b"\x8a\xff" + b"\x7f" * 255 + b".", "more than 64 bits"),
    "a text of 4 GiB": (START + b"X\xff\xff\xff\xff.", "has a text of 4294967295 bytes"),
    "a text of 2^63 bytes": (START + b"\x8d" + b"\xff" * 8 + b".", "has the instruction"),
    "bytes of 2^63": (START + b"\x8e" + b"\xff" * 8 + b".", "has the instruction"),
    "a memo of 2^31": (START + b"Nr\xff\xff\xff\x7f.", "does not hold the Metadata"),
    "a memo that is not there": (START + b"j\xff\xff\xff\x7f.", "do not fit one another"),
    "a frame of 2^63 bytes": (START + b"\x95" + b"\xff" * 8 + b"N.", "does not hold the Metadata"),
    "billion laughs": (START + BOMB + b"0" * 120 + b".", "does not hold the Metadata"),
    "billion laughs as a key": (START + b"}" + TUPLES + b"Ns.", "has a key of type tuple"),
    "a stack without end": (START + b"N" * 100_000, "values on its stack"),
    "marks without end": (START + b"(" * 100_000, "nested more than"),
    "depth without end": (START + b")" + b"\x85" * 300_000 + b".", "than its length lets expect"),
    "a deep key": (START + b"})" + b"\x85N0N0N0" * 20_000 + b"Ns.", "has a key of type tuple"),
    "lists without end": (START + b"]" + b"]a" * 100_000 + b".", "than its length lets expect"),
    "a list that holds itself": (START + b"]\x94h\x00a.", "does not hold the Metadata"),
    "a name without an end": (START + b"c" + b"x" * 1_000_000, "name without an end"),
    "nothing": (START + b".", "does not end with one value"),
    "two values": (START + b"NN.", "does not end with one value"),
    "an end that is missing": (START + b"N", "ends too early"),
    "a state of nothing": (START + b"N}b.", "gives a state to what has none"),
    "a pop below": (START + b"0.", "do not fit one another"),
    "a mark that is missing": (START + b"t.", "do not fit one another"),
    "text that is no UTF-8": (START + b"\x8c\x01\xff.", "not UTF-8"),
    "items of what is no dict": (START + b"]NNs.", "sets items of what is no dict"),
    "an append to what is no list": (START + b"}Na.", "appends to what is no list"),
    "another object": (START + call("collections", "OrderedDict") + b".", "does not hold the Metadata"),
    "no fields": (START + name("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81.", "is no dict"),
}


@pytest.mark.parametrize("case", PICKLES)
def test_a_pickle_that_torch_did_not_write_is_refused(case: str, tmp_path: Path) -> None:
    data, said = PICKLES[case]
    save = Save.make(tmp_path / "theirs")
    save.write(data)
    for ask in (lambda: hpdcp.load(state(), checkpoint_id=save.folder), lambda: inspect_checkpoint(save.folder)):
        with nothing_done(save.folder), pytest.raises(HpdcpError) as raised:
            ask()
        assert said in str(raised.value) and ".metadata" in str(raised.value), str(raised.value)


def test_allow_pickle_does_not_make_metadata_run_code(tmp_path: Path) -> None:
    save = Save.make(tmp_path / "theirs")
    save.write(PICKLES["names os.system"][0])
    reader = hpdcp.FileSystemReader(save.folder, allow_pickle=True)
    with nothing_done(save.folder), pytest.raises(HpdcpError, match=r"names 'os\.system'"):
        hpdcp.load(state(), storage_reader=reader)


# Records of torch's that do not fit.


def tensor(metadata: Metadata) -> TensorStorageMetadata:
    found = metadata.state_dict_metadata["w"]
    assert isinstance(found, TensorStorageMetadata)
    return found


def place(metadata: Metadata, fqn: str = "w") -> _StorageInfo:
    found: _StorageInfo = next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)
    return found


def moved_file(to: str) -> Callable[[Metadata], object]:
    return lambda metadata: setattr(place(metadata), "relative_path", to)


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def overlap(metadata: Metadata) -> None:
    tensor(metadata).chunks.append(box((2, 0), (1, 4)))
    metadata.storage_data[MetadataIndex("w", (2, 0))] = place(metadata)


def many_chunks(metadata: Metadata) -> None:
    """One list of chunks under very many names."""
    record = tensor(metadata)
    record.chunks = [box((0, 0), (3, 4))] * 1000
    metadata.state_dict_metadata |= {f"w{n}": record for n in range(10_000)}


def many_dimensions(metadata: Metadata) -> None:
    shape = torch.Size([1] * 10_000)
    tensor(metadata).size = shape
    tensor(metadata).chunks = [ChunkStorageMetadata(shape, shape)] * 100


def long_paths(metadata: Metadata) -> None:
    """One path under very many names: harmless, since paths that do not spell their names are not followed."""
    metadata.planner_data = dict.fromkeys(metadata.state_dict_metadata, ("x",) * 10_000)
    place(metadata).relative_path = "../x"


RECORDS: dict[str, tuple[Callable[[Metadata], object], str]] = {
    "a file above": (moved_file("../__0_0.distcp"), "'../__0_0.distcp'"),
    "a file far above": (moved_file("../../../../etc/passwd"), "'../../../../etc/passwd'"),
    "an absolute file": (moved_file("/etc/passwd"), "'/etc/passwd'"),
    "a file of Windows": (moved_file("..\\secret"), "secret'"),
    "a file with NUL": (moved_file("a\0b"), "a\\x00b"),
    "a file without a name": (moved_file(""), "''"),
    "a folder": (moved_file("."), "'.'"),
    "a URL": (moved_file("s3://bucket/key"), "'s3://bucket/key'"),
    "a file that is not there": (moved_file("__7_0.distcp"), "'__7_0.distcp'"),
    "a file that is no text": (lambda m: setattr(place(m), "relative_path", 3), "the file of 'w' is no text"),
    "an offset beyond the file": (lambda m: setattr(place(m), "offset", 1 << 40), "'w'"),
    "an offset that wraps around": (lambda m: setattr(place(m), "offset", (1 << 64) - 1), "64 bits"),
    "an offset below 0": (lambda m: setattr(place(m), "offset", -1), "'w' has a number of bytes that is none"),
    "a length beyond the file": (lambda m: setattr(place(m), "length", 1 << 40), "'w'"),
    "a length of nothing": (lambda m: setattr(place(m), "length", 0), "is stored in 0"),
    "a length that is no number": (lambda m: setattr(place(m), "length", 1e9), "a number of bytes that is none"),
    "boxes that overlap": (overlap, "overlap"),
    "a box beyond its tensor": (lambda m: tensor(m).chunks.append(box((3, 0), (1, 4))), "a chunk beyond it"),
    "a box below 0": (lambda m: tensor(m).chunks.append(box((-1, 0), (1, 4))), "a shape or an offset that is none"),
    "a box of other dimensions": (lambda m: tensor(m).chunks.append(box((0,), (1,))), "a chunk beyond it"),
    "a box without a place": (lambda m: m.storage_data.pop(MetadataIndex("w", (0, 0))), "where it is stored"),
    "a value without a place": (lambda m: m.storage_data.pop(MetadataIndex("step")), "where it is stored"),
    "a shape beyond all storage": (
        lambda m: setattr(tensor(m), "size", torch.Size([1 << 40, 1 << 40])),
        "more than any storage holds",
    ),
    "a tensor larger than its data": (
        lambda m: m.state_dict_metadata.update(
            w=TensorStorageMetadata(TensorProperties(), torch.Size([1 << 30, 4]), [box((0, 0), (1 << 30, 4))])
        ),
        "is stored in",
    ),
    "dimensions without end": (many_dimensions, "a shape or an offset that is none"),
    "chunks without end": (many_chunks, "more chunks than there are places"),
    "paths without end": (long_paths, "'../x'"),
    "a tensor that is none": (lambda m: m.state_dict_metadata.update(w={}), "neither tensor nor value"),
    "a name that is none": (lambda m: m.state_dict_metadata.update({3: BytesStorageMetadata()}), "is no text"),
    "no names": (lambda m: setattr(m, "state_dict_metadata", None), "state_dict_metadata is no dict"),
    "no places": (lambda m: setattr(m, "storage_data", None), "storage_data is no dict"),
    "a place that is none": (lambda m: m.storage_data.update({MetadataIndex("w", (0, 0)): ("a", 0)}), "'w' is stored"),
    "an index that is none": (lambda m: m.storage_data.update({"w": place(m)}), "no MetadataIndex"),
    "chunks that are none": (lambda m: tensor(m).chunks.append(("a", "b")), "a chunk that is none"),  # type: ignore[arg-type]
    "no chunks": (lambda m: setattr(tensor(m), "chunks", None), "has no list of chunks"),
    "no dtype": (lambda m: setattr(tensor(m), "properties", None), "has no dtype"),
    "a dtype that is none": (lambda m: setattr(tensor(m).properties, "dtype", 7), "has no dtype"),
    "transforms without names": (lambda m: setattr(place(m), "transform_descriptors", [7]), "that have no names"),
    "a transform of a stranger's": (lambda m: setattr(place(m), "transform_descriptors", ["os/1"]), "transforms"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_records_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, said = RECORDS[case]
    save = Save.make(tmp_path / "theirs")
    (tmp_path / "__0_0.distcp").write_bytes(b"not yours")
    save.edit(change)
    target = state()
    with nothing_done(save.folder), pytest.raises(HpdcpError) as raised:
        hpdcp.load(target, checkpoint_id=save.folder)
    assert said in str(raised.value), str(raised.value)
    assert torch.equal(target["w"], torch.zeros(3, 4))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    save = Save.make(tmp_path / "theirs")
    file = save.folder / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with nothing_done(save.folder), pytest.raises(HpdcpError, match="out of the folder"):
        hpdcp.load(state(), checkpoint_id=save.folder)


# Items.


def other_shape(item: bytearray) -> None:
    at = item.index(b"K\x03K\x04\x86")
    item[at : at + 5] = b"K\x04K\x03\x86"


def far_storage(item: bytearray) -> None:
    """Twelve elements in the description become three."""
    at = item.index(b"K\x0ct")
    item[at + 1] = 3


def far_start(item: bytearray) -> None:
    at = item.index(b"QK\x00K\x03")
    item[at + 2] = 200


def run_code(item: bytearray) -> None:
    start = item.index(b"\x80\x02")
    code = b"cos\nsystem\nX\x02\x00\x00\x00id\x85R."
    item[start : start + len(code) + 2] = b"\x80\x02" + code


ITEMS: dict[str, tuple[str, Callable[[bytearray], object], str]] = {
    "no archive": ("w", lambda item: item.__setitem__(slice(0, 4), b"\0\0\0\0"), "'w'"),
    "another shape": ("w", other_shape, "'w'"),
    "a storage that is too short": ("w", far_storage, "does not hold"),
    "a start beyond the storage": ("w", far_start, "does not hold"),
    "code in a tensor": ("w", run_code, "'w'"),
    "code in a value": ("step", run_code, "'step'"),
    "a compressed record": ("w", lambda item: item.__setitem__(8, 8), "compressed"),
    "zeros": ("w", lambda item: item.__setitem__(slice(None), bytes(len(item))), "'w'"),
}


@pytest.mark.parametrize("case", ITEMS)
def test_items_that_do_not_fit_are_refused_by_key(case: str, tmp_path: Path) -> None:
    fqn, change, said = ITEMS[case]
    save = Save.make(tmp_path / "theirs")
    save.edit_item(fqn, change)
    with pytest.raises(HpdcpError) as raised:
        hpdcp.load(state(), checkpoint_id=save.folder)
    assert said in str(raised.value) and f"'{fqn}'" in str(raised.value), str(raised.value)
    report = verify_checkpoint(save.folder)
    assert [damage.fqn for damage in report.damages] == [fqn]


def test_an_item_that_asks_for_code_runs_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = Save.make(tmp_path / "theirs")
    save.edit_item("step", run_code)
    ran: list[object] = []
    monkeypatch.setattr("os.system", ran.append)
    monkeypatch.setattr(builtins, "eval", ran.append)
    with pytest.raises(HpdcpError):
        hpdcp.load(state(), checkpoint_id=save.folder)
    assert ran == []
