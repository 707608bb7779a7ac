"""Four ranks give a sharded model of the meta device its memory and weights: the same values as transformers loads."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import hpdcp
from hpdcp import TensorPart
from hpdcp._base.errors import HpdcpError, InvalidArgumentError, MissingKeysError
from tests.support.job import Job

RANKS = 4

EXPERT_ROWS = 16
LLAMA = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, tie_word_embeddings=True,
)  # fmt: skip
MIXTURE = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=EXPERT_ROWS, num_experts=4,
    num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
)  # fmt: skip


def plain(model: nn.Module, ranks: Job) -> None:
    """Every rank holds the whole."""


def fsdp(model: nn.Module, ranks: Job) -> None:
    _fully_shard(model, ranks.mesh(RANKS))


def tensor_parallel(model: nn.Module, ranks: Job) -> None:
    _parallelize(model, ranks.mesh(RANKS))


def both(model: nn.Module, ranks: Job) -> None:
    mesh = ranks.mesh(2, 2)
    names = mesh.mesh_dim_names or ()
    _parallelize(model, mesh[names[1]])
    _fully_shard(model, mesh[names[0]])


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    for layer in model.get_submodule("model.layers").children():
        plan = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel())
        parallelize_module(layer, mesh, {**plan, "self_attn.o_proj": RowwiseParallel()})


def differing(expected: nn.Module, model: nn.Module) -> list[str]:
    """Names of parameters and buffers that are not bit for bit the same."""
    found = dict([*model.named_parameters(), *model.named_buffers()])
    wanted = dict([*expected.named_parameters(), *expected.named_buffers()])
    assert wanted.keys() == found.keys()
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for name, tensor in sorted(found.items())
    }
    return [name for name, tensor in wanted.items() if not torch.equal(tensor, whole[name])]


@pytest.mark.parametrize("shard", [plain, fsdp, tensor_parallel, both])
def test_a_sharded_model_holds_what_transformers_loads(
    ranks: Job, folder: Path, shard: Callable[[nn.Module, Job], None]
) -> None:
    if ranks.rank == 0:
        torch.manual_seed(0)
        LlamaForCausalLM(LLAMA).save_pretrained(folder / "weights")
    ranks.barrier()
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    shard(model, ranks)
    hpdcp.from_pretrained(model, folder / "weights")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = LlamaForCausalLM.from_pretrained(folder / "weights")
    assert differing(expected, model) == []
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected(tokens).logits)


def _stacked(key: str) -> str | TensorPart:
    found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", key)
    if found is None:
        return key
    where, number, kind = found[1], int(found[2]), found[3]
    if kind == "down":
        return TensorPart(f"{where}.down_proj", (number, 0, 0))
    return TensorPart(f"{where}.gate_up_proj", (number, EXPERT_ROWS * (kind == "up"), 0))


def test_experts_that_transformers_stacks_are_stacked(ranks: Job, folder: Path) -> None:
    if ranks.rank == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(MIXTURE).save_pretrained(folder / "weights", max_shard_size="20KB")
    ranks.barrier()
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(MIXTURE)
    fsdp(model, ranks)
    hpdcp.from_pretrained(model, folder / "weights", name_map=_stacked)
    assert differing(Qwen3MoeForCausalLM.from_pretrained(folder / "weights"), model) == []


def test_what_is_not_stored_is_an_error_on_every_rank(ranks: Job, folder: Path) -> None:
    if ranks.rank == 0:
        torch.manual_seed(0)
        whole = LlamaForCausalLM(LLAMA)
        whole.model.norm.weight = None  # type: ignore[assignment]
        whole.save_pretrained(folder / "weights")
    ranks.barrier()
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
    fsdp(model, ranks)
    with pytest.raises(MissingKeysError, match=r"model\.norm\.weight"):
        hpdcp.from_pretrained(model, folder / "weights")
    hpdcp.from_pretrained(model, folder / "weights", strict=False)
    norm = model.model.norm.weight
    assert isinstance(norm, DTensor)
    assert norm.full_tensor().eq(1).all()


def test_a_model_that_is_wrong_on_one_rank_makes_all_raise(ranks: Job, folder: Path) -> None:
    if ranks.rank == 0:
        LlamaForCausalLM(LLAMA).save_pretrained(folder / "weights")
    ranks.barrier()
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA)
        if ranks.rank == 2:
            model.register_buffer("odd", torch.ones(3), persistent=False)
    with pytest.raises(HpdcpError, match="'odd'"):
        hpdcp.from_pretrained(model, folder / "weights")
    with pytest.raises(InvalidArgumentError):
        hpdcp.from_pretrained("model" if ranks.rank == 1 else model, folder / "weights")  # type: ignore[type-var]
