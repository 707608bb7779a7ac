"""What does not fit is said all at once, with near names, before any target has been touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import CHUNK_INFO, ChunkInfo, ChunkStorageMetadata, Metadata, PerRank, StandardSavePlanner
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CoverageError,
    HpdcpError,
    InvalidArgumentError,
    LoadMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    StateDictError,
)
from hpdcp._plan.replicas import drop_duplicates
from hpdcp._plan.save_plan import SavePlan

_MARK = -7.0


def _model(fill: float | None = None, layers: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape) if fill is None else torch.full(shape, fill)

    return {f"layer{n}": {"weight": tensor(4, 3), "bias": tensor(4)} for n in range(layers)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hpdcp.save({"model": _model(), "step": 3, "lr": {"now": 0.1}}, checkpoint_id=tmp_path)
    return tmp_path


def _untouched(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return bool((state == _MARK).all())
    return all(map(_untouched, state.values())) if isinstance(state, dict) else state == _MARK


def _refusal(state: dict[str, Any], checkpoint: Path, kind: type[HpdcpError]) -> str:
    with pytest.raises(kind) as caught:
        hpdcp.load(state, checkpoint_id=checkpoint)
    assert type(caught.value) is kind
    assert _untouched(state)
    return str(caught.value)


def test_every_missing_key_is_listed_with_the_name_it_may_have_meant(checkpoint: Path) -> None:
    state: dict[str, Any] = {"model": _model(_MARK, layers=3), "step": _MARK}
    state["model"]["layer1"]["wieght"] = torch.full((4, 3), _MARK)
    state["model"]["layer2"]["biass"] = torch.full((4,), _MARK)
    state["zzz"] = _MARK
    text = _refusal(state, checkpoint, MissingKeysError)
    assert "3 keys are not in the checkpoint" in text
    assert "'model.layer1.wieght' (did you mean 'model.layer1.weight'" in text
    assert "'model.layer2.biass' (did you mean 'model.layer2.bias'" in text
    assert "'zzz'" in text
    assert "allow_partial_load=True" in text


def test_hundreds_of_missing_keys_are_hundreds_of_names(checkpoint: Path) -> None:
    text = _refusal({f"key{n}": _MARK for n in range(500)}, checkpoint, MissingKeysError)
    assert all(f"'key{n}'" in text for n in range(500))


def test_near_names_are_looked_up_for_the_first_of_many_only(tmp_path: Path) -> None:
    names = [f"layers.{n}.{part}.weight" for n in range(20) for part in ("up", "down")]
    hpdcp.save(dict.fromkeys(names, 0), checkpoint_id=tmp_path)
    text = _refusal({name.replace("layers", "layer"): _MARK for name in names}, tmp_path, MissingKeysError)
    assert "'layer.0.up.weight' (did you mean 'layers.0.up.weight'" in text
    assert all(f"'{name.replace('layers', 'layer')}'" in text for name in names)
    assert text.count("did you mean") == 20


def test_no_near_name_is_given_twice(tmp_path: Path) -> None:
    hpdcp.save({"m": {"bias": 0, "weight": 0}}, checkpoint_id=tmp_path)
    assert "(did you mean 'm.bias'?)" in _refusal({"m": {"m": {"biass": _MARK}}}, tmp_path, MissingKeysError)
    assert "(did you mean 'm.bias'?)" in _refusal({"m": {"biass": _MARK}}, tmp_path, MissingKeysError)


@pytest.mark.parametrize(
    ("stored", "wanted", "how"),
    [
        ("{}", "model.{}", "without 'model.' in front"),
        ("model.{}", "{}", "with 'model.' in front"),
        ("a.b.{}", "{}", "with 'a.b.' in front"),
        ("a.b.{}", "b.{}", "with 'a.' in front"),
        ("model.{}", "model.module.{}", "without 'module.'"),
        ("model.module.{}", "model.{}", "with 'module.'"),
        ("m._orig_mod.{}", "m.{}", "with '_orig_mod.'"),
        ("m.{}", "m._orig_mod.{}", "without '_orig_mod.'"),
        ("{}", "module.{}", "without 'module.' in front"),
        ("{0}.w", "{0}._checkpoint_wrapped_module.w", "without '_checkpoint_wrapped_module.'"),
        ("{0}._fsdp_wrapped_module.w", "{0}.w", "with '_fsdp_wrapped_module.'"),
    ],
)
@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("value", [0, torch.zeros(1)], ids=["values", "tensors"])
def test_one_cause_of_many_missing_keys_is_said_first(
    tmp_path: Path, stored: str, wanted: str, how: str, extra: bool, value: Any
) -> None:
    layers = [f"layers.{n}" for n in range(8)]
    hpdcp.save({stored.format(layer): value for layer in layers}, checkpoint_id=tmp_path)
    state: dict[str, Any] = {wanted.format(layer): value for layer in layers} | ({"zzz": _MARK} if extra else {})
    with pytest.raises(MissingKeysError) as caught:
        hpdcp.load(state, checkpoint_id=tmp_path)
    text = str(caught.value)
    first = f"{wanted.format('layers.0')!r} (as {stored.format('layers.0')!r})"
    count = "8 of the 9" if extra else "All 8"
    assert text.startswith(f"{count} keys that are not in the checkpoint are stored {how}: {first}, ")
    assert "and 5 more" in text and "did you mean" not in text
    assert ("The others: 'zzz'." in text) is extra
    names = [wanted.format(layer) for layer in layers]
    assert all(text.count(repr(name)) <= 1 for name in names)


def test_every_shape_that_differs_is_listed_with_both_shapes(checkpoint: Path) -> None:
    state = {"model": _model(_MARK)}
    state["model"]["layer0"]["weight"] = torch.full((3, 4), _MARK)
    state["model"]["layer2"]["bias"] = torch.full((5,), _MARK)
    text = _refusal(state, checkpoint, ShapeMismatchError)
    assert "'model.layer0.weight' (stored [4, 3], wanted [3, 4])" in text
    assert "'model.layer2.bias' (stored [4], wanted [5])" in text


def test_a_tensor_is_no_place_for_a_value_and_a_value_none_for_a_tensor(checkpoint: Path) -> None:
    state = {"model": {"layer0": {"weight": _MARK}}, "step": torch.full((1,), _MARK)}
    text = _refusal(state, checkpoint, ShapeMismatchError)
    assert "'model.layer0.weight' (stored as a tensor, wanted as a Python value)" in text
    assert "'step' (stored as a Python value, wanted as a tensor)" in text


def test_all_kinds_of_trouble_come_in_one_error(checkpoint: Path) -> None:
    state: dict[str, Any] = {"model": _model(_MARK), "gone": _MARK, "step": torch.full((1,), _MARK)}
    state["model"]["layer0"]["bias"] = torch.full((9,), _MARK)
    state["model"]["layer1"]["bias"] = torch.full((4,), _MARK, dtype=torch.bfloat16)
    with pytest.raises(LoadMismatchError) as caught:
        hpdcp.load(state, checkpoint_id=checkpoint, planner=hpdcp.StandardLoadPlanner(allow_dtype_cast=False))
    assert _untouched(state)
    text = str(caught.value)
    for named in ("'gone'", "'step'", "'model.layer0.bias'", "'model.layer1.bias' (stored float32, wanted bfloat16)"):
        assert named in text


def test_stored_keys_that_nobody_asks_for_are_fine(checkpoint: Path) -> None:
    state = {"lr": {"now": _MARK}}
    hpdcp.load(state, checkpoint_id=checkpoint)
    assert state == {"lr": {"now": 0.1}}


def test_per_rank_state_and_shared_state_are_different_things(tmp_path: Path) -> None:
    hpdcp.save({"own": PerRank(1), "shared": 2}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeysError, match="'own'"):
        hpdcp.load({"own": _MARK}, checkpoint_id=tmp_path)
    with pytest.raises(MissingKeysError, match="'shared'"):
        hpdcp.load({"shared": PerRank(_MARK)}, checkpoint_id=tmp_path)


class _LeavesHoles(StandardSavePlanner):
    """Records what it was given without asking whether that is all of it."""

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return drop_duplicates(plans, remove_redundancy=True, to_minimum_rank=False, whole=False)


def _rows(start: int, tensor: torch.Tensor, of: int) -> torch.Tensor:
    chunk = ChunkStorageMetadata((start, 0), tuple(tensor.shape))
    setattr(tensor, CHUNK_INFO, ChunkInfo(chunk, (of, tensor.shape[1])))
    return tensor


def test_a_hole_is_an_error_that_names_the_key_and_the_box(tmp_path: Path) -> None:
    state = {"w": _rows(2, torch.ones(3, 4), of=8), "v": _rows(0, torch.ones(3, 4), of=4), "whole": torch.ones(2)}
    with pytest.raises(StateDictError, match=r"'w' of shape \[8, 4\] lacks \[0, 0\] to \[2, 4\]"):
        hpdcp.save(state, checkpoint_id=tmp_path)
    hpdcp.save(state, checkpoint_id=tmp_path, planner=_LeavesHoles())
    targets = {"w": torch.full((8, 4), _MARK), "v": torch.full((4, 4), _MARK), "whole": torch.full((2,), _MARK)}
    text = _refusal(targets, tmp_path, CoverageError)
    assert "'w' (nothing stored for [0, 0] to [2, 4])" in text
    assert "'v' (nothing stored for [3, 0] to [4, 4])" in text
    inside = _rows(3, torch.full((2, 4), _MARK), of=8)
    hpdcp.load({"w": inside}, checkpoint_id=tmp_path)
    assert bool((inside == 1).all())


def test_a_state_dict_is_a_mapping(checkpoint: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="list"):
        hpdcp.load([torch.zeros(2)], checkpoint_id=checkpoint)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="list"):
        hpdcp.save([torch.zeros(2)], checkpoint_id=checkpoint)  # type: ignore[arg-type]


def test_a_location_without_a_checkpoint_is_told_from_the_ones_near_it(tmp_path: Path) -> None:
    for step in (9, 10):
        hpdcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / f"step_{step}")
    with pytest.raises(CheckpointNotFoundError, match=r"folders of it do: 'step_9', 'step_10'. Give one of them"):
        hpdcp.load({"w": torch.ones(1)}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"step_11 is not there. Did you mean .*step_10"):
        hpdcp.load({"w": torch.ones(1)}, checkpoint_id=tmp_path / "step_11")
    with pytest.raises(CheckpointNotFoundError, match=r"Did you mean"):
        hpdcp.load({"w": torch.ones(1)}, checkpoint_id=tmp_path / "step_11", use_collectives=False)


def test_extra_states_that_do_not_fit_may_be_left_out(tmp_path: Path) -> None:
    stored = {"fp8": {"w": torch.ones(2), "_extra_state": torch.ones(7, dtype=torch.uint8)}}
    hpdcp.save({"model": stored}, checkpoint_id=tmp_path)
    for extra, kind in ((torch.zeros(9, dtype=torch.uint8), ShapeMismatchError), (None, LoadMismatchError)):
        target = {"model": {"fp8": {"w": torch.zeros(2), "_extra_state": extra}}}
        with pytest.raises(kind, match=r'k\.endswith\("_extra_state"\)'):
            hpdcp.load(target, checkpoint_id=tmp_path)
    hpdcp.save({"model": {"fp8": {"w": torch.ones(2)}}}, checkpoint_id=tmp_path / "without")
    with pytest.raises(MissingKeysError, match=r'k\.endswith\("_extra_state"\)'):
        hpdcp.load(target, checkpoint_id=tmp_path / "without")
    with pytest.raises(MissingKeysError) as caught:
        hpdcp.load({"model": {"extra": torch.ones(1)}}, checkpoint_id=tmp_path)
    assert "endswith" not in str(caught.value)
