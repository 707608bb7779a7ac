"""Planners that a background worker can import, and that leave word of what they were asked to do."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path

import hpdcp
from hpdcp import Metadata
from hpdcp._plan.save_plan import SavePlan


class ToldPlanner(hpdcp.StandardSavePlanner):
    """The standard plan; every planning in full adds a line to a file, whichever process it happens in."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.log = log

    def cache_key(self) -> Hashable | None:
        # The standard planner's own key, which it keeps from subclasses that do not say they plan alike.
        key = hpdcp.StandardSavePlanner()
        key.__dict__.update(self.__dict__)
        standard = key.cache_key()
        return None if standard is None else ("told", standard)

    def build_local_plan(self) -> SavePlan:
        self._tell("local")
        return super().build_local_plan()

    def build_global_plan(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._tell("global")
        return super().build_global_plan(plans)

    def __getstate__(self) -> dict[str, object]:
        # What a planner learns of one state is not for the worker, and cannot be sent.
        return {name: value for name, value in self.__dict__.items() if name in ("log", *self._options())}

    def _options(self) -> list[str]:
        return [f"_{name}" for name in self.options()]

    def _tell(self, what: str) -> None:
        with open(self.log, "a") as file:
            file.write(f"{what} in {os.getpid()}\n")

    def told(self) -> list[str]:
        """Lines so far, without the process."""
        return [line.split()[0] for line in self.log.read_text().splitlines()] if self.log.exists() else []
