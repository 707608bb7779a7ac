"""Steps that all ranks share, over a process group of torch."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from hpdcp._base import config
from hpdcp._base.arguments import require_flags
from hpdcp._base.errors import PeerLostError
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import COORDINATOR, Alone, Exchange, FramedExchange, failure_frame

_PIECE_BYTES: Final = 256 << 20
"""Longest single message; gloo's own limit is below 2 GiB."""
_SMALL_BYTES: Final = 64 << 10
"""Up to here the coordinator sends an answer to each rank, which reaches all that live however many have died; a larger
one is broadcast, which does not."""
_LARGE: Final = b"*"
_NEVER_SENT: Final = 0x6870
"""Tag of messages that nobody sends: to wait for one is to look whether the connection still stands."""


class ProcessGroupExchange(FramedExchange):
    """Ranks of a process group; plans go to the coordinator and back point to point, never to everybody."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        """Carries host tensors between all ranks."""
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def min_max(self, step: str, count: int, local: Callable[[], Sequence[int]]) -> tuple[list[int], list[int]]:
        failure: BaseException | None = None
        # One message for all: the greatest of a number is the least of its negative, and the first says who is well.
        votes = torch.zeros(1 + 2 * count, dtype=torch.int64, device="cpu")
        try:
            mine = local()
            votes = torch.tensor([1, *mine, *(-number for number in mine)], dtype=torch.int64, device="cpu")
        except BaseException as error:  # noqa: BLE001  # whatever it is, the other ranks must hear of it
            failure = error
        try:
            with self._peers(step):
                dist.all_reduce(votes, dist.ReduceOp.MIN, group=self.group)
        except BaseException as lost:  # noqa: BLE001  # raised again
            # Ranks wait for one another here: each that raises ends the wait of others.
            self._hang_up()
            raise (failure or lost) from None
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

    def _hang_up(self) -> None:
        hang_up(self.group)

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
            return failure_frame(rank, error)

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
        """To every other rank that is still there. One that is lost is met again by the next step, which tells all."""
        for rank in range(self.world_size):
            if rank == self.rank:
                continue
            with contextlib.suppress(PeerLostError), self._peers(step):
                self._send(part(rank), rank)

    def _send(self, payload: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(payload)], dtype=torch.int64, device="cpu"), group_dst=rank, group=self.group)
        for piece in _pieces(bytearray(payload)):
            dist.send(piece, group_dst=rank, group=self.group)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.recv(length, group_src=rank, group=self.group)
        buffer = bytearray(int(length))
        for piece in _pieces(buffer):
            dist.recv(piece, group_src=rank, group=self.group)
        return bytes(buffer)


def open_exchange(*, no_dist: bool, use_collectives: bool) -> Exchange:
    """The exchange that the flags and the process group, if there is one, ask for.

    Raises:
        InvalidArgumentError: a flag is neither True nor False.
    """
    require_flags(no_dist=no_dist, use_collectives=use_collectives)
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return Alone()
    if not use_collectives:
        return Alone(dist.get_rank(), dist.get_world_size())
    if dist.get_world_size() == 1:
        return Alone()
    return ProcessGroupExchange(_host_group())


def hang_up(group: dist.ProcessGroup) -> None:
    """Close this rank's connections in `group`, so that whoever waits for it there raises now and not at the timeout.

    For a rank that leaves in the midst of an exchange, since another one is dead or since it is interrupted: messages
    would be out of step from then on, and the group is of no use any more. Nothing happens where the group carries no
    host tensors.
    """
    mine, buffer = dist.get_rank(group), torch.zeros(1, dtype=torch.uint8, device="cpu")
    for rank in range(dist.get_world_size(group)):
        if rank == mine:
            continue
        try:
            work = dist.irecv(buffer, group=group, group_src=rank, tag=_NEVER_SENT)
        except (RuntimeError, ValueError):
            continue  # no connection to that one, or none for hosts
        if work is not None:
            # What gloo does when a wait takes too long: it closes all connections of the group.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
            return


def standing_host_group() -> dist.ProcessGroup | None:
    """A group of all ranks that carries host tensors, where there is one; none is made."""
    default = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if default is None or "cpu" in backends_of(default):
        return default
    return _own_group[1] if _own_group is not None and _own_group[0] is default else None


def is_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the connection to `rank` is closed, since it died or left the group. Waits for nothing.

    Each look leaves some bytes in the group, at both ends: it is for what else says that something is wrong.
    """
    try:
        dist.irecv(torch.zeros(1, dtype=torch.uint8, device="cpu"), group=group, group_src=rank, tag=_NEVER_SENT)
    except RuntimeError:
        return True
    except ValueError:
        pass  # this rank itself has left it
    return False


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Kind of device → the name of what carries its tensors in this group."""
    pairs = (pair.split(":") for pair in str(dist.get_backend_config(group)).split(",") if ":" in pair)
    return {pair[0]: pair[1] for pair in pairs}


_own_group: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
"""(the default group it was made for, a gloo group beside it), where the default one cannot carry host tensors."""


def _host_group() -> dist.ProcessGroup:
    """A group whose ranks can exchange host tensors: the default one, or a gloo group made once beside it.

    All ranks come here in the same call, so all of them make it.
    """
    global _own_group
    default = dist.group.WORLD
    assert default is not None
    carried = backends_of(default)
    if "cpu" in carried:
        return default
    if _own_group is None or _own_group[0] is not default:
        timeout = timedelta(seconds=config.current().group_timeout)
        log_message(
            logging.INFO,
            f"the default process group carries tensors on {' and '.join(sorted(carried))} only, so hpdcp makes one of "
            "gloo beside it, once, for plans, metadata and objects. Start yours with a backend for the CPU as well, "
            f"as cpu:gloo,{','.join(f'{kind}:{name}' for kind, name in sorted(carried.items()))}, and none is made.",
        )
        _own_group = (default, dist.new_group(backend="gloo", timeout=timeout))
    return _own_group[1]


def _raise_if(failure: BaseException | None) -> None:
    if failure is not None:
        raise failure


def _pieces(buffer: bytearray) -> list[torch.Tensor]:
    if not buffer:
        return []
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    return [whole[start : start + _PIECE_BYTES] for start in range(0, len(buffer), _PIECE_BYTES)]
