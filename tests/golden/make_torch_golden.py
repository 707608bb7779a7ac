"""Write the golden checkpoints of torch.distributed.checkpoint, by the torch that runs this.

    export PYTHONPATH=.:backends
    python -m torch.distributed.run --standalone --nproc-per-node=2 -m tests.golden.make_torch_golden FOLDER

The committed folders (`torch_dcp_2_13` was written by torch 2.13) are never made again. Another version of torch gets
a folder of its own beside them.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.golden import torch_values, values


def fsdp1(rank: int, whole: torch.Tensor) -> Any:
    """The rows that FSDP's `SHARDED_STATE_DICT` has of a parameter."""
    rows = torch.chunk(whole, values.WORLD)[rank].clone()
    start = sum(len(part) for part in torch.chunk(whole, values.WORLD)[:rank])
    shard = sharded_tensor.Shard.from_tensor_and_offsets(rows, [start, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], *whole.shape)


def model_state(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    return {
        "rows": distribute_tensor(values.sharded(3), mesh, [Shard(0)]),
        "columns": distribute_tensor(values.sharded(4, torch.bfloat16), mesh, [Shard(1)]),
        "same": distribute_tensor(values.sharded(2), mesh, [Replicate()]),
        "fsdp1": fsdp1(rank, values.sharded(6)),
    }


def state(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    model, optimizer = torch_values.trained()
    _, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {
        "model": model_state(mesh, rank),
        "net": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "flat": flat,
        "dtypes": {name: values.of_dtype(name) for name in values.DTYPES},
        "nan": values.nan_payloads(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3, dtype=torch.int32),
        "turned": values.sharded(3).t(),
        "values": torch_values.plain(),
        "listed": [torch.ones(2), {"deep": torch.arange(3)}, "text"],
    }


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (values.WORLD,))
    dcp.save(state(mesh, rank), storage_writer=FileSystemWriter(folder / "together"))
    for name, options in {
        "threads": {"thread_count": 4},
        "files": {"single_file_per_rank": False},
        "zstd": {"_extensions": [ZStandard()]},
    }.items():
        small = {"model": model_state(mesh, rank), "step": 7}
        dcp.save(small, storage_writer=FileSystemWriter(folder / name, **options))  # type: ignore[arg-type]
    safetensors = FileSystemWriter(folder / "safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save({"model": model_state(mesh, rank), "step": 7}, storage_writer=safetensors)
    apart = {"model": model_state(mesh, rank), "step": 7, "rank": rank}
    dcp.save(apart, storage_writer=FileSystemWriter(folder / "apart"), use_collectives=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
