"""Plans that the trainer no longer has are forgotten by its worker."""

from __future__ import annotations

from hpdcp._plan.plan_cache import CachedPlan, PlanCache


def test_plans_that_are_not_retained_are_forgotten_and_others_stay() -> None:
    cache = PlanCache()
    for key, plan_id in (("a", 1), ("a", 2), ("b", 1), ("a", 3)):
        cache.put(key, CachedPlan(plan_id, b"", b"", None))
    cache.retain("a", [3, 1, 9])
    assert [plan.plan_id for plan in cache.find("a")] == [3, 1]
    assert [plan.plan_id for plan in cache.find("b")] == [1]
    cache.retain("a", ())
    assert cache.find("a") == []
    assert len(cache) == 1
