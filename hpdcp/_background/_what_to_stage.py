"""What one call stages: of what a rank holds, the items that it writes or that are compared, at once or in waves."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hpdcp._background._arena import Arena
from hpdcp._background._sampled import Sampled
from hpdcp._background._staging import StagedState, build_staged_state_dict, with_copied_values
from hpdcp._base.config import Config
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import MetadataIndex
from hpdcp._plan.plan_cache import PLANS, CachedPlan
from hpdcp._plan.plan_key import plan_key
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.replica_rules import ALL, OFF, ReplicaRules
from hpdcp._plan.samples import SAMPLE_BYTES
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter


@dataclass(frozen=True, slots=True)
class Staging:
    """What came of staging."""

    key: Hashable | None = None
    """Under which the plan is cached."""
    cached: Sequence[CachedPlan] = ()
    """What is cached there."""
    plan: SavePlan | None = None
    staged: StagedState | None = None
    """None where the state goes in waves."""
    rest: SavePlan | None = None
    """What this rank holds beside `plan`, where earlier plans have others write it."""
    wave_bytes: int = 0
    """Most that a wave may take; 0 where all was staged at once."""
    sampled: Sampled | None = None
    """What is compared of `rest`."""


def stage(
    state_dict: object,
    planner: SavePlanner,
    writer: StorageWriter,
    context: PlannerContext,
    arena: Arena,
    config: Config,
) -> Staging:
    """Plan what this rank holds, and copy what is needed of it into `arena`, unless that would go beyond the budget.

    Raises:
        StateDictError: something cannot be stored so that it comes back exactly; names the key.
        StorageError: there is no shared memory for it.
    """
    planner.configure_planner(with_copied_values(state_dict), context)
    key = plan_key(writer, planner, context, config)
    cached = [] if key is None else PLANS.find(key)
    plan, rest = _needed(cached, ReplicaRules(config.check_replicas)) if cached else (planner.build_local_plan(), None)
    budget = _staging_budget(config, arena)
    if int(np.maximum(plan.nbytes, 0).sum()) <= budget:
        sampled = _sampled(planner, cached, rest)
        return Staging(key, cached, plan, build_staged_state_dict(planner, plan, arena), rest, sampled=sampled)
    # The worker asks for what it needs, so it must know of all there is, and how long each of it is.
    return Staging(key, cached, planner.build_local_plan() if cached else plan, wave_bytes=budget)


def _needed(cached: Sequence[CachedPlan], rules: ReplicaRules) -> tuple[SavePlan, SavePlan]:
    """Of what this rank holds, what it writes by these plans or compares all bytes of, and the rest."""
    local = SavePlan.from_bytes(cached[0].local)
    plans = [SavePlan.from_part(plan.part, SavePlan.from_bytes(plan.local)) for plan in cached]
    modes = rules.modes(local.entries.fqns)[local.chunks.entry]
    compared = (modes == ALL) | ((local.nbytes <= SAMPLE_BYTES) & (modes != OFF))
    for plan in plans:
        if plan.compared is not None:
            compared[plan.compared.rows[plan.compared.in_full]] = True
    needed = rows_needed(local, plans, compared)
    return local.select(needed), local.select(np.setdiff1d(np.arange(len(local)), needed))


def rows_needed(local: SavePlan, plans: Sequence[SavePlan], compared: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Items of `local` of which `plans` write something, which are `compared`, or whose length is not known."""
    asked = [*plans, *(plan.sent_plan() for plan in plans if plan.redistribution is not None)]
    other = tied_names_of(local)
    asked_for = (item.index for plan in asked for item in plan.items)
    names = {(other.get(index.fqn, index.fqn), index.owner) for index in asked_for}
    written = [(index.fqn, index.owner) in names for index in (item.index for item in local.items)]
    return np.flatnonzero(compared | (local.nbytes < 0) | np.array(written, dtype=np.bool_))


def tied_names_of(plan: SavePlan) -> dict[str, str]:
    """fqn → the name under which `plan` has its items; of another rank, which may not tie them, it may be asked so."""
    tied = np.flatnonzero(plan.entries.kinds == EntryKind.ALIAS).tolist()
    return {plan.entries.fqns[row]: plan.entries.targets[row] for row in tied}


def _sampled(planner: SavePlanner, cached: Sequence[CachedPlan], rest: SavePlan | None) -> Sampled | None:
    """The samples of what is not staged, and what `cached` compare."""
    if rest is None or not len(rest):
        return None
    wanted: set[MetadataIndex] = set()
    for plan in cached:
        local = SavePlan.from_bytes(plan.local)
        compared = SavePlan.from_part(plan.part, local).compared
        if compared is not None:
            wanted.update(local.item(row).index for row in compared.rows[~compared.in_full].tolist())
    rows = [row for row, item in enumerate(rest.items) if item.index in wanted]
    return Sampled.of(planner, rest.select(np.array(rows, dtype=np.int64)))


def _staging_budget(settings: Config, arena: Arena) -> int:
    """Bytes that one rank may stage at a time: as configured, else its share of half the host's memory.

    What staging holds already counts as available. The largest single item fits whatever the budget is.
    """
    if settings.async_staging_budget is not None:
        return max(1, settings.async_staging_budget)
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, (available // ranks + arena.capacity) // 2)
