"""Write the golden checkpoints of the format version that this hpdcp writes.

    export PYTHONPATH=.:backends
    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.golden.make_golden FOLDER

The committed folders were made by this program and are never made again: they show that what an earlier version
wrote still loads. A new format version gets folders of its own beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hpdcp
from tests.golden import values


def state(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (values.WORLD,))
    tied = torch.arange(4.0)
    chunk = values.chunked()[:4] if rank == 0 else values.chunked()[4:]
    rows = hpdcp.ChunkStorageMetadata((0 if rank == 0 else 4, 0), tuple(chunk.shape))
    chunk = chunk.clone()
    setattr(chunk, hpdcp.CHUNK_INFO, hpdcp.ChunkInfo(rows, (6, 4)))
    return {
        "model": {
            "rows": distribute_tensor(values.sharded(3), mesh, [Shard(0)]),
            "columns": distribute_tensor(values.sharded(4, torch.bfloat16), mesh, [Shard(1)]),
            "same": distribute_tensor(values.sharded(2), mesh, [Replicate()]),
            "one row": distribute_tensor(torch.full((1, 2), 9.0), mesh, [Shard(0)]),
            "tied": tied,
            "also tied": tied,
            "chunked": chunk,
        },
        "dtypes": {name: values.of_dtype(name) for name in values.DTYPES},
        "nan": values.nan_payloads(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "odd": {"": torch.tensor(1), "a/../b": torch.tensor(2), "__metadata__": torch.tensor(3), 7: torch.tensor(4)},
        "values": values.values(),
        "scaled": values.scaled(),
        "rng": hpdcp.PerRank(values.of_rank(rank)),
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    hpdcp.save(state(rank), checkpoint_id=folder / "together")
    some = {name: value for name, value in state(rank).items() if name in ("model", "rng")}
    hpdcp.save(some, checkpoint_id=folder / "apart", use_collectives=False)
    dist.barrier()
    if rank == 0:
        # A note to the next save, not a part of the checkpoint.
        (folder / "together" / ".attempt").unlink()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
