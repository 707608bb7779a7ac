"""Train, save, and resume: in the same layout, and in another one. Run it with `make demo`.

A small Llama learns the bytes of this repository's LICENSE. It is trained three times:

1. on four ranks, FSDP2 across two and tensor parallelism across two, for twenty steps; half-way it saves a checkpoint;
2. on four ranks again, from that checkpoint: the remaining losses must be the same, bit for bit;
3. on two ranks with FSDP2 alone, from the same checkpoint: every tensor must be loaded bit for bit, and the losses
   must agree as closely as another order of additions allows.

Read `train` first: it is what a training script needs. What surrounds it starts the three runs and compares them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

import hpdcp
from hpdcp.utils import flatten_state_dict

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
SAVE_AT, STEPS = 10, 20
BATCH, LENGTH = 4, 64
LARGEST_DIFFERENCE = 1e-4
"""Relative, between losses of different layouts: sharded matrix products add up in another order."""


def build_model(mesh: DeviceMesh, seed: int) -> torch.nn.Module:
    """A Llama with random weights, sharded over the dimensions that `mesh` has: "dp", and perhaps "tp"."""
    # Here and not at the top: the process that only starts the runs need not wait for it.
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip
    if "tp" in (mesh.mesh_dim_names or ()):
        plan: dict[str, ParallelStyle] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class Batches:
    """Random stretches of the text, different on each data parallel rank. Its position is a generator's state."""

    def __init__(self, dp_rank: int) -> None:
        self.generator = torch.Generator().manual_seed(1000 + dp_rank)
        self.text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(self.text) - LENGTH - 1, (BATCH,), generator=self.generator)
        windows = torch.stack([self.text[start : start + LENGTH + 1] for start in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]


def train(mesh: DeviceMesh, checkpoint: Path, *, resume: bool) -> dict[str, Any]:
    """Train from the first step and save half-way; or, with `resume`, go on from the checkpoint to the last step."""
    report: dict[str, Any] = {"losses": {}}
    # Another seed for the run that resumes: what it computes with must come from the checkpoint, not from the seed.
    model = build_model(mesh, seed=1 if resume else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = Batches(mesh["dp"].get_local_rank())
    state: dict[str, Any]
    step = 0

    if resume:
        began = time.perf_counter()
        # AdamW creates its moments in the first step. The checkpoint knows which ones there are, so none is needed.
        hpdcp.allocate_optimizer_state(optimizer, checkpoint_id=checkpoint)
        # `.all()` gives the value of every rank that saved, however many there are now.
        state = {"model": model, "optimizer": optimizer, "step": step, "data": hpdcp.PerRank.all()}
        hpdcp.load(state, checkpoint_id=checkpoint)
        report["load_seconds"] = time.perf_counter() - began
        # Tensors were filled in place; a Python value is put back into the dict.
        step = state["step"]
        # Four ranks saved, two for each data parallel rank, which had read the same stretches.
        saved_by = state["data"].value
        batches.generator.set_state(saved_by[len(saved_by) // mesh["dp"].size() * mesh["dp"].get_local_rank()])
        report["digests"] = digests(model, optimizer)

    while step < STEPS:
        inputs, targets = batches.next()
        logits = model(input_ids=inputs).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        report["losses"][step] = average(loss.detach(), mesh["dp"])

        if step == SAVE_AT and not resume:
            began = time.perf_counter()
            # Objects that have state_dict() and load_state_dict() go in as they are. `PerRank` marks what differs on
            # every rank; hpdcp would refuse it without the mark, since ranks hold different values under one key.
            state = {
                "model": model,
                "optimizer": optimizer,
                "step": step,
                "data": hpdcp.PerRank(batches.generator.get_state()),
            }
            metadata = hpdcp.save(state, checkpoint_id=checkpoint)
            report["save_seconds"] = time.perf_counter() - began
            report["bytes"] = sum(metadata.files.values())
            report["digests"] = digests(model, optimizer)
    return report


def average(loss: torch.Tensor, mesh: DeviceMesh) -> float:
    """The mean over the data parallel ranks."""
    dist.all_reduce(loss, group=mesh.get_group())
    return float(loss / mesh.size())


def digests(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """A digest of every whole tensor of the model and the optimizer, so that two layouts can be compared bit by bit."""
    tensors, _ = flatten_state_dict({"model": model, "optimizer": optimizer})
    found = {}
    for name, value in tensors.items():
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[name] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def run_rank(layout: str, checkpoint: Path, result: Path, *, resume: bool) -> None:
    """What each process that torchrun starts does."""
    # `digests` puts tensors together that two mesh dimensions share, and torch says each time that it takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    try:
        if layout == "fsdp+tp":
            mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        report = train(mesh, checkpoint, resume=resume)
        if dist.get_rank() == 0:
            result.write_text(json.dumps(report))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def launch(ranks: int, layout: str, folder: Path, name: str, *, resume: bool) -> dict[str, Any]:
    """Start this file on `ranks` ranks and wait for them; what rank 0 reports."""
    what = f"resumes at step {SAVE_AT}" if resume else f"trains {STEPS} steps, saves at step {SAVE_AT}"
    print(f"{name}: {ranks} ranks, {layout}: {what} ...", flush=True)
    began = time.perf_counter()
    result = folder / f"{name}.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}"]
    arguments = [layout, str(folder / "checkpoint"), str(result), "resume" if resume else "start"]
    # One thread per rank: the ranks share the cores, and the order of additions stays the same.
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    # The logits are a view, and fully_shard warns about what this script does not do: changing them in place.
    variables["PYTHONWARNINGS"] = "ignore:FSDP2-wrapped module:UserWarning"
    subprocess.run([sys.executable, *torchrun, __file__, *arguments], env=os.environ | variables, check=True)
    print(f"    done in {time.perf_counter() - began:.0f} s", flush=True)
    report: dict[str, Any] = json.loads(result.read_text())
    return report


def compare(whole: dict[str, Any], same: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Print the runs side by side; everything that was claimed and does not hold."""
    print("\nstep   uninterrupted        4 ranks, resumed     2 ranks, resumed     difference of the last")
    broken = []
    for step, loss in whole["losses"].items():
        if int(step) <= SAVE_AT:
            print(f"{step:>4}   {loss:.15f}" + ("    <- saved here" if int(step) == SAVE_AT else ""))
            continue
        here, there = (run["losses"].get(step, float("nan")) for run in (same, other))
        difference = abs(there - loss) / abs(loss)
        print(f"{step:>4}   {loss:.15f}    {here:.15f}    {there:.15f}    {difference:.1e}")
        if here != loss:
            broken.append(f"step {step}: the loss on 4 ranks is not the uninterrupted one, bit for bit")
        if not difference <= LARGEST_DIFFERENCE:
            broken.append(f"step {step}: the loss on 2 ranks differs by {difference:.1e}")
    expected = [str(step) for step in range(SAVE_AT + 1, STEPS + 1)]
    for name, run in (("4", same), ("2", other)):
        if list(run["losses"]) != expected:
            broken.append(f"{name} ranks ran the steps {list(run['losses'])}, not {expected}")
        if run["digests"].keys() != whole["digests"].keys():
            broken.append(f"{name} ranks hold other tensors than were saved")
        wrong = [key for key, digest in run["digests"].items() if whole["digests"].get(key) != digest]
        broken += [f"{name} ranks: {key} was not loaded bit for bit" for key in wrong]
        print(
            f"{len(run['digests']) - len(wrong)} of {len(whole['digests'])} tensors loaded on {name} ranks bit for bit"
        )
    print(
        f"\nsaved {whole['bytes']:,} bytes in {whole['save_seconds']:.3f} s; loaded in {same['load_seconds']:.3f} s on "
        f"4 ranks, in {other['load_seconds']:.3f} s on 2"
    )
    return broken


def main() -> int:
    """Run everything in a temporary folder; 0 when all claims hold."""
    with tempfile.TemporaryDirectory(prefix="hpdcp-demo-") as name:
        folder = Path(name)
        whole = launch(4, "fsdp+tp", folder, "uninterrupted", resume=False)
        same = launch(4, "fsdp+tp", folder, "same-layout", resume=True)
        other = launch(2, "fsdp", folder, "other-layout", resume=True)
        broken = compare(whole, same, other)
        command = ["hpdcp", "inspect", str(folder / "checkpoint"), "--limit", "12"]
        print(f"\n$ {' '.join(command)}", flush=True)
        subprocess.run([Path(sys.executable).with_name("hpdcp"), *command[1:]], check=True)
    for claim in broken:
        print(f"FAILED: {claim}")
    print("\nFAILED" if broken else "\nAll claims hold.")
    return 1 if broken else 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_rank(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), resume=sys.argv[4] == "resume")
        # With or without hpdcp, torch's own threads abort one process in twenty that ends while they do. There is
        # nothing left to end well for.
        sys.stdout.flush()
        os._exit(0)
    else:
        sys.exit(main())
