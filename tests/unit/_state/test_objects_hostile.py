"""Bytes that are damaged or written to harm: named, refused, and never run."""

from __future__ import annotations

import enum
import pickle
import sys
import types
import warnings
from collections import OrderedDict, deque
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from hpdcp._base.errors import CorruptCheckpointError, LoadMismatchError, UnsafePickleError
from hpdcp._state.objects import PickledObjectWarning, decode, encode


@dataclass
class Config:
    lr: float


def torch_bytes(value: object) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_a_pickle_that_a_default_load_refuses_is_announced_at_save_and_refused_at_load() -> None:
    with pytest.warns(PickledObjectWarning, match=r"'trainer\.config'.*Config.*allow_pickle"):
        stored = encode({"config": Config(0.1)}, key="trainer.config")
    assert stored.pickled
    with pytest.raises(UnsafePickleError, match=r"'trainer\.config'.*Config.*FileSystemReader\(allow_pickle=True\)"):
        decode(stored.data, key="trainer.config")
    assert decode(stored.data, key="trainer.config", allow_pickle=True) == {"config": Config(0.1)}


def test_a_pickle_that_a_default_load_reads_is_not_announced() -> None:
    value = torch.eye(3).to_sparse()
    stored = encode(deque([value])[0], key="k")
    assert stored.pickled
    assert torch.equal(decode(stored.data, key="k").to_dense(), torch.eye(3))


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    data = torch_bytes({"a": [Bomb(tmp_path / "ran")]})
    with pytest.raises(UnsafePickleError, match="'k'"):
        decode(data, key="k")
    for blob in (pickle.dumps(Bomb(tmp_path / "ran")), pickle.dumps(Bomb(tmp_path / "ran"), protocol=0)):
        with pytest.raises(CorruptCheckpointError, match="'k'"):
            decode(blob, key="k")
    assert not (tmp_path / "ran").exists()


def test_a_class_whose_module_is_gone_is_said_so_when_pickles_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("hpdcp_gone")
    kind = type("Gone", (), {"__module__": "hpdcp_gone"})
    module.Gone = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hpdcp_gone", module)
    with pytest.warns(PickledObjectWarning):
        stored = encode(kind(), key="k")
    monkeypatch.delitem(sys.modules, "hpdcp_gone")
    with pytest.raises(LoadMismatchError, match=r"'k'.*hpdcp_gone"):
        decode(stored.data, key="k", allow_pickle=True)


@pytest.fixture
def unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that can be imported, is not, and leaves a file behind when it is."""
    (tmp_path / "hpdcp_lazy.py").write_text(
        "import enum, pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Mode(enum.Enum):\n    ON = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hpdcp_lazy", raising=False)
    return tmp_path / "ran"


def test_no_module_is_imported_on_a_checkpoints_word(unloaded: Path) -> None:
    data = b'{"$enum":["hpdcp_lazy:Mode","ON"]}'
    with pytest.raises(UnsafePickleError, match=r"'k' needs hpdcp_lazy:Mode, .*import hpdcp_lazy before loading"):
        decode(data, key="k")
    assert not unloaded.exists()
    assert decode(data, key="k", allow_pickle=True).name == "ON"
    assert unloaded.exists()


def test_a_module_that_makes_its_attributes_on_demand_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    module = types.ModuleType("hpdcp_dynamic")
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "hpdcp_dynamic", module)
    with pytest.raises(UnsafePickleError, match="does not have"):
        decode(b'{"$enum":["hpdcp_dynamic:Mode","ON"]}', key="k")
    assert asked == []


class Mode(enum.Enum):
    OFF = 0


@pytest.mark.parametrize(
    "text",
    [
        '{"$enum":["os:system","x"]}',
        '{"$enum":["builtins:int","real"]}',
        f'{{"$enum":["{Mode.__module__}:Mode","__class__"]}}',
        '{"$namedtuple":["subprocess:Popen",["args"],["true"]]}',
        '{"$namedtuple":["builtins:tuple",[],[]]}',
    ],
)
def test_only_enum_members_and_named_tuples_are_looked_up(text: str) -> None:
    with pytest.raises(UnsafePickleError, match="'k'"):
        decode(text.encode(), key="k")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"\xff\xfe",
        b"{",
        b"nan",
        b"NaN",
        b"Infinity",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"$tuple":1}',
        b'{"$nothing":[]}',
        b'{"$set":[[]]}',
        b'{"$dict":[[{},1]]}',
        b'{"$dict":[[1]]}',
        b'{"$bytes":["?"]}',
        b'{"$bytes":[0]}',
        b'{"$bytearray":[99999999999]}',
        b'{"$int":["zz"]}',
        b'{"$float":["00"]}',
        b'{"$datetime":[2024,13,1,0,0,0,0,null,0]}',
        b'{"$Fraction":[1,0]}',
        b'{"$Decimal":["one"]}',
        b'{"$torch.dtype":["save"]}',
        b'{"$torch.device":["nonsense"]}',
        b'{"$scalar":["|O","AAAAAAAAAAA="]}',
        b'{"$scalar":["<f8","AAAA"]}',
        b'{"$array":["",  "<f4", [-1], "C"]}',
        b'{"$array":["", "|V0", [4611686018427387904], "C"]}',
        b'{"$array":["", "<f8", [0, 4611686018427387904], "C"]}',
        b'{"$tensor":["", "float32", [1000000000000], false, false]}',
        b'{"$tensor":["AA==", "uint8", [1], true, true]}',
        b'{"$OrderedDict":[[],{"items":1}]}',
        b'{"$defaultdict":["eval",[]]}',
        b"PK\x03\x04",
        b"\xf8\x00\x00\x00\x00\x00\x00\x00" + b"{}".ljust(248),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_nonsense_is_reported_as_damage_with_its_key(data: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"'the\.key'"):
        decode(data, key="the.key")


SAMPLES = [
    encode(value, key="k").data
    for value in (
        {"a": [1, -0.5, "x", None], 3: (b"\x00", {1, 2}), "when": range(3)},
        [np.arange(4, dtype=">i2"), np.zeros(2, [("a", "i4"), ("b", "S3")]), OrderedDict(a=deque([torch.ones(3)]))],
    )
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(SAMPLES),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
)
def test_damaged_data_reads_as_a_value_or_is_reported_as_damage(
    data: bytes, changes: list[tuple[float, int]], cut: bool
) -> None:
    damaged = bytearray(data)
    for where, byte in changes:
        damaged[int(where * (len(damaged) - 1))] = byte
    if cut:
        del damaged[int(changes[0][0] * len(damaged)) :]
    with suppress(CorruptCheckpointError):
        decode(bytes(damaged), key="k")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_random_bytes_read_as_a_value_or_are_reported_as_damage(data: bytes) -> None:
    with suppress(CorruptCheckpointError):
        decode(data, key="k")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(0, 255))
def test_a_damaged_pickle_is_damage_or_unsafe_and_nothing_else(where: int, byte: int) -> None:
    damaged = bytearray(torch_bytes({"a": [1, 2.5, "text"], "t": torch.ones(2)}))
    damaged[where % len(damaged)] = byte
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with suppress(CorruptCheckpointError, UnsafePickleError):
            decode(bytes(damaged), key="k")
