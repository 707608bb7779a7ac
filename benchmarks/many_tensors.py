"""What does a tensor cost on save and on load, beside its bytes?

    python benchmarks/many_tensors.py --folder /dev/shm/bench [--tensors 10000] [--bytes 4096] [--ranks 1]
        [--repetitions 5] [--times 3] [--contestants plain,safetensors,torch,hpdcp] [--clock wall|cpu]

State: so many float32 tensors of so many bytes on each rank; on several ranks DTensors sharded by rows, as FSDP2 makes
them. `plain` writes them into one file for each rank with few calls, `safetensors` is `save_file` and `load_file` of
its torch binding (of each rank's shards), `torch` its own distributed checkpoints. Every contestant saves into an empty
folder, then over it as often as `--times` says, and loads as often; figures are milliseconds, the median of each
repetition's times. `--clock cpu`: CPU time of rank 0, for a machine that others use as well.

With few tensors (`--tensors 10 --times 20`) it tells the latency of a save and a load. For hpdcp a second table says
where the time of a save over an earlier one and of the first save goes, in microseconds a tensor, by its own stages.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

_STAGE = "us a tensor: "


class Stages(logging.Handler):
    """Collects the seconds that hpdcp logs for each of its stages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seconds: dict[str, list[float]] = {}
        logger = logging.getLogger("hpdcp")
        logger.setLevel(logging.INFO)
        logger.propagate = False
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and len(record.args) == 2:
            name, seconds = record.args
            self.seconds.setdefault(str(name), []).append(float(str(seconds)))


def build(tensors: int, nbytes: int, ranks: int, rank: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    names = [f"model.layers.{i // 128:03d}.mlp.experts.{i % 128:03d}.down_proj.weight" for i in range(tensors)]
    local = {name: torch.rand(8, nbytes // 32, generator=generator) for name in names}
    if ranks == 1:
        return local
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in local.items()}


def local_part(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def verbs(contestant: str, folder: Path, rank: int) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """(save, load) of a contestant."""
    path = folder / contestant
    if contestant == "hpdcp":
        import hpdcp

        return (
            lambda state: hpdcp.save(state, checkpoint_id=path),
            lambda state: hpdcp.load(state, checkpoint_id=path),
        )
    if contestant == "torch":
        import torch.distributed.checkpoint as dcp

        return (
            lambda state: dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path))),
            lambda state: dcp.load(state, storage_reader=dcp.FileSystemReader(str(path))),
        )
    path.mkdir(parents=True, exist_ok=True)
    if contestant == "safetensors":
        from safetensors.torch import load_file, save_file

        file = path / f"{rank}.safetensors"

        def load(state: dict[str, Any]) -> None:
            for name, tensor in load_file(file).items():
                local_part(state[name]).copy_(tensor)

        return lambda state: save_file({name: local_part(tensor) for name, tensor in state.items()}, file), load
    return plain_verbs(path / f"{rank}.bin")


def plain_verbs(file: Path) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    """The bytes alone, in calls of as many buffers as the system takes; a save replaces the file by a new one."""

    def views(state: dict[str, Any]) -> list[memoryview]:
        return [memoryview(local_part(tensor).numpy()).cast("B") for tensor in state.values()]

    def moved(move: Callable[[int, list[memoryview]], int], descriptor: int, buffers: list[memoryview]) -> None:
        for start in range(0, len(buffers), 1024):
            some = buffers[start : start + 1024]
            assert move(descriptor, some) == sum(map(len, some))

    def save(state: dict[str, Any]) -> None:
        new = file.with_suffix(".new")
        with open(new, "wb", buffering=0) as out:
            moved(os.writev, out.fileno(), views(state))
            os.fsync(out.fileno())
        os.replace(new, file)

    def load(state: dict[str, Any]) -> None:
        with open(file, "rb", buffering=0) as source:
            moved(os.readv, source.fileno(), views(state))

    return save, load


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if options.ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if options.ranks > 1 else 0
    state = build(options.tensors, options.bytes, options.ranks, rank)
    target = emptied(state)
    save, load = verbs(options.contestant, options.folder, rank)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    figures: dict[str, float] = {}

    def timed(name: str, action: Callable[[], object], times: int) -> None:
        stages = Stages() if options.contestant == "hpdcp" else None
        taken = []
        for _ in range(times):
            if options.ranks > 1:
                dist.barrier()
            start = clock()
            action()
            taken.append((clock() - start) * 1e3)
        figures[f"{name}, ms"] = statistics.median(taken)
        for stage, seconds in ({} if stages is None else stages.seconds).items():
            figures[f"{_STAGE}{name}: {stage}"] = statistics.median(seconds) * 1e6 / options.tensors
        if stages is not None:
            logging.getLogger("hpdcp").removeHandler(stages)

    # Code that is loaded when it is first used is no tensor's cost.
    small = dict(list(build(2, 4096, options.ranks, rank).items()))
    warm_save, warm_load = verbs(options.contestant, options.folder / "warm", rank)
    warm_save(small)
    warm_load(small)
    timed("save, first", lambda: save(state), 1)
    timed("save, over it", lambda: save(state), options.times)
    timed("load, first", lambda: load(target), 1)
    timed("load, again", lambda: load(target), options.times)
    assert all(torch.equal(local_part(state[name]), local_part(target[name])) for name in state)
    if rank == 0:
        print("RESULT " + json.dumps(figures), flush=True)
    if options.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--contestants", default="plain,safetensors,torch,hpdcp")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        worker(options)
        return
    passed = [
        f"--{name}={getattr(options, name)}" for name in ("folder", "tensors", "bytes", "ranks", "times", "clock")
    ]
    names = options.contestants.split(",")

    def remove(name: str) -> None:
        for folder in (options.folder / name, options.folder / "warm"):
            shutil.rmtree(folder, ignore_errors=True)

    contestants = {name: harness.command(options.ranks, __file__, "--contestant", name, *passed) for name in names}
    found = harness.compare(contestants, repetitions=options.repetitions, before_each=remove)
    base = "safetensors" if "safetensors" in names else names[0]
    harness.print_table({name: values for name, values in found.items() if _STAGE not in name}, base=base, rates={})
    stages = {name.removeprefix(_STAGE): values for name, values in found.items() if _STAGE in name}
    if stages:
        print("\nmicroseconds a tensor\n")
        harness.print_table(stages, base="hpdcp", rates={})


if __name__ == "__main__":
    main()
