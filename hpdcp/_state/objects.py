"""One Python value as bytes, and back without running code.

A blob is one of three, told apart by its first byte:

    JSON          the typed JSON of `hpdcp._state._typed_json`
    0xF8          a safetensors container: that JSON in its `__metadata__`, arrays, tensors, long bytes as its entries
    "P"           what `torch.save` writes (a zip file), for every value that typed JSON does not know

Only the last can ask for code to be run when it is read, and it is refused then unless the reader allows it. What each
of them takes in memory is bounded by its own length, before anything is allocated.
"""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from io import BytesIO
from json.encoder import encode_basestring
from math import isfinite
from typing import Any, Final

import torch

from hpdcp._base.errors import (
    CorruptCheckpointError,
    HpdcpError,
    LoadMismatchError,
    UnsafePickleError,
    UnsupportedTypeError,
)
from hpdcp._format.container import TensorEntry, build_header, parse_header
from hpdcp._format.dtypes import DTYPE_BITS
from hpdcp._state._array_data import NotTypedError
from hpdcp._state._classes import MissingClassError, class_name
from hpdcp._state._pickle_bounds import UnboundedPickleError, check_bounds, repacked
from hpdcp._state._typed_json import MAX_DEPTH, Attachment, Encoder, HiddenTensorError, Json, TooDeepError, dumps
from hpdcp._state._typed_reading import loads

_TREE: Final = "hpdcp.object"
"""Name of the JSON in a container's metadata."""

_ALIGN: Final = 256
"""The header with its 8 bytes of length ends on a multiple of it, so the length's first byte is always 0xF8."""
_CONTAINER: Final = _ALIGN - 8
_PICKLE: Final = ord("P")

_SWITCH: Final = "FileSystemReader(allow_pickle=True) or the configuration's `allow_pickle`"


class PickledObjectWarning(UserWarning):
    """A value was stored in a way that a load refuses by default, because reading it may run any code."""


@dataclass(frozen=True, slots=True)
class EncodedObject:
    """One value's bytes."""

    data: bytes
    pickled: bool
    """Written by `torch.save`: equal values may then differ in their bytes (the order of a set, what shares what)."""


def encode(value: object, *, key: str, tensors: bool = True) -> EncodedObject:
    """The bytes of `value`; equal values of equal types give equal bytes in every process, unless `pickled`.

    `key` names the value in messages. `tensors`: whether there may be tensors inside; a value that ranks share must
    have none, since one rank's would stand for those of all. Warns with PickledObjectWarning, at once, when `decode`
    would refuse the result by default. Raises UnsupportedTypeError for what cannot be stored at all: nesting without
    end, objects that pickle refuses (open files, locks, lambdas), and tensors where there may be none.
    """
    # The JSON encoder takes longer to set up than these take to write.
    if isinstance(value, str) and type(value) is str and value.isascii():
        return EncodedObject(encode_basestring(value).encode("ascii"), False)
    if (type(value) is float and isfinite(value)) or (type(value) is int and -(1 << 63) < value < 1 << 63):
        return EncodedObject(repr(value).encode("ascii"), False)
    attachments: list[Attachment] = []
    try:
        tree = Encoder(attachments, tensors).encode(value)
        return EncodedObject(_pack(tree, attachments) if attachments else dumps(tree).encode("utf-8"), False)
    except NotTypedError as error:
        if not tensors and _pickles_a_tensor(value):
            raise _hidden_tensor(key, value) from None
        return _pickle(value, key, str(error))
    except HiddenTensorError:
        raise _hidden_tensor(key, value) from None
    except (TooDeepError, RecursionError) as error:
        raise UnsupportedTypeError(
            f"{key!r} is nested more than {MAX_DEPTH} levels deep, or contains itself; such a value cannot be stored. "
            "Flatten it, or break the cycle."
        ) from error


def _hidden_tensor(key: str, value: object) -> UnsupportedTypeError:
    return UnsupportedTypeError(
        f"{key!r} is a {class_name(type(value))} with a tensor inside it, which would be stored as one rank has it, "
        "whatever other ranks hold. Put the tensor into a dict, list or tuple of the state dict "
        "under a name of its own; wrap the value in PerRank where each rank is to keep its own."
    )


class _TensorFinder(pickle.Pickler):
    def persistent_id(self, value: object) -> None:
        if isinstance(value, torch.Tensor):
            raise HiddenTensorError


def _pickles_a_tensor(value: object) -> bool:
    try:
        _TensorFinder(BytesIO(), protocol=5, buffer_callback=lambda _: False).dump(value)
    except HiddenTensorError:
        return True
    except Exception:  # noqa: BLE001 - whatever cannot be pickled is refused, with its reason, where it is to be
        return False
    return False


def check_torch_file(path: str) -> None:
    """Raise ValueError where reading the file of `torch.save` without running code takes more than its size lets
    expect, or reads beyond its records; other errors mean that it is damaged."""
    with open(path, "rb") as file:
        check_bounds(file)


def is_pickled(data: bytes) -> bool:
    """Whether `data`, as `encode` gave it, went through pickle: then equal values need not have equal bytes."""
    return data[:1] == bytes([_PICKLE])


def decode(data: bytes | bytearray | memoryview, *, key: str, allow_pickle: bool = False) -> Any:
    """The value that `encode` made `data` from. Arrays and tensors are fresh copies, tensors on the CPU.

    Runs no code that `data` names, unless `allow_pickle`. `key` names the value in messages.

    Raises:
        CorruptCheckpointError: not what `encode` writes.
        UnsafePickleError: reading it needs code to be run (a pickled class, a module to be imported), and that is
            not allowed.
        LoadMismatchError: a class it needs is not what it was, or is gone.
    """
    try:
        if not len(data):
            raise ValueError("it is empty")
        if data[0] == _PICKLE:
            return _unpickle(data, key, allow_pickle)
        if data[0] != _CONTAINER:
            return loads(str(data, "utf-8"), import_classes=allow_pickle)
        return _unpack(memoryview(data), key, allow_pickle)
    except HpdcpError:
        raise
    except MissingClassError as error:
        if allow_pickle:
            raise LoadMismatchError(f"{key!r} needs {error}. Load with the code it was saved with.") from error
        raise UnsafePickleError(
            f"{key!r} needs {error}, or let the load import it: {_SWITCH}, for checkpoints you trust."
        ) from error
    except Exception as error:
        # Damaged bytes can end in any exception of any constructor; which one says nothing to the caller.
        raise CorruptCheckpointError(
            f"the stored value of {key!r} cannot be read ({type(error).__name__}: {error}): its bytes are damaged. "
            "Load an earlier checkpoint."
        ) from error


def _pack(tree: Json, attachments: list[Attachment]) -> bytes:
    # Widest first keeps every entry aligned, which readers that map the file rely on.
    order = sorted(enumerate(attachments), key=lambda numbered: -DTYPE_BITS[numbered[1].dtype_name])
    entries = [TensorEntry(str(number), each.dtype_name, each.shape, len(each.data)) for number, each in order]
    header, _ = build_header(entries, {_TREE: dumps(tree)}, align=_ALIGN)
    return b"".join([header, *(each.data for _, each in order)])


def parts_of(data: bytes) -> tuple[str, list[memoryview]]:
    """The typed JSON of what `encode` made, no pickle, and the attachments that it names by number."""
    if data[0] != _CONTAINER:
        return str(data, "utf-8"), []
    return _opened(memoryview(data), "a value")


def _opened(data: memoryview, what: str) -> tuple[str, list[memoryview]]:
    header = parse_header(data, len(data), where=what)
    found = {entry.key: data[entry.offset : entry.offset + entry.nbytes] for entry in header.entries}
    return header.metadata[_TREE], [found[str(index)] for index in range(len(found))]


def _unpack(data: memoryview, key: str, allow_pickle: bool) -> Any:
    tree, attachments = _opened(data, f"the stored value of {key!r}")
    return loads(tree, attachments, import_classes=allow_pickle)


def _pickle(value: object, key: str, kind: str) -> EncodedObject:
    buffer = BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # each class has its own way of refusing
        raise UnsupportedTypeError(
            f"{key!r} holds a {kind}, which can be stored neither as data nor as a pickle "
            f"({type(error).__name__}: {error}). Store what it is made of, or leave it out."
        ) from error
    data = buffer.getvalue()
    try:
        _unpickle(data, key, False)
    except Exception:  # noqa: BLE001 - whatever stops this load stops the user's
        warnings.warn(
            f"{key!r} holds a {kind}, so it is stored as a pickle, which a load refuses by default because reading it "
            f"can run any code. Store plain values, arrays or tensors instead, or load it with {_SWITCH}.",
            PickledObjectWarning,
            stacklevel=3,
        )
    return EncodedObject(data, True)


def _unpickle(data: bytes | bytearray | memoryview, key: str, allow_pickle: bool) -> Any:
    if not allow_pickle:
        return _unpickle_data(repacked(data), key)
    try:
        return torch.load(BytesIO(data), map_location="cpu", weights_only=False)
    except (ImportError, AttributeError) as error:
        raise LoadMismatchError(
            f"{key!r} was pickled and needs a class that is not here ({error}). Load with the code it was saved with."
        ) from error


def _unpickle_data(file: BytesIO, key: str) -> Any:
    """What can be read without running code."""
    try:
        check_bounds(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, UnboundedPickleError) as error:
        file.seek(0)
        # Walks the pickle's instructions without following them; raises on a damaged one.
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if not names and isinstance(error, UnboundedPickleError):
            raise
        wanted = ", ".join(names) if names else str(error.__cause__ or error).strip().splitlines()[0]
        raise UnsafePickleError(
            f"{key!r} is a pickle that would run code to be read ({wanted}), and pickles are not allowed. "
            f"If you trust whoever wrote this checkpoint: {_SWITCH}."
        ) from error
