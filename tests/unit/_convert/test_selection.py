"""Which tensors of a training checkpoint become weights, and under which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import InvalidArgumentError, UnsupportedTypeError
from tests.unit._convert.test_round_trips import read_folder


def trained(folder: Path) -> tuple[dict[str, torch.Tensor], Path]:
    """A checkpoint of a model, its optimizer and a scheduler; the model's own state dict."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "train": {"adam": optimizer.state_dict(), "step": 3}}
    hpdcp.save(state, checkpoint_id=folder / "dcp")
    return model.state_dict(), folder / "dcp"


def exported(src: Path, **options: Any) -> dict[str, str]:
    """What is left out of an export, which holds the rest."""
    dst = src.parent / "hf"
    done = offline_transform.convert_dcp_to_huggingface(src, dst, overwrite=True, **options)
    assert read_folder(dst).keys() == done.tensors.keys()
    return dict(done.skipped)


def test_a_model_leaves_its_optimizer_behind_by_whatever_name(tmp_path: Path) -> None:
    weights, saved = trained(tmp_path)
    skipped = exported(saved, prefix="model.")
    assert read_folder(tmp_path / "hf").keys() == weights.keys()
    assert skipped["train.adam.state.0.exp_avg"] == "optimizer state"
    assert skipped["train.step"] == "a Python value"
    assert exported(saved).keys() == skipped.keys()
    assert read_folder(tmp_path / "hf").keys() == {f"model.{name}" for name in weights}


def test_optimizer_state_is_exported_where_it_is_asked_for(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    exported(saved, prefix="train.adam.state.", include=["*.exp_avg"])
    assert read_folder(tmp_path / "hf").keys() == {f"{number}.exp_avg" for number in range(4)}


def test_flat_optimizer_state_and_what_is_called_optimizer_are_recognised(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(1), "state.w.exp_avg": torch.ones(1), "param_groups.w.lr": 0.1,
        "optim": {"m": torch.ones(1)}, "optimizer_norm.weight": torch.ones(1),
    }  # fmt: skip
    hpdcp.save(state, checkpoint_id=tmp_path / "dcp")
    exported(tmp_path / "dcp")
    assert read_folder(tmp_path / "hf").keys() == {"w", "optimizer_norm.weight"}


def test_a_module_called_state_is_no_optimizer(tmp_path: Path) -> None:
    hpdcp.save({"state": {"w": torch.ones(1)}, "x": torch.ones(1)}, checkpoint_id=tmp_path / "dcp")
    assert exported(tmp_path / "dcp") == {}


def test_patterns_choose_by_names_without_the_prefix(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    skipped = exported(saved, prefix="model.", include=["0.*"], exclude=["*.bias"])
    assert read_folder(tmp_path / "hf").keys() == {"0.weight"}
    assert skipped["model.0.bias"] == "excluded by '*.bias'"
    assert skipped["model.1.bias"] == "not among include"


def test_names_are_mapped_by_a_table_or_a_function(tmp_path: Path) -> None:
    _, saved = trained(tmp_path)
    exported(saved, prefix="model.", name_map={"0.weight": "in.weight"})
    assert read_folder(tmp_path / "hf").keys() == {"in.weight", "0.bias", "1.weight", "1.bias"}
    skipped = exported(saved, prefix="model.", name_map=lambda name: None if name == "1.bias" else f"net.{name}")
    assert read_folder(tmp_path / "hf").keys() == {"net.0.weight", "net.0.bias", "net.1.weight"}
    assert skipped["model.1.bias"] == "left out by name_map"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_map": lambda _: "one"}, r"'model.0.(bias|weight)' and .* would both be called 'one'"),
        ({"name_map": {"0.bias": "1.bias"}}, "would both be called '1.bias'"),
        ({"name_map": lambda _: 3}, "maps '0.bias' to 3"),
        ({"name_map": {"0.bias": "__metadata__"}}, "__metadata__"),
        ({"prefix": "mode."}, "no tensor is left.*begin with 'model', 'train'"),
        ({"prefix": "model"}, "end it with one"),
        ({"include": ["0.*", "2.*"]}, r"no tensor matches '2\.\*'"),
        ({"include": "0.*"}, "expected a list of patterns"),
        ({"exclude": ["*"]}, "no tensor is left"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"dtype": "bf16"}, "dtype is 'bf16'"),
        ({"max_shard_size": "lots"}, "max_shard_size is 'lots'"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_nothing_is_written(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    _, saved = trained(tmp_path)
    with pytest.raises(InvalidArgumentError, match=message):
        offline_transform.convert_dcp_to_huggingface(saved, tmp_path / "hf", **{"prefix": "model.", **options})
    assert not (tmp_path / "hf").exists()


def test_tied_weights_are_stored_once_under_the_embeddings_name(tmp_path: Path) -> None:
    shared = torch.randn(5, 4)
    state = {"lm_head.weight": shared, "model.embed_tokens.weight": shared, "model.norm": torch.ones(4)}
    hpdcp.save(state, checkpoint_id=tmp_path / "dcp")
    skipped = exported(tmp_path / "dcp")
    assert skipped == {"lm_head.weight": "tied to 'model.embed_tokens.weight', stored once"}
    exported(tmp_path / "dcp", exclude=["model.embed*"])
    assert torch.equal(read_folder(tmp_path / "hf")["lm_head.weight"], shared)
    done = offline_transform.save_state_dict_as_huggingface_format(tmp_path / "direct", state)
    assert dict(done.skipped) == skipped
    assert read_folder(tmp_path / "direct").keys() == {"model.embed_tokens.weight", "model.norm"}


def test_views_strides_and_nested_dicts_are_exported_from_memory(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"a": {"t": whole.t(), "row": whole[1]}, "neg": torch.randn(3, dtype=torch.complex64).conj(), "all": whole}
    offline_transform.save_state_dict_as_huggingface_format(tmp_path, state)
    found = read_folder(tmp_path)
    assert found.keys() == {"a.t", "a.row", "neg", "all"}
    assert torch.equal(found["a.t"], whole.t())
    assert torch.equal(found["a.row"], whole[1])
    assert torch.equal(found["neg"], state["neg"])


@pytest.mark.parametrize(
    "value",
    [3, None, [1, 2], torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)],
)
def test_what_is_no_plain_tensor_is_refused_by_key(tmp_path: Path, value: object) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"'layer\.odd'"):
        offline_transform.save_state_dict_as_huggingface_format(
            tmp_path / "hf", {"fine": torch.ones(1), "layer.odd": value}
        )
    assert not (tmp_path / "hf").exists()
