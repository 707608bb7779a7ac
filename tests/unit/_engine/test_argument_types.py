"""Arguments of another type are refused at the door, by name, before anything is read, written or run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import hpdcp
from hpdcp import FileSystemReader, FileSystemWriter, StandardLoadPlanner, StandardSavePlanner
from hpdcp.compare import compare_checkpoints
from hpdcp.errors import InvalidArgumentError
from hpdcp.offline_copy import convert_dcp_to_dcp
from hpdcp.offline_transform import (
    convert_dcp_to_huggingface,
    convert_dcp_to_torch,
    convert_full_checkpoint_to_dcp,
    dcp_to_full_state_dict,
    full_state_dict_to_dcp_format,
    save_state_dict_as_huggingface_format,
)
from hpdcp.remove import remove_checkpoint

STATE = {"w": torch.ones(2)}


def save(**arguments: Any) -> object:
    return hpdcp.save(STATE, **({"checkpoint_id": "elsewhere"} | arguments))


def load(**arguments: Any) -> object:
    return hpdcp.load(STATE, **({"checkpoint_id": "here"} | arguments))


def async_save(**arguments: Any) -> object:
    return hpdcp.async_save(STATE, **({"checkpoint_id": "elsewhere"} | arguments))


def allocate(**arguments: Any) -> object:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])
    return hpdcp.allocate_optimizer_state(optimizer, checkpoint_id="here", **arguments)


CALLS: dict[str, tuple[Callable[..., object], str]] = {
    "save no_dist": (save, "no_dist"),
    "save use_collectives": (save, "use_collectives"),
    "load no_dist": (load, "no_dist"),
    "load use_collectives": (load, "use_collectives"),
    "load broadcast": (load, "broadcast_replicated_tensors"),
    "load groups": (load, "broadcast_groups"),
    "load batch": (load, "broadcast_batch_bytes"),
    "async no_dist": (async_save, "no_dist"),
    "async use_collectives": (async_save, "use_collectives"),
    "async use_gloo": (async_save, "use_gloo"),
    "async callback": (async_save, "callback"),
    "allocate no_dist": (allocate, "no_dist"),
    "allocate use_collectives": (allocate, "use_collectives"),
    "reader allow_pickle": (FileSystemReader, "allow_pickle"),
    "reader verify": (FileSystemReader, "verify"),
    "reader options": (FileSystemReader, "storage_options"),
    "writer options": (FileSystemWriter, "storage_options"),
    "partial": (StandardLoadPlanner, "allow_partial_load"),
    "cast": (StandardLoadPlanner, "allow_dtype_cast"),
    "caching": (StandardSavePlanner, "enable_plan_caching"),
    "redundancy": (StandardSavePlanner, "remove_redundancy"),
    "minimum rank": (StandardSavePlanner, "save_to_minimum_rank"),
    "remove force": (lambda **a: remove_checkpoint("here", **a), "force"),
    "remove dry_run": (lambda **a: remove_checkpoint("here", **a), "dry_run"),
    "compare values": (lambda **a: compare_checkpoints("here", "here", **a), "values"),
    "copy dry_run": (lambda **a: convert_dcp_to_dcp("here", "there", **a), "dry_run"),
    "copy no_dist": (lambda **a: convert_dcp_to_dcp("here", "there", **a), "no_dist"),
    "export overwrite": (lambda **a: convert_dcp_to_huggingface("here", "there", **a), "overwrite"),
    "export dry_run": (lambda **a: convert_dcp_to_huggingface("here", "there", **a), "dry_run"),
    "torch allow_pickle": (lambda **a: convert_dcp_to_torch("here", "there.pt", **a), "allow_pickle"),
    "torch dry_run": (lambda **a: convert_dcp_to_torch("here", "there.pt", **a), "dry_run"),
    "state allow_pickle": (lambda **a: dcp_to_full_state_dict("here", **a), "allow_pickle"),
    "import dry_run": (lambda **a: convert_full_checkpoint_to_dcp("here", "there", **a), "dry_run"),
    "format no_dist": (lambda **a: full_state_dict_to_dcp_format(STATE, "there", **a), "no_dist"),
    "weights overwrite": (lambda **a: save_state_dict_as_huggingface_format("there", STATE, **a), "overwrite"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    hpdcp.save(STATE, checkpoint_id="here")
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("value", ["false", 7.5], ids=["text", "number"])
def test_an_argument_of_another_type_is_named(call: str, value: object, here: Path) -> None:
    function, name = CALLS[call]
    with pytest.raises(InvalidArgumentError, match=rf"{name} is .*expected"):
        function(**{name: value})
    assert {entry.name for entry in here.iterdir()} == {"here"}


@pytest.mark.parametrize(
    ("call", "name", "value", "says"),
    [
        (save, "storage_writer", lambda: dcp.FileSystemWriter("x"), "hpdcp.FileSystemWriter writes"),
        (async_save, "storage_writer", lambda: dcp.FileSystemWriter("x"), "hpdcp.FileSystemWriter writes"),
        (load, "storage_reader", lambda: dcp.FileSystemReader("x"), "hpdcp.FileSystemReader reads"),
        (allocate, "storage_reader", lambda: dcp.FileSystemReader("x"), "hpdcp.FileSystemReader reads"),
        (save, "planner", dcp.DefaultSavePlanner, "hpdcp.StandardSavePlanner"),
        (async_save, "planner", dcp.DefaultSavePlanner, "hpdcp.StandardSavePlanner"),
        (load, "planner", dcp.DefaultLoadPlanner, "hpdcp.StandardLoadPlanner"),
        (load, "planner", StandardSavePlanner, "hpdcp.StandardLoadPlanner"),
        (load, "planner", lambda: StandardLoadPlanner, "class StandardLoadPlanner itself"),
        (load, "storage_reader", lambda: FileSystemWriter("x"), "hpdcp.FileSystemReader reads"),
    ],
)
def test_what_torch_has_under_that_name_is_refused_with_what_takes_its_place(
    call: Callable[..., object], name: str, value: Callable[[], object], says: str, here: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"{name} is .*{says}"):
        call(**{name: value()})


def test_a_state_dict_that_is_none_is_refused(here: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="state_dict is a Linear of torch"):
        hpdcp.save(torch.nn.Linear(1, 1), checkpoint_id="elsewhere")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="state_dict is a list"):
        hpdcp.load([], checkpoint_id="here")  # type: ignore[arg-type]
