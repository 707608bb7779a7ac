"""Parameters that models stack, and Hugging Face's files hold in parts: an expert's matrices each by itself."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, HuggingFaceReader, StandardLoadPlanner, TensorPart
from hpdcp._base.errors import CoverageError, HpdcpError, InvalidArgumentError, ShapeMismatchError
from hpdcp._format.container import TensorEntry, build_header
from hpdcp._plan.planner import PlannerContext
from tests.support.huggingface import same, shard_name, write_index, write_shards, write_single


def refused(state: dict[str, Any], kind: type[HpdcpError], reader: HuggingFaceReader) -> str:
    with pytest.raises(kind) as caught:
        hpdcp.load(state, storage_reader=reader)
    assert type(caught.value) is kind
    return str(caught.value)


def expert(number: int, part: str) -> str:
    return f"mlp.experts.{number}.{part}.weight"


def stacked(key: str) -> str | TensorPart:
    """As transformers 5 has them: all experts' matrices in one, those that multiply the same input side by side."""
    number, _, part = key.removeprefix("mlp.experts.").removesuffix(".weight").partition(".")
    if part == "down_proj":
        return TensorPart("mlp.experts.down_proj", (int(number), 0, 0))
    return TensorPart("mlp.experts.gate_up_proj", (int(number), {"gate_proj": 0, "up_proj": 3}[part], 0))


def experts(count: int) -> dict[str, torch.Tensor]:
    found = {expert(n, part): torch.randn(3, 5) for n in range(count) for part in ("gate_proj", "up_proj")}
    return found | {expert(n, "down_proj"): torch.randn(5, 3) for n in range(count)}


def test_parts_that_are_stored_apart_fill_one_tensor(tmp_path: Path) -> None:
    tensors = experts(4)
    write_shards(tmp_path, tensors, shards=3)
    state = {"mlp.experts.gate_up_proj": torch.zeros(4, 6, 5), "mlp.experts.down_proj": torch.zeros(4, 5, 3)}
    hpdcp.load({"net": state}, storage_reader=HuggingFaceReader(tmp_path, prefix="net.", name_map=stacked))
    for n in range(4):
        assert same(tensors[expert(n, "gate_proj")], state["mlp.experts.gate_up_proj"][n, :3])
        assert same(tensors[expert(n, "up_proj")], state["mlp.experts.gate_up_proj"][n, 3:])
        assert same(tensors[expert(n, "down_proj")], state["mlp.experts.down_proj"][n])


def test_a_part_that_is_not_stored_is_a_hole_and_one_too_many_another_shape(tmp_path: Path) -> None:
    tensors = experts(4)
    del tensors[expert(2, "up_proj")]
    write_single(tmp_path, tensors)
    reader = HuggingFaceReader(tmp_path, name_map=stacked)
    said = refused({"mlp.experts.gate_up_proj": torch.zeros(4, 6, 5)}, CoverageError, reader)
    assert "nothing stored for [2, 3, 0] to [3, 6, 5]" in said
    # What is whole loads all the same.
    hpdcp.load({"mlp.experts.down_proj": torch.zeros(4, 5, 3)}, storage_reader=reader)
    said = refused({"mlp.experts.down_proj": torch.zeros(3, 5, 3)}, ShapeMismatchError, reader)
    assert "stored [4, 5, 3], wanted [3, 5, 3]" in said


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"a": TensorPart("w", (0, 0)), "b": TensorPart("w", (1, 0))}, "boxes that overlap"),
        ({"a": TensorPart("w", (0, 0)), "b": "w"}, "'a' and 'b'"),
        ({"b": TensorPart("w", (0, 0)), "a": "w"}, "'a' and 'b'"),
        ({"a": TensorPart("w", (0, 0)), "b": TensorPart("w", (0, 0, 0))}, "2 and 3 dimensions"),
        ({"a": TensorPart("w", (0, 0)), "c": TensorPart("w", (2, 0))}, "cannot be parts of one tensor 'w'"),
        ({"a": TensorPart("w", (0,))}, "at least 2 numbers"),
        ({"a": TensorPart("w", (0, -1))}, "numbers from 0"),
        ({"a": TensorPart("w", (0, True))}, "numbers from 0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, table: dict[str, str | TensorPart], said: str) -> None:
    write_single(tmp_path, {"a": torch.ones(2, 2), "b": torch.ones(2, 2), "c": torch.ones(2, 2, dtype=torch.int64)})
    assert said in refused({}, InvalidArgumentError, HuggingFaceReader(tmp_path, name_map=table))


def test_parts_of_a_row_tile_any_shape(tmp_path: Path) -> None:
    whole = torch.randn(7, 9)
    cuts = {"a": (0, 0, 4, 5), "b": (0, 5, 4, 4), "c": (4, 0, 3, 2), "d": (4, 2, 3, 7)}
    write_single(tmp_path, {k: whole[i : i + n, j : j + m].clone() for k, (i, j, n, m) in cuts.items()})
    table = {key: TensorPart("w", (i, j)) for key, (i, j, _, _) in cuts.items()}
    target = torch.zeros(7, 9)
    hpdcp.load({"w": target}, storage_reader=HuggingFaceReader(tmp_path, name_map=table))
    assert same(whole, target)


def test_a_mixture_of_experts_that_transformers_wrote_loads_into_its_stacked_parameters(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, num_experts=4, vocab_size=64,
    )  # fmt: skip
    saved = Qwen3MoeForCausalLM(settings)
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    expert_key = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

    def name_map(key: str) -> str | TensorPart:
        found = expert_key.fullmatch(key)
        if found is None:
            return key
        experts, number, kind = found[1], int(found[2]), found[3]
        if kind == "down":
            return TensorPart(f"{experts}.down_proj", (number, 0, 0))
        return TensorPart(f"{experts}.gate_up_proj", (number, settings.moe_intermediate_size * (kind == "up"), 0))

    fresh = Qwen3MoeForCausalLM(settings)
    wanted = saved.state_dict()
    assert not any(same(wanted[key], tensor) for key, tensor in fresh.state_dict().items() if key.endswith("_proj"))
    hpdcp.load(fresh.state_dict(), storage_reader=HuggingFaceReader(tmp_path, name_map=name_map))
    assert [key for key, tensor in fresh.state_dict().items() if not same(wanted[key], tensor)] == []


def test_a_folder_of_a_large_mixture_of_experts_is_planned_from_its_headers(tmp_path: Path) -> None:
    """The keys, shapes and shards of a model of 30 billion parameters: the files are holes, and take no room."""
    layers, count, hidden, inner = 48, 128, 2048, 768
    shape_of = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes = {
        f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight": shape
        for layer in range(layers)
        for number in range(count)
        for part, shape in shape_of.items()
    }
    per_file = 1200
    keys = sorted(shapes)
    groups = [keys[start : start + per_file] for start in range(0, len(keys), per_file)]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups):
        name = shard_name(number, len(groups))
        entries = [TensorEntry(key, "BF16", shapes[key], 2 * hidden * inner) for key in group]
        head, _ = build_header(entries, {"format": "pt"})
        (tmp_path / name).write_bytes(head)
        os.truncate(tmp_path / name, len(head) + sum(entry.nbytes for entry in entries))
        weight_map |= dict.fromkeys(group, name)
    write_index(tmp_path, {"weight_map": weight_map})

    def name_map(key: str) -> TensorPart:
        stem, number, part = key.removesuffix("_proj.weight").rsplit(".", 2)
        if part == "down":
            return TensorPart(f"{stem}.down_proj", (int(number), 0, 0))
        return TensorPart(f"{stem}.gate_up_proj", (int(number), inner if part == "up" else 0, 0))

    metadata = HuggingFaceReader(tmp_path, name_map=name_map).load_metadata()
    assert (len(metadata.entries), len(metadata.chunks)) == (2 * layers, layers * count * 3)
    # A rank of eight that holds some columns of all experts of one layer.
    target = torch.ones(count, 2 * inner, hidden // 8, dtype=torch.bfloat16)
    box = ChunkStorageMetadata((0, 0, hidden // 8), tuple(target.shape))
    setattr(target, CHUNK_INFO, ChunkInfo(box, (count, 2 * inner, hidden)))
    planner = StandardLoadPlanner()
    planner.configure_planner(
        {"model.layers.7.mlp.experts.gate_up_proj": target}, metadata, PlannerContext(1, 8, False, True, False)
    )
    plan = planner.build_local_plan()
    assert len(plan.items) == 2 * count
    assert sum(math.prod(item.lengths) for item in plan.items) == target.numel()


def test_a_part_keeps_its_earlier_name() -> None:
    assert hpdcp.Part is hpdcp.TensorPart is TensorPart
