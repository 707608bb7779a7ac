"""Replicated chunks read by one rank and sent to the others, in one walk that every rank makes in the same order.

The coordinator has cut the load into shared parts (`LoadPlan.shared`), each with a source and a group of ranks. Every
rank walks its own parts in their one total order: it issues the broadcast of a part, or of a batch of small ones,
and waits only for broadcasts issued earlier. Of all broadcasts not yet done, the first in the total order can
therefore always go on: everything before it is done, so all its members come to it. Nobody leaves the walk: a source
that cannot read sends filler, says so, and raises when the walk is over.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from hpdcp._base.errors import InvalidArgumentError, PeerLostError
from hpdcp._devices import buffers, device, streams
from hpdcp._format.metadata import Metadata, MetadataIndex
from hpdcp._plan.load_plan import LoadPlan, ReadItem, SharedPart, cut_items
from hpdcp._plan.planner import LoadPlanner, PlannerContext
from hpdcp._plan.storage import StorageReader
from hpdcp._state.dtypes import dtype_of
from hpdcp._state.views import view_of_box

IN_FLIGHT: Final = 8
"""Broadcasts a rank has issued and not waited for."""
READ_AHEAD: Final = 2
"""Shards, or batches of them, read before their turn to be sent, beside those that threads are reading."""
STATUS_BYTES: Final = 64 << 20
"""After so many bytes of single shards their source says whether all is well; a batch says so itself."""
_TAIL_BYTES: Final = 16
"""At the end of a batch, its first byte the status; a multiple of every element's size."""

_SENDING: Final = "tensors were broadcast"

_TYPED: Final = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})
"""Dtypes that every process group sends as they are; others travel as bytes (gloo 2.13 refuses int16, uint16 to
uint64 and float8, tried)."""

Group = tuple[int, ...]


def transport_dtype(stored: str) -> str:
    """Name of the dtype in which elements of dtype `stored` are sent."""
    return stored if stored in _TYPED else "uint8"


@dataclass(slots=True)
class _Unit:
    """What one broadcast carries: one shard, a batch of small ones, or only how its source fares."""

    group: Group
    source: int
    transport: str
    stored: str = "uint8"
    parts: list[SharedPart] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Elements of each part."""
    nbytes: int = 0
    batch: bool = False
    on_device: bool = False
    """Whether it goes from device to device."""

    def add(self, part: SharedPart, count: int, nbytes: int) -> None:
        self.parts.append(part)
        self.counts.append(count)
        self.nbytes += nbytes


def units_of(parts: Sequence[SharedPart], batch_bytes: int) -> list[_Unit]:
    """The broadcasts that carry `parts`, in the order of the walk: that of each one's first part.

    A part below `batch_bytes` joins the open batch of its group, source and dtype, unless that would grow beyond
    `batch_bytes`; then a new batch is opened at this place of the order. All members of a group see the same parts in
    the same order, so all of them form the same batches.
    """
    units: list[_Unit] = []
    batches: dict[tuple[Group, int, str, bool], _Unit] = {}
    unsaid: dict[tuple[Group, int, bool], int] = {}
    for part in parts:
        info, stored = part.info, part.stored_dtype
        count = math.prod(part.sizes)
        nbytes = count * dtype_of(stored).itemsize
        if nbytes < batch_bytes:
            key = (info.group, info.source, stored, info.on_device)
            batch = batches.get(key)
            if batch is None or batch.nbytes + nbytes > batch_bytes:
                batch = _Unit(info.group, info.source, info.transport_dtype, stored, batch=True)
                batch.on_device = info.on_device
                batches[key] = batch
                units.append(batch)
            batch.add(part, count, nbytes)
            continue
        single = _Unit(info.group, info.source, info.transport_dtype, stored, [part], [count], nbytes)
        single.on_device = info.on_device
        units.append(single)
        said = (info.group, info.source, info.on_device)
        unsaid[said] = unsaid.get(said, 0) + nbytes
        if unsaid[said] >= STATUS_BYTES:
            unsaid[said] = 0
            units.append(_Unit(info.group, info.source, "uint8", on_device=info.on_device))
    return units


@contextlib.contextmanager
def broadcast_groups_for_load(
    new: Sequence[Group],
    given: Mapping[Group, dist.ProcessGroup],
    *,
    me: int,
    timeout: timedelta,
    backend: str = "gloo",
) -> Iterator[dict[Group, dist.ProcessGroup]]:
    """The `given` groups and those of `new`, which is the same on every rank; every rank enters, member or not.

    Those of `new` are created in order, and destroyed at the end in order of their ranks. A rank that is no member of
    one keeps nothing of it. Given groups are left alone.

    Raises:
        PeerLostError: a group could not be made, since a rank died or did not come.
    """
    groups = dict(given)
    created: list[Group] = []
    try:
        for ranks in new:
            with _peers(me, f"making a process group of the ranks {ranks}"):
                made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            if me in ranks:
                groups[ranks] = made
                created.append(ranks)
        yield groups
    finally:
        for ranks in sorted(created):
            dist.destroy_process_group(groups.pop(ranks))


@contextlib.contextmanager
def _peers(me: int, doing: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"rank {me} lost the other ranks while {doing}: {error}. A rank died or took longer than the group's "
            "timeout; look at the other ranks' output for the first error."
        ) from error


def read_and_broadcast(
    plan: LoadPlan,
    *,
    reader: StorageReader,
    planner: LoadPlanner,
    groups: Mapping[Group, dist.ProcessGroup],
    me: int,
    batch_bytes: int,
    device_groups: Mapping[Group, dist.ProcessGroup] | None = None,
    failure: Exception | None = None,
) -> None:
    """Fill every shared part of `plan`, or with a `failure` of this rank walk along, so that no other waits for it.

    What goes over hosts goes through `groups`, what goes from device to device through `device_groups`; on return all
    of it has landed.

    Raises:
        PeerLostError: another rank died or fell silent.
        Exception: what reading or writing a target raised here, once the walk is over; another rank's failure is
            not raised, since the step that all ranks share says it.
    """
    parts = plan.shared
    columns = plan.shared_columns
    mine = columns.boxes.entry[columns.source == me]
    items: dict[MetadataIndex, list[ReadItem]] = {}
    for item in plan.items_at(np.flatnonzero(np.isin(plan.item_columns.boxes.entry, mine))):
        items.setdefault(item.dest_index, []).append(item)
    walk = _Walk(reader, _InTurn(planner), (groups, device_groups or {}), me, items, failure)
    walk.run(units_of(parts, batch_bytes))


class _Walk:
    def __init__(
        self,
        reader: StorageReader,
        planner: _InTurn,
        groups: tuple[Mapping[Group, dist.ProcessGroup], Mapping[Group, dist.ProcessGroup]],
        me: int,
        items: Mapping[MetadataIndex, Sequence[ReadItem]],
        failure: Exception | None,
    ) -> None:
        self._reader = reader
        self._planner = planner
        self._groups = groups
        self._me = me
        self._items = items
        self._failure: BaseException | None = None
        self._in_trouble = threading.Event()
        """Some rank has failed: what is read from now on is for nothing, so nothing is."""
        self._flying: deque[tuple[dist.Work, Callable[[], None]]] = deque()
        if failure is not None:
            self._fail(failure)

    def run(self, units: Sequence[_Unit]) -> None:
        mine = [unit for unit in units if unit.source == self._me and unit.parts]
        ahead = _ReadAhead(mine, self._loaded, threads=self._reader.reads_at_once)
        try:
            for unit in units:
                self._step(unit, ahead)
            while self._flying:
                self._land()
            if any(unit.on_device for unit in units):
                # A broadcast that was waited for is waited for by the device only; its group may go when this returns.
                streams.wait_for_caller()
        finally:
            ahead.close()
        if self._failure is not None:
            raise self._failure

    def _loaded(self, unit: _Unit) -> _Load:
        """The unit's bytes, read; or, when something has failed, a place for filler."""
        load = _Load(unit, self._planner)
        if not self._in_trouble.is_set():
            try:
                load.read(self._reader, self._items)
            except BaseException as error:  # noqa: BLE001  # raised when the walk is over
                self._fail(error)
        return load

    def _step(self, unit: _Unit, ahead: _ReadAhead) -> None:
        if not unit.parts:
            where = buffers.device_buffer(1) if unit.on_device else device.empty_on_host((1,), torch.uint8)
            status = where.fill_(int(self._in_trouble.is_set()))
            self._send(unit, status, lambda: self._heed(int(status[0]) != 0))
            return
        if unit.source == self._me:
            load = ahead.take()
            load.say(self._in_trouble.is_set())
        else:
            load = _Load(unit, self._planner)
            self._attempt(lambda: load.allocate(receives=True))
        self._send(unit, load.wire(), lambda: self._arrived(unit, load))

    def _send(self, unit: _Unit, payload: torch.Tensor, landed: Callable[[], None]) -> None:
        group = self._groups[unit.on_device][unit.group]
        with _peers(self._me, _SENDING):
            work = dist.broadcast(payload, src=unit.source, group=group, async_op=True)
        assert work is not None
        self._flying.append((work, landed))
        while len(self._flying) >= IN_FLIGHT:
            self._land()

    def _land(self) -> None:
        work, landed = self._flying.popleft()
        with _peers(self._me, _SENDING):
            work.wait()
        landed()

    def _arrived(self, unit: _Unit, load: _Load) -> None:
        if unit.batch:
            self._heed(load.trouble())
        if not self._in_trouble.is_set():
            self._attempt(load.deliver)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # raised when the walk is over
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._in_trouble.set()

    def _heed(self, trouble: bool) -> None:
        if trouble:
            self._in_trouble.set()


class _ReadAhead:
    """Reads units on threads, begun in order; `READ_AHEAD` of them are read and not yet taken, one being read a thread.

    A unit is begun only when all before it are, so the one that is taken next is always under way or read.
    """

    def __init__(self, units: Sequence[_Unit], read: Callable[[_Unit], _Load], *, threads: int) -> None:
        self._units = iter(enumerate(units))
        self._read = read
        self._room = threading.Semaphore(READ_AHEAD + threads - 1)
        self._turn = threading.Lock()
        self._loads: dict[int, _Load] = {}
        self._arrived = threading.Condition()
        self._taken = 0
        self._closed = False
        self._threads = [
            # In the caller's context: `config.using` holds for the reader as well.
            threading.Thread(target=contextvars.copy_context().run, args=(self._run,), name="hpdcp-read-ahead")
            for _ in range(min(threads, len(units)))
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> _Load:
        """The next unit, once it is read."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._taken in self._loads)
            load = self._loads.pop(self._taken)
            self._taken += 1
        self._room.release()
        return load

    def close(self) -> None:
        """Read nothing more, and return when the threads have ended."""
        self._closed = True
        self._room.release(len(self._threads) or 1)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            self._room.acquire()
            with self._turn:
                position, unit = next(self._units, (-1, None))
            if unit is None or self._closed:
                return
            load = self._read(unit)
            with self._arrived:
                self._loads[position] = load
                self._arrived.notify_all()


class _InTurn:
    """A planner that is asked by one thread at a time: the one that reads ahead and the one that receives."""

    def __init__(self, planner: LoadPlanner) -> None:
        self._planner = planner
        self._turn = threading.Lock()

    def acquire(self, items: Sequence[ReadItem]) -> list[torch.Tensor]:
        """The memory of each item."""
        with self._turn:
            return list(map(self._planner.acquire_tensor, items))

    def apply(self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor]) -> None:
        """Tell the planner that the targets are filled."""
        with self._turn:
            for item, target in zip(items, targets, strict=True):
                self._planner.apply_tensor(item, target)


class _Load:
    """The bytes of one unit on this rank: straight in the target, or in a buffer of the wire's shape.

    What goes from device to device is read into a buffer on the host all the same, and brought to the device when it is
    its turn: so the device holds the `IN_FLIGHT` buffers that are on their way, and none that were read ahead.
    """

    def __init__(self, unit: _Unit, planner: _InTurn) -> None:
        self._unit = unit
        self._planner = planner
        self._boxes: list[ReadItem] = []
        self._targets: list[torch.Tensor] = []
        self._buffer: torch.Tensor | None = None
        """On the host."""
        self._sent: torch.Tensor | None = None
        """The same on the device."""

    def allocate(self, *, receives: bool) -> None:
        """Take the memory that the bytes go to, as a rank that receives them or as the one that reads them.

        Raises:
            InvalidArgumentError: the planner gave memory of another shape.
        """
        unit = self._unit
        self._boxes = [part.as_item() for part in unit.parts]
        targets = self._planner.acquire(self._boxes)
        for part, target in zip(unit.parts, targets, strict=True):
            if tuple(target.shape) != part.sizes:
                raise InvalidArgumentError(
                    f"{part.index.fqn!r}: the planner's acquire_tensor gave a tensor of shape {list(target.shape)} for "
                    f"a box of sizes {list(part.sizes)}."
                )
        self._targets = targets
        if unit.batch or not (unit.parts[0].info.direct and _can_receive(targets[0], unit.parts[0], unit.on_device)):
            if receives and unit.on_device:
                self._sent = buffers.device_buffer(self._size)
                return
            self._make_buffer()

    @property
    def _size(self) -> int:
        return self._unit.nbytes + (_TAIL_BYTES if self._unit.batch else 0)

    def _make_buffer(self) -> None:
        for_device = self._unit.on_device or any(not device.is_host(target) for target in self._targets)
        self._buffer = buffers.host_buffer(self._size, for_device=for_device)
        if self._unit.batch:
            self._buffer[self._unit.nbytes :] = 0

    def wire(self) -> torch.Tensor:
        """What is sent or received, as one flat tensor of the transport dtype."""
        dtype = dtype_of(self._unit.transport)
        if self._buffer is None and self._sent is None:
            if self._targets:
                return self._targets[0].detach().view(-1).view(dtype)
            # Nothing could be acquired here; the walk goes on with bytes that nobody looks at.
            self._make_buffer()
        if self._unit.on_device and self._sent is None:
            assert self._buffer is not None
            self._sent = buffers.to_device(self._size, self._buffer)
        wire = self._buffer if self._sent is None else self._sent
        assert wire is not None
        return wire.view(dtype)

    def read(self, reader: StorageReader, items: Mapping[MetadataIndex, Sequence[ReadItem]]) -> None:
        """Fill the buffer, or the target itself, from storage."""
        self.allocate(receives=False)
        wanted: list[ReadItem] = []
        memory: _Memory = {}
        for part, view in zip(self._unit.parts, self._views(self._buffer), strict=True):
            for item in cut_items(items[part.index], part.offsets, part.sizes, self._unit.source):
                begin = tuple(a - b for a, b in zip(item.dest_offsets, part.offsets, strict=True))
                memory[item.dest_index, item.dest_offsets, item.lengths] = view_of_box(view, begin, item.lengths)
                wanted.append(item)
        reader.execute_read(LoadPlan.build(wanted), _IntoMemory(memory))

    def deliver(self) -> None:
        """Put what arrived into the targets."""
        arrived = self._buffer if self._sent is None else self._sent
        if arrived is not None and self._targets:
            views = self._views(arrived)
            alike = [
                target.dtype == view.dtype and target.device == view.device
                for target, view in zip(self._targets, views, strict=True)
            ]
            if self._unit.batch and all(alike) and self._unit.stored == self._unit.transport:
                torch._foreach_copy_([target.detach() for target in self._targets], views)
            else:
                for target, view in zip(self._targets, views, strict=True):
                    device.copy_into(target, view)
        self._planner.apply(self._boxes, self._targets)

    def say(self, trouble: bool) -> None:
        """Let the batch tell its receivers whether its bytes are good."""
        if self._unit.batch and self._buffer is None:
            self._make_buffer()
        if self._unit.batch and self._buffer is not None:
            self._buffer[self._unit.nbytes] = int(trouble)

    def trouble(self) -> bool:
        """Whether the batch's source said that it failed."""
        arrived = self._buffer if self._sent is None else self._sent
        return arrived is None or bool(arrived[self._unit.nbytes].item())

    def _views(self, buffer: torch.Tensor | None) -> list[torch.Tensor]:
        """Each part's place in the buffer, or the target itself, in the stored dtype."""
        if buffer is None:
            return [target.detach() for target in self._targets]
        unit = self._unit
        flat = buffer[: unit.nbytes].view(dtype_of(unit.stored)).split_with_sizes(unit.counts)
        return [piece.view(part.sizes) for piece, part in zip(flat, unit.parts, strict=True)]


def _can_receive(target: torch.Tensor, part: SharedPart, on_device: bool) -> bool:
    """Whether the part's bytes, as they are stored, are what the target's memory is to hold."""
    return (
        (device.is_current(target) if on_device else device.is_host(target))
        and target.is_contiguous()
        and target.dtype == dtype_of(part.stored_dtype)
        and not (target.is_conj() or target.is_neg())
    )


_Memory: TypeAlias = dict[tuple[MetadataIndex, tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Where boxes go, by destination chunk, offsets and sizes: stored boxes may overlap, and begin at one place."""


class _IntoMemory(LoadPlanner):
    """Lets a reader fill buffers that are not targets yet."""

    def __init__(self, memory: _Memory) -> None:
        self._memory = memory

    def acquire_tensor(self, item: ReadItem) -> torch.Tensor:
        return self._memory[item.dest_index, item.dest_offsets, item.lengths]

    def apply_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        return

    def configure_planner(self, state_dict: Mapping[Any, Any], metadata: Metadata, context: PlannerContext) -> None:
        raise AssertionError("only asked for memory")

    def build_local_plan(self) -> LoadPlan:
        raise AssertionError("only asked for memory")

    def build_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        raise AssertionError("only asked for memory")

    def finalize_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def apply_bytes(self, item: ReadItem, data: bytes) -> None:
        raise AssertionError("objects are never broadcast")

    def finish_load(self) -> None:
        return
