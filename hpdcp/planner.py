"""The contracts that decide what is saved and what is loaded, with their plans and items."""

from hpdcp._format.columns import (
    EntryKind,
)
from hpdcp._plan.load_plan import (
    LoadPlan,
    LoadTarget,
    ReadItem,
)
from hpdcp._plan.planner import LoadPlanner, PlannerContext, SavePlanner
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.save_plan import SavePlan, WriteItem

__all__ = [
    "EntryKind",
    "LoadPlan",
    "LoadPlanner",
    "LoadTarget",
    "PlannerContext",
    "ReadItem",
    "ReadTargets",
    "SavePlan",
    "SavePlanner",
    "WriteItem",
]
