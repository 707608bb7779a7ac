"""What goes to and comes from a device that is not the CPU; `test_device_path.py` runs it in a process of its own."""

from __future__ import annotations

import contextvars
import logging
import random
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import StandardSavePlanner
from hpdcp._background._arena import Arena, tensor_at
from hpdcp._background._background_saves import SAVES
from hpdcp._background._staging import build_staged_state_dict
from hpdcp._base.errors import InvalidArgumentError, StorageError
from hpdcp._devices import buffers, downloads, streams
from hpdcp._devices.byte_pieces import byte_pieces
from hpdcp._devices.downloads import Downloads
from hpdcp._devices.streams import after_the_caller
from hpdcp._files import box_reads
from hpdcp._format.checksums import block_checksums
from hpdcp._plan.planner import PlannerContext
from hpdcp_backends.local import LocalBackend
from tests.support import fake_device
from tests.support.fake_device import MODULE, NAME, shadow

DEVICE = fake_device.install()
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool, torch.uint8]


@pytest.fixture(autouse=True)
def _nothing_left_queued() -> Iterator[None]:
    DEVICE.log.clear()
    yield
    stream = streams.copy_stream(torch.device(NAME, 0))._stream
    assert stream.ended == stream.begun
    assert not [line for line in DEVICE.log if "pageable later" in line]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches and slabs of 4 KiB, so that small tensors take many."""
    monkeypatch.setattr(downloads, "BATCH_BYTES", 4096)
    monkeypatch.setattr(box_reads, "SLAB_BYTES", 4096)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(NAME)


def some_state() -> dict[str, torch.Tensor]:
    """Tensors of the host; larger than a batch of `small_batches`, smaller, of no element, of none of the shapes."""
    made = {
        f"{str(dtype).rpartition('.')[2]}.{number}": torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        .clamp_(max=1 if dtype is torch.bool else 255)
        .view(dtype)
        .reshape(shape)
        for dtype in DTYPES
        for number, shape in enumerate([(3,), (1000, 7), (0, 4), (5, 5, 5)])
    }
    return made | {"scalar": torch.tensor(2.5)}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def test_the_device_s_memory_is_out_of_the_processor_s_reach() -> None:
    tensor = on_device(torch.arange(4.0))
    with pytest.raises(InvalidArgumentError, match="CPU"):
        hpdcp._devices.device.host_bytes(tensor)
    assert tensor.cpu().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("side", ["device", "mixed"])
def test_a_state_comes_back_bit_by_bit_to_either_side(tmp_path: Path, side: str) -> None:
    values = some_state()
    there = lambda number: side == "device" or number % 2  # noqa: E731
    state = {key: on_device(value) if there(n) else value for n, (key, value) in enumerate(values.items())}
    hpdcp.save(state, checkpoint_id=tmp_path / "c")
    on_host = {key: torch.zeros_like(value) for key, value in values.items()}
    hpdcp.load(on_host, checkpoint_id=tmp_path / "c")
    back = {key: torch.zeros_like(value) for key, value in state.items()}
    hpdcp.load(back, checkpoint_id=tmp_path / "c")
    for key, value in values.items():
        assert same_bits(on_host[key], value), key
        assert back[key].device == state[key].device
        assert same_bits(shadow(back[key]), value), key


@pytest.mark.usefixtures("small_batches")
def test_tensors_whose_elements_are_not_in_a_row_are_saved_and_filled(tmp_path: Path) -> None:
    value = torch.arange(120 * 90, dtype=torch.int32).reshape(120, 90)
    hpdcp.save({"t": on_device(value).t(), "part": on_device(value)[3:70, 5:60]}, checkpoint_id=tmp_path / "c")
    target = on_device(torch.zeros(120, 90, dtype=torch.int32))
    part = on_device(torch.zeros(67, 55, dtype=torch.float32))
    with pytest.warns(UserWarning, match="cast to their target's dtype: 'part'"):
        hpdcp.load({"t": target.t(), "part": part}, checkpoint_id=tmp_path / "c")
    assert torch.equal(shadow(target), value)
    assert torch.equal(shadow(part), value[3:70, 5:60].float())


def test_a_save_sees_what_was_queued_before_it(tmp_path: Path) -> None:
    tensor = on_device(torch.zeros(1000))
    with MODULE.stream(fake_device.Stream()):
        tensor.fill_(7)
        hpdcp.save({"t": tensor}, checkpoint_id=tmp_path / "c")
    loaded = {"t": torch.zeros(1000)}
    hpdcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert loaded["t"].unique().tolist() == [7.0]


def test_a_load_comes_after_what_was_queued_before_it_and_is_done_when_it_returns(tmp_path: Path) -> None:
    hpdcp.save({"t": torch.arange(1000.0)}, checkpoint_id=tmp_path / "c")
    target = on_device(torch.zeros(1000))
    with MODULE.stream(fake_device.Stream()):
        target.fill_(3)
        hpdcp.load({"t": target}, checkpoint_id=tmp_path / "c")
    assert torch.equal(shadow(target), torch.arange(1000.0))


def test_a_thread_s_copies_follow_the_stream_of_the_caller_it_works_for() -> None:
    tensor = on_device(torch.zeros(100))
    found: list[torch.Tensor] = []

    def bring() -> None:
        found.extend(part.clone() for _, part in Downloads[None](0).on_host([(None, tensor)]))

    with MODULE.stream(fake_device.Stream()), after_the_caller():
        tensor.fill_(5)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(bring,))
        thread.start()
        thread.join()
    assert found[0].view(torch.float32).unique().tolist() == [5.0]


def test_the_next_batch_is_on_its_way_while_one_is_used() -> None:
    size = downloads.BATCH_BYTES
    tensors = [(number, on_device(torch.full((size,), number, dtype=torch.uint8))) for number in range(4)]
    DEVICE.log.clear()
    for number, _ in Downloads[int](0).on_host(tensors):
        DEVICE.note(f"use {number}")
    copy = "copy to host pinned later"
    kinds = [copy if line.startswith(copy) else line for line in DEVICE.log]
    middle = [step for number in range(3) for step in (copy, "wait event", f"use {number}")]
    assert kinds == [copy, *middle, "wait event", "use 3"]


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("window", [1, 700, 4096, 10_000, 50_000])
@pytest.mark.parametrize("seed", range(6))
def test_memory_handed_out_stays_as_it_is_for_the_write_window(window: int, seed: int) -> None:
    chance = random.Random(seed)
    before = DEVICE.pinned_bytes
    tensors: list[tuple[int, torch.Tensor]] = []
    for number in range(60):
        tensor = torch.randint(0, 255, (chance.choice([8, 100, 3000, 4096, 9001, 20_000]),), dtype=torch.uint8)
        kind = chance.random()
        if kind < 0.2:
            tensors.append((number, tensor))
        elif kind < 0.4:
            tensors.append((number, on_device(tensor.reshape(-1, 2 if len(tensor) % 2 == 0 else 1)).t()))
        else:
            tensors.append((number, on_device(tensor)))
    under_test = Downloads[int](window)
    for _ in range(2):
        recent: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        pieces: dict[int, list[torch.Tensor]] = {}
        for number, piece in under_test.on_host(tensors):
            flat = piece.reshape(-1)
            pieces.setdefault(number, []).append(flat.clone())
            recent.append((flat, flat.clone()))
            while sum(len(kept) for _, kept in list(recent)[1:]) >= window:
                recent.popleft()
            for held, kept in recent:
                assert torch.equal(held, kept), "memory was used again too early"
        for number, tensor in tensors:
            assert torch.equal(torch.cat(pieces[number]), shadow(tensor).contiguous().reshape(-1))
        under_test.release()
    assert DEVICE.pinned_bytes - before <= 2 * window + 4 * 4096


@pytest.mark.usefixtures("small_batches")
def test_without_a_window_all_that_was_handed_out_stays_good_and_page_locked_memory_small() -> None:
    before = DEVICE.pinned_bytes
    tensors = [(n, torch.randint(0, 255, (3000,), dtype=torch.uint8)) for n in range(50)]
    parts = [part for _, part in Downloads[int](None).on_host([(n, on_device(tensor)) for n, tensor in tensors])]
    assert torch.equal(torch.cat(parts), torch.cat([tensor for _, tensor in tensors]))
    assert DEVICE.pinned_bytes - before <= 3 * 4096


@pytest.mark.usefixtures("small_batches")
def test_pieces_of_a_tensor_stay_good_unless_their_user_says_that_it_is_done_with_them() -> None:
    value = torch.randint(0, 255, (30_000,), dtype=torch.uint8)
    tensor = on_device(value)
    assert b"".join(list(byte_pieces(tensor))) == bytes(value.numpy())
    before = DEVICE.pinned_bytes
    assert block_checksums(byte_pieces(tensor, kept=False)) == block_checksums(byte_pieces(value))
    assert DEVICE.pinned_bytes - before <= 3 * 4096


def test_a_save_locks_little_memory_whatever_the_size_of_the_state(tmp_path: Path) -> None:
    window = LocalBackend(str(tmp_path)).write_window
    assert window is not None
    state = {f"t{n}": on_device(torch.full((5 << 20,), n, dtype=torch.int32)) for n in range(8)}
    before, device_bytes = DEVICE.pinned_bytes, DEVICE.held()
    DEVICE.forget_peak()
    hpdcp.save(state, checkpoint_id=tmp_path / "c")
    assert DEVICE.pinned_bytes - before <= window + 3 * downloads.BATCH_BYTES < 100 << 20
    assert DEVICE.peak == device_bytes
    # The memory was used again many times below a backend that writes on threads of its own.
    loaded = {key: torch.zeros(5 << 20, dtype=torch.int32) for key in state}
    hpdcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(loaded[key], shadow(tensor)) for key, tensor in state.items())


def test_a_load_into_devices_takes_no_device_memory(tmp_path: Path) -> None:
    hpdcp.save({"t": torch.arange(30 << 20, dtype=torch.uint8)}, checkpoint_id=tmp_path / "c")
    target = on_device(torch.zeros(30 << 20, dtype=torch.uint8))
    held = DEVICE.held()
    DEVICE.forget_peak()
    hpdcp.load({"t": target}, checkpoint_id=tmp_path / "c")
    assert DEVICE.peak == held


@pytest.mark.usefixtures("small_batches")
def test_a_load_reads_on_while_what_it_read_goes_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpdcp.save({"t": torch.arange(20_000, dtype=torch.uint8)}, checkpoint_id=tmp_path / "c")
    target = on_device(torch.zeros(20_000, dtype=torch.uint8))
    read_ranges = LocalBackend.read_ranges

    def noted(self: LocalBackend, *arguments: Any) -> None:
        DEVICE.note("read")
        read_ranges(self, *arguments)

    monkeypatch.setattr(LocalBackend, "read_ranges", noted)
    DEVICE.log.clear()
    hpdcp.load({"t": target}, checkpoint_id=tmp_path / "c")
    copy = "copy to device pinned later"
    kinds = [copy if line.startswith(copy) else line for line in DEVICE.log]
    first = kinds.index(copy)
    # Two pieces of memory in turn: from the third read on, the copy of two reads before is waited for first.
    assert kinds[first - 1 : first + 8] == [
        "read",
        copy,
        "read",
        copy,
        "wait event",
        "read",
        copy,
        "wait event",
        "read",
    ]
    assert torch.equal(shadow(target), torch.arange(20_000, dtype=torch.uint8))


@pytest.mark.usefixtures("small_batches")
def test_a_write_that_fails_leaves_no_copy_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LocalBackend, key: str, buffers: Iterator[memoryview], **_: Any) -> None:
        del self, key
        for number, _ in enumerate(buffers):
            if number == 3:
                raise StorageError("the disk is gone")

    monkeypatch.setattr(LocalBackend, "write", broken)
    with pytest.raises(StorageError, match="the disk is gone"):
        hpdcp.save({"t": on_device(torch.zeros(100_000))}, checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("small_batches")
def test_a_read_that_fails_leaves_no_copy_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpdcp.save({"t": torch.zeros(20_000)}, checkpoint_id=tmp_path / "c")
    read_ranges = LocalBackend.read_ranges
    reads: list[str] = []

    def breaking(self: LocalBackend, key: str, *arguments: Any) -> None:
        reads.append(key)
        if sum("safetensors" in name for name in reads) == 4:
            raise StorageError("the disk is gone")
        read_ranges(self, key, *arguments)

    monkeypatch.setattr(LocalBackend, "read_ranges", breaking)
    with pytest.raises(StorageError, match="the disk is gone"):
        hpdcp.load({"t": on_device(torch.zeros(20_000))}, checkpoint_id=tmp_path / "c")


@pytest.mark.usefixtures("small_batches")
def test_where_nothing_can_be_page_locked_copies_block_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError(f"no {nbytes} bytes to lock")

    monkeypatch.setattr(buffers, "allocate_pinned", refuse)
    value = torch.arange(50_000.0)
    with caplog.at_level(logging.WARNING, "hpdcp"):
        hpdcp.save({"t": on_device(value)}, checkpoint_id=tmp_path / "c")
    assert "cannot page-lock host memory" in caplog.text
    target = on_device(torch.zeros(50_000))
    hpdcp.load({"t": target}, checkpoint_id=tmp_path / "c")
    assert torch.equal(shadow(target), value)


@pytest.mark.usefixtures("small_batches")
def test_a_device_without_streams_is_waited_for_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    plain = streams.CopyStream.__new__(streams.CopyStream)
    monkeypatch.setattr(streams, "device_module", lambda _: SimpleNamespace())
    plain.__init__(torch.device(NAME, 0))  # type: ignore[misc]
    monkeypatch.undo()
    monkeypatch.setattr(streams, "copy_stream", lambda _: plain)
    monkeypatch.setattr(streams, "synchronize", waits.append)
    value = torch.arange(5000.0)
    hpdcp.save({"t": on_device(value)}, checkpoint_id=tmp_path / "c")
    target = on_device(torch.zeros(5000))
    hpdcp.load({"t": target}, checkpoint_id=tmp_path / "c")
    assert torch.equal(shadow(target), value)
    assert waits
    monkeypatch.undo()


class Runtime:
    """What the device's module shows of its runtime where that can page-lock memory that is there already."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802  # the runtime's own name
        assert flags == 1
        assert nbytes > 0
        if not self.status:
            self.locked[address] = nbytes
            DEVICE.pinned.append((address, address + nbytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        DEVICE.pinned.remove((address, address + self.locked.pop(address)))
        return 0


def staged(state: dict[str, torch.Tensor], arena: Arena) -> dict[str, torch.Tensor]:
    """What the worker would see of the state."""
    planner = StandardSavePlanner()
    planner.configure_planner(state, PlannerContext(0, 1, True, False))
    plan = planner.build_local_plan()
    copied = build_staged_state_dict(planner, plan, arena)
    return {
        item.index.fqn: tensor_at(arena.memory(where), state[item.index.fqn].dtype, item.index.sizes)
        for item, where in zip(copied.plan.items, copied.ranges, strict=True)
    }


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("runtime", [None, Runtime()], ids=["through page-locked memory", "straight"])
def test_staging_copies_a_state_and_returns_when_it_may_be_changed(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime | None
) -> None:
    if runtime is not None:
        monkeypatch.setattr(MODULE, "cudart", lambda: runtime, raising=False)
    values = some_state()
    state = {key: on_device(value) if n % 3 else value for n, (key, value) in enumerate(values.items())}
    state["turned"] = on_device(torch.arange(5000).reshape(50, 100)).t()
    values["turned"] = torch.arange(5000).reshape(50, 100).t()
    queued = on_device(torch.zeros(3000))
    queued.fill_(4)
    state["queued"], values["queued"] = queued, torch.full((3000,), 4.0)
    arena = Arena()
    for _ in range(2):
        DEVICE.log.clear()
        found = staged(state, arena)
        assert found.keys() == {key for key, value in values.items() if value.numel()}
        for key, copy in found.items():
            assert same_bits(copy, values[key]), key
        assert "wait event" in DEVICE.log
        if runtime is not None:
            # All of it in one go: nobody waits between copies that go straight into the arena.
            straight = [t for t in state.values() if t.device.type == NAME and t.numel() and t.is_contiguous()]
            assert DEVICE.log.index("wait event") >= len(straight) > 10
    if runtime is not None:
        assert list(runtime.locked.values()) == [segment.size for segment in arena.segments]
    arena.close()
    assert runtime is None or not runtime.locked


@pytest.mark.usefixtures("small_batches")
def test_shared_memory_that_cannot_be_locked_is_copied_into_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(MODULE, "cudart", lambda: Runtime(status=2), raising=False)
    arena = Arena()
    with caplog.at_level(logging.WARNING, "hpdcp"):
        found = staged({"t": on_device(torch.arange(3000))}, arena)
    assert torch.equal(found["t"], torch.arange(3000))
    assert "could not be page-locked for npu (error 2)" in caplog.text
    arena.close()


def test_an_asynchronous_save_keeps_what_the_device_held_when_it_was_called(tmp_path: Path) -> None:
    tensor = on_device(torch.zeros(100_000))
    tensor.fill_(1)
    response = hpdcp.async_save({"t": tensor, "host": torch.ones(3)}, checkpoint_id=tmp_path / "c")
    tensor.fill_(2)
    worker = Path(f"/proc/{SAVES.worker()._process.pid}/environ").read_bytes().split(b"\0")
    assert {b"ASCEND_RT_VISIBLE_DEVICES=", b"TORCH_DEVICE_BACKEND_AUTOLOAD=0"} <= set(worker)
    response.get_result()
    loaded = {"t": torch.zeros(100_000), "host": torch.zeros(3)}
    hpdcp.load(loaded, checkpoint_id=tmp_path / "c")
    assert loaded["t"].unique().tolist() == [1.0]
    assert loaded["host"].tolist() == [1.0] * 3
