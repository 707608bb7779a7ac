"""Replicated chunks read by one rank and sent to the others, in one walk that every rank makes in the same order.

The coordinator has cut the load into shared boxes (`LoadPlan.shared`), each with a reader rank and a group of ranks.
Every rank walks its own boxes in their one total order: it issues the broadcast of a box, or of a batch of small ones,
and waits only for broadcasts issued earlier. Of all broadcasts not yet done, the first in the total order can
therefore always go on: everything before it is done, so all its members come to it. Nobody leaves the walk: a reader
rank that cannot read sends filler, says so, and raises when the walk is over. Only who meets a dead rank leaves it, and
hangs up, so that all others hear of it one after another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from hpdcp._broadcast._read_ahead import ReadAhead
from hpdcp._broadcast._unit_memory import TargetsInTurn, UnitMemory
from hpdcp._broadcast._units import Unit, units_of
from hpdcp._broadcast.groups import ProcessGroups, peer_errors
from hpdcp._devices import buffers, device, streams
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, ReadItem
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.storage import StorageReader

IN_FLIGHT: Final = 8
"""Broadcasts a rank has issued and not waited for."""

_SENDING: Final = "tensors were broadcast"


@dataclass(frozen=True, slots=True)
class BroadcastContext:
    """What a rank walks with."""

    rank: int
    reader: StorageReader
    targets: ReadTargets
    """Asked from several threads, but never by two at a time."""
    groups: ProcessGroups
    batch_bytes: int
    """Boxes below this many bytes are sent together; 0: each by itself. Equal on all ranks."""


def read_and_broadcast(plan: LoadPlan, context: BroadcastContext, *, failure: BaseException | None = None) -> None:
    """Fill every shared box of `plan`, or with a `failure` of this rank walk along, so that no other waits for it.

    On return all broadcasts are completed.

    Raises:
        PeerLostError: another rank died or fell silent.
        Exception: what reading or writing a target raised here, once the walk is over; another rank's failure is
            not raised, since the step that all ranks share says it.
    """
    columns = plan.shared_columns
    mine = columns.boxes.entry[columns.reader_rank == context.rank]
    items: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items_at(np.flatnonzero(np.isin(plan.item_columns.boxes.entry, mine))):
        items.setdefault(item.dest_index, []).append(item)
    _Walk(context, items, failure).run(units_of(plan.shared, context.batch_bytes))


class _Walk:
    """One rank's walk; `items` are what it reads for others, by destination chunk."""

    def __init__(
        self,
        context: BroadcastContext,
        items: Mapping[MetadataIndex, Sequence[ReadItem]],
        failure: BaseException | None,
    ) -> None:
        self._context = context
        self._targets = TargetsInTurn(context.targets)
        self._items = items
        self._failure: BaseException | None = None
        self._some_failed = threading.Event()
        """Some rank has failed: what is read from now on is for nothing, so nothing is."""
        self._in_flight: deque[tuple[dist.Work, Callable[[], None]]] = deque()
        if failure is not None:
            self._fail(failure)

    def run(self, units: Sequence[Unit]) -> None:
        """Issue every broadcast in order; raise this rank's failure when all are completed."""
        mine = [unit for unit in units if unit.reader_rank == self._context.rank and not unit.is_status]
        ahead = ReadAhead(mine, self._read, threads=self._context.reader.max_concurrent_reads)
        try:
            for unit in units:
                if unit.is_status:
                    self._exchange_status(unit)
                elif unit.reader_rank == self._context.rank:
                    self._send(unit, ahead.next())
                else:
                    self._receive(unit)
            while self._in_flight:
                self._complete_first()
            if any(unit.on_device for unit in units):
                # A broadcast that was waited for is waited for by the device only; its group may go when this returns.
                streams.wait_for_caller()
        except BaseException:
            # This rank has left the walk: whoever waits for it, in any of the groups, must not wait longer.
            self._context.groups.hang_up()
            raise
        finally:
            ahead.close()
        if self._failure is not None:
            raise self._failure

    def _read(self, unit: Unit) -> UnitMemory:
        """The unit's bytes, read; or, when something has failed, memory for filler."""
        memory = UnitMemory(unit, self._targets)
        if not self._some_failed.is_set():
            try:
                memory.read(self._context.reader, self._items)
            except BaseException as error:  # noqa: BLE001  # raised when the walk is over
                self._fail(error)
        return memory

    def _exchange_status(self, unit: Unit) -> None:
        buffer = buffers.device_buffer(1) if unit.on_device else device.empty_on_host((1,), torch.uint8)
        status = buffer.fill_(int(self._some_failed.is_set()))
        self._broadcast(unit, status, lambda: self._note_status(int(status[0]) != 0))

    def _send(self, unit: Unit, memory: UnitMemory) -> None:
        memory.set_status(self._some_failed.is_set())
        self._broadcast(unit, memory.wire(), lambda: self._deliver(unit, memory))

    def _receive(self, unit: Unit) -> None:
        memory = UnitMemory(unit, self._targets)
        self._attempt(lambda: memory.allocate(receives=True))
        self._broadcast(unit, memory.wire(), lambda: self._deliver(unit, memory))

    def _deliver(self, unit: Unit, memory: UnitMemory) -> None:
        if unit.batch:
            self._note_status(memory.has_failed())
        if not self._some_failed.is_set():
            self._attempt(memory.deliver)

    def _broadcast(self, unit: Unit, payload: torch.Tensor, completed: Callable[[], None]) -> None:
        """Issue it; `completed` is called once it is completed, in the order in which broadcasts are issued."""
        group = self._context.groups.of(unit.group, on_device=unit.on_device)
        with peer_errors(self._context.rank, _SENDING):
            work = dist.broadcast(payload, src=unit.reader_rank, group=group, async_op=True)
        assert work is not None
        self._in_flight.append((work, completed))
        while len(self._in_flight) >= IN_FLIGHT:
            self._complete_first()

    def _complete_first(self) -> None:
        work, completed = self._in_flight.popleft()
        with peer_errors(self._context.rank, _SENDING):
            work.wait()
        completed()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  # raised when the walk is over
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._some_failed.set()

    def _note_status(self, failed: bool) -> None:
        if failed:
            self._some_failed.set()
