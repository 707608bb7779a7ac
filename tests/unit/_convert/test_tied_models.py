"""Models that tie weights, of four families: what is exported has the keys of their own `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import hpdcp
from hpdcp import offline_transform

transformers = pytest.importorskip("transformers")

SMALL = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "tie_word_embeddings": True,
        },
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}),
    "T5ForConditionalGeneration": ("T5Config", {"d_model": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 8}),
    "BertForMaskedLM": (
        "BertConfig",
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    ),
}  # fmt: skip


def small(name: str) -> Any:
    config, arguments = SMALL[name]
    return getattr(transformers, name)(getattr(transformers, config)(vocab_size=64, **arguments))


@pytest.mark.parametrize("name", SMALL)
def test_a_model_with_tied_weights_loads_from_its_export_with_nothing_missing(tmp_path: Path, name: str) -> None:
    model = small(name)
    hpdcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp")
    model.config.save_pretrained(tmp_path / "hf")
    done = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", prefix="model.")
    assert any("tied to" in why for why in done.skipped.values())
    model.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as theirs:
        assert done.tensors.keys() == set(theirs.keys())
    loaded, info = type(model).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values())
    expected, found = model.state_dict(), loaded.state_dict()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
