"""Under which key a plan is cached: everything that a plan depends on, gathered in one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Final

from hpdcp._base.config import Config
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.storage import StorageWriter

_WITHOUT_EFFECT: Final = frozenset(
    {"async_staging_budget", "exit_timeout", "group_timeout", "mailbox_timeout", "progress"}
)
"""Settings of how long to wait, how much to stage at once and what to show: no plan depends on them."""


def plan_key(writer: StorageWriter, planner: SavePlanner, context: PlannerContext, settings: Config) -> Hashable | None:
    """Equal for two saves exactly when one's plan is right for the other, on this rank; None: its plan is not cached.

    Of what plans depend on, the state and the options are told by the planner's `cache_key`, the arrangement by the
    writer's, and the rest is all here: the classes of both, the rank's place among the others, and every setting but
    those that are named above, so that none is forgotten which a planner, a writer, a layout or a backend may read. A
    class that changes how plans are made, and leaves `cache_key` as a class below it has it, is not cached: nobody else
    knows what it depends on.

    Asked once the planner is configured; the writer need not be.
    """
    if not context.collective:
        return None
    if not _tells_all(type(planner), "configure_planner", "build_local_plan", "build_global_plan"):
        return None
    if not _tells_all(type(writer), "arrange_global_plan"):
        return None
    held, arranged = planner.cache_key(), writer.cache_key()
    if held is None or arranged is None:
        return None
    names = (field.name for field in dataclasses.fields(settings) if field.name not in _WITHOUT_EFFECT)
    said = tuple((name, repr(getattr(settings, name))) for name in names)
    return type(planner), held, type(writer), arranged, dataclasses.astuple(context), said


def _tells_all(kind: type, *methods: str) -> bool:
    """Whether `cache_key` is of the class that has the last word on all of `methods`, or of one derived from it."""
    order = {each: place for place, each in enumerate(kind.__mro__)}

    def whose(method: str) -> int:
        return next(order[each] for each in kind.__mro__ if method in vars(each))

    return all(whose("cache_key") <= whose(method) for method in methods)
