"""What does the zarr layout cost, beside the default one and beside zarr-python with the same arrays and chunks?

    python benchmarks/zarr_layout.py --folder /dev/shm/bench [--mib 256] [--repetitions 5] [--small 1000]
    python benchmarks/zarr_layout.py --folder /dev/shm/bench --compression

One process each. `zarr` writes with `zarr.create_array` and reads with `array[...]`, uncompressed and in one chunk
each, as hpdcp's are here (64 MiB and 4 KiB); it makes nothing durable. `--small` adds so many tensors of 4 KiB.
`--compression` shows the gain of that instead: on tensors drawn at random, and on weights and Adam's moments after
some steps of a small language model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import harness


def build(mib: int, small: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    rows = 1 << 20  # of 64 bytes
    state: dict[str, Any] = {
        f"large.{number}": torch.empty(rows, 16).uniform_(generator=generator) for number in range(max(1, mib // 64))
    }
    state |= {f"small.{number:04d}": torch.full((1024,), float(number)) for number in range(small)}
    return state


def one(contestant: str, folder: Path, mib: int, small: int) -> dict[str, float]:
    import torch

    state = build(mib, small)
    empty = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    place = folder / contestant
    shutil.rmtree(place, ignore_errors=True)
    if contestant == "zarr":
        import numpy as np
        import zarr

        def save() -> None:
            group = zarr.open_group(place, mode="w")
            for name, tensor in state.items():
                array = group.create_array(
                    name, shape=tensor.shape, dtype="float32", chunks=tuple(tensor.shape), compressors=None
                )
                array[...] = tensor.numpy()

        def load() -> None:
            group: Any = zarr.open_group(place, mode="r")
            for name, tensor in empty.items():
                np.copyto(tensor.numpy(), group[name][...])

    else:
        import hpdcp
        from hpdcp._base import config

        def save() -> None:
            with config.using(layout=contestant.removeprefix("hpdcp-")):
                hpdcp.save(state, checkpoint_id=place)

        def load() -> None:
            hpdcp.load(empty, checkpoint_id=place)

    began = time.perf_counter()
    save()
    saved = time.perf_counter()
    load()
    loaded = time.perf_counter()
    assert all(torch.equal(empty[name], tensor) for name, tensor in state.items())
    files = sum(1 for path in place.rglob("*") if path.is_file())
    shutil.rmtree(place)
    return {"save": saved - began, "load": loaded - saved, "files": float(files)}


def trained() -> dict[str, Any]:
    """Weights and Adam's moments of a small network after 50 steps, and weights drawn at random."""
    import torch

    torch.manual_seed(0)
    embed = torch.nn.Embedding(4096, 256)
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 4096))
    parameters = [*embed.parameters(), *net.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for _ in range(50):
        # Words as they are in text: a few are in every batch, most in none.
        words = (torch.rand(256) ** 6 * 4096).long()
        loss = torch.nn.functional.cross_entropy(net(embed(words[:-1])), words[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    moments = [optimizer.state[parameter] for parameter in parameters]
    kinds = {
        "random float32": [torch.randn(1024, 1024)],
        "random bfloat16": [torch.randn(1024, 1024).bfloat16()],
        "weights after 50 steps, float32": [parameter.detach() for parameter in parameters],
        "weights after 50 steps, bfloat16": [parameter.detach().bfloat16() for parameter in parameters],
        "exp_avg, float32": [each["exp_avg"] for each in moments],
        "exp_avg_sq, float32": [each["exp_avg_sq"] for each in moments],
        "exp_avg_sq, bfloat16": [each["exp_avg_sq"].bfloat16() for each in moments],
    }
    return {kind: {str(at): tensor for at, tensor in enumerate(tensors)} for kind, tensors in kinds.items()}


def print_compression(folder: Path) -> None:
    import hpdcp
    from hpdcp._base import config

    print("| state | zstd | zstd, shuffle | MB/s saved | MB/s loaded |")
    print("|---|---|---|---|---|")
    for kind, state in trained().items():
        whole = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        cells = []
        for shuffle in (False, True):
            place = folder / "compressed"
            shutil.rmtree(place, ignore_errors=True)
            options = {"compressor": "zstd", "level": 3, "shuffle": shuffle}
            began = time.perf_counter()
            with config.using(layout="zarr", layouts={"zarr": options}):
                metadata = hpdcp.save(state, checkpoint_id=place)
            saved = time.perf_counter()
            hpdcp.load(dict(state), checkpoint_id=place)
            loaded = time.perf_counter()
            cells.append(f"{int(metadata.storage.length.sum()) / whole:.2f}")
        rates = [f"{whole / seconds / 1e6:.0f}" for seconds in (saved - began, loaded - saved)]
        print(f"| {kind} | {' | '.join([*cells, *rates])} |")
    shutil.rmtree(folder / "compressed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--small", type=int, default=0)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--compression", action="store_true")
    parser.add_argument("--contestant", choices=["zarr", "safetensors", "hpdcp-zarr"])
    arguments = parser.parse_args()
    if arguments.contestant is not None:
        name = arguments.contestant
        print("RESULT " + json.dumps(one(name, arguments.folder, arguments.mib, arguments.small)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.compression:
        print_compression(arguments.folder)
        return
    base = [sys.executable, __file__, "--folder", str(arguments.folder)]
    base += ["--mib", str(arguments.mib), "--small", str(arguments.small)]
    names = ("zarr", "safetensors", "hpdcp-zarr")
    found = harness.compare({n: [*base, "--contestant", n] for n in names}, repetitions=arguments.repetitions)
    nbytes = float(arguments.mib // 64 * 64 * (1 << 20) + arguments.small * 4096)
    harness.print_table(found, base="zarr", rates={"save": nbytes, "load": nbytes})


if __name__ == "__main__":
    main()
