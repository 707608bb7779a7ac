"""Which Python values a load asks for: what a mapping names, and all that is stored below what asks for everything."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hpdcp
from hpdcp import PerRank, StandardLoadPlanner
from hpdcp._base.errors import LoadMismatchError, MissingKeysError, ShapeMismatchError


class Stateful:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.loaded: Any = None

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def whole(value: dict[str, Any]) -> dict[str, Any]:
    """Stored as one value, as any mapping without a tensor was by versions before 1.2."""
    return defaultdict(int, value)


def t(value: float) -> torch.Tensor:
    return torch.tensor([float(value)])


BESIDE = pytest.mark.parametrize("beside", [{}, {"t": t(1.0)}], ids=["no tensor", "a tensor"])
WRITTEN = pytest.mark.parametrize("written", [dict, whole], ids=["by key", "whole"])


class TestAMappingInTheCallersHands:
    @BESIDE
    def test_asks_for_what_it_names_and_misses_what_is_not_stored(self, tmp_path: Path, beside: dict[str, Any]) -> None:
        hpdcp.save({"args": {"lr": 0.1, "old": 1} | beside}, checkpoint_id=tmp_path)
        args = {"lr": 0.0, "new": 5} | beside
        with pytest.raises(MissingKeysError, match=r"'args\.new'"):
            hpdcp.load({"args": args}, checkpoint_id=tmp_path)
        assert args == {"lr": 0.0, "new": 5} | beside
        planner = StandardLoadPlanner(allow_partial_load=True)
        hpdcp.load({"args": args}, checkpoint_id=tmp_path, planner=planner)
        assert planner.not_loaded == ("args.new",)
        assert args == {"lr": 0.1, "new": 5} | beside

    def test_misses_what_is_not_in_a_value_that_was_stored_whole(self, tmp_path: Path) -> None:
        hpdcp.save({"args": whole({"lr": 0.1, "old": 1})}, checkpoint_id=tmp_path)
        args = {"lr": 0.0, "new": 5, "newer": {"x": 1}}
        with pytest.raises(MissingKeysError, match=r"2 keys .*'args\.new', 'args\.newer\.x'"):
            hpdcp.load({"args": args}, checkpoint_id=tmp_path)
        del args["new"], args["newer"]
        hpdcp.load({"args": args}, checkpoint_id=tmp_path)
        assert args == {"lr": 0.1}

    @BESIDE
    @WRITTEN
    def test_is_filled_in_place(self, tmp_path: Path, beside: dict[str, Any], written: Any) -> None:
        hpdcp.save({"train": written({"step": 7, "deep": {"x": [1]}}), "t": t(2)}, checkpoint_id=tmp_path)
        deep = {"x": [0]}
        train = {"step": 0, "deep": deep}
        hpdcp.load({"train": train}, checkpoint_id=tmp_path)
        assert train == {"step": 7, "deep": {"x": [1]}}
        assert train["deep"] is deep

    @pytest.mark.parametrize("empty", [{}, None, OrderedDict(), 3, [1, 2]], ids=repr)
    @WRITTEN
    def test_takes_all_where_it_names_nothing(self, tmp_path: Path, empty: Any, written: Any) -> None:
        stored = {"z": 1, "a": {"y": [2], "b": {}, "c": OrderedDict(q=1, p=2)}, 3: None}
        hpdcp.save({"args": written(stored)}, checkpoint_id=tmp_path)
        state = {"args": empty}
        hpdcp.load(state, checkpoint_id=tmp_path)
        assert state["args"] == stored
        assert repr(dict(state["args"])) == repr(stored), "keys come in the order in which they were saved"
        assert written is whole or type(empty) is not dict or state["args"] is empty

    def test_with_nothing_in_it_is_no_target_for_tensors(self, tmp_path: Path) -> None:
        hpdcp.save({"optim": {"state": {0: t(1)}}}, checkpoint_id=tmp_path)
        with pytest.raises(MissingKeysError, match="allocate_optimizer_state"):
            hpdcp.load({"optim": {"state": {}}}, checkpoint_id=tmp_path)

    def test_two_places_do_not_share_what_was_stored_once(self, tmp_path: Path) -> None:
        hpdcp.save({"a": whole({"x": [1], "y": [2]})}, checkpoint_id=tmp_path)
        state: dict[str, Any] = {"a": {"x": 0, "y": 0}}
        hpdcp.load(state, checkpoint_id=tmp_path)
        shared: dict[str, Any] = {}
        hpdcp.save({"a": {"n": 1}, "b": {"n": 2}}, checkpoint_id=tmp_path)
        both = {"a": shared, "b": shared}
        hpdcp.load(both, checkpoint_id=tmp_path)
        assert both == {"a": {"n": 1}, "b": {"n": 2}}


class TestWhatAsksForEverything:
    @BESIDE
    @WRITTEN
    def test_an_object_gets_what_it_does_not_name(self, tmp_path: Path, beside: dict[str, Any], written: Any) -> None:
        stored = {"n": 1, "deep": {"a": 1, "more": {"x": [1]}}, "grown": (2,)}
        hpdcp.save(
            {"thing": Stateful(written(stored) if written is whole else stored | beside)}, checkpoint_id=tmp_path
        )
        if written is whole and beside:
            return
        thing = Stateful({"n": 0, "deep": {"a": 0}} | beside)
        hpdcp.load({"thing": thing}, checkpoint_id=tmp_path)
        assert thing.loaded == stored | beside
        assert thing.state == {"n": 0, "deep": {"a": 0}} | beside

    @BESIDE
    def test_an_object_misses_what_it_names(self, tmp_path: Path, beside: dict[str, Any]) -> None:
        hpdcp.save({"thing": Stateful({"n": 1} | beside)}, checkpoint_id=tmp_path)
        with pytest.raises(MissingKeysError, match=r"'thing\.new'"):
            hpdcp.load({"thing": Stateful({"n": 0, "new": 1} | beside)}, checkpoint_id=tmp_path)

    def test_tensors_that_nobody_names_stay_out_with_what_is_beside_them(self, tmp_path: Path) -> None:
        stored = {"n": 1, "state": {0: {"step": 1, "m": t(1)}, 1: {"step": 2, "m": t(2)}}}
        hpdcp.save({"thing": Stateful(stored)}, checkpoint_id=tmp_path)
        thing = Stateful({"n": 0, "state": {0: {"step": 0, "m": t(0)}}})
        hpdcp.load({"thing": thing}, checkpoint_id=tmp_path)
        assert thing.loaded == {"n": 1, "state": {0: {"step": 1, "m": t(1)}}}

    def test_a_module_names_all_that_it_has(self, tmp_path: Path) -> None:
        class Extra(nn.Linear):
            def get_extra_state(self) -> Any:
                return {"amax": 1}

            def set_extra_state(self, state: Any) -> None:
                assert state == {"amax": 1}

        hpdcp.save({"model": nn.Sequential(Extra(1, 1), Extra(1, 1))}, checkpoint_id=tmp_path)
        hpdcp.load({"model": nn.Sequential(Extra(1, 1))}, checkpoint_id=tmp_path)
        hpdcp.load({"model": nn.Sequential(nn.Linear(1, 1))}, checkpoint_id=tmp_path)

    def test_what_a_rank_kept_comes_back_whatever_it_names(self, tmp_path: Path) -> None:
        hpdcp.save({"own": PerRank({"a": 1, "b": {"c": 2}}), "all": PerRank({"z": 1, "a": 2})}, checkpoint_id=tmp_path)
        state: dict[str, Any] = {"own": PerRank({"a": 0}), "all": PerRank.all()}
        hpdcp.load(state, checkpoint_id=tmp_path)
        assert state["own"].value == {"a": 1, "b": {"c": 2}}
        assert repr(state["all"].value) == "[{'z': 1, 'a': 2}]"

    @pytest.mark.parametrize("saved_lr", [0.5, torch.tensor(0.5)], ids=["a number", "a tensor"])
    @pytest.mark.parametrize("as_object", [True, False], ids=["optimizer", "state_dict()"])
    def test_an_optimizer_s_groups_keep_what_a_scheduler_put_there(
        self, tmp_path: Path, saved_lr: Any, as_object: bool
    ) -> None:
        def optimizer(lr: Any) -> torch.optim.Optimizer:
            made = torch.optim.SGD([nn.Parameter(t(1))], lr=lr, momentum=0.9)
            made.param_groups[0]["params"][0].grad = t(1)
            return made

        saved, fresh = optimizer(saved_lr * 1), optimizer(torch.tensor(0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(saved, 1, gamma=0.5)
        for each in (saved, fresh):
            each.step()
        scheduler.step()
        saved.param_groups[0]["betas"] = (0.1, 0.2)
        hpdcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
        if as_object:
            hpdcp.load({"optimizer": fresh}, checkpoint_id=tmp_path)
        else:
            state = {"optimizer": fresh.state_dict()}
            hpdcp.load(state, checkpoint_id=tmp_path)
            fresh.load_state_dict(state["optimizer"])
        group = fresh.param_groups[0]
        assert {name: group[name] for name in ("lr", "initial_lr", "momentum", "betas")} == {
            "lr": 0.25,
            "initial_lr": 0.5,
            "momentum": 0.9,
            "betas": (0.1, 0.2),
        }
        assert isinstance(group["lr"], torch.Tensor)


class TestSequences:
    @pytest.mark.parametrize("stored", [[t(1), t(2), t(3), 4], (t(1), 2, 3, {"x": 1})], ids=["list", "tuple"])
    def test_of_another_length_are_refused_by_name(self, tmp_path: Path, stored: Any) -> None:
        hpdcp.save({"x": stored}, checkpoint_id=tmp_path)
        with pytest.raises(ShapeMismatchError, match=r"'x' \(stored with 4 items, wanted with 1"):
            hpdcp.load({"x": [t(0)]}, checkpoint_id=tmp_path)
        with pytest.raises(MissingKeysError, match=r"'x\.4'"):
            hpdcp.load({"x": [*stored, 5]}, checkpoint_id=tmp_path)
        hpdcp.load({"x": {0: t(0)}}, checkpoint_id=tmp_path)

    def test_of_another_length_are_refused_where_they_were_stored_whole(self, tmp_path: Path) -> None:
        hpdcp.save({"x": {"groups": [{"a": 1}, {"a": 2}]}}, checkpoint_id=tmp_path)
        target = {"x": {"groups": [{"a": 0, "param_groups": []}], "t": 0}}
        with pytest.raises(LoadMismatchError):
            hpdcp.load(target, checkpoint_id=tmp_path)
        hpdcp.save({"x": whole({"groups": [{"a": 1}, {"a": 2}]}), "t": t(1)}, checkpoint_id=tmp_path)
        planner = StandardLoadPlanner(allow_partial_load=True)
        with pytest.raises(ShapeMismatchError, match=r"'x\.groups' is stored with 2 items, wanted with 1"):
            hpdcp.load({"x": {"groups": [{"a": 0, "t": t(0)}]}}, checkpoint_id=tmp_path, planner=planner)

    def test_without_tensors_come_back_as_they_were(self, tmp_path: Path) -> None:
        hpdcp.save({"x": {"history": [1, 2, 3]}}, checkpoint_id=tmp_path)
        state: dict[str, Any] = {"x": {"history": []}}
        hpdcp.load(state, checkpoint_id=tmp_path)
        assert state == {"x": {"history": [1, 2, 3]}}


def test_many_values_of_one_stored_mapping_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = {f"key {number}": number for number in range(2000)}
    hpdcp.save({"many": whole(many)}, checkpoint_id=tmp_path)
    calls: list[str] = []
    decode = hpdcp._state.objects.decode
    monkeypatch.setattr("hpdcp._state.objects.decode", lambda data, **k: calls.append(k["key"]) or decode(data, **k))
    target = dict.fromkeys(many, 0)
    hpdcp.load({"many": target}, checkpoint_id=tmp_path)
    assert target == many
    assert calls == ["many"]
