"""Pickles that torch wrote, read as inert records: no name in one is imported, nothing it asks for is called.

An interpreter of the instructions that Python's pickler writes from protocol 2 on, and of no others. It stands in for
`pickle.Unpickler` with an allow-list, which bounds neither time nor memory: a memo's number alone decides how much it
allocates (`LONG_BINPUT` of 2^31 takes 32 GiB), and hashing tuples that hold one another twice, or to a great depth,
takes for ever or ends the process. Here each instruction takes as long as its own bytes, or as the values that it
takes from a bounded stack, and allocates in proportion. Whoever reads the result has to bound what it visits: values
may be shared, or hold themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

MOST_STACK: Final = 1 << 14
"""Values on the stack at once: a pickler hands over 1000 at a time."""
MOST_MARKS: Final = 64
"""How deep what torch records is nested, with room to spare."""
MOST_TEXT: Final = 1 << 20
"""Characters of one text: the longest are names of tensors."""
MOST_INTEGER_BYTES: Final = 8
_LEAST_BYTES: Final = 4
"""Of a pickle for each container in it: torch's have 8 and more, and a container takes 50 to 150 bytes of memory."""


class PickleError(ValueError):
    """It is no pickle that torch wrote, or a damaged one."""


class ForbiddenNameError(PickleError):
    """It names something that what is read here never needs."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name!r}")
        self.name = name


class Name:
    """A function or a class that a pickle names; only ever a text here."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Record:
    """What a pickle would have made of a name: an object of that class, or the answer of that function."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None
        """What the pickle gives it; mostly a dict of its fields."""


Calls = Mapping[str, Callable[[tuple[Any, ...]], Any]]
"""For some of the names, what a call of it is taken as in place of a `Record`; it may raise PickleError."""


@dataclass(frozen=True)
class Vocabulary:
    """What a pickle may name."""

    known: Callable[[str, str], str | None]
    """(module, name) → what it is called here; None: nothing of the kind is needed."""
    calls: Calls
    persistent: Callable[[Any], Any] | None = None
    """What a reference to something outside of the pickle is taken as; None: there are none."""


def read_pickle(data: bytes | memoryview, vocabulary: Vocabulary) -> tuple[Any, int]:
    """The value at the start of `data`, and where its pickle ends.

    Raises:
        ForbiddenNameError: it names what the vocabulary does not know.
        PickleError: anything else.
    """
    machine = _Machine(bytes(data), vocabulary)
    try:
        return machine.run(), machine.at
    except PickleError:
        raise
    except (IndexError, KeyError, struct.error):
        raise PickleError("it ends too early, or its instructions do not fit one another") from None
    except UnicodeDecodeError:
        raise PickleError("it has a text that is not UTF-8") from None


class _Machine:
    def __init__(self, data: bytes, vocabulary: Vocabulary) -> None:
        self._data = data
        self._vocabulary = vocabulary
        self.at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, stack, memo, steps = self._data, self._stack, self._memo, _STEPS
        push = stack.append
        left = 1000 + len(data) // _LEAST_BYTES
        at = 0
        while True:
            code = data[at]
            at += 1
            # Four of five instructions are one of these, which take half of the time here that a call takes.
            if code == _GET:
                push(memo[data[at]])
                at += 1
            elif code == _MEMOIZE:
                memo[len(memo)] = stack[-1]
            elif code == _LONG_GET:
                push(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == _SMALL:
                push(data[at])
                at += 1
            elif code == _NO_ITEMS:
                push(())
            elif code == _STOP:
                self.at = at
                return self._only_value()
            else:
                step = steps.get(code)
                if step is None:
                    raise PickleError(
                        f"it has the instruction {bytes([code])!r}, which is not needed to describe tensors"
                    )
                self.at = at
                step(self)
                at = self.at
                left -= code in _CONTAINERS
                if left < 0:
                    raise PickleError("it makes more lists, dicts and tuples than its length lets expect")
            if len(stack) > MOST_STACK:
                raise PickleError(f"it puts more than {MOST_STACK} values on its stack")

    def _only_value(self) -> Any:
        if len(self._stack) != 1:
            raise PickleError("it does not end with one value")
        return self._stack[0]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = self._data[self.at : self.at + count]
        if len(found) < count:
            raise IndexError
        self.at += count
        return found

    def number(self, count: int) -> int:
        """The number that the next bytes are."""
        return int.from_bytes(self.take(count), "little")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, length_bytes: int) -> None:
        length = self.number(length_bytes)
        if length > MOST_TEXT:
            raise PickleError(f"it has a text of {length} bytes")
        self._stack.append(self.take(length).decode("utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self._data.find(b"\n", self.at, self.at + 1000)
        if end < 0:
            raise PickleError("it has a name without an end")
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def integer(self) -> None:
        length = self.number(1)
        if length > MOST_INTEGER_BYTES:
            raise PickleError("it has a number of more than 64 bits")
        self._stack.append(int.from_bytes(self.take(length), "little", signed=True))

    def signed(self) -> None:
        self._stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def binary_float(self) -> None:
        self._stack.append(struct.unpack(">d", self.take(8))[0])

    def mark(self) -> None:
        if len(self._marks) >= MOST_MARKS:
            raise PickleError(f"it is nested more than {MOST_MARKS} levels deep")
        self._marks.append(len(self._stack))

    def to_mark(self) -> list[Any]:
        """The values above the last mark, which are taken from the stack."""
        start = self._marks.pop()
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def top(self, count: int) -> list[Any]:
        """The last values of the stack, which are taken from it."""
        start = len(self._stack) - count
        if start < (self._marks[-1] if self._marks else 0):
            raise IndexError
        values = self._stack[start:]
        del self._stack[start:]
        return values

    def put(self, length: int) -> None:
        self._memo[self.number(length)] = self._stack[-1]

    def named(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("it names something by no text")
        known = self._vocabulary.known(module, name)
        if known is None:
            raise ForbiddenNameError(f"{module}.{name}"[:200])
        self._stack.append(Name(known))

    def make(self) -> None:
        kind, arguments = self.top(2)
        if type(kind) is not Name or type(arguments) is not tuple:
            raise PickleError("it calls something that is no name")
        self._stack.append(Record(kind.text, arguments))

    def call(self) -> None:
        kind, arguments = self.top(2)
        if type(kind) is not Name or type(arguments) is not tuple:
            raise PickleError("it calls something that is no name")
        taken_as = self._vocabulary.calls.get(kind.text)
        self._stack.append(Record(kind.text, arguments) if taken_as is None else taken_as(arguments))

    def build(self) -> None:
        (state,) = self.top(1)
        if type(self._stack[-1]) is not Record:
            raise PickleError("it gives a state to what has none")
        self._stack[-1].state = state

    def extend(self, values: Sequence[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise PickleError("it appends to what is no list")
        self._stack[-1].extend(values)

    def update(self, values: Sequence[Any]) -> None:
        if type(self._stack[-1]) is not dict or len(values) % 2:
            raise PickleError("it sets items of what is no dict")
        keys = values[::2]
        for key in keys:
            # A record is itself; of a tuple the hash would be that of all it holds.
            if type(key) not in _KEYS:
                raise PickleError(f"it has a key of type {type(key).__name__}")
        self._stack[-1].update(zip(keys, values[1::2], strict=True))

    def outside(self) -> None:
        if self._vocabulary.persistent is None:
            raise PickleError("it refers to something outside")
        self._stack.append(self._vocabulary.persistent(*self.top(1)))


_CONTAINERS: Final = frozenset(b"\x85\x86\x87t]}\x81R")
"""Instructions that make one."""
_KEYS: Final = (str, int, Record)
_GET, _LONG_GET, _MEMOIZE, _SMALL, _NO_ITEMS, _STOP = b"hj\x94K)."
_STEPS: Final[Mapping[int, Callable[[_Machine], None]]] = {
    code[0]: step
    for code, step in (
        (b"\x80", lambda m: m.take(1)),  # PROTO
        (b"\x95", lambda m: m.take(8)),  # FRAME: only says how far one could read ahead
        (b"(", _Machine.mark),
        (b"0", lambda m: m.top(1)),  # POP
        (b"N", lambda m: m.push(None)),
        (b"\x88", lambda m: m.push(True)),
        (b"\x89", lambda m: m.push(False)),
        (b"J", _Machine.signed),
        (b"M", lambda m: m.push(m.number(2))),
        (b"\x8a", _Machine.integer),
        (b"G", _Machine.binary_float),
        (b"\x8c", lambda m: m.text(1)),
        (b"X", lambda m: m.text(4)),
        (b"\x85", lambda m: m.push(tuple(m.top(1)))),
        (b"\x86", lambda m: m.push(tuple(m.top(2)))),
        (b"\x87", lambda m: m.push(tuple(m.top(3)))),
        (b"t", lambda m: m.push(tuple(m.to_mark()))),
        (b"]", lambda m: m.push([])),
        (b"}", lambda m: m.push({})),
        (b"a", lambda m: m.extend(m.top(1))),
        (b"e", lambda m: m.extend(m.to_mark())),
        (b"s", lambda m: m.update(m.top(2))),
        (b"u", lambda m: m.update(m.to_mark())),
        (b"q", lambda m: m.put(1)),
        (b"r", lambda m: m.put(4)),
        (b"c", lambda m: m.named(m.line(), m.line())),
        (b"\x93", lambda m: m.named(*m.top(2))),
        (b"\x81", _Machine.make),
        (b"R", _Machine.call),
        (b"b", _Machine.build),
        (b"Q", _Machine.outside),
    )
}
"""What each other instruction does; those that are missing no pickler of protocol 2 or later writes for plain data."""
