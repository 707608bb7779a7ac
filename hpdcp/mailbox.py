"""Ranks that exchange through the storage they save to: no process group, no pickle.

Each message is one small file under a folder of the attempt, published in one step and checked from mark to mark.
Every rank leaves its message for the coordinator and looks for the answer; looking means listing the folder and then
reading, since a network file system may go on for half a minute not seeing a name it once looked up in vain. Messages
grow with the number of ranks, not with its square.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import crc32c

from hpdcp.backend import Backend
from hpdcp.collectives import COORDINATOR, FramedExchange
from hpdcp.errors import CheckpointError, CorruptCheckpointError, KeyNotFoundError, PeerLostError, StorageError

FOLDER_PREFIX: Final = ".mailbox-"
_MARK: Final = b"hpdcpmsg"
_END: Final = b"\nend."
_HEAD: Final = struct.Struct("<8sQI")
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 1.0
_READERS: Final = 16


def mailbox_folder(attempt: str) -> str:
    """Where the messages of an attempt lie."""
    return FOLDER_PREFIX + attempt


class Mailbox(FramedExchange):
    """One attempt's exchange through storage.

    Args:
        attempt: agreed by all ranks beforehand; messages of other attempts are in other folders and never read.
        deadline: seconds without any new message after which the ranks still missing are given up.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        attempt: str,
        rank: int,
        world_size: int,
        deadline: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._backend = backend
        self._folder = mailbox_folder(attempt)
        self._deadline = deadline
        self._steps = itertools.count()
        self._step = 0
        self._asked, self._answered = "STATUS", "RESULT"

    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        self._step = next(self._steps)
        if not self.is_coordinator:
            self._post(self._key(self._asked, self.rank), payload)
            return None
        others = [self._key(self._asked, rank) for rank in range(self.world_size) if rank != self.rank]
        found = self._await(step, others)
        answers = [found[key] for key in others]
        answers.insert(self.rank, payload)
        return answers

    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        if parts is None:
            key = self._key(self._answered, self.rank)
            return self._await(step, [key])[key]
        self._post_all({self._key(self._answered, rank): part for rank, part in enumerate(parts) if rank != self.rank})
        return parts[self.rank]

    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        key = self._key("RESULT", COORDINATOR)
        if whole is None:
            return self._await(step, [key])[key]
        self._post(key, whole)
        return whole

    def plan(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        self._asked, self._answered = "LOCAL_PLAN", "FINAL_PLAN"
        return super().plan(step, local, combine)

    def conclude(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        self._asked, self._answered = "STORAGE_DATA", "RESULT"
        return super().conclude(step, local, combine)

    def announce(self, step: str, make: Callable[[], bytes]) -> bytes:
        self._step = next(self._steps)
        return super().announce(step, make)

    def close(self) -> None:
        """Leave word that this rank needs no message any more; the coordinator waits for all and clears up.

        What cannot be removed is left to the next attempt on the folder.
        """
        try:
            if not self.is_coordinator:
                self._post(self._key("DONE", self.rank, last=True), b"")
                return
            others = [self._key("DONE", rank, last=True) for rank in range(self.world_size) if rank != self.rank]
            self._await("closing the mailbox", others, deadline=min(self._deadline, 30.0))
        except (PeerLostError, CheckpointError, StorageError):
            pass
        clear_mailbox(self._backend, self._folder)

    def _key(self, kind: str, rank: int, *, last: bool = False) -> str:
        number = "last" if last else f"{self._step:04d}"
        return f"{self._folder}/{number}.{kind}_{rank}"

    def _post(self, key: str, payload: bytes) -> None:
        head = _HEAD.pack(_MARK, len(payload), crc32c.crc32c(payload))
        self._backend.publish(key, head + payload + _END)

    def _post_all(self, messages: dict[str, bytes]) -> None:
        with ThreadPoolExecutor(_READERS, "hpdcp-mailbox") as pool:
            list(pool.map(lambda pair: self._post(*pair), messages.items()))

    def _await(self, step: str, keys: Sequence[str], *, deadline: float | None = None) -> dict[str, bytes]:
        limit = self._deadline if deadline is None else deadline
        missing = dict.fromkeys(keys)
        found: dict[str, bytes] = {}
        last = time.monotonic()
        pauses = _pauses()
        while missing:
            keys_there = [info.key for info in self._backend.list_keys(self._folder)]
            self._heed_deaths(step, keys_there)
            there = [key for key in keys_there if key in missing]
            read = self._read_all(there)
            for key, payload in read.items():
                found[key] = payload
                del missing[key]
            if read:
                last, pauses = time.monotonic(), _pauses()
            elif time.monotonic() - last > limit:
                raise PeerLostError(
                    f"{step}: no message for {limit:.0f} s in {self._backend.url}/{self._folder}; still missing are "
                    f"{[key.rpartition('/')[2] for key in list(missing)[:8]]} ({len(missing)} in all). Look at those "
                    "ranks' output for the first error."
                )
            if missing:
                time.sleep(next(pauses))
        return found

    def _heed_deaths(self, step: str, keys: Sequence[str]) -> None:
        dead = [key.rpartition("_")[2] for key in keys if key.startswith(_death_key(self._folder, ""))]
        if dead:
            raise PeerLostError(f"{step}: the background worker of rank {', '.join(sorted(dead, key=int))} died.")

    def _read_all(self, keys: Sequence[str]) -> dict[str, bytes]:
        if not keys:
            return {}
        with ThreadPoolExecutor(min(_READERS, len(keys)), "hpdcp-mailbox") as pool:
            payloads = list(pool.map(self._read, keys))
        return {key: payload for key, payload in zip(keys, payloads, strict=True) if payload is not None}

    def _read(self, key: str) -> bytes | None:
        """The message; None where it is not all there yet."""
        try:
            data = self._backend.read(key)
        except KeyNotFoundError:
            return None
        if len(data) < _HEAD.size + len(_END) or not data.endswith(_END):
            return None
        mark, length, checksum = _HEAD.unpack_from(data)
        payload = data[_HEAD.size : -len(_END)]
        if mark != _MARK or len(payload) != length or crc32c.crc32c(payload) != checksum:
            raise CorruptCheckpointError(f"{key!r} in {self._backend.url} is no message of this hpdcp, or is damaged.")
        return payload


def tell_of_death(backend: Backend, attempt: str, rank: int) -> None:
    """Let the others know that this rank's worker is no more, so that nobody waits for it."""
    backend.publish(_death_key(mailbox_folder(attempt), str(rank)), b"")


def _death_key(folder: str, rank: str) -> str:
    return f"{folder}/DEAD_{rank}"


def clear_mailbox(backend: Backend, folder: str) -> None:
    """Remove an attempt's messages; what cannot be removed now is left."""
    try:
        backend.delete([info.key for info in backend.list_keys(folder)])
    except (CheckpointError, StorageError):
        return


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(_LONGEST_PAUSE, pause * 1.5)
