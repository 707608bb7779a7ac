"""What does it bring that one rank reads for all: small tensors in batches, slow stores, and the local disk?

    python benchmarks/broadcast_load.py QUESTION --folder /dev/shm/bench [--ranks 4] [--repetitions 5]

QUESTION `small`: 512 replicated tensors of 64 KiB, in batches against one broadcast each, and against each rank
reading all. `remote`: 1 GiB replicated, from a store whose link carries 200 MB/s for all ranks together; broadcast,
each rank for itself, and one process that reads it once. `local`: 1 GiB, half of it replicated, from the folder itself;
the automatic choice against broadcasts forced off and forced on.

All contestants of a question run in the same processes, in turn, so that they meet the same state of the machine.
Times are those of the slowest rank, medians over the repetitions; a ratio is the median of the ratios within one
repetition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness

Contestants = dict[str, dict[str, Any]]
"""Arguments of `load`, by name; the first is the one that others are compared with."""

QUESTIONS: dict[str, Contestants] = {
    "small": {
        "batched": {"broadcast_replicated_tensors": True},
        "one broadcast each": {"broadcast_replicated_tensors": True, "broadcast_batch_bytes": 0},
        "each rank for itself": {"broadcast_replicated_tensors": False},
    },
    "remote": {
        "read once by one process": {"no_dist": True},
        "broadcast": {},
        "each rank for itself": {"broadcast_replicated_tensors": False},
    },
    "local": {
        "off": {"broadcast_replicated_tensors": False},
        "automatic": {},
        "on": {"broadcast_replicated_tensors": True},
    },
}


def build(question: str, mesh: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def placed(shape: tuple[int, ...], placement: Any, value: float) -> Any:
        return DTensor.from_local(torch.full(shape, value), mesh, [placement], run_check=False)

    if question == "small":
        return {f"layer{n:03d}.weight": placed((128, 128), Replicate(), float(n)) for n in range(512)}
    mib = 1024 * 256
    if question == "remote":
        return {f"w{n}": placed((256, 2 * mib), Replicate(), float(n)) for n in range(2)}
    state = {f"w{n}": placed((32, mib), Replicate(), float(n)) for n in range(16)}
    rows = 512 // mesh.size()
    state["sharded"] = placed((rows, mib), Shard(0), 7.0)
    return state


class Stages(logging.Handler):
    """Seconds of each stage of the last load on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, float] = {}
        logging.getLogger("hpdcp").addHandler(self)
        logging.getLogger("hpdcp").setLevel(logging.INFO)
        logging.getLogger("hpdcp").propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 2 and "cost" in record.msg:
            name, seconds = record.args
            assert isinstance(seconds, float)
            self.seconds[str(name)] = seconds


@contextlib.contextmanager
def store(question: str) -> Iterator[None]:
    import hpdcp
    from tests.support.backends import registered

    if question != "remote":
        yield
        return
    with registered(), hpdcp.config.using(backend="throttled"):
        yield


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import hpdcp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = build(options.question, init_device_mesh("cpu", (dist.get_world_size(),)))
    hpdcp.save(state, checkpoint_id=options.folder / "all")
    if options.question == "remote" and rank == 0:
        plain = {name: tensor.to_local() for name, tensor in state.items()}
        hpdcp.save(plain, checkpoint_id=options.folder / "one", no_dist=True)
    stages = Stages()
    figures: dict[str, list[float]] = {}

    def measure(name: str, load: Callable[[], None]) -> None:
        for tensor in state.values():
            tensor.to_local().fill_(-1.0)
        dist.barrier()
        stages.seconds.clear()
        start = time.perf_counter()
        load()
        mine = torch.tensor([time.perf_counter() - start, stages.seconds.get("execute_read", 0.0)])
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        for figure, seconds in zip(("load", "execute_read"), mine.tolist(), strict=True):
            figures.setdefault(f"{name}: {figure}", []).append(seconds)

    with store(options.question):
        for round_ in range(options.repetitions + 1):
            turns = list(QUESTIONS[options.question].items())
            # Nobody always comes after the same one, and meets what that one left in the caches.
            turns = turns[::-1] if round_ % 2 else turns
            for name, arguments in turns:
                if arguments.get("no_dist"):
                    target = {key: tensor.to_local() for key, tensor in state.items()}
                    place = options.folder / "one"
                    measure(name, lambda: hpdcp.load(target, checkpoint_id=place, no_dist=True) if rank == 0 else None)  # noqa: B023
                    if rank:
                        continue
                else:
                    measure(name, lambda: hpdcp.load(state, checkpoint_id=options.folder / "all", **arguments))  # noqa: B023
                for number, tensor in enumerate(state.values()):
                    value = 7.0 if options.question == "local" and number == 16 else float(number)
                    assert bool((tensor.to_local() == value).all()), f"{name} loaded something else"
    if rank == 0:
        # The first round warms up: groups, page cache, first touch.
        print("RESULT " + json.dumps({name: values[1:] for name, values in figures.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=sorted(QUESTIONS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    passed = [options.question, "--folder", str(options.folder), "--repetitions", str(options.repetitions), "--worker"]
    try:
        found: Any = harness.run(harness.torchrun(options.ranks, __file__, *passed))
    finally:
        for name in ("all", "one"):
            shutil.rmtree(options.folder / name, ignore_errors=True)
    base = next(iter(QUESTIONS[options.question]))
    print(f"| {options.question} | load | to {base} | execute_read | to {base} |")
    print("|---|---|---|---|---|")
    for name in QUESTIONS[options.question]:
        cells = []
        for figure in ("load", "execute_read"):
            mine, first = found[f"{name}: {figure}"], found[f"{base}: {figure}"]
            ratio = statistics.median(a / b for a, b in zip(mine, first, strict=True))
            cells += [f"{statistics.median(mine):.3f} s", f"{ratio:.2f}x"]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
