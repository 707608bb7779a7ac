"""Steps that all ranks share: everybody succeeds, or everybody raises the same error.

A step is a function that each rank runs on its own and, for some, one that the coordinator runs over all answers.
Whatever either raises is caught, travels as text, and is raised on every rank; no step leaves a rank waiting for
one that failed. Nothing that can raise may run between two steps outside of one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hpdcp.errors import HpdcpError, PeerLostError, RankFailedError, rebuild

T = TypeVar("T")

COORDINATOR: Final = 0
_PIECE_BYTES: Final = 256 << 20
"""Longest single message; gloo's own limit is below 2 GiB."""
_ALL_RANKS: Final = -1
"""Stands for what the coordinator does on behalf of all."""
_SMALL_BYTES: Final = 64 << 10
"""Up to here the coordinator sends an answer to each rank, which reaches all that live however many have died; a larger
one is broadcast, which does not."""
_LARGE: Final = b"*"
_MOST_CAUSES: Final = 8
"""Ranks whose messages are spelled out when many fail."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a rank could not do its part of a step."""

    rank: int
    lineage: tuple[str, ...]
    """The error's class name and its bases' names, closest first."""
    message: str
    trace: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failed:
        lineage = tuple(kind.__name__ for kind in type(error).__mro__)
        message = str(error) if isinstance(error, HpdcpError) else f"{type(error).__name__}: {error}"
        return cls(rank, lineage, message, "".join(traceback.format_exception(error)))

    def to_json(self) -> list[object]:
        return [self.rank, list(self.lineage), self.message, self.trace]

    @classmethod
    def from_json(cls, fields: Sequence[object]) -> Failed:
        rank, lineage, message, trace = fields
        assert isinstance(rank, int) and isinstance(lineage, list)
        return cls(rank, tuple(map(str, lineage)), str(message), str(trace))


class Exchange(ABC):
    """One interface over a process group, a single rank, and ranks that do not talk to one another."""

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits for all."""
        return self.rank == COORDINATOR

    @abstractmethod
    def plan(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        """Every rank's `local()` goes to the coordinator, `combine` answers them all, each rank gets its own part."""

    @abstractmethod
    def conclude(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Every rank's `local()` goes to the coordinator; what `combine` makes of them goes to every rank."""

    @abstractmethod
    def announce(self, step: str, make: Callable[[], bytes]) -> bytes:
        """What the coordinator's `make()` returns, on every rank."""

    def agree(self, step: str, local: Callable[[], T]) -> T:
        """Run `local()` on every rank; return its value here once all ranks have succeeded."""
        kept: list[T] = []

        def run() -> bytes:
            kept.append(local())
            return b""

        self.conclude(step, run, lambda _: b"")
        return kept[0]

    def vote(self, step: str, count: int, local: Callable[[], Sequence[int]]) -> tuple[list[int], list[int]]:
        """The least and the greatest of each of the `count` numbers that ranks' `local()` return, on every rank.

        Numbers are at least 0 and below 2**63.
        """

        def combine(answers: list[bytes]) -> bytes:
            votes = np.stack([np.frombuffer(answer, dtype=np.int64) for answer in answers])
            return np.concatenate([votes.min(axis=0), votes.max(axis=0)]).tobytes()

        answer = self.conclude(step, lambda: np.array(local(), dtype=np.int64).tobytes(), combine)
        both: list[int] = np.frombuffer(answer, dtype=np.int64).tolist()
        return both[:count], both[count:]


class Alone(Exchange):
    """A rank that neither asks nor tells anyone: the only one, or one of many without collectives."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def is_coordinator(self) -> bool:
        return True

    def plan(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        return combine([local()])[0]

    def conclude(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        return combine([local()])

    def announce(self, step: str, make: Callable[[], bytes]) -> bytes:
        return make()


class FramedExchange(Exchange):
    """An exchange made of three ways to move bytes; what moves says whether it is an answer or a failure."""

    @abstractmethod
    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload in order of rank, on the coordinator; None elsewhere."""

    @abstractmethod
    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        """This rank's part of what the coordinator passes."""

    @abstractmethod
    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        """What the coordinator passes."""

    def plan(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]) -> bytes:
        answers = self._gather(step, _attempt(self.rank, local))
        return self._open(step, self._scatter(step, None if answers is None else self._combine(answers, combine)))

    def conclude(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        answers = self._gather(step, _attempt(self.rank, local))
        whole = None if answers is None else self._combine(answers, lambda parts: [combine(parts)])[0]
        return self._open(step, self._broadcast(step, whole))

    def announce(self, step: str, make: Callable[[], bytes]) -> bytes:
        return self._open(step, self._broadcast(step, _attempt(self.rank, make) if self.is_coordinator else None))

    def _combine(self, answers: list[bytes], combine: Callable[[list[bytes]], Sequence[bytes]]) -> list[bytes]:
        """The coordinator's framed answers, one for each rank; every one a failure if any rank failed."""
        failed = [cause for answer in answers for cause in _failures(answer)]
        if not failed:
            try:
                return [b"+" + part for part in combine([answer[1:] for answer in answers])]
            except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
                failed = [Failed.of(_ALL_RANKS, error)]
        return [_frame(failed)] * len(answers)

    def _open(self, step: str, answer: bytes) -> bytes:
        failed = _failures(answer)
        if failed:
            raise joint_error(step, failed, self.world_size)
        return answer[1:]


class ProcessGroupExchange(FramedExchange):
    """Ranks of a process group; plans go to the coordinator and back point to point, never to everybody."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        """Carries host tensors between all ranks."""
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def vote(self, step: str, count: int, local: Callable[[], Sequence[int]]) -> tuple[list[int], list[int]]:
        failure: Exception | None = None
        # One message for all: the greatest of a number is the least of its negative, and the first says who is well.
        votes = torch.zeros(1 + 2 * count, dtype=torch.int64)
        try:
            mine = local()
            votes = torch.tensor([1, *mine, *(-number for number in mine)], dtype=torch.int64)
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            failure = error
        with self._peers(step):
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        well, *least = votes.tolist()
        if not well:
            self.agree(step, lambda: _raise_if(failure))
        return least[:count], [-number for number in least[count:]]

    @contextlib.contextmanager
    def _peers(self, step: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise PeerLostError(
                f"rank {self.rank} lost the other ranks in step {step!r}: {error}. A rank died or took longer than the "
                "process group's timeout; look at the other ranks' output for the first error."
            ) from error

    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        if self.rank != COORDINATOR:
            with self._peers(step):
                self._send(payload, COORDINATOR)
            return None
        return [payload if rank == self.rank else self._answer_of(step, rank) for rank in range(self.world_size)]

    def _answer_of(self, step: str, rank: int) -> bytes:
        """What the rank sent; a failure in its name when it is lost, so that the others hear of it at once."""
        try:
            with self._peers(step):
                return self._receive(rank)
        except PeerLostError as error:
            return failure(rank, error)

    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        if parts is None:
            with self._peers(step):
                return self._receive(COORDINATOR)
        self._send_to_all(step, lambda rank: parts[rank])
        return parts[self.rank]

    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        if whole is None:
            with self._peers(step):
                small = self._receive(COORDINATOR)
                if small[:1] != _LARGE:
                    return small
                buffer = bytearray(int.from_bytes(small[1:], "little"))
                for piece in _pieces(buffer):
                    dist.broadcast(piece, group_src=COORDINATOR, group=self.group)
                return bytes(buffer)
        if len(whole) <= _SMALL_BYTES:
            self._send_to_all(step, lambda _: whole)
            return whole
        self._send_to_all(step, lambda _: _LARGE + len(whole).to_bytes(8, "little"))
        with self._peers(step):
            for piece in _pieces(bytearray(whole)):
                dist.broadcast(piece, group_src=COORDINATOR, group=self.group)
        return whole

    def _send_to_all(self, step: str, part: Callable[[int], bytes]) -> None:
        """To every other rank that is still there; those that are lost are said once all others have their part."""
        lost: PeerLostError | None = None
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            try:
                with self._peers(step):
                    self._send(part(rank), rank)
            except PeerLostError as error:
                if not _failures(part(rank)):
                    lost = error
        if lost is not None:
            raise lost

    def _send(self, payload: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(payload)], dtype=torch.int64), group_dst=rank, group=self.group)
        for piece in _pieces(bytearray(payload)):
            dist.send(piece, group_dst=rank, group=self.group)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group_src=rank, group=self.group)
        buffer = bytearray(int(length))
        for piece in _pieces(buffer):
            dist.recv(piece, group_src=rank, group=self.group)
        return bytes(buffer)


def open_exchange(*, no_dist: bool, use_collectives: bool) -> Exchange:
    """The exchange that the flags and the process group, if there is one, ask for."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return Alone()
    if not use_collectives:
        return Alone(dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() == 1:
        return Alone()
    return ProcessGroupExchange(_host_group())


def open_ranks(*, no_dist: bool) -> tuple[int, int]:
    """This process's rank and the number of ranks, without a word to any of them."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def agree_on_attempt(place: str, ordinal: int, *, alone: bool) -> str:
    """An id for save number `ordinal` to `place`, the same on all ranks and new; nobody waits for anybody.

    The first rank to ask the process group's store decides; `alone`, nobody is asked.
    """
    nonce = uuid.uuid4().hex[:16]
    if alone or not dist.is_available() or not dist.is_initialized():
        return nonce
    name = hashlib.blake2b(f"{place}\n{ordinal}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(f"hpdcp/attempt/{name}", "", nonce).decode()


_own_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""(the default group it was made for, a gloo group beside it), where the default one cannot carry host tensors."""


def _host_group() -> dist.ProcessGroup:
    """A group whose ranks can exchange host tensors: the default one, or a gloo group made once beside it."""
    global _own_group
    default = dist.group.WORLD
    assert default is not None
    if "cpu" in dist.get_backend_config(default):
        return default
    if _own_group is None or _own_group[0] is not default:
        _own_group = (default, dist.new_group(backend="gloo"))
    return _own_group[1]


def run_nonce() -> str:
    """Equal on all ranks of this run, different in any other; agreed through the store, no collective."""
    named = os.environ.get("HPDCP_RUN_ID")
    if named:
        return f"{named}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        agreed = store.compare_set("hpdcp/run", "", uuid.uuid4().hex)
        return agreed.decode()
    return _ALONE_NONCE


_ALONE_NONCE: Final = uuid.uuid4().hex


def joint_error(step: str, failed: Sequence[Failed], world_size: int) -> HpdcpError:
    """One error for all ranks: of the closest class the causes have in common, naming each rank and its cause."""
    shared = [name for name in failed[0].lineage if all(name in cause.lineage for cause in failed)]
    kind = next((name for name in shared if type(rebuild(name, "")).__name__ == name), "RankFailedError")
    if kind in ("HpdcpError", "CheckpointError"):
        kind = "RankFailedError"
    messages = {cause.message for cause in failed}
    if len(messages) == 1 and (len(failed) == world_size or failed[0].rank == _ALL_RANKS):
        text = failed[0].message
    else:
        lines = [f"rank {cause.rank}: {cause.message}" for cause in failed[:_MOST_CAUSES]]
        if len(failed) > _MOST_CAUSES:
            lines.append(f"and {len(failed) - _MOST_CAUSES} more ranks")
        text = f"{step} failed on {len(failed)} of {world_size} ranks: " + "; ".join(lines)
    error = rebuild(kind, text)
    whose = "the coordinator" if failed[0].rank == _ALL_RANKS else f"rank {failed[0].rank}"
    error.add_note(f"Traceback of {whose}:\n{failed[0].trace}")
    if isinstance(error, RankFailedError):
        error.causes = tuple((cause.rank, cause.message) for cause in failed)
    return error


def failure(rank: int, error: Exception) -> bytes:
    """What a rank answers when it could not do its part, or what is put in its place when it is lost."""
    return _frame([Failed.of(rank, error)])


def failure_frame(rank: int, error: Exception) -> bytes:
    """What stands for the answer of a rank that cannot give one."""
    return _frame([Failed.of(rank, error)])


def _attempt(rank: int, local: Callable[[], bytes]) -> bytes:
    try:
        return b"+" + local()
    except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
        return failure(rank, error)


def _raise_if(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _frame(failed: Sequence[Failed]) -> bytes:
    return b"-" + json.dumps([cause.to_json() for cause in failed]).encode()


def _failures(answer: bytes) -> list[Failed]:
    return [Failed.from_json(fields) for fields in json.loads(answer[1:])] if answer[:1] == b"-" else []


def _pieces(buffer: bytearray) -> list[torch.Tensor]:
    if not buffer:
        return []
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    return [whole[start : start + _PIECE_BYTES] for start in range(0, len(buffer), _PIECE_BYTES)]
