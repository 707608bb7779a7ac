"""One file of `torch.save`, read without running code, and written, on any store."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import torch

from hpdcp._base.backend import TEMPORARY_PREFIX, Backend, ByteRange
from hpdcp._base.errors import CorruptCheckpointError, InvalidArgumentError, StorageError, UnsafePickleError
from hpdcp._devices import device
from hpdcp._state.objects import check_torch_file

_BLOCK_BYTES: Final = 16 << 20
"""What is moved at a time between a store and a temporary file."""
_ALIGNMENT: Final = 64
_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"


@contextlib.contextmanager
def local_copy(backend: Backend, key: str, local_path: str | None) -> Iterator[str]:
    """The path of the file: `local_path` where it has one, else that of a temporary copy."""
    if local_path is not None:
        yield local_path
        return
    with tempfile.NamedTemporaryFile(prefix="hpdcp-") as copy:
        for block in _blocks_of(backend, key):
            copy.write(block)
        copy.flush()
        yield copy.name


def _blocks_of(backend: Backend, key: str) -> Iterator[memoryview]:
    """The key's bytes, in order; each block is good until the one after it is asked for."""
    size = backend.size(key)
    buffers = [memoryview(bytearray(min(size, _BLOCK_BYTES))) for _ in range(2)]
    for number, start in enumerate(range(0, size, _BLOCK_BYTES)):
        block = buffers[number % 2][: min(_BLOCK_BYTES, size - start)]
        backend.read_ranges(key, [ByteRange(start, len(block))], [block])
        yield block


def load_torch_file(path: str, *, shown: str) -> Mapping[Any, Any]:
    """The state dict in the file, its tensors mapped rather than read where the file's format allows.

    Raises:
        UnsafePickleError: reading it would run code.
        CorruptCheckpointError: it is no file of `torch.save`, or not a whole one.
        InvalidArgumentError: it holds something that is no state dict.
    """
    with open(path, "rb") as file:
        head = file.read(len(_ZIP))
    if head != _ZIP and head[:1] != _PICKLE:
        raise CorruptCheckpointError(f"{shown} is no whole file of torch.save: it begins with {head!r}.")
    if head == _ZIP:
        _require_bounded(path, shown)
    try:
        # What torch wrote before 1.6 is no zip and cannot be mapped.
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=head == _ZIP)
    except pickle.UnpicklingError as error:
        raise UnsafePickleError(
            f"{shown} cannot be read without running code that it names ({_named_code(path, error)}), and hpdcp runs "
            "none. If you trust it, load it yourself and save its state_dict() alone."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, ImportError) as error:
        raise CorruptCheckpointError(
            f"{shown} is no whole file of torch.save: {type(error).__name__}: {error}."
        ) from error
    if not isinstance(found, Mapping):
        raise InvalidArgumentError(
            f"{shown} holds a {type(found).__name__}; expected a state dict, as torch.save(model.state_dict(), ...) "
            "writes."
        )
    return found


def _require_bounded(path: str, shown: str) -> None:
    try:
        check_torch_file(path)
    except Exception as error:
        # torch tells of code that the file names, which is the better answer where there is any.
        with contextlib.suppress(Exception):
            if torch.serialization.get_unsafe_globals_in_checkpoint(path):
                return
        raise CorruptCheckpointError(
            f"{shown} is no whole file of torch.save: {type(error).__name__}: {error}."
        ) from error


def _named_code(path: str, error: pickle.UnpicklingError) -> str:
    """What the file asks for, from its instructions, none of which are followed."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # noqa: BLE001  # of files of an old torch it knows nothing
        names = []
    return ", ".join(names) or str(error.__cause__ or error).strip().splitlines()[0]


def save_torch_file(value: Any, path: str, on_bytes: Callable[[int], None] = lambda _: None) -> int:
    """`torch.save(value)` as a file of this host, durable and in one step; how many bytes it has.

    `on_bytes` is told of each so many bytes that were written.
    """
    folder, name = os.path.split(path)
    os.makedirs(folder, exist_ok=True)
    temporary = os.path.join(folder, TEMPORARY_PREFIX + secrets.token_hex(8))
    try:
        # By an open file: by name, torch refuses one that begins with a dot.
        with _CountingFile(temporary, on_bytes) as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        # torch's own writer reports a full disk as a RuntimeError.
        raise StorageError(f"cannot write {name!r} in {folder}: {error}.") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size


class _CountingFile(io.BufferedWriter):
    """A new file that tells how much is written."""

    def __init__(self, path: str, on_bytes: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(path, "x"))
        self._on_bytes = on_bytes

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._on_bytes(written)
        return written


def upload(path: str, backend: Backend, key: str) -> None:
    """Store the file of this host under the key."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        # Fresh memory for each: a store may hold on to many of them until the upload ends.
        blocks = (memoryview(file.read(_BLOCK_BYTES)) for _ in range(0, size, _BLOCK_BYTES))
        backend.write(key, blocks, size=size, exclusive=False)


class ScratchMemory:
    """Memory for tensors in a temporary file: the system writes it to disk where it would else run out of memory.

    Args:
        nbytes: room for all that will be allocated; nothing is made before the first is.
        folder: where the file is made; None: where temporary files go.
    """

    def __init__(self, nbytes: int, folder: str | None = None) -> None:
        self._nbytes = nbytes
        self._folder = folder
        self._used = 0

    @classmethod
    def for_tensors(cls, sizes: Iterable[int], folder: str | None = None) -> ScratchMemory:
        """Room for tensors of so many bytes each."""
        return cls(sum(_rounded(nbytes) for nbytes in sizes), folder)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of a part of the memory; each is rounded up to `_ALIGNMENT` bytes."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        if nbytes == 0:
            return device.empty_on_host(shape, dtype)
        start = self._used
        self._used += _rounded(nbytes)
        return device.tensor_over(self._whole[start : start + nbytes]).view(dtype).view(tuple(shape))

    @cached_property
    def _whole(self) -> memoryview:
        with tempfile.TemporaryFile(prefix=TEMPORARY_PREFIX, dir=self._folder) as file:
            try:
                os.truncate(file.fileno(), self._nbytes)
                return memoryview(mmap.mmap(file.fileno(), self._nbytes))
            except OSError as error:
                raise StorageError(f"cannot make a temporary file of {self._nbytes} bytes: {error}.") from error


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
