"""A model of the meta device gets memory and stored weights; what is not stored is set by its module or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hpdcp
from hpdcp._base.errors import InvalidArgumentError, MissingKeysError, ShapeMismatchError
from tests.support.huggingface import write_shards, write_single

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


class Positions(nn.Module):
    """A buffer that is not stored, and that the module can set."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.positions.copy_(torch.arange(4))


class Net(nn.Module):
    def __init__(self, positions: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.positions = positions


def on_meta(kind: type[nn.Module] = Positions) -> Net:
    with torch.device("meta"):
        return Net(kind())


@pytest.fixture
def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = Net(Positions()).state_dict()
    return {name: torch.randn_like(value) if value.is_floating_point() else value for name, value in state.items()}


def test_a_model_of_transformers_is_the_same_as_when_transformers_loads_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    expected = LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    assert hpdcp.from_pretrained(model, tmp_path) is model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for table in ("named_parameters", "named_buffers"):
        wanted, found = dict(getattr(expected, table)()), dict(getattr(model, table)())
        assert wanted.keys() == found.keys()
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_buffers_that_are_not_stored_are_set_and_leave_what_was_loaded(
    tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    write_shards(tmp_path, stored, shards=2)
    model = hpdcp.from_pretrained(on_meta(), tmp_path)
    assert {name: tensor.tolist() for name, tensor in model.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in stored.items()
    }
    assert model.get_buffer("positions.positions").tolist() == [0, 1, 2, 3]


def test_a_buffer_that_nobody_sets_is_refused_by_name(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    class Silent(Positions):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)

    write_shards(tmp_path, stored, shards=1)
    with pytest.raises(InvalidArgumentError, match=r"1 tensors .*'positions\.positions'.*reset_parameters"):
        hpdcp.from_pretrained(on_meta(Silent), tmp_path)


def test_a_weight_that_is_not_stored_is_missing_unless_its_module_may_set_it(
    tmp_path: Path, stored: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    bias = stored.pop("body.bias")
    write_shards(tmp_path, stored, shards=1)
    with pytest.raises(MissingKeysError, match=r"body\.bias"):
        hpdcp.from_pretrained(on_meta(), tmp_path)
    with caplog.at_level(logging.WARNING, logger="hpdcp"):
        model = hpdcp.from_pretrained(on_meta(), tmp_path, strict=False)
    found = model.get_parameter("body.bias")
    assert found.isfinite().all()
    assert found.abs().max() <= 0.5, "as nn.Linear begins"
    assert not torch.equal(found, bias)
    assert torch.equal(model.get_parameter("body.weight"), stored["body.weight"])
    assert "1 tensors are not stored and begin with what their modules set: 'body.bias'" in caplog.text


def test_what_has_memory_keeps_it_and_is_filled(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    write_shards(tmp_path, stored, shards=1)
    model = on_meta()
    model.body = nn.Linear(4, 4)
    weight = model.body.weight
    model.register_buffer("mine", torch.full((3,), 7.0), persistent=False)
    hpdcp.from_pretrained(model, tmp_path)
    assert model.body.weight is weight
    assert torch.equal(weight, stored["body.weight"])
    assert model.get_buffer("mine").tolist() == [7.0, 7.0, 7.0]


def test_a_dtype_is_that_of_what_is_stored_and_computed_buffers_keep_theirs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path)
    expected = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    hpdcp.from_pretrained(model, tmp_path, dtype=torch.bfloat16)
    for (name, wanted), found in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert found.dtype is torch.bfloat16
        assert torch.equal(wanted, found), name
    for (name, wanted), found in zip(expected.named_buffers(), model.buffers(), strict=True):
        assert found.dtype is wanted.dtype
        assert torch.equal(wanted, found), name


def test_names_are_mapped_and_shapes_must_fit(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    write_single(tmp_path, {f"model.{name}": tensor for name, tensor in stored.items()})
    model = hpdcp.from_pretrained(on_meta(), tmp_path, name_map=lambda key: key.removeprefix("model."))
    assert torch.equal(model.get_parameter("body.weight"), stored["body.weight"])
    with torch.device("meta"):
        other = nn.ModuleDict({"body": nn.Linear(4, 5)})
    with pytest.raises(ShapeMismatchError):
        hpdcp.from_pretrained(other, tmp_path, name_map=lambda key: key.removeprefix("model."))


def test_a_dense_format_in_memory_is_kept(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 4)
    write_single(tmp_path, {"weight": weight, "bias": torch.zeros(2)})
    with torch.device("meta"):
        model = nn.Conv2d(3, 2, 4).to(memory_format=torch.channels_last)
    hpdcp.from_pretrained(model, tmp_path, strict=False)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight, weight)


def test_other_things_than_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="model"):
        hpdcp.from_pretrained({"w": torch.ones(1)}, tmp_path)  # type: ignore[type-var]
