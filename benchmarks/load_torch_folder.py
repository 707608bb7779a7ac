"""How long a load of a checkpoint of torch.distributed.checkpoint takes, with torch's own reader and with hpdcp.

Ranks save with torch once, sharded by rows, and then load by turns with both: in the layout that was saved, by columns,
and, of a checkpoint of many small tensors, where planning and opening items is what takes the time. Wall seconds and
the CPU seconds of all ranks; ratios are of one round each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hpdcp

CASES = {"large": (32, (1024, 1024)), "small": (1000, (64, 64))}
"""Tensors of float32, and the shape of each."""


def state(mesh: DeviceMesh, count: int, shape: tuple[int, int], dim: int) -> dict[str, Any]:
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    names = (f"model.layers.{n}.weight" for n in range(count))
    return {name: distribute_tensor(whole + n, mesh, [Shard(dim)]) for n, name in enumerate(names)}


def measured(load: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    load()
    dist.barrier()
    spent = torch.tensor(time.process_time() - cpu)
    wall = time.perf_counter() - wall
    dist.all_reduce(spent)
    return wall, float(spent)


def run(folder: Path, rounds: int) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for case, (count, shape) in CASES.items():
        target = folder / case
        dcp.save(state(mesh, count, shape, 0), checkpoint_id=target)
        for layout, dim in (("as saved", 0), ("by columns", 1)):
            wanted = state(mesh, count, shape, dim)
            blank = state(mesh, count, shape, dim)
            taken: dict[str, list[tuple[float, float]]] = {"torch": [], "hpdcp": []}
            for _ in range(rounds):
                for who, load in (("torch", dcp.load), ("hpdcp", hpdcp.load)):
                    for tensor in blank.values():
                        tensor.to_local().zero_()
                    taken[who].append(measured(partial(load, blank, checkpoint_id=target)))
                    for name, tensor in blank.items():
                        assert isinstance(tensor, DTensor)
                        assert torch.equal(tensor.to_local(), wanted[name].to_local()), (who, name)
            if dist.get_rank() == 0:
                report(f"{case}, {layout}", taken)
    dist.destroy_process_group()


def report(what: str, taken: dict[str, list[tuple[float, float]]]) -> None:
    figures = []
    for kind, number in (("wall", 0), ("CPU", 1)):
        ours, theirs = [each[number] for each in taken["hpdcp"]], [each[number] for each in taken["torch"]]
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        figures.append(
            f"{kind}: torch {statistics.median(theirs):.2f} s, hpdcp {statistics.median(ours):.2f} s, {ratio:.1f}x"
        )
    print(f"{what}: {'; '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    if "RANK" in os.environ:
        run(given.folder, given.rounds)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
        arguments = [__file__, "--folder", folder, "--rounds", str(given.rounds)]
        subprocess.run([sys.executable, *launcher, *arguments], check=True)


if __name__ == "__main__":
    main()
