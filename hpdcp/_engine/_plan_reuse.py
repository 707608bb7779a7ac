"""Which plan of an earlier save is right for this one, on every rank."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import Final

from hpdcp._comm.exchange import Exchange
from hpdcp._plan.plan_cache import CachedPlan

ONCE: Final = 0
"""Instead of a plan's id: this plan is good for one save only."""


def draw_plan_id() -> int:
    """A number that nobody else draws: at least 1, below 2**63."""
    return secrets.randbelow((1 << 63) - 1) + 1


def agree_on_cached_plan(
    exchange: Exchange, step: str, look_up: Callable[[], tuple[Sequence[CachedPlan], bytes]]
) -> CachedPlan | None:
    """A plan that every rank has; None on every rank when there is none.

    Args:
        look_up: this rank's plans, last used first, and what must be alike on all ranks for one of them to be used.
            Runs where a failure reaches all ranks.
    """
    found: list[CachedPlan] = []

    def vote() -> tuple[int, int, int]:
        plans, alike = look_up()
        found.extend(plans)
        if not plans:
            return 0, ONCE, 0
        digest = hashlib.blake2b(alike, digest_size=8).digest()
        return 1, plans[0].plan_id, int.from_bytes(digest, "little") >> 1

    (all_have, least_id, least_digest), (_, most_id, most_digest) = exchange.min_max(step, 3, vote)
    if not all_have or least_digest != most_digest:
        return None
    agreed = {most_id}
    if least_id != most_id:
        # Some rank's part is the same in several saves, and it could not know which of these this one is.
        ids = (least_id, most_id)
        known = {plan.plan_id for plan in found}
        everywhere, _ = exchange.min_max(step, 2, lambda: [int(number in known) for number in ids])
        agreed = {number for number, held in zip(ids, everywhere, strict=True) if held}
    return next((plan for plan in found if plan.plan_id == min(agreed, default=ONCE)), None)
