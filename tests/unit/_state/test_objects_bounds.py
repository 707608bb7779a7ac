"""What a value takes when it is read is bounded by its own length: small bytes that ask for much are refused."""

from __future__ import annotations

import gc
import io
import json
import pickle
import resource
import struct
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, UnsupportedTypeError
from hpdcp._format.container import TensorEntry, build_header
from hpdcp._state.objects import decode, encode
from hpdcp._state.paths import decode_path

LONG = {"$range": [0, 10**12, 1]}


@contextmanager
def bounded(seconds: float = 5.0, nbytes: int = 512 << 20) -> Iterator[None]:
    """A block that may not take more memory or time: of memory, the system refuses it."""
    gc.collect()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, hard))
    start = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.monotonic() - start < seconds


TYPED = [
    {"$deque": [LONG, None]},
    {"$deque": [LONG, 5]},
    {"$set": [{"$deque": [LONG, None]}]},
    {"$dict": [LONG]},
    {"$dict": [[LONG]]},
    {"$Counter": [LONG]},
    {"$OrderedDict": [LONG, {}]},
    {"$OrderedDict": [[], LONG]},
    {"$defaultdict": ["list", LONG]},
    {"$defaultdict": ["list", [LONG]]},
    {"$Fraction": ["1e999999999", 1]},
    {"$Fraction": [{"$Decimal": ["1e999999999"]}, 1]},
    {"$Fraction": [{"$int": ["0x" + "f" * 300_000]}, {"$int": ["0x" + "e" * 299_999 + "1"]}]},
    {"$bytearray": [6_000_000_000]},
    {"$bytearray": [LONG]},
    {"$torch.Size": [LONG]},
    {"$complex": ["1" * 100, 0]},
    {"$datetime": [LONG]},
    {"$timedelta": [1e300, 0, 0]},
    {"$array": ["", "<f8", LONG, "C"]},
    {"$array": ["", "<f8", {"$range": [1, 10**12, 1]}, "C"]},
    {"$array": ["", {"$tuple": ["<f8", LONG]}, [0], "C"]},
    {"$array": ["", "<f8", [-1, 0], "C"]},
    {"$array": ["", "<f8", [2**63, 0], "C"]},
    {"$array": ["", "<f8", [1] * 100_000, "C"]},
    {"$tensor": ["", "float32", LONG, False, False]},
    {"$tensor": ["", "float32", [2**62, 2**62, 4], False, False]},
    {"$tensor": ["", ["float32"], [0], False, False]},
    {"$namedtuple": ["time:struct_time", LONG, []]},
    {"$namedtuple": ["time:struct_time", [], LONG]},
    {"$enum": [LONG, "A"]},
]


@pytest.mark.parametrize("tree", TYPED, ids=lambda tree: json.dumps(tree)[:60])
def test_typed_json_that_asks_for_more_than_it_holds_is_refused(tree: object) -> None:
    with bounded(), pytest.raises(HpdcpError, match="'k'"):
        decode(json.dumps(tree).encode(), key="k")


@pytest.mark.parametrize("kind", ["$set", "$frozenset", "$dict", "$Counter"])
def test_keys_that_collide_are_refused_before_they_are_compared(kind: str) -> None:
    keys = [number * sys.hash_info.modulus for number in range(60_000)]
    parts = [[key, 0] for key in keys] if kind in ("$dict", "$Counter") else keys
    with bounded(), pytest.raises(CorruptCheckpointError, match="one hash"):
        decode(json.dumps({kind: parts}).encode(), key="k")


def test_a_path_with_colliding_keys_is_refused() -> None:
    keys = [number * sys.hash_info.modulus for number in range(60_000)]
    with bounded(), pytest.raises(CorruptCheckpointError, match="path"):
        decode_path(json.dumps([{"$frozenset": keys}]))


def test_an_attachment_belongs_to_one_value() -> None:
    once = {"$array": [0, "|u1", [1 << 20], "C"]}
    text = json.dumps([once] * 2000)
    header, _ = build_header([TensorEntry("0", "U8", (1 << 20,), 1 << 20)], {"hpdcp.object": text}, align=256)
    with bounded(), pytest.raises(CorruptCheckpointError, match="belongs to two values"):
        decode(header + bytes(1 << 20), key="k")


def torch_file(pickled: bytes, *, compress: int = zipfile.ZIP_STORED, **storages: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compress) as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", b"3\n")
        for key, data in storages.items():
            file.writestr(f"archive/data/{key}", data)
    return out.getvalue()


def global_(name: str) -> bytes:
    module, _, what = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + what.encode() + b"\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    data = pickle.encode_long(value)
    return b"\x8a" + bytes([len(data)]) + data


def storage(count: int, kind: str = "FloatStorage") -> bytes:
    return b"(" + text("storage") + global_(f"torch.{kind}") + text("0") + text("cpu") + number(count) + b"tQ"


def laughs(depth: int) -> bytes:
    """A tuple of two tuples of two tuples ..., each held once."""
    return b"N" + b"".join(b"q" + bytes([at]) + b"h" + bytes([at]) + b"\x86" for at in range(depth))


TENSOR = global_("torch._utils._rebuild_tensor_v2")
PICKLES = {
    "bytearray": global_("builtins.bytearray") + number(6_000_000_000) + b"\x85R",
    "bytearray by protocol 2's name": global_("__builtin__.bytearray") + number(6_000_000_000) + b"\x85R",
    "bytearray, new": global_("builtins.bytearray") + number(6_000_000_000) + b"\x85\x81",
    "bytearray from the memo": number(6_000_000_000) + b"q\x000" + global_("builtins.bytearray") + b"h\x00\x85R",
    "bytearray of a list": global_("builtins.bytearray") + b"]" + number(5) + b"a\x85R",
    "arguments in a list": global_("builtins.bytearray") + b"]" + number(6_000_000_000) + b"aR",
    "a tensor of a size": global_("torch.FloatTensor") + number(6_000_000_000) + b"\x85R",
    "a storage of a size": global_("torch.storage.UntypedStorage") + number(6_000_000_000) + b"\x85R",
    "another encoding": global_("_codecs.encode") + text("x") + text("zlib_codec") + b"\x86R",
    "a storage longer than its record": TENSOR + b"(" + storage(1_000_000) + b"K\x00K\x01\x85K\x01\x85\x89NtR",
    "a storage of another kind": TENSOR + b"(" + storage(1, "DoubleStorage") + b"K\x00K\x01\x85K\x01\x85\x89NtR",
    "a storage without a record": storage(1).replace(text("0"), text("9")),
    "a storage of no kind": storage(1, "NoStorage"),
    "a quantised tensor": global_("torch._utils._rebuild_qtensor") + b"(" + storage(1) + b"K\x00"
    + number(6_000_000_000) + b"\x85K\x01\x85)\x89NtR",
    "a tuple that doubles": laughs(200),
    "a tuple that doubles, as a key": b"}" + laughs(200) + b"Ns",
    "no stack": b"R",
    "no mark": b"t",
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_pickles_that_ask_for_more_than_they_hold_are_refused(name: str) -> None:
    data = torch_file(b"\x80\x02" + PICKLES[name] + b".", **{"0": bytes(4)})
    with bounded(), pytest.raises(HpdcpError, match="'k'"):
        decode(data, key="k")


def test_a_packed_record_is_refused() -> None:
    packed = torch_file(b"\x80\x02N.", compress=zipfile.ZIP_DEFLATED, **{"0": bytes(256 << 20)})
    assert len(packed) < 1 << 20
    with bounded(nbytes=128 << 20), pytest.raises(CorruptCheckpointError, match="compressed"):
        decode(packed, key="k")


def test_records_that_lie_in_one_another_are_refused() -> None:
    plain = io.BytesIO(torch_file(b"\x80\x02N.", **{"0": bytes(1 << 20)}))
    with zipfile.ZipFile(plain, "a") as file:
        first = file.getinfo("archive/data/0")
        for copy in range(1, 400):
            again = zipfile.ZipInfo(f"archive/data/{copy}")
            for slot in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(again, slot, getattr(first, slot))
            file.filelist.append(again)
            file.NameToInfo[again.filename] = again
        file._didModify = True  # type: ignore[attr-defined]
    with bounded(), pytest.raises(CorruptCheckpointError, match="more room than the file"):
        decode(plain.getvalue(), key="k")


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        [torch.eye(3).to_sparse(), bytearray(b"abc"), b"\x00\xff" * 300, {1, 2}, 2**70, "text", 1 + 2j],
        {"deep": [torch.ones(2, 2).to_sparse()] * 100},
    ],
    ids=["sparse", "many kinds", "shared"],
)
def test_what_torch_saves_is_read(value: object) -> None:
    data = encode(value, key="k")
    assert data.pickled
    assert repr(decode(data.data, key="k")) == repr(value)


def test_a_fraction_comes_back_however_long_it_may_be() -> None:
    value = Fraction(3**100_000, 2**100_000)
    assert decode(encode(value, key="k").data, key="k") == value


def test_a_buffer_comes_back_as_one_where_it_was() -> None:
    buffer = io.BytesIO()
    buffer.write(b"written" * 100)
    buffer.seek(3)
    stored = encode({"losses": buffer}, key="k")
    assert not stored.pickled
    found = decode(stored.data, key="k")["losses"]
    assert type(found) is io.BytesIO and found.tell() == 3 and found.getvalue() == b"written" * 100
    buffer.close()
    with pytest.raises(UnsupportedTypeError, match="closed"):
        encode(buffer, key="k")
