"""How fast are conversions, and how much memory do they take, beside `cp` of the same bytes and beside torch's own?

    python benchmarks/convert.py --folder /dev/shm/bench [--gib 2] [--ranks 2] [--repetitions 5] [--cold]
        [--questions to-dcp,to-hf,to-torch]

A model in bfloat16, one sixth of it a single tensor. `to-dcp`: one Hugging Face file → checkpoint. `to-hf`: a
checkpoint of so many ranks, sharded by rows → Hugging Face files of 500 MB; torch's is `consolidate_safetensors_files`,
from the files that its `HuggingFaceStorageWriter` saves. `to-torch`: the same checkpoint → one file of `torch.save`;
torch's is `dcp_to_torch_save`. `cp` copies the files of hpdcp's source, `cp + fsync` also makes them durable, which
hpdcp does and torch does not. `--cold` drops the page cache before each run (root only). Peak memory is anonymous
resident memory above what it is after the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness

QUESTIONS = ("to-dcp", "to-hf", "to-torch")
CONTESTANTS = {
    "to-dcp": ("cp", "cp + fsync", "hpdcp"),
    "to-hf": ("cp", "cp + fsync", "torch", "hpdcp"),
    "to-torch": ("cp", "cp + fsync", "torch", "hpdcp"),
}
SHARD_BYTES = 500_000_000


def shapes(gib: float) -> dict[str, tuple[int, int]]:
    """Name → shape of each tensor; bfloat16."""
    layers = max(1, round(gib * (1 << 30) / (6 * (32 << 20))))
    found = {"embed.weight": (4096 * layers, 4096)}
    for layer in range(layers):
        found |= {f"layers.{layer}.{name}.weight": (4096, 4096) for name in ("q", "k", "v", "o", "up")}
        found[f"layers.{layer}.norm.weight"] = (1, 4096)
    return found


def prepare(folder: Path, gib: float) -> None:
    """On each rank of a job: the sources of all questions."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import hpdcp

    dist.init_process_group("gloo")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    generator = torch.Generator().manual_seed(rank)
    state: dict[str, Any] = {}
    for name, (rows, columns) in shapes(gib).items():
        if rows < ranks:
            state[name] = torch.ones(rows, columns, dtype=torch.bfloat16)
            continue
        local = torch.empty(rows // ranks, columns, dtype=torch.bfloat16).random_(-9999, 9999, generator=generator)
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    hpdcp.save(state, checkpoint_id=folder / "dcp")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(folder / "torch-dcp")))
    dcp.save(
        state,
        storage_writer=dcp.HuggingFaceStorageWriter(
            str(folder / "torch-hf"), fqn_to_index_mapping=files_of(gib), save_distributed=True
        ),
    )
    del state
    dist.barrier()
    if rank == 0:
        (folder / "hf").mkdir()
        whole = hpdcp.offline_transform.dcp_to_full_state_dict(folder / "dcp")
        save_file(whole, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print("RESULT {}", flush=True)


def files_of(gib: float) -> dict[str, int]:
    """Tensor → number of its file, for torch, which does not choose."""
    number, held, found = 1, 0, dict[str, int]()
    for name, (rows, columns) in shapes(gib).items():
        if held and held + 2 * rows * columns > SHARD_BYTES:
            number, held = number + 1, 0
        found[name] = number
        held += 2 * rows * columns
    return found


def work_of(question: str, contestant: str, folder: Path, out: Path, gib: float) -> Callable[[], object]:
    """What is timed; imports are done."""
    source = folder / ("hf" if question == "to-dcp" else "dcp")
    if contestant.startswith("cp"):

        def copy() -> None:
            subprocess.run(["cp", "-r", str(source), str(out)], check=True)
            if contestant == "cp":
                return
            for path in out.iterdir():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

        return copy
    if contestant == "hpdcp":
        import huggingface_hub  # noqa: F401

        from hpdcp import offline_transform

        return {
            "to-dcp": lambda: offline_transform.convert_full_checkpoint_to_dcp(source, out),
            "to-hf": lambda: offline_transform.convert_dcp_to_huggingface(source, out, max_shard_size=SHARD_BYTES),
            "to-torch": lambda: offline_transform.convert_dcp_to_torch(source, out / "all.pt"),
        }[question]
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    out.mkdir()
    if question == "to-hf":
        return lambda: consolidate_safetensors_files(
            str(folder / "torch-hf"), str(out), files_of(gib), num_threads=os.cpu_count() or 1
        )
    return lambda: dcp_to_torch_save(str(folder / "torch-dcp"), out / "all.pt")


def anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def worker(options: argparse.Namespace) -> None:
    out = options.folder / "out"
    work = work_of(options.question, options.contestant, options.folder, out, options.gib)
    peak, before, done = 0.0, anonymous_mib(), threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_mib() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    began = time.perf_counter()
    work()
    took = time.perf_counter() - began
    done.set()
    sampler.join()
    figures = {options.question: took}
    if not options.contestant.startswith("cp"):
        figures[f"peak MiB, {options.question}"] = peak
    print("RESULT " + json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--questions", default=",".join(QUESTIONS))
    parser.add_argument("--question", help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant == "prepare":
        prepare(options.folder, options.gib)
        return
    if options.contestant:
        worker(options)
        return
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    passed = ["--folder", str(options.folder), "--gib", str(options.gib)]
    harness.run(harness.torchrun(options.ranks, __file__, "--contestant", "prepare", *passed))
    amount = float(sum(2 * rows * columns for rows, columns in shapes(options.gib).values()))

    def before_each(_: str) -> None:
        shutil.rmtree(options.folder / "out", ignore_errors=True)
        if options.cold:
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("3")

    for question in options.questions.split(","):
        commands = {
            name: [sys.executable, __file__, "--question", question, "--contestant", name, *passed]
            for name in CONTESTANTS[question]
        }
        found = harness.compare(commands, repetitions=options.repetitions, before_each=before_each)
        harness.print_table(found, base="cp", rates={question: amount})
        print()
    shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
