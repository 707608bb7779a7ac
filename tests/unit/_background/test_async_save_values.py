"""What a save in the background stores is what the state was at the call, bit for bit, and each tensor once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hpdcp
from hpdcp import DataCopier, FileSystemReader, PerRank
from hpdcp._plan.plan_cache import PLANS
from tests.support.data_files import without_attempt

SOON = 60.0


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    PLANS.clear()
    yield
    assert hpdcp.wait_for_saves(SOON)
    PLANS.clear()


def saved(state: dict[str, Any], folder: Path, spoil: Any = lambda: None) -> hpdcp.Metadata:
    response = hpdcp.async_save(state, checkpoint_id=folder)
    spoil()
    return response.get_result(SOON)


def loaded(target: dict[str, Any], folder: Path) -> dict[str, Any]:
    hpdcp.load(target, checkpoint_id=folder)
    return target


TENSORS = {
    "0-dim": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "stepped": lambda: torch.arange(24.0).reshape(3, 8)[:, ::2],
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "channels last": lambda: torch.arange(48.0).reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
    "shared": lambda: torch.arange(5.0).share_memory_(),
    "from numpy": lambda: torch.from_numpy(np.arange(4.0)),
    "nan": lambda: torch.tensor([0x7FC01234, 0x7F800001], dtype=torch.int32).view(torch.float32),
    "bfloat16": lambda: torch.arange(5.0).bfloat16(),
    "bool": lambda: torch.tensor([True, False]),
    "float8": lambda: torch.arange(8, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "complex128": lambda: torch.full((2,), 1 + 2j, dtype=torch.complex128),
}


def test_tensors_of_every_kind_are_copied_and_never_aliased(tmp_path: Path) -> None:
    state = {name: make() for name, make in TENSORS.items()}
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}

    def spoil() -> None:
        for name, tensor in state.items():
            if name != "expanded":
                tensor.detach().view(torch.uint8 if name == "float8" else tensor.dtype).zero_()

    saved(state, tmp_path, spoil)
    target = loaded({name: torch.empty_like(tensor) for name, tensor in expected.items()}, tmp_path)

    def bits(tensor: torch.Tensor) -> list[int]:
        return list(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())

    assert [name for name in state if bits(target[name]) != bits(expected[name])] == []


def test_python_values_are_those_of_the_call_however_deep(tmp_path: Path) -> None:
    state = {"history": {"losses": [1.0], "by step": {3: [4]}}, "array": np.arange(3), "set": {1}, "n": 1}

    def spoil() -> None:
        state["history"]["losses"].append(2.0)
        state["history"]["by step"][3][0] = 5
        state["array"][:] = 9
        state["set"].add(2)
        state["n"] = 2

    saved(state, tmp_path, spoil)
    target = loaded(dict.fromkeys(state), tmp_path)
    assert target["history"] == {"losses": [1.0], "by step": {3: [4]}}
    assert target["array"].tolist() == [0, 1, 2]
    assert (target["set"], target["n"]) == ({1}, 1)


def test_tied_tensors_stay_tied_and_are_stored_once(tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    for turn in range(2):
        metadata = saved({"a": weight, "b": weight, "c": {"d": weight}}, tmp_path / str(turn))
        assert sum(metadata.files.values()) < 4000 + 8192
        assert metadata.state_dict_metadata["b"].alias_of == "a"
    alone = loaded({"c": {"d": torch.zeros(1000)}}, tmp_path / "1")
    assert torch.equal(alone["c"]["d"], weight)


def test_a_view_costs_what_it_shows(tmp_path: Path) -> None:
    whole = torch.arange(50_000_000, dtype=torch.uint8)
    metadata = saved({"a": whole[10:20], "b": whole[15:30]}, tmp_path)
    assert sum(metadata.files.values()) < 16384
    target = loaded({"a": torch.zeros(10, dtype=torch.uint8), "b": torch.zeros(15, dtype=torch.uint8)}, tmp_path)
    assert target["a"].tolist() == list(range(10, 20))
    assert target["b"].tolist() == list(range(15, 30))


def test_per_rank_state_is_saved_in_the_background_too(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    state = {"rng": PerRank({"torch": generator.get_state(), "python": (3, (1, 2), None)})}
    expected = generator.get_state()
    saved(state, tmp_path, lambda: state["rng"].value["torch"].zero_())
    target = loaded({"rng": PerRank({"torch": torch.zeros_like(expected), "python": None})}, tmp_path)
    assert torch.equal(target["rng"].value["torch"], expected)
    assert target["rng"].value["python"] == (3, (1, 2), None)


@dataclass
class Progress:
    seen: list[int]


def test_a_state_class_of_ones_own_is_copied_as_registered_and_others_warn_once(tmp_path: Path) -> None:
    copied: list[Progress] = []

    @DataCopier.register(Progress)
    def copy_progress(progress: Progress) -> Progress:
        copied.append(progress)
        return Progress(list(progress.seen))

    progress = Progress([1])
    try:
        with pytest.warns(hpdcp._state.objects.PickledObjectWarning, match="progress"):  # type: ignore[attr-defined]
            response = hpdcp.async_save({"progress": progress}, checkpoint_id=tmp_path)
    finally:
        DataCopier._copies.pop(Progress)
    progress.seen.append(2)
    response.get_result(SOON)
    assert copied == [progress]
    target: dict[str, Any] = {"progress": None}
    hpdcp.load(target, storage_reader=FileSystemReader(tmp_path, allow_pickle=True))
    assert target["progress"] == Progress([1])


def test_objects_with_a_state_dict_go_in_as_they_are(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def train_on() -> None:
        for _ in range(3):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()

    saved({"model": model, "optimizer": optimizer}, tmp_path, train_on)
    hpdcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])] == []
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_a_value_that_grows_between_saves_is_stored_whole_although_the_plan_is_reused(tmp_path: Path) -> None:
    state = {"w": torch.arange(4.0), "log": [0]}
    for turn in range(1, 4):
        state["w"] += 1
        state["log"] += range(turn * 1000)
        saved(state, tmp_path)
        target = loaded({"w": torch.zeros(4), "log": None}, tmp_path)
        assert target["log"] == state["log"]
        assert torch.equal(target["w"], state["w"])
    assert len(PLANS) == 1


def test_a_state_of_another_structure_is_planned_anew(tmp_path: Path) -> None:
    saved({"a": torch.ones(2)}, tmp_path / "1")
    saved({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "2")
    saved({"a": torch.ones(2, dtype=torch.float64)}, tmp_path / "3")
    assert loaded({"b": torch.zeros(3)}, tmp_path / "2")["b"].tolist() == [1, 1, 1]
    assert str(FileSystemReader(tmp_path / "3").load_metadata().state_dict_metadata["a"].dtype) == "float64"
    assert len(PLANS) == 3


def test_saves_of_both_kinds_store_the_same(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0), "n": {"a": [1, (2,)]}, "rank": PerRank([1])}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        now = hpdcp.save(state, checkpoint_id=tmp_path / "now")
        later = saved(state, tmp_path / "later")
    names = [sorted(metadata.files) for metadata in (now, later)]
    assert without_attempt(names[0]) == without_attempt(names[1])
    for name, other in zip(*names, strict=True):
        ours, theirs = (tmp_path / "now" / name).read_bytes(), (tmp_path / "later" / other).read_bytes()
        marks = [metadata.settings["attempt"].encode() for metadata in (now, later)]
        assert ours.replace(marks[0], b"") == theirs.replace(marks[1], b"")
