"""What does it cost to plan a save for very many ranks, beside torch's own planner?

    python benchmarks/plan_scale.py [--quick] [--repetitions 3]

One process plays the coordinator of R ranks with N items each; nothing is sent. Two kinds of job: `fsdp`, where all
ranks have the same names, nine in ten tensors are sharded by rows over all ranks and the tenth is replicated; `moe`,
where the ranks form 8 pipeline stages, half of a rank's tensors are its stage's and half are experts of its own. Every
rank also has a step counter and, under PerRank, the state of its random numbers.

hpdcp: `decode` is all ranks' plans from their bytes, `plan` is who writes what and the metadata, `join` is where each
item belongs in it (what makes a later save with the same plan skip all this), `encode` is every rank's answer as bytes.
`again` is what the coordinator does instead when the plan is reused. torch: `plan` is `dedup_save_plans` and
`create_default_global_save_plan`; `decode` and `encode` are pickle, of all plans and of the metadata. Peak memory is
that of the whole process, the ranks' plans included.
"""

from __future__ import annotations

import argparse
import json
import pickle
import resource
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import harness

STAGES = 8
WIDTH = 1024
QUICK = [("fsdp", 64, 200), ("moe", 64, 200)]
BESIDE_TORCH = [("fsdp", 256, 1000)]
ALONE = [("fsdp", 1024, 3000), ("moe", 1024, 3000), ("fsdp", 8192, 1000), ("moe", 8192, 1000)]


def tensors(kind: str, ranks: int, items: int, rank: int) -> Iterator[tuple[str, int, int, int]]:
    """(name, rows of the whole tensor, first row here, rows here) of all tensors of a rank."""
    for number in range(items):
        if kind == "moe":
            stage, per_stage = rank * STAGES // ranks, max(1, ranks // STAGES)
            if number % 2:
                yield f"stages.{stage}.layers.{number}.experts.{rank % per_stage}.up.weight", 8, 0, 8
            else:
                yield f"stages.{stage}.layers.{number}.attention.weight", 8 * per_stage, 8 * (rank % per_stage), 8
        elif number % 10:
            yield f"model.layers.{number}.mlp.up_proj.weight", 8 * ranks, 8 * rank, 8
        else:
            yield f"model.layers.{number}.input_layernorm.weight", 1, 0, 1


def our_plans(kind: str, ranks: int, items: int) -> list[bytes]:
    """Every rank's local plan, as it arrives at the coordinator."""
    from dataclasses import replace

    import numpy as np

    from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable, ends_of
    from hpdcp._plan.save_plan import SavePlan

    table: EntryTable | None = None
    plans = []
    for rank in range(ranks):
        held = list(tensors(kind, ranks, items, rank))
        if table is None or kind == "moe":
            entries = [
                Entry(name, json.dumps(name.split(".")), EntryKind.TENSOR, "bfloat16", (rows, WIDTH))
                for name, rows, _, _ in held
            ]
            entries.append(Entry("step", '["step"]', EntryKind.OBJECT))
            entries.append(Entry("rng", '["rng"]', EntryKind.OBJECT, owner=rank))
            table = EntryTable.from_entries(entries)
        owners = table.owners.copy()
        owners[-1] = rank
        boxes = np.array([[first, 0, rows, WIDTH] for _, _, first, rows in held], dtype=np.int64)
        chunks = ChunkTable(
            entry=np.arange(items + 2, dtype=np.int64),
            ends=ends_of(np.array([2] * items + [0, 0], dtype=np.int64)),
            offsets=boxes[:, :2].ravel(),
            sizes=boxes[:, 2:].ravel(),
        )
        nbytes = np.concatenate([boxes[:, 2] * WIDTH * 2, [1, 5000]])
        plans.append(SavePlan(replace(table, owners=owners), chunks, nbytes).to_bytes())
    return plans


def run_ours(kind: str, ranks: int, items: int) -> dict[str, float]:
    from hpdcp._plan.replicas import drop_duplicates
    from hpdcp._plan.save_plan import SavePlan
    from hpdcp._plan.whole_plan import WholePlan

    arrived = our_plans(kind, ranks, items)
    clock = harness.Clock()
    local = clock.time("decode", lambda: [SavePlan.from_bytes(plan) for plan in arrived])
    final, metadata = clock.time("plan", lambda: drop_duplicates(local, remove_redundancy=True, to_minimum_rank=False))
    whole = clock.time("join", lambda: WholePlan.of(metadata, final, local))
    answers = clock.time("encode", lambda: [p.to_part(mine) for p, mine in zip(final, local, strict=True)])
    peak = peak_gib()
    kept = whole.without_object_lengths().to_bytes()
    clock.time("again", lambda: WholePlan.from_bytes(kept).plans({}))
    total = sum(seconds for name, seconds in clock.seconds.items() if name != "again")
    return {
        **clock.seconds,
        "total": total,
        "us_per_item": total / (ranks * items) * 1e6,
        "peak_gib": peak,
        "in_mib": sum(map(len, arrived)) / 2**20,
        "out_mib": sum(map(len, answers)) / 2**20,
    }


def run_torch(kind: str, ranks: int, items: int) -> dict[str, float]:
    import torch
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=torch.bfloat16)

    def item(name: str, total: int, first: int, rows: int) -> Any:
        offsets, sizes = torch.Size([first, 0]), torch.Size([rows, WIDTH])
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size([total, WIDTH]))
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def objects(rank: int) -> list[Any]:
        names = ("step", f"rng.{rank}")
        return [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in names]

    arrived = [
        pickle.dumps(SavePlan([*(item(*facts) for facts in tensors(kind, ranks, items, rank)), *objects(rank)]))
        for rank in range(ranks)
    ]
    clock = harness.Clock()
    local = clock.time("decode", lambda: [pickle.loads(plan) for plan in arrived])
    deduped = clock.time("plan", lambda: dedup_save_plans(local))
    final, metadata = clock.time("plan", lambda: create_default_global_save_plan(deduped))
    answers = clock.time("encode", lambda: [pickle.dumps(plan) for plan in final])
    clock.time("encode", lambda: pickle.loads(pickle.dumps(metadata)))
    total = sum(clock.seconds.values())
    return {
        **clock.seconds,
        "total": total,
        "us_per_item": total / (ranks * items) * 1e6,
        "peak_gib": peak_gib(),
        "in_mib": sum(map(len, arrived)) / 2**20,
        "out_mib": sum(map(len, answers)) / 2**20,
    }


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


FIGURES = ("decode", "plan", "join", "encode", "total", "us_per_item", "peak_gib", "in_mib", "out_mib", "again")


def print_row(name: str, found: dict[str, list[float]]) -> None:
    cells = [f"{statistics.median(found[figure]):.3g}" if figure in found else "-" for figure in FIGURES]
    print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def measure(who: str, kind: str, ranks: int, items: int, repetitions: int) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--one", who, kind, str(ranks), str(items)]
    found = harness.compare({who: command}, repetitions=repetitions)
    return {figure: values[who] for figure, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 ranks of 200 items: does it still run?")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", nargs=4, metavar=("WHO", "KIND", "RANKS", "ITEMS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        who, kind, ranks, items = arguments.one
        print("RESULT", json.dumps((run_ours if who == "hpdcp" else run_torch)(kind, int(ranks), int(items))))
        return
    print("| who, job, ranks x items | " + " | ".join(FIGURES) + " |")
    print("|---" * (len(FIGURES) + 1) + "|")
    ratios = []
    for kind, ranks, items in QUICK if arguments.quick else BESIDE_TORCH:
        pair = {}
        for who in ("hpdcp", "torch"):
            pair[who] = measure(who, kind, ranks, items, arguments.repetitions)
            print_row(f"{who} {kind} {ranks} x {items}", pair[who])
        for figure in ("plan", "total"):
            ratio = statistics.median(pair["torch"][figure]) / statistics.median(pair["hpdcp"][figure])
            ratios.append(f"{kind} {ranks} x {items}: hpdcp's {figure} is {ratio:.0f}x as fast as torch's")
    for kind, ranks, items in [] if arguments.quick else ALONE:
        print_row(f"hpdcp {kind} {ranks} x {items}", measure("hpdcp", kind, ranks, items, 1))
    print("\n" + "\n".join(ratios))


if __name__ == "__main__":
    main()
