"""Several ranks that save one checkpoint, as threads of this process."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpdcp._base.errors import HpdcpError, StorageError
from hpdcp._comm.exchange import FramedExchange
from hpdcp._engine.save import save_state
from hpdcp._files.writer import FileSystemWriter
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import SavePlanner
from hpdcp._plan.save_plan import WriteItem
from hpdcp._plan.standard_save_planner import StandardSavePlanner


def save_as_ranks(
    place: str, states: Sequence[Mapping[str, Any]], planners: Sequence[SavePlanner] | None = None
) -> Metadata:
    """Save one checkpoint as so many ranks would, each with its state; threads of this process stand for them."""
    ranks = _Ranks(len(states))
    saved: list[Metadata] = []
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        planner = StandardSavePlanner(enable_plan_caching=False) if planners is None else planners[rank]
        try:
            saved.append(
                save_state(
                    states[rank],
                    open_writer=lambda: FileSystemWriter(place),
                    planner=planner,
                    exchange=_RankExchange(ranks, rank),
                    collective=True,
                )
            )
        except BaseException as error:  # noqa: BLE001  # raised by whoever started the threads
            failed.append(error)
            ranks.barrier.abort()

    # Each with a copy of the context, which has the configuration.
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, rank)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise next((error for error in failed if isinstance(error, HpdcpError)), failed[0])
    return saved[0]


class _Ranks:
    """Where threads that stand for ranks meet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.payloads: list[bytes] = [b""] * count


class _RankExchange(FramedExchange):
    def __init__(self, ranks: _Ranks, rank: int) -> None:
        self.rank = rank
        self.world_size = ranks.count
        self._ranks = ranks

    def _gather(self, step: str, payload: bytes) -> list[bytes] | None:
        self._ranks.payloads[self.rank] = payload
        self._ranks.barrier.wait()
        found = list(self._ranks.payloads)
        self._ranks.barrier.wait()
        return found if self.is_coordinator else None

    def _scatter(self, step: str, parts: Sequence[bytes] | None) -> bytes:
        if parts is not None:
            self._ranks.payloads = list(parts)
        self._ranks.barrier.wait()
        mine = self._ranks.payloads[self.rank]
        self._ranks.barrier.wait()
        return mine

    def _broadcast(self, step: str, whole: bytes | None) -> bytes:
        return self._scatter(step, None if whole is None else [whole] * self.world_size)


class StoppingPlanner(StandardSavePlanner):
    """Hands out Python values, and fails for tensors."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=False)

    def get_tensor(self, item: WriteItem) -> torch.Tensor:
        raise StorageError("this rank has had enough")
