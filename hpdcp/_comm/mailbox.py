"""Steps that all ranks share, over the storage they save to: no process group, no pickle.

Each message is one small file in a folder of the attempt, published in one step and checked from mark to mark.
Every rank writes its message for the coordinator and polls for the answer; polling means listing the folder and then
reading, since a network file system may go on for half a minute not seeing a name it once looked up in vain. Messages
grow with the number of ranks, not with its square.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import crc32c

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import CheckpointError, CorruptCheckpointError, KeyNotFoundError, PeerLostError, StorageError
from hpdcp._base.threads import Threads
from hpdcp._comm.exchange import COORDINATOR, FramedExchange, failure_frame
from hpdcp._format.file_names import mailbox_folder

_MARK: Final = b"hpdcpmsg"
_END: Final = b"\nend."
_HEAD: Final = struct.Struct("<8sQI")
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 1.0
_READERS: Final = 16
_CLOSING_SECONDS: Final = 30.0
"""How long the coordinator waits for the others to be done with the messages before it removes them."""
_PARTING_SECONDS: Final = 2.0
"""And how long where it has heard of one that will not come: the others have looked by then."""


class Mailbox(FramedExchange):
    """One attempt's exchange through storage.

    Args:
        attempt: agreed by all ranks beforehand; messages of other attempts are in other folders and never read.
        timeout: seconds without any new message after which the ranks still missing count as lost.
        heard: why some rank will not come any more, as is known by other ways; empty where nothing is known.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        attempt: str,
        rank: int,
        world_size: int,
        timeout: float,
        heard: Callable[[], str] = str,
    ) -> None:
        self._heard = heard
        self.rank = rank
        self.world_size = world_size
        self._backend = backend
        self._folder = mailbox_folder(attempt)
        self._timeout = timeout
        self._steps = itertools.count()
        self._step = 0
        self._asked, self._answered = "STATUS", "RESULT"

    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        self._step = next(self._steps)
        if not self.is_coordinator:
            self._post(self._key(self._asked, self.rank), payload)
            return None
        others = {rank: self._key(self._asked, rank) for rank in range(self.world_size) if rank != self.rank}
        found, lost = self._await(step, others, self._timeout, self._heard)
        # A lost rank answers too, with why: what the coordinator tells the others then ends their wait as well.
        answers = {rank: failure_frame(rank, error) for rank, error in lost.items()} | found | {self.rank: payload}
        return [answers[rank] for rank in range(self.world_size)]

    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        if parts is None:
            return self._from_coordinator(step, self._key(self._answered, self.rank))
        self._post_all({self._key(self._answered, rank): part for rank, part in enumerate(parts) if rank != self.rank})
        return parts[self.rank]

    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        key = self._key("RESULT", COORDINATOR)
        if whole is None:
            return self._from_coordinator(step, key)
        self._post(key, whole)
        return whole

    def _from_coordinator(self, step: str, key: str) -> bytes:
        found, lost = self._await(step, {COORDINATOR: key}, self._timeout, self._heard)
        if lost:
            raise lost[COORDINATOR]
        return found[COORDINATOR]

    def gather_scatter(
        self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        self._asked, self._answered = "LOCAL_PLAN", "FINAL_PLAN"
        return super().gather_scatter(step, local, combine)

    def gather_broadcast(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        self._asked, self._answered = "STORAGE_DATA", "RESULT"
        return super().gather_broadcast(step, local, combine)

    def broadcast(self, step: str, make: Callable[[], bytes]) -> bytes:
        self._step = next(self._steps)
        return super().broadcast(step, make)

    def close(self) -> None:
        """Say that this rank needs no message any more; the coordinator waits for all to say so and removes the folder.

        What cannot be removed is left to the next attempt.
        """
        heard = bool(self._heard())
        try:
            if not self.is_coordinator:
                if not heard:  # else the coordinator has it from elsewhere, and may have removed the folder
                    self._post(self._key("DONE", self.rank, last=True), b"")
                return
            others = {rank: self._key("DONE", rank, last=True) for rank in range(self.world_size) if rank != self.rank}
            seconds = min(self._timeout, _PARTING_SECONDS if heard else _CLOSING_SECONDS)
            self._await("closing the mailbox", others, seconds, heard=str)
        except (CheckpointError, StorageError):
            pass
        clear_mailbox(self._backend, self._folder)

    def _key(self, kind: str, rank: int, *, last: bool = False) -> str:
        number = "last" if last else f"{self._step:04d}"
        return f"{self._folder}/{number}.{kind}_{rank}"

    def _post(self, key: str, payload: bytes) -> None:
        head = _HEAD.pack(_MARK, len(payload), crc32c.crc32c(payload))
        self._backend.publish(key, head + payload + _END)

    def _post_all(self, messages: dict[str, bytes]) -> None:
        with Threads(_READERS, "hpdcp-mailbox") as pool:
            list(pool.map(lambda pair: self._post(*pair), messages.items()))

    def _await(
        self, step: str, keys: Mapping[int, str], timeout: float, heard: Callable[[], str]
    ) -> tuple[dict[int, bytes], dict[int, PeerLostError]]:
        """The message under each rank's key, once all are there or lost; and why the lost ones are."""
        missing = dict(keys)
        found: dict[int, bytes] = {}
        lost: dict[int, PeerLostError] = {}
        departed: set[int] = set()
        """Those that had left by the listing before."""
        last = time.monotonic()
        pauses = _pauses()
        while missing:
            reason = heard()
            there = {info.key for info in self._backend.list_keys(self._folder)}
            read = self._read_all({rank: key for rank, key in missing.items() if key in there})
            found |= read
            for rank in [rank for rank in missing if rank not in read]:
                if reason:
                    lost[rank] = PeerLostError(f"{step}: {reason}")
                elif _dead_key(self._folder, rank) in there:
                    lost[rank] = PeerLostError(f"{step}: the background worker of rank {rank} died.")
                elif rank in departed and missing[rank] not in there:
                    lost[rank] = PeerLostError(f"{step}: rank {rank} gave up. Look at its output for the error.")
            # A listing may have begun before the message came, and ended after its rank had left.
            departed = {rank for rank in missing if self._key("DONE", rank, last=True) in there}
            missing = {rank: key for rank, key in missing.items() if rank not in found and rank not in lost}
            if read:
                last, pauses = time.monotonic(), _pauses()
            elif time.monotonic() - last > timeout:
                text = (
                    f"{step}: no message for {timeout:.0f} s in {self._backend.url}/{self._folder}; still missing are "
                    f"ranks {sorted(missing)[:8]} ({len(missing)} in all). Look at their output for the first error."
                )
                return found, lost | {rank: PeerLostError(text) for rank in missing}
            if missing:
                time.sleep(next(pauses))
        return found, lost

    def _read_all(self, keys: Mapping[int, str]) -> dict[int, bytes]:
        if not keys:
            return {}
        with Threads(min(_READERS, len(keys)), "hpdcp-mailbox") as pool:
            payloads = list(pool.map(self._read, keys.values()))
        return {rank: payload for rank, payload in zip(keys, payloads, strict=True) if payload is not None}

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


def report_dead_worker(backend: Backend, attempt: str, rank: int) -> None:
    """Tell the other ranks that this rank's background worker died, so that nobody waits for it."""
    backend.prepare()
    backend.publish(_dead_key(mailbox_folder(attempt), rank), b"")


def _dead_key(folder: str, rank: int) -> str:
    return f"{folder}/DEAD_{rank}"


def is_message(backend: Backend, key: str) -> bool:
    """Whether the key's first bytes are those of a message."""
    head = bytearray(len(_MARK))
    try:
        backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
    except StorageError:
        return False
    return head == _MARK


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
