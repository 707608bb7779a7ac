"""What a file of `torch.save` would allocate when it is read without running code, told before it is read.

`torch.load(weights_only=True)` calls only functions that it knows, but with whatever arguments the file gives:
`bytearray(6_000_000_000)` is one of them, a storage of more bytes than its record has is another, and a record may be
packed 1,000 to 1. So the pickle's instructions are walked first, over stand-ins for the values, and none is followed.
"""

from __future__ import annotations

import os
import pickletools
import zipfile
from dataclasses import dataclass, field
from io import BytesIO
from typing import IO, Any, Final

import torch


class UnboundedPickleError(ValueError):
    """Reading the file would take more than the file's size lets expect."""


_MOST_EXPANDED: Final = 10_000_000
"""Most values that there may be if each list that is held twice counted twice: to compare or print them visits each."""

_ENCODINGS: Final = ("latin1", "latin-1")
"""How pickle writes bytes; others may do more than turn each character into a byte."""


@dataclass(slots=True, eq=False)
class _Node:
    """A stand-in for a value."""

    kind: str
    """`int`, `str`, `bytes`, `tuple`, `name` (of a function or a class), or `other`."""
    value: Any = None
    """Of an `int`, a `str` or a `name`."""
    items: list[_Node] = field(default_factory=list)
    """What it holds, or was made of."""


def repacked(data: bytes | bytearray | memoryview) -> BytesIO:
    """The file of `torch.save` once more, with records that are as long as they say; else UnboundedPickleError.

    Written anew, since what one reader of zip files takes for a file's list of records another may not. Other errors
    mean that the file is damaged.
    """
    out = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        _check_records(source, len(data))
        for info in source.infolist():
            target.writestr(zipfile.ZipInfo(info.filename), source.read(info))
    out.seek(0)
    return out


def check_bounds(file: IO[bytes]) -> None:
    """Raise UnboundedPickleError unless reading the file of `torch.save` takes what its size lets expect."""
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as source:
        records = _check_records(source, size)
        pickles = [name for name in records if name.partition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise UnboundedPickleError(f"it has {len(pickles)} records data.pkl, expected one")
        folder = pickles[0].partition("/")[0]
        storages = {name.removeprefix(f"{folder}/data/"): nbytes for name, nbytes in records.items()}
        with source.open(pickles[0]) as stream:
            _Walk(storages, size).walk(stream)
    file.seek(0)


def _check_records(source: zipfile.ZipFile, size: int) -> dict[str, int]:
    """The length of each record by its name."""
    records: dict[str, int] = {}
    for info in source.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise UnboundedPickleError(f"its record {info.filename!r} is compressed, which torch.save does not do")
        if info.filename in records:
            raise UnboundedPickleError(f"its record {info.filename!r} is there twice")
        records[info.filename] = info.file_size
    if sum(records.values()) > size:
        raise UnboundedPickleError("its records take more room than the file has")
    return records


class _Walk:
    """Follows what happens to the stack, as torch's own reader does, which knows these instructions and no others."""

    def __init__(self, storages: dict[str, int], size: int) -> None:
        self._storages = storages
        self._size = size
        self._stack: list[_Node] = []
        self._below: list[list[_Node]] = []
        self._memo: dict[int, _Node] = {}

    def walk(self, stream: IO[bytes]) -> None:
        keys: list[_Node] = []
        for opcode, argument, _ in pickletools.genops(stream):
            name = opcode.name
            if name in ("SETITEM", "SETITEMS"):
                pairs = self._pop_mark() if name == "SETITEMS" else self._pop(2)
                keys += pairs[::2]
                self._stack[-1].items += pairs
            else:
                self._step(name, argument)
        (root,) = self._stack or [_Node("other")]
        expanded: dict[int, int] = {}
        for node in (root, *keys):
            if _expanded(node, expanded) > _MOST_EXPANDED:
                raise UnboundedPickleError(f"it holds more than {_MOST_EXPANDED} values, most of them many times")

    def _step(self, name: str, argument: Any) -> None:
        push = self._stack.append
        if name in ("PROTO", "STOP"):
            return
        if name == "MARK":
            self._below.append(self._stack)
            self._stack = []
        elif name == "GLOBAL":
            push(_Node("name", argument.replace(" ", ".")))
        elif name in ("NEWOBJ", "REDUCE"):
            function, arguments = self._pop(2)
            self._stack.append(self._called(function, arguments))
        elif name == "BUILD":
            (state,) = self._pop(1)
            self._stack[-1].items.append(state)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_mark() if name == "APPENDS" else self._pop(1)
            self._stack[-1].items += items
        elif name == "BINPERSID":
            push(self._storage(*self._pop(1)))
        elif name in ("BINGET", "LONG_BINGET"):
            push(self._memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._stack[-1]
        elif name == "TUPLE":
            items = self._pop_mark()
            self._stack.append(_Node("tuple", items=items))
        elif name in _TUPLES:
            items = self._pop(_TUPLES[name])
            self._stack.append(_Node("tuple", items=items))
        elif name in _PLAIN:
            kind = _PLAIN[name]
            push(_Node(kind, argument if kind in ("int", "str") else None))
        else:
            raise UnboundedPickleError(f"it has the instruction {name}, which torch.load does not know")

    def _pop(self, count: int) -> list[_Node]:
        if len(self._stack) < count:
            raise ValueError("its instructions take more from the stack than is there")
        items = self._stack[-count:] if count else []
        del self._stack[len(self._stack) - count :]
        return items

    def _pop_mark(self) -> list[_Node]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _called(self, function: _Node, arguments: _Node) -> _Node:
        if function.kind != "name" or arguments.kind != "tuple":
            raise UnboundedPickleError("it calls something with arguments that cannot be told before")
        given, name = arguments.items, function.value
        if name == "_codecs.encode":
            if [each.kind for each in given] != ["str", "str"] or given[1].value not in _ENCODINGS:
                raise UnboundedPickleError("it encodes text in a way that pickle does not")
            return _Node("bytes")
        if name in ("builtins.bytearray", "__builtin__.bytearray"):
            if [each.kind for each in given] not in ([], ["bytes"]):
                raise UnboundedPickleError("it makes a bytearray of something else than bytes")
        elif name == "torch._utils._rebuild_qtensor":
            _check_count(given[2] if len(given) > 2 else _Node("other"), 4 * self._size)
        elif name.startswith("torch.") and name.endswith(("Tensor", "Storage")) and given:
            raise UnboundedPickleError(f"it makes a {name} of a size instead of data")
        return _Node("other", items=list(given))

    def _storage(self, pid: _Node) -> _Node:
        items = pid.items if pid.kind == "tuple" else []
        if [each.kind for each in items] != ["str", "name", "str", "str", "int"]:
            raise UnboundedPickleError("it names a storage in a way that torch.save does not")
        key, count = items[2].value, items[4].value
        itemsize = _itemsize(items[1].value)
        if key not in self._storages or not 0 <= count * itemsize <= self._storages[key]:
            raise UnboundedPickleError(f"its storage {key!r} has fewer bytes than its {count} elements take")
        return _Node("other")


def _itemsize(name: str) -> int:
    """Bytes of one element of the class of storages."""
    if name == "torch.storage.UntypedStorage":
        return 1
    try:
        named = torch.serialization.StorageType(name.rpartition(".")[2])  # type: ignore[no-untyped-call]
        dtype: torch.dtype = named.dtype
    except KeyError:
        raise UnboundedPickleError(f"it names a storage of {name!r}, which torch does not have") from None
    return dtype.itemsize


def _check_count(shape: _Node, most: int) -> None:
    """Raise unless the shape is one of integers, with at most so many elements."""
    count = 1
    for size in shape.items:
        count *= size.value if size.kind == "int" else most + 1
    if shape.kind != "tuple" or not 0 <= count <= most:
        raise UnboundedPickleError("it makes a tensor of more elements than it has bytes for")


def _expanded(root: _Node, known: dict[int, int]) -> int:
    """Values below `root`, shared ones counted as often as they are held; what contains itself counts once."""
    stack = [(root, False)]
    while stack:
        node, visited = stack.pop()
        if visited:
            known[id(node)] = min(1 + sum(known[id(item)] for item in node.items), _MOST_EXPANDED + 1)
        elif id(node) not in known:
            known[id(node)] = 1
            stack.append((node, True))
            stack.extend((item, False) for item in node.items)
    return known[id(root)]


_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PLAIN: Final = {
    **dict.fromkeys(("NONE", "NEWFALSE", "NEWTRUE", "BINFLOAT", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), "other"),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), "int"),
    "BINUNICODE": "str",
    "SHORT_BINSTRING": "bytes",
    "EMPTY_TUPLE": "tuple",
}
