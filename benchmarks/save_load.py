"""How fast are a save and a load, beside torch's own checkpoints and beside plain files?

    python benchmarks/save_load.py --folder /dev/shm/bench [--gib 1] [--ranks 2] [--repetitions 5] [--cold]
        [--asynchronous]

State: tensors sharded by rows over all ranks (bfloat16 weights, float32 moments) and 256 small replicated ones. `raw`
writes each tensor with one call to one file for each rank, and fsyncs once: the limit of what files can do. It writes
over its file in place; `raw-replace` writes a new one and gives it the name, as a save over a checkpoint must. `--cold`
drops the page cache before the first load (root only) and also reports the bytes the disk read. Peak memory is that
of the largest rank, above what it was when the state was built. `--asynchronous` adds three asynchronous saves in a
row: how long the trainer stands still in each (`raw`: one copy into memory that is kept), and until it has landed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness


def build(gib: float, ranks: int, rank: int) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(rank)
    state: dict[str, Any] = {}
    elements = 4096 * 4096
    layers = max(1, int(gib * (1 << 30) // (elements * 10)))
    for layer in range(layers):
        for name, dtype in (("w", torch.bfloat16), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)):
            local = torch.empty(4096 // ranks, 4096, dtype=dtype).uniform_(generator=generator)
            state[f"layers.{layer:03d}.{name}"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    for number in range(256):
        local = torch.full((1024,), float(number))
        state[f"norm.{number:04d}.weight"] = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    return state


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.distributed.tensor import DTensor

    return {
        key: DTensor.from_local(torch.zeros_like(t.to_local()), t.device_mesh, t.placements, run_check=False)
        for key, t in state.items()
    }


def asynchronous_verb(contestant: str, folder: Path) -> Callable[[Any], Callable[[], object]]:
    """Starts an asynchronous save of a state; what it returns waits until that has landed."""
    path = str(folder / contestant)
    if contestant == "hpdcp":
        import hpdcp

        def begin(state: Any) -> Callable[[], object]:
            response = hpdcp.async_save(state, checkpoint_id=path, use_gloo=True)
            return lambda: response.get_result(600)

    elif contestant == "torch":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        def begin(state: Any) -> Callable[[], object]:
            kind = AsyncCheckpointerType.PROCESS
            future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path), async_checkpointer_type=kind)
            return lambda: getattr(future, "upload_completion", future).result()

    else:
        kept: dict[str, Any] = {}

        def begin(state: Any) -> Callable[[], object]:
            for key, tensor in state.items():
                if key in kept:
                    kept[key].copy_(tensor.to_local())
                else:
                    kept[key] = tensor.to_local().clone()
            return lambda: None

    return begin


def verbs(contestant: str, folder: Path, rank: int) -> tuple[Callable[[Any], None], Callable[[Any], None]]:
    """(save, load) of a contestant."""
    path = str(folder / contestant)
    if contestant == "hpdcp":
        import hpdcp

        def save(state: Any) -> None:
            hpdcp.save(state, checkpoint_id=path)

        def load(state: Any) -> None:
            hpdcp.load(state, checkpoint_id=path)

    elif contestant == "torch":
        import torch.distributed.checkpoint as dcp

        def save(state: Any) -> None:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path))

        def load(state: Any) -> None:
            dcp.load(state, storage_reader=dcp.FileSystemReader(path))

    else:
        import torch

        file = Path(path) / f"rank{rank}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)

        def views(state: Any) -> list[memoryview]:
            return [memoryview(t.to_local().view(torch.uint8).numpy()).cast("B") for t in state.values()]

        written = file.with_suffix(".new") if contestant == "raw-replace" else file

        def save(state: Any) -> None:
            with open(written, "wb", buffering=0) as out:
                for view in views(state):
                    out.write(view)
                os.fsync(out.fileno())
            os.replace(written, file)

        def load(state: Any) -> None:
            with open(file, "rb", buffering=0) as source:
                for view in views(state):
                    done = 0
                    while done < len(view):
                        done += source.readinto(view[done:])

    return save, load


def disk_bytes_read() -> int:
    """Bytes that whole disks have read since the machine started; partitions would count them twice."""
    disks = {entry.name for entry in Path("/sys/block").iterdir()}
    lines = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return 512 * sum(int(fields[5]) for fields in lines if fields[2] in disks)


def worker(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = build(options.gib, ranks, rank)
    save, load = verbs(options.contestant, options.folder, rank)
    figures: dict[str, float] = {}

    def timed(name: str, action: Callable[[], None]) -> None:
        dist.barrier()
        start = time.perf_counter()
        action()
        dist.barrier()
        figures[name] = time.perf_counter() - start

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timed("save, first", lambda: save(state))
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before])
    timed("save, over it", lambda: save(state))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    target = emptied(state)
    if options.cold:
        if rank == 0:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")
        dist.barrier()
        read_before = disk_bytes_read()
        timed("load, cold", lambda: load(target))
        figures["disk MiB read"] = (disk_bytes_read() - read_before) / 2**20
    else:
        timed("load, first", lambda: load(target))
    same = all(torch.equal(state[key].to_local(), target[key].to_local()) for key in state)
    assert same, "what was loaded is not what was saved"
    timed("load, warm", lambda: load(target))
    figures["peak MiB of a save"] = int(peak) / 1024
    if options.asynchronous:
        begin = asynchronous_verb(options.contestant, options.folder)
        waits: list[Callable[[], object]] = []
        for number in ("first", "second", "third"):
            timed(f"stall, {number}", lambda: waits.append(begin(state)))
            timed(f"landing after the {number}", lambda: waits.pop()())
    if rank == 0:
        print("RESULT " + json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--contestants", default="raw,raw-replace,torch,hpdcp")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        worker(options)
        return
    passed = ["--folder", str(options.folder), "--gib", str(options.gib), *(["--cold"] if options.cold else [])]
    passed += ["--asynchronous"] if options.asynchronous else []
    contestants = {
        name: harness.torchrun(options.ranks, __file__, "--contestant", name, *passed)
        for name in options.contestants.split(",")
    }
    found = harness.compare(
        contestants,
        repetitions=options.repetitions,
        before_each=lambda name: shutil.rmtree(options.folder / name, ignore_errors=True),
    )
    layers = max(1, int(options.gib * (1 << 30) // (4096 * 4096 * 10)))
    amount = float(layers * 4096 * 4096 * 10 + options.ranks * 256 * 4096)
    timings = [name for name in found if name.startswith(("save", "load", "stall"))]
    harness.print_table(found, base="raw", rates=dict.fromkeys(timings, amount))


if __name__ == "__main__":
    main()
