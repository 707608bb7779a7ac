"""Targets are filled in their own memory, whatever they look like, and nothing beside them is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpdcp
from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._format.metadata import TensorStorageMetadata

_MARK = -7.0


def _full(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"matrix": _full(4, 6), "image": _full(2, 3, 4, 5), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    hpdcp.save(state, checkpoint_id=tmp_path)
    return tmp_path


def test_a_leaf_that_requires_grad_stays_one(checkpoint: Path) -> None:
    leaf = nn.Parameter(torch.full((4, 6), _MARK))
    leaf.grad = torch.ones(4, 6)
    where = leaf.data_ptr()
    hpdcp.load({"matrix": leaf}, checkpoint_id=checkpoint)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf.data_ptr() == where
    assert torch.equal(leaf.detach(), _full(4, 6))
    (leaf * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 6), 3.0))


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[3:7, 5:11],
        lambda base: base.t()[2:6, 1:7],
        lambda base: base[1:9:2, 0:12:2],
        lambda base: base.view(-1)[9:33].view(4, 6),
        lambda base: base.view(-1)[1:145].view(6, 24)[:, 3:7].t(),
    ],
    ids=["a window", "a transposed window", "every second element", "a flat stretch", "a transposed stretch"],
)
def test_a_view_is_filled_and_its_surroundings_are_not(checkpoint: Path, view: Any) -> None:
    base = torch.full((12, 13), _MARK)
    target = view(base)
    assert target.shape == (4, 6)
    hpdcp.load({"matrix": target}, checkpoint_id=checkpoint)
    assert torch.equal(target, _full(4, 6))
    target.fill_(_MARK)
    assert bool((base == _MARK).all())


def test_channels_last_stays_channels_last(checkpoint: Path) -> None:
    target = torch.full((2, 3, 4, 5), _MARK).to(memory_format=torch.channels_last)
    hpdcp.load({"image": target}, checkpoint_id=checkpoint)
    assert target.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(target, _full(2, 3, 4, 5))


def test_a_strided_source_is_stored_by_its_values(tmp_path: Path) -> None:
    sources = {
        "transposed": _full(6, 4).t(),
        "channels last": _full(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": _full(1, 4).expand(3, 4),
        "every second": _full(9)[::2],
        "grad": nn.Parameter(_full(3)),
    }
    hpdcp.save(sources, checkpoint_id=tmp_path)
    targets = {name: torch.full(tuple(tensor.shape), _MARK) for name, tensor in sources.items()}
    hpdcp.load(targets, checkpoint_id=tmp_path)
    for name, tensor in sources.items():
        assert torch.equal(targets[name], tensor.detach()), name


def test_scalars_and_tensors_without_elements_are_targets_too(checkpoint: Path) -> None:
    scalar, none = torch.tensor(_MARK), torch.empty(0, 3)
    inside = torch.full((3,), _MARK)
    hpdcp.load({"scalar": scalar, "none": none}, checkpoint_id=checkpoint)
    hpdcp.load({"scalar": inside[1]}, checkpoint_id=checkpoint)
    assert scalar.item() == 2.5
    assert inside.tolist() == [_MARK, 2.5, _MARK]


def test_a_module_and_its_optimizer_are_filled_without_new_tensors(tmp_path: Path) -> None:
    def train(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = train(0)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    hpdcp.save(state, checkpoint_id=tmp_path)
    other, other_optimizer = train(1)
    memory = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    target = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict(), "step": 0}
    hpdcp.load(target, checkpoint_id=tmp_path)
    other_optimizer.load_state_dict(target["optimizer"])
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == memory
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other_optimizer.param_groups[0]["lr"] == 0.1
    for saved, loaded in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in optimizer.state[saved].items():
            assert torch.equal(other_optimizer.state[loaded][name], value), name
    assert target["step"] == 3


def test_tied_weights_are_stored_once_stay_tied_and_either_name_loads_alone(tmp_path: Path) -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    metadata = hpdcp.save({"embed": embedding.state_dict(), "head": head.state_dict()}, checkpoint_id=tmp_path)
    assert len(metadata.chunks) == 1
    alias = metadata.state_dict_metadata["head.weight"]
    assert isinstance(alias, TensorStorageMetadata)
    assert alias.alias_of == "embed.weight"
    for name in ("embed", "head"):
        alone = torch.full((5, 3), _MARK)
        hpdcp.load({name: {"weight": alone}}, checkpoint_id=tmp_path)
        assert torch.equal(alone, embedding.weight.detach()), name
    tied = nn.Parameter(torch.full((5, 3), _MARK))
    hpdcp.load({"embed": {"weight": tied}, "head": {"weight": tied}}, checkpoint_id=tmp_path)
    assert torch.equal(tied.detach(), embedding.weight.detach())
    apart = {"embed": {"weight": torch.zeros(5, 3)}, "head": {"weight": torch.zeros(5, 3)}}
    hpdcp.load(apart, checkpoint_id=tmp_path)
    assert torch.equal(apart["embed"]["weight"], apart["head"]["weight"])
    assert torch.equal(apart["head"]["weight"], embedding.weight.detach())


def test_views_that_overlap_without_being_the_same_are_not_tied(tmp_path: Path) -> None:
    base = _full(4, 6)
    metadata = hpdcp.save({"whole": base, "rows": base[1:3], "turned": base.t()}, checkpoint_id=tmp_path)
    assert len(metadata.chunks) == 3
    targets = {"whole": torch.zeros(4, 6), "rows": torch.zeros(2, 6), "turned": torch.zeros(6, 4)}
    hpdcp.load(targets, checkpoint_id=tmp_path)
    assert torch.equal(targets["whole"], base)
    assert torch.equal(targets["rows"], base[1:3])
    assert torch.equal(targets["turned"], base.t())


@pytest.mark.parametrize(
    ("target", "why"),
    [
        (torch.empty(4, 6, device="meta"), "meta device"),
        (torch.zeros(1, 6).expand(4, 6), "share memory"),
        (torch.zeros(4, 6).to_sparse(), "sparse"),
    ],
    ids=["meta", "expanded", "sparse"],
)
def test_targets_that_cannot_be_filled_are_refused_by_name(checkpoint: Path, target: torch.Tensor, why: str) -> None:
    beside = torch.tensor(_MARK)
    with pytest.raises(UnsupportedTypeError, match=f"matrix.*{why}"):
        hpdcp.load({"scalar": beside, "matrix": target}, checkpoint_id=checkpoint)
    assert beside.item() == _MARK


def test_every_meta_target_is_named(checkpoint: Path) -> None:
    targets = {"matrix": torch.empty(4, 6, device="meta"), "scalar": torch.empty((), device="meta")}
    with pytest.raises(UnsupportedTypeError) as caught:
        hpdcp.load(targets, checkpoint_id=checkpoint)
    assert "matrix" in str(caught.value)
    assert "scalar" in str(caught.value)


def test_a_backward_pass_recorded_before_the_load_does_not_use_the_loaded_values(checkpoint: Path) -> None:
    leaf = nn.Parameter(torch.full((4, 6), _MARK))
    loss = (leaf * leaf).sum()
    hpdcp.load({"matrix": leaf}, checkpoint_id=checkpoint)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
