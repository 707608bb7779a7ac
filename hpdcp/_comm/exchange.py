"""Steps that all ranks share: everybody succeeds, or everybody raises the same error.

A step is a function that each rank runs on its own and, for some, one that the coordinator runs over all answers.
Whatever either raises is caught, travels as text, and is raised on every rank; no step leaves a rank waiting for
one that failed. Nothing that can raise may run between two steps outside of one. An interrupt (KeyboardInterrupt,
SystemExit, GeneratorExit) travels like any failure; the rank that it came to raises the interrupt itself.

Ranks wait for the coordinator and the coordinator waits for ranks, never ranks for one another. So a rank that dies is
met by the coordinator, which tells all others in the same step, or in the next one: that an answer did not reach a dead
rank is no failure of the step, which is decided by then. A rank that leaves a step for any other reason hangs up, so
that nobody waits for it.

How bytes get from rank to rank is for others to say: `process_group`, or `mailbox`, which needs no torch.
"""

from __future__ import annotations

import json
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from hpdcp._base.errors import HpdcpError, PeerLostError, RankFailedError, rebuild

T = TypeVar("T")

COORDINATOR: Final = 0
_ALL_RANKS: Final = -1
"""Stands for what the coordinator does on behalf of all."""
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

    def rebuilt(self, otherwise: type[HpdcpError]) -> HpdcpError:
        """The error, of the closest class that hpdcp has; of class `otherwise` where it has none."""
        for name in self.lineage:
            error = rebuild(name, self.message)
            if type(error).__name__ == name:
                return error
        return otherwise(self.message)

    def to_json(self) -> list[object]:
        return [self.rank, list(self.lineage), self.message, self.trace]

    @classmethod
    def from_json(cls, fields: Sequence[object]) -> Failed:
        rank, lineage, message, trace = fields
        assert isinstance(rank, int) and isinstance(lineage, list)
        return cls(rank, tuple(map(str, lineage)), str(message), str(trace))


class Exchange(ABC):
    """The steps that ranks take together, whatever carries their messages.

    Every rank calls the same methods in the same order. `step` says in errors what was being done.

    Raises, on every rank alike:
        RankFailedError: a rank failed; of the class that the causes share, where they do.
        PeerLostError: a rank died, or sent nothing in time.
    """

    rank: int
    world_size: int

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank plans and commits for all."""
        return self.rank == COORDINATOR

    @abstractmethod
    def gather_scatter(
        self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """Gather every rank's `local()` on the coordinator; this rank's of the answers that `combine` makes."""

    @abstractmethod
    def gather_broadcast(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        """Gather every rank's `local()` on the coordinator; what `combine` makes of them, on every rank."""

    @abstractmethod
    def broadcast(self, step: str, make: Callable[[], bytes]) -> bytes:
        """What the coordinator's `make()` returns, on every rank."""

    def agree(self, step: str, local: Callable[[], T]) -> T:
        """This rank's `local()`, once all ranks have succeeded with theirs; nobody sees another rank's value."""
        kept: list[T] = []

        def run() -> bytes:
            kept.append(local())
            return b""

        self.gather_broadcast(step, run, lambda _: b"")
        return kept[0]

    def min_max(self, step: str, count: int, local: Callable[[], Sequence[int]]) -> tuple[list[int], list[int]]:
        """The least and the greatest of each of the `count` numbers that ranks' `local()` return, on every rank.

        Numbers are at least 0 and below 2**63.
        """

        def combine(answers: list[bytes]) -> bytes:
            votes = np.stack([np.frombuffer(answer, dtype=np.int64) for answer in answers])
            return np.concatenate([votes.min(axis=0), votes.max(axis=0)]).tobytes()

        answer = self.gather_broadcast(step, lambda: np.array(local(), dtype=np.int64).tobytes(), combine)
        both: list[int] = np.frombuffer(answer, dtype=np.int64).tolist()
        return both[:count], both[count:]


class Alone(Exchange):
    """A rank that sends nothing to others: the only one, or one of many without collectives."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size

    @property
    def is_coordinator(self) -> bool:
        return True

    def gather_scatter(
        self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        return combine([local()])[0]

    def gather_broadcast(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        return combine([local()])

    def broadcast(self, step: str, make: Callable[[], bytes]) -> bytes:
        return make()


class FramedExchange(Exchange):
    """An exchange made of three ways to move bytes. Each message says whether it is an answer or a failure."""

    @abstractmethod
    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        """Every rank's payload in order of rank, on the coordinator; None elsewhere."""

    @abstractmethod
    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        """This rank's part of what the coordinator passes."""

    @abstractmethod
    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        """What the coordinator passes."""

    def _hang_up(self) -> None:
        """This rank leaves in the midst of a step: end the wait of those that wait for it, where that can be done."""

    def gather_scatter(
        self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        def carry(mine: _Outcome) -> bytes:
            answers = self._gather(step, mine.frame)
            return self._scatter(step, None if answers is None else self._combine(answers, combine, mine))

        return self._share(step, _Outcome(self.rank, local), carry)

    def gather_broadcast(self, step: str, local: Callable[[], bytes], combine: Callable[[list[bytes]], bytes]) -> bytes:
        def carry(mine: _Outcome) -> bytes:
            answers = self._gather(step, mine.frame)
            whole = None if answers is None else self._combine(answers, lambda parts: [combine(parts)], mine)[0]
            return self._broadcast(step, whole)

        return self._share(step, _Outcome(self.rank, local), carry)

    def broadcast(self, step: str, make: Callable[[], bytes]) -> bytes:
        mine = _Outcome(self.rank, make if self.is_coordinator else bytes)
        return self._share(step, mine, lambda mine: self._broadcast(step, mine.frame if self.is_coordinator else None))

    def _share(self, step: str, mine: _Outcome, carry: Callable[[_Outcome], bytes]) -> bytes:
        """The answer that `carry` brings, or the failure that it is; this rank's own interrupt once others know it."""
        try:
            answer = carry(mine)
        except PeerLostError:
            self._hang_up()
            own = failures_in(mine.frame)
            if mine.interrupt is None and not own:
                raise
            answer = _frame(own)
        except BaseException:
            self._hang_up()
            raise
        if mine.interrupt is not None:
            raise mine.interrupt
        return self._open(step, answer)

    def _combine(
        self, answers: list[bytes], combine: Callable[[list[bytes]], Sequence[bytes]], mine: _Outcome
    ) -> list[bytes]:
        """The coordinator's framed answers, one for each rank; every one a failure if any rank failed."""
        failed = [cause for answer in answers for cause in failures_in(answer)]
        if not failed:
            try:
                return [b"+" + part for part in combine([answer[1:] for answer in answers])]
            except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
                failed = [Failed.of(_ALL_RANKS, error)]
            except BaseException as interrupt:  # noqa: BLE001  # raised once the other ranks have heard of it
                mine.interrupt = interrupt
                # What it did for all may be done or not: to the others it is as if it had died there.
                name = type(interrupt).__name__
                lost = PeerLostError(f"the coordinator, rank {self.rank}, was interrupted in the midst of it: {name}")
                failed = [Failed.of(_ALL_RANKS, lost)]
        return [_frame(failed)] * len(answers)

    def _open(self, step: str, answer: bytes) -> bytes:
        failed = failures_in(answer)
        if failed:
            raise joint_error(step, failed, self.world_size)
        return answer[1:]


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
        error.causes = tuple((cause.rank, cause.message) for cause in failed if cause.rank != _ALL_RANKS)
    return error


def failure_frame(rank: int, error: BaseException) -> bytes:
    """What stands for the answer of a rank that cannot give one."""
    return _frame([Failed.of(rank, error)])


class _Outcome:
    """What a rank's part of a step came to."""

    def __init__(self, rank: int, local: Callable[[], bytes]) -> None:
        self.interrupt: BaseException | None = None
        """To be raised on this rank, and on no other, once the others have heard of it."""
        try:
            self.frame = b"+" + local()
        except Exception as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            self.frame = failure_frame(rank, error)
        except BaseException as interrupt:  # noqa: BLE001  # raised by `_share`
            self.interrupt = interrupt
            self.frame = failure_frame(rank, interrupt)


def _frame(failed: Sequence[Failed]) -> bytes:
    return b"-" + json.dumps([cause.to_json() for cause in failed]).encode()


def failures_in(answer: bytes) -> list[Failed]:
    """Why ranks failed, if the answer says so instead of being one."""
    return [Failed.from_json(fields) for fields in json.loads(answer[1:])] if answer[:1] == b"-" else []
