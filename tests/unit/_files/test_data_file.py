"""A file is the same whether its items are read at their addresses or asked for one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hpdcp
from hpdcp._devices.byte_pieces import VIEW_BYTES
from hpdcp._files._data_file import _SHORTEST_RUN, _runs
from hpdcp._files.layout import FileNaming
from hpdcp._files.safetensors_layout import SafetensorsLayout
from hpdcp._format.checksums import BLOCK_BYTES, block_checksums
from hpdcp._format.columns import I64
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.write_results import WriteResults
from hpdcp_backends.local import LocalBackend


class OneByOne(hpdcp.StandardSavePlanner):
    """As a planner that knows no addresses."""

    def get_addresses(self, plan: SavePlan) -> I64:
        return np.zeros(len(plan), dtype=np.int64)


def written(folder: Path, state: dict[str, Any], planner: hpdcp.StandardSavePlanner) -> WriteResults:
    planner.configure_planner(state, PlannerContext(0, 1, True, True))
    plan = planner.build_local_plan()
    with LocalBackend(str(folder)) as backend:
        backend.prepare()
        return SafetensorsLayout().write(backend, plan, planner, FileNaming(0, "0" * 16))


def mixed(*, turned: set[int], count: int) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 7, "name": "x"}
    for number in range(count):
        tensor = torch.arange(6 * number, dtype=torch.float32).reshape(number, 6)
        state[f"w{number:03d}"] = tensor.t() if number in turned else tensor
    return state


@pytest.mark.parametrize(
    "state",
    [
        mixed(turned=set(), count=40),
        mixed(turned={3, 20, 39}, count=40),
        mixed(turned=set(range(0, 40, 2)), count=40),
        mixed(turned=set(range(1, 20)), count=60),
        {"a": torch.arange(VIEW_BYTES, dtype=torch.uint8), "b": torch.zeros(VIEW_BYTES + 1, dtype=torch.int8)},
        {
            "a": torch.arange(BLOCK_BYTES // 4 + 5, dtype=torch.int32),
            "b": torch.zeros(2 * BLOCK_BYTES, dtype=torch.bool),
        },
        {"a": torch.zeros(0), "b": torch.tensor(1.5), "c": torch.zeros(3, 0, dtype=torch.bfloat16)},
        {},
    ],
    ids=["host", "few", "every other", "a run of others", "views", "blocks", "empty", "nothing"],
)
def test_both_ways_write_the_same_file(tmp_path: Path, state: dict[str, Any]) -> None:
    results = [
        written(tmp_path / "addresses", state, hpdcp.StandardSavePlanner()),
        written(tmp_path / "asked", state, OneByOne()),
    ]
    names = sorted(path.name for path in (tmp_path / "addresses").iterdir()) if state else []
    assert all(
        (tmp_path / "addresses" / name).read_bytes() == (tmp_path / "asked" / name).read_bytes() for name in names
    )
    assert results[0].to_bytes() == results[1].to_bytes()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        return
    stored = load_file(tmp_path / "addresses" / next(name for name in names if name.endswith(".safetensors")))
    assert all(torch.equal(stored[name], value) for name, value in tensors.items() if value.numel())


def test_what_is_reported_is_what_lies_in_the_file(tmp_path: Path) -> None:
    table = written(tmp_path, mixed(turned={2}, count=30), hpdcp.StandardSavePlanner()).table
    ends = table.crc_ends.tolist()
    for row, end in enumerate(ends):
        data = (tmp_path / table.file_names[int(table.file[row])]).read_bytes()
        start = int(table.offset[row])
        extent = memoryview(data)[start : start + int(table.length[row])]
        assert block_checksums([extent]) == table.crcs[ends[row - 1] if row else 0 : end].tolist()


def test_short_runs_with_addresses_go_with_their_neighbours() -> None:
    def runs(*lengths: int) -> list[tuple[int, int, bool]]:
        """Alternating runs, the first one without addresses."""
        return list(_runs(np.repeat(np.arange(len(lengths)) % 2, lengths)))

    many = _SHORTEST_RUN
    assert runs(0, 3) == [(0, 3, True)]
    assert runs(3) == [(0, 3, False)]
    assert runs() == []
    assert runs(1, 1, 1, many, 2) == [(0, 3, False), (3, 3 + many, True), (3 + many, 5 + many, False)]
    assert runs(0, many, 1, many - 1) == [(0, many, True), (many, 2 * many, False)]
