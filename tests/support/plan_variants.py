"""Ways of saving one state that plan differently, or that might: every pair of them shares a process, and its plans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hpdcp
from hpdcp._base import config
from hpdcp._format.metadata import Metadata
from hpdcp._plan.save_plan import SavePlan


class Backwards(hpdcp.FileSystemWriter):
    """Arranges plans in a way of its own, and does not say what that depends on: every rank's items in another file."""

    def arrange_global_plan(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        return [plan.select(range(len(plan))[::-1]) for plan in plans], metadata  # type: ignore[arg-type]


class LowestRank(hpdcp.StandardSavePlanner):
    """Says what it depends on."""

    def __init__(self) -> None:
        super().__init__(save_to_minimum_rank=True)

    def cache_key(self) -> Hashable:
        return "of the one state that is saved here"


class Spread(LowestRank):
    """Changes what its base class says."""

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._save_to_minimum_rank = False
        return super().build_global_plan(plans)


@contextlib.contextmanager
def _by(settings: Mapping[str, Any], **arguments: Any) -> Iterator[dict[str, Any]]:
    with config.using(**settings):  # type: ignore[arg-type]
        yield {name: make() for name, make in arguments.items()}


def _planner(**options: bool) -> Callable[[], hpdcp.StandardSavePlanner]:
    return lambda: hpdcp.StandardSavePlanner(**options)


VARIANTS: dict[str, Callable[[], contextlib.AbstractContextManager[dict[str, Any]]]] = {
    "default": lambda: _by({}),
    "zarr": lambda: _by({"layout": "zarr"}),
    "zarr compressed": lambda: _by({"layout": "zarr", "layouts": {"zarr": {"compressor": "zstd"}}}),
    "fsspec": lambda: _by({"backend": "fsspec"}),
    "replicas all": lambda: _by({"check_replicas": "all"}),
    "replicas off": lambda: _by({"check_replicas": "off"}),
    "replicas exempt": lambda: _by({"check_replicas": {"w*": "off"}}),
    "every copy": lambda: _by({}, planner=_planner(remove_redundancy=False)),
    "lowest": lambda: _by({}, planner=_planner(save_to_minimum_rank=True)),
    "not cached": lambda: _by({}, planner=_planner(enable_plan_caching=False)),
    "writer": lambda: _by({}, storage_writer=Backwards),
    "planner": lambda: _by({}, planner=LowestRank),
    "planner's child": lambda: _by({}, planner=Spread),
}


def walk_all_pairs(names: Sequence[str]) -> list[str]:
    """An order in which every variant comes after every other one, and after itself."""
    order: list[str] = []
    for number, name in enumerate(names):
        order += [name, name]
        for other in names[number + 1 :]:
            order += [other, name]
    return order


def save_as(variant: str, state: Mapping[str, Any], folder: Path) -> list[tuple[Any, ...]]:
    """Save; what the checkpoint is, beside the names of its files: each box, who wrote it, and its checksums."""
    with VARIANTS[variant]() as arguments:
        metadata = hpdcp.save(state, checkpoint_id=folder, **arguments)
    found = []
    for row in range(len(metadata.chunks)):
        info = metadata.storage_info(row)
        writer = info.key.split("_")[1].split(".")[0] if info.key.startswith("_rank") else info.key
        entry = int(metadata.chunks.entry[row])
        found.append(
            (metadata.entries.fqns[entry], metadata.chunks.box(row), writer, info.offset, info.length, info.checksums)
        )
    return sorted(found, key=repr)
