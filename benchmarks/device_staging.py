"""What does it cost to bring state from a device to storage and back, with page-locked memory and without?

    python benchmarks/device_staging.py [--device auto|cuda|npu|xpu|fake] [--gib 2] [--repetitions 3] [--limit 170]
        [--folder /dev/shm/hpdcp-device-staging]

`pinned` is what hpdcp does; `pageable` is the same with page-locking switched off, so every copy blocks; `raw` copies
the state, one call for each tensor, between the device and page-locked memory that is kept, and touches no storage. One
process for each contestant and repetition; none is begun that would not end within `--limit` seconds. The state is
large tensors and 256 small ones. Figures:

    save, load           a synchronous save to the folder, and a load into the same tensors
    stall, first/kept    how long an asynchronous save holds the trainer up, in new shared memory and in used memory
    host MiB locked      page-locked memory that a save or a load took for copies on their way, at most
    device MiB added     device memory that saves and loads took beside the state

Exits with status 2 where there is no such device. `fake` is a device that the tests make of host memory: it shows that
this script runs, and nothing of speed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

CONTESTANTS = ("pinned", "pageable", "raw")


def find_device(asked: str) -> Any:
    """The device, or None where there is no such one."""
    import torch

    if asked == "fake":
        from tests.support import fake_device

        fake_device.install()
        return torch.device("npu", 0)
    if asked != "auto":
        from hpdcp._base.errors import NotSupportedError
        from hpdcp._devices.device import device_module
        from tests.support.devices import named_device

        try:
            kind = named_device(asked)
            module: Any = device_module(kind)
        except NotSupportedError as error:
            print(error, file=sys.stderr)
            return None
        available = getattr(module, "is_available", lambda: False)()
        return torch.device(asked, module.current_device()) if available else None
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def build(device: Any, nbytes: int) -> dict[str, Any]:
    import torch

    large = max(1 << 20, min(256 << 20, nbytes // 4))
    state = {
        f"layers.{number:03d}": torch.full((large // 4,), float(number), device="cpu").to(device)
        for number in range(max(1, nbytes // large))
    }
    return state | {f"norm.{number:04d}": torch.full((1024,), float(number)).to(device) for number in range(256)}


def seconds(wait: Callable[[], object], work: Callable[[], object]) -> float:
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def measure(contestant: str, device: Any, nbytes: int, folder: Path) -> harness.Figures:
    import hpdcp
    from hpdcp._background import _arena
    from hpdcp._devices import buffers, streams

    # An event on the stream that computes; never the whole device, which the fake one would not allow.
    wait = streams.wait_for_caller
    state = build(device, nbytes)
    if contestant == "raw":
        return measure_raw(state, wait)
    locked = [0]
    allocate = buffers.allocate_pinned

    def counted(size: int) -> Any:
        if contestant == "pageable":
            raise RuntimeError("page-locking is switched off for this run")
        made = allocate(size)
        locked[0] += size
        return made

    buffers.allocate_pinned = counted
    if contestant == "pageable":
        _arena.lock_pages = lambda memory, kind: None
    taken = device_bytes(device)
    figures: harness.Figures = {}
    place = folder / contestant
    for _ in range(2):  # the first takes what is kept for the next one
        figures["save"] = seconds(wait, lambda: hpdcp.save(state, checkpoint_id=place))
    for _ in range(2):
        figures["load"] = seconds(wait, lambda: hpdcp.load(state, checkpoint_id=place))
    # Each call asks for its own; torch gives back what was freed, so this is an upper limit.
    figures["host MiB locked"] = locked[0] / 4 / (1 << 20)
    figures["device MiB added"] = (device_bytes(device) - taken) / (1 << 20)
    for name in ("stall, first", "stall, kept"):
        began = time.perf_counter()
        response = hpdcp.async_save(state, checkpoint_id=place)
        figures[name] = time.perf_counter() - began
        response.get_result()
    return figures


def measure_raw(state: dict[str, Any], wait: Callable[[], object]) -> harness.Figures:
    from hpdcp._devices import buffers

    kept = {key: buffers.allocate_pinned(tensor.nbytes).view(tensor.dtype) for key, tensor in state.items()}

    def down() -> None:
        for key, tensor in state.items():
            kept[key].copy_(tensor, non_blocking=True)

    def up() -> None:
        for key, tensor in state.items():
            tensor.copy_(kept[key], non_blocking=True)

    for _ in range(2):
        save, load = seconds(wait, down), seconds(wait, up)
    return {"save": save, "load": load, "stall, kept": save}


def device_bytes(device: Any) -> int:
    """The most that the process has held on the device until now."""
    import torch

    most = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if most is not None:
        return int(most())
    from tests.support import fake_device

    return fake_device.STATE.peak


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--limit", type=float, default=170.0)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/hpdcp-device-staging"))
    parser.add_argument("--contestant", choices=CONTESTANTS)
    options = parser.parse_args()
    nbytes = int(options.gib * (1 << 30))
    if options.contestant is not None:
        device = find_device(options.device)
        print("RESULT " + json.dumps(measure(options.contestant, device, nbytes, options.folder)), flush=True)
        return 0
    device = find_device(options.device)
    if device is None:
        print(
            f"no accelerator: --device {options.device} found none that torch can use here; nothing was measured. Run "
            "this on a machine with a GPU or an NPU and the torch made for it; --device fake only tries the script.",
            file=sys.stderr,
        )
        return 2
    common = ["--device", options.device, "--gib", str(options.gib), "--folder", str(options.folder)]
    began = time.monotonic()
    found: dict[str, dict[str, list[float]]] = {}
    done = 0
    try:
        while done < options.repetitions:
            # As long as the slowest so far: the next one must end within the limit as well.
            spent = time.monotonic() - began
            if done and spent + spent / done > options.limit:
                print(f"stopped after {done} of {options.repetitions} repetitions and {spent:.0f} s", file=sys.stderr)
                break
            commands = {name: [sys.executable, __file__, *common, "--contestant", name] for name in CONTESTANTS}
            for figure, values in harness.compare(commands, repetitions=1).items():
                for name, measured in values.items():
                    found.setdefault(figure, {}).setdefault(name, []).extend(measured)
            done += 1
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    rates = {figure: float(nbytes) for figure in ("save", "load", "stall, first", "stall, kept")}
    print(f"{device}, {options.gib} GiB, {done} repetitions")
    harness.print_table(found, base="raw", rates=rates)
    return 0


if __name__ == "__main__":
    sys.exit(main())
