"""Ranks on two clients exchange through the storage alone, without torch."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from hpdcp._comm.mailbox import Mailbox
from hpdcp_backends.nfs import NfsBackend
from tests.nfs.conftest import Mounts

WORLD = 4


def test_ranks_on_two_clients_agree_attempt_after_attempt(mounts: Mounts) -> None:
    assert "torch" not in sys.modules

    def run(rank: int, attempt: str) -> tuple[object, ...]:
        backend = NfsBackend(str((mounts.a, mounts.b)[rank % 2] / "step_1"))
        backend.prepare()
        mailbox = Mailbox(backend, attempt=attempt, rank=rank, world_size=WORLD, timeout=20.0)
        told = mailbox.broadcast("telling", lambda: attempt.encode())
        mine = bytes([rank]) * (1 + 50_000 * rank)
        part = mailbox.gather_scatter("planning", lambda: mine, lambda parts: [text[:9] + b"!" for text in parts])
        sums = [
            mailbox.gather_broadcast(
                "summing", lambda n=n: bytes([rank + n]), lambda parts: bytes([sum(b"".join(parts))])
            )
            for n in range(3)
        ]
        mailbox.close()
        return told, part, sums

    for number in range(5):
        attempt = f"{number:016x}"
        with ThreadPoolExecutor(WORLD) as pool:
            answers = list(pool.map(run, range(WORLD), [attempt] * WORLD))
        for rank, answer in enumerate(answers):
            expected = bytes([rank]) * min(9, 1 + 50_000 * rank) + b"!"
            assert answer == (attempt.encode(), expected, [b"\x06", b"\x0a", b"\x0e"])
        for root in (mounts.a, mounts.b):
            assert NfsBackend(str(root / "step_1")).list_keys(recursive=True) == []
