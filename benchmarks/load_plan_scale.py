"""What does it cost to plan a load for very many ranks?

    python benchmarks/load_plan_scale.py [--quick]

`coordinator`: one process plays the coordinator of R ranks with N destination chunks each; nothing is sent. Two kinds
of job: `fsdp`, where nine in ten tensors are sharded by rows over all ranks and the tenth is wanted by all, and `hsdp`,
where every shard is wanted by two ranks. `decode` is all ranks' plans from their bytes, `choose` is who reads what for
whom, `encode` is every rank's answer as bytes. Peak memory is that of the whole process, the ranks' plans included.

`rank`: one rank plans its own part of a checkpoint that S ranks stored by rows, of tensors with more columns than rows
(sharded on another dimension than the largest) and of tensors with more rows than columns. `tested / found` is how many
stored chunks were compared with a wanted one for each that met it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from typing import Any

import harness

WIDTH = 1024
QUICK_JOBS = [("fsdp", 64, 200), ("hsdp", 64, 200)]
JOBS = [
    ("fsdp", 256, 1000),
    ("hsdp", 256, 1000),
    ("fsdp", 1024, 3000),
    ("hsdp", 1024, 3000),
    ("fsdp", 8192, 1000),
    ("hsdp", 8192, 1000),
]
QUICK_RANKS = [("wide", 32, 100), ("tall", 32, 100)]
RANKS = [("wide", 256, 1000), ("tall", 256, 1000), ("wide", 1024, 1000), ("tall", 1024, 1000)]


def metadata_of(items: int, shards: Any, shape_rows: Any) -> Any:
    """A checkpoint of `items` bfloat16 tensors, the i-th of `shape_rows[i]` rows in `shards[i]` equal chunks."""
    import numpy as np

    from hpdcp._format.columns import ChunkTable, Entry, EntryKind, EntryTable, ends_of, starts_of
    from hpdcp._format.metadata import Metadata
    from hpdcp._format.strings import StringColumn

    entries = EntryTable.from_entries(
        [
            Entry(name_of(number), json.dumps(["model", number]), EntryKind.TENSOR, "bfloat16", (int(rows), WIDTH))
            for number, rows in enumerate(shape_rows)
        ]
    )
    entry = np.repeat(np.arange(items, dtype=np.int64), shards)
    rows = np.repeat(shape_rows // shards, shards)
    offsets = np.zeros((len(entry), 2), dtype=np.int64)
    offsets[:, 0] = (np.arange(len(entry)) - np.repeat(starts_of(ends_of(shards)), shards)) * rows
    sizes = np.stack([rows, np.full(len(entry), WIDTH)], axis=1)
    chunks = ChunkTable(entry, ends_of(np.full(len(entry), 2, dtype=np.int64)), offsets.ravel(), sizes.ravel())
    assert StringColumn.from_strings(sorted(entries.fqns)).ends.tolist() == entries.fqns.ends.tolist()
    return Metadata(entries, chunks)


def name_of(number: int) -> str:
    return f"model.layers.{number:06d}.weight"


def coordinator(kind: str, ranks: int, items: int) -> dict[str, float]:
    import numpy as np

    from hpdcp._broadcast.reader_choice import GroupRules, choose_readers
    from hpdcp._format.columns import ChunkTable, ends_of, starts_of
    from hpdcp._format.strings import StringColumn
    from hpdcp._plan.load_plan import ItemColumns, LoadPlan, TargetColumns

    number = np.arange(items)
    shards = np.where(number % 10 == 9, 1, ranks) if kind == "fsdp" else np.full(items, ranks // 2)
    shape_rows = np.where(shards == 1, 1, 8 * shards)
    metadata = metadata_of(items, shards, shape_rows)
    first = starts_of(ends_of(shards))
    names = StringColumn.from_strings([name_of(n) for n in range(items)])
    dtypes = StringColumn.from_strings(["bfloat16"])
    ends = ends_of(np.full(items, 2, dtype=np.int64))
    none = np.full(items, -1, dtype=np.int64)
    arrived = []
    for rank in range(ranks):
        shard = rank % shards
        rows = shape_rows // shards
        offsets = np.stack([shard * rows, np.zeros(items, dtype=np.int64)], axis=1).ravel()
        sizes = np.stack([rows, np.full(items, WIDTH)], axis=1).ravel()
        targets = TargetColumns(
            ChunkTable(np.arange(items, dtype=np.int64), ends, offsets, sizes),
            none,
            np.zeros(items, dtype=np.uint8),
            np.zeros(items, dtype=np.int32),
            np.ones(items, dtype=np.uint8),
        )
        nowhere = np.zeros(2 * items, dtype=np.int64)
        boxes = ChunkTable(np.arange(items, dtype=np.int64), ends, nowhere, sizes)
        arrived.append(LoadPlan(names, dtypes, targets, ItemColumns(boxes, nowhere, first + shard)).to_bytes())
    clock = harness.Clock()
    local = clock.time("decode", lambda: [LoadPlan.from_bytes(plan) for plan in arrived])
    rules = GroupRules(
        6 << 20, shares=lambda group: True, exists=lambda group: True, carries_devices=lambda group: False
    )
    plans, groups = clock.time("choose", lambda: choose_readers(local, metadata, rules))
    answers = clock.time("encode", lambda: [plan.to_part(mine) for plan, mine in zip(plans, local, strict=True)])
    total = sum(clock.seconds.values())
    assert len(groups) == (1 if kind == "fsdp" else ranks // 2)
    return {
        **clock.seconds,
        "total": total,
        "us_per_item": total / (ranks * items) * 1e6,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "in_mib": sum(map(len, arrived)) / 2**20,
        "out_mib": sum(map(len, answers)) / 2**20,
    }


def rank(kind: str, stored_by: int, items: int) -> dict[str, float]:
    """One rank of half as many as saved plans its part, of two stored chunks for each tensor."""
    import numpy as np
    import torch

    import hpdcp
    from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata
    from hpdcp._plan import stored_index
    from hpdcp._plan.planner import PlannerContext
    from hpdcp._state.geometry import Box

    rows = 2 if kind == "wide" else 16
    metadata = metadata_of(items, np.full(items, stored_by), np.full(items, rows * stored_by))
    state = {}
    for number in range(items):
        part = torch.empty(2 * rows, WIDTH, dtype=torch.bfloat16)
        offsets = (2 * rows * (number % (stored_by // 2)), 0)
        info = ChunkInfo(ChunkStorageMetadata(offsets, tuple(part.shape)), (rows * stored_by, WIDTH))
        setattr(part, CHUNK_INFO, info)
        state.setdefault("model", {}).setdefault("layers", {})[f"{number:06d}"] = {"weight": part}
    tested = 0
    intersect = stored_index.intersect

    def counted(want: Box, have: Box) -> Box | None:
        nonlocal tested
        tested += 1
        return intersect(want, have)

    stored_index.intersect = counted
    planner = hpdcp.StandardLoadPlanner()
    clock = harness.Clock()
    context = PlannerContext(0, stored_by // 2, True, True, False)
    clock.time("configure", lambda: planner.configure_planner(state, metadata, context))
    plan = clock.time("plan", planner.build_local_plan)
    assert len(plan) == 2 * items
    encoded = clock.time("encode", plan.to_bytes)
    return {
        **clock.seconds,
        "us_per_tensor": sum(clock.seconds.values()) / items * 1e6,
        "tested / found": tested / len(plan),
        "out_mib": len(encoded) / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 ranks of 200 chunks: does it still run?")
    parser.add_argument("--one", nargs=4, metavar=("WHO", "KIND", "RANKS", "ITEMS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        who, kind, count, items = arguments.one
        print("RESULT", json.dumps((coordinator if who == "coordinator" else rank)(kind, int(count), int(items))))
        return
    jobs = {"coordinator": QUICK_JOBS if arguments.quick else JOBS, "rank": QUICK_RANKS if arguments.quick else RANKS}
    for who, cases in jobs.items():
        for number, (kind, count, items) in enumerate(cases):
            found = harness.run([sys.executable, __file__, "--one", who, kind, str(count), str(items)])
            if number == 0:
                print(f"| {who}, job, ranks x items | " + " | ".join(found) + " |")
                print("|---" * (len(found) + 1) + "|")
            cells = [f"{value:.3g}" for value in found.values()]
            print(f"| {kind} {count} x {items} | " + " | ".join(cells) + " |", flush=True)
        print()


if __name__ == "__main__":
    main()
