"""Plans of earlier saves: a training job saves the same structure again and again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hpdcp._format.container import pack_columns, unpack_columns

_MOST_PLANS: Final = 8
"""Plans kept: a job saves its model, its optimizer and little else under names of their own."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """One save's plan, as bytes: nothing can change them, and they may be sent to another process.

    Holds no file names, no checksums, and -1 for the length of every object.
    """

    plan_id: int
    """Drawn by the coordinator for the plan of all ranks; parts belong together when their ids are equal."""
    local: bytes
    """What this rank holds: `SavePlan.to_bytes`."""
    part: bytes
    """What this rank writes: `SavePlan.to_part` of `local`."""
    whole: bytes | None
    """On the coordinator `WholePlan.to_bytes`: what all ranks write, and its metadata."""

    def to_bytes(self) -> bytes:
        """For another process."""
        parts = {"local": self.local, "part": self.part, "whole": self.whole or b""}
        columns = {name: np.frombuffer(data, dtype=np.uint8) for name, data in parts.items()}
        return pack_columns(columns, {"plan_id": str(self.plan_id)})

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> CachedPlan:
        columns, facts = unpack_columns(data, where="a cached plan")
        local, part, whole = (columns[name].tobytes() for name in ("local", "part", "whole"))
        return cls(int(facts["plan_id"]), local, part, whole or None)


class PlanCache:
    """The plans of the last few saves of one rank, by key.

    A key may have several: a rank may hold the same, or nothing, in two saves that differ on other ranks.
    """

    def __init__(self, most: int = _MOST_PLANS) -> None:
        self._most = most
        self._plans: OrderedDict[tuple[Hashable, int], CachedPlan] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> list[CachedPlan]:
        """The plans put under `key`, last used first."""
        with self._lock:
            return [plan for (known, _), plan in reversed(self._plans.items()) if known == key]

    def put(self, key: Hashable, plan: CachedPlan) -> None:
        """Keep `plan`, as the last used; where there are too many, the one that was not used for longest goes."""
        with self._lock:
            self._plans[key, plan.plan_id] = plan
            self._plans.move_to_end((key, plan.plan_id))
            while len(self._plans) > self._most:
                self._plans.popitem(last=False)

    def retain(self, key: Hashable, plan_ids: Collection[int]) -> None:
        """Of the plans put under `key`, forget all but these."""
        with self._lock:
            for known, plan_id in list(self._plans):
                if known == key and plan_id not in plan_ids:
                    del self._plans[known, plan_id]

    def clear(self) -> None:
        """Forget every plan: the next save of anything plans in full, on all ranks."""
        with self._lock:
            self._plans.clear()

    def __len__(self) -> int:
        return len(self._plans)


PLANS: Final = PlanCache()
"""What saves of this process use."""
