"""Ranks that exchange through a folder; here they are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpdcp._base.errors import CorruptCheckpointError, HpdcpError, PeerLostError, StateDictError, StorageError
from hpdcp._comm.mailbox import Mailbox, mailbox_folder, report_dead_worker
from hpdcp._files.commit import Attempt
from hpdcp_backends.local import LocalBackend

ATTEMPT = "0123456789abcdef"
WORLD = 4


def opened(folder: Path, rank: int, *, timeout: float = 10.0, attempt: str = ATTEMPT, world: int = WORLD) -> Mailbox:
    backend = LocalBackend(str(folder))
    backend.prepare()
    return Mailbox(backend, attempt=attempt, rank=rank, world_size=world, timeout=timeout)


def on_all(
    folder: Path, work: Callable[[Mailbox], object], *, ranks: range = range(WORLD), timeout: float = 10.0
) -> list[object]:
    """What `work` returns on each rank, or the error it raises."""

    def run(rank: int) -> object:
        mailbox = opened(folder, rank, timeout=timeout)
        try:
            return work(mailbox)
        except HpdcpError as error:
            return error
        finally:
            mailbox.close()

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(run, ranks))


def messages(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_rank_gets_its_own_part_of_what_the_coordinator_makes_of_all(tmp_path: Path) -> None:
    def work(mailbox: Mailbox) -> bytes:
        mine = bytes([mailbox.rank]) * (1 + 50_000 * mailbox.rank)
        return mailbox.gather_scatter("planning", lambda: mine, lambda parts: [part + b"!" for part in parts])

    assert on_all(tmp_path, work) == [bytes([rank]) * (1 + 50_000 * rank) + b"!" for rank in range(WORLD)]


def test_all_ranks_hear_the_same_and_may_go_on_step_by_step(tmp_path: Path) -> None:
    def work(mailbox: Mailbox) -> object:
        least, most = mailbox.min_max("voting", 2, lambda: [mailbox.rank, 7])
        told = mailbox.broadcast("telling", lambda: b"start")
        sums = [
            mailbox.gather_broadcast(
                "summing", lambda n=n: bytes([mailbox.rank + n]), lambda parts: bytes([sum(b"".join(parts))])
            )
            for n in range(3)
        ]
        return least, most, told, sums

    expected = ([0, 7], [WORLD - 1, 7], b"start", [b"\x06", b"\x0a", b"\x0e"])
    assert on_all(tmp_path, work) == [expected] * WORLD


def test_messages_are_named_for_what_they_hold_and_are_gone_in_the_end(tmp_path: Path) -> None:
    seen: list[str] = []

    def combine(parts: list[bytes]) -> list[bytes]:
        seen.extend(messages(tmp_path))
        return parts

    def work(mailbox: Mailbox) -> object:
        mailbox.gather_scatter("planning", lambda: b"", combine)
        return mailbox.gather_broadcast("saving", lambda: b"", lambda parts: combine(parts)[0])

    on_all(tmp_path, work)
    names = {name.rpartition(".")[2] for name in seen}
    assert {f"LOCAL_PLAN_{rank}" for rank in (1, 2, 3)} <= names
    assert {f"STORAGE_DATA_{rank}" for rank in (1, 2, 3)} <= names
    assert all(name.startswith(mailbox_folder(ATTEMPT) + "/") for name in seen)
    assert list(tmp_path.iterdir()) == []


def test_each_rank_leaves_few_messages_however_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[str] = []
    publish = LocalBackend.publish

    def count(self: LocalBackend, key: str, data: bytes) -> None:
        published.append(key)
        publish(self, key, data)

    monkeypatch.setattr(LocalBackend, "publish", count)

    def work(mailbox: Mailbox) -> object:
        mailbox.min_max("voting", 1, lambda: [1])
        mailbox.gather_scatter("planning", lambda: b"", lambda parts: parts)
        return mailbox.gather_broadcast("saving", lambda: b"", lambda parts: b"")

    on_all(tmp_path, work)
    # Of each rank but the coordinator a vote, a plan, a result and a last word; to each its part; and twice one to all.
    assert len(published) == 5 * (WORLD - 1) + 2


@pytest.mark.parametrize("failing", range(WORLD))
def test_a_failure_of_one_rank_is_raised_on_all_with_its_cause(tmp_path: Path, failing: int) -> None:
    def work(mailbox: Mailbox) -> object:
        def local() -> bytes:
            if mailbox.rank == failing:
                raise StateDictError("a lock cannot be stored")
            return b""

        return mailbox.gather_scatter("planning", local, lambda parts: parts)

    errors = on_all(tmp_path, work)
    assert [type(error) for error in errors] == [StateDictError] * WORLD
    assert all(f"rank {failing}: a lock cannot be stored" in str(error) for error in errors)


def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    began = time.monotonic()
    errors = on_all(tmp_path, lambda mailbox: mailbox.agree("saving", lambda: None), ranks=range(2), timeout=0.5)
    assert [type(error) for error in errors] == [PeerLostError] * 2
    assert "2" in str(errors[0]) and "3" in str(errors[0]) and "missing" in str(errors[0])
    assert time.monotonic() - began < 5


def test_the_timeout_counts_from_the_last_message(tmp_path: Path) -> None:
    """A rank takes longer altogether than the timeout, but others go on coming."""

    def work(mailbox: Mailbox) -> object:
        time.sleep(0.5 * mailbox.rank)
        return mailbox.gather_broadcast("saving", lambda: b"", lambda parts: b"done")

    assert on_all(tmp_path, work, timeout=1.2)[0] == b"done"


def test_a_rank_known_to_be_dead_ends_the_wait_at_once(tmp_path: Path) -> None:
    report_dead_worker(LocalBackend(str(tmp_path / "not there yet")), ATTEMPT, 3)
    began = time.monotonic()
    errors = on_all(
        tmp_path / "not there yet",
        lambda mailbox: mailbox.agree("saving", lambda: None),
        ranks=range(3),
        timeout=60,
    )
    assert [type(error) for error in errors] == [PeerLostError] * 3
    assert all("worker of rank 3 died" in str(error) for error in errors)
    assert time.monotonic() - began < 10


def test_a_rank_that_leaves_since_it_cannot_send_ends_the_wait_long_before_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = LocalBackend.publish

    def fail(self: LocalBackend, key: str, data: bytes) -> None:
        if key.endswith("STORAGE_DATA_1"):
            raise StorageError(f"cannot publish {key}: the store is away for a moment")
        publish(self, key, data)

    monkeypatch.setattr(LocalBackend, "publish", fail)

    def work(rank: int) -> str:
        mailbox = opened(tmp_path, rank, timeout=3600.0, world=2)
        try:
            with pytest.raises(HpdcpError) as caught:
                mailbox.gather_broadcast("saving", lambda: b"", lambda parts: b"")
            return str(caught.value)
        finally:
            mailbox.close()

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(work, range(2)))
    assert "rank 1 gave up" in told[0]
    assert "away for a moment" in told[1]


def test_a_rank_that_dies_after_its_last_word_loses_nothing(tmp_path: Path) -> None:
    def work(mailbox: Mailbox) -> object:
        if mailbox.rank == 3:
            mailbox._asked = "STORAGE_DATA"
            mailbox._gather("saving", b"+mine")
            report_dead_worker(LocalBackend(str(tmp_path)), ATTEMPT, 3)
            return None
        time.sleep(0.2)
        return mailbox.gather_broadcast("saving", lambda: b"", b"".join)

    assert on_all(tmp_path, work)[:3] == [b"mine"] * 3


def test_messages_of_another_attempt_are_never_read(tmp_path: Path) -> None:
    stale = opened(tmp_path, 1, attempt="fedcba9876543210")
    stale._gather("saving", b"+stale")
    report_dead_worker(LocalBackend(str(tmp_path)), "fedcba9876543210", 2)
    got = on_all(tmp_path, lambda mailbox: mailbox.gather_broadcast("saving", lambda: b"new", b"".join))
    assert got == [b"new" * WORLD] * WORLD
    assert messages(tmp_path) == [".mailbox-fedcba9876543210/0000.STATUS_1", ".mailbox-fedcba9876543210/DEAD_2"]


def test_the_next_attempt_on_the_folder_removes_what_ended_ones_left(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    attempts = ["a" * 16, "b" * 16]
    for attempt in attempts:
        Attempt.begin(backend, attempt)
        opened(tmp_path, 1, attempt=attempt)._gather("saving", b"+stale")
    assert len([name for name in messages(tmp_path) if name.startswith(".mailbox-")]) == 2 - 1
    strange = tmp_path / ".mailbox-of-somebody-else"
    strange.mkdir()
    (strange / "0000.STATUS_1").write_bytes(b"mine")
    Attempt.begin(backend, "c" * 16)
    assert messages(tmp_path) == [".attempt", ".mailbox-of-somebody-else/0000.STATUS_1"]


def test_the_next_attempt_leaves_its_own_messages(tmp_path: Path) -> None:
    """The others may have left word before the coordinator begins."""
    opened(tmp_path, 1)._gather("saving", b"+mine")
    Attempt.begin(LocalBackend(str(tmp_path)), ATTEMPT)
    assert f"{mailbox_folder(ATTEMPT)}/0000.STATUS_1" in messages(tmp_path)


def test_a_lease_that_means_harm_removes_nothing_outside(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    backend = LocalBackend(str(folder))
    Attempt.begin(backend, "x/../../precious")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"keep")
    Attempt.begin(backend, ATTEMPT)
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("keep", [0, 5, 25, -1])
def test_half_a_message_is_waited_for(tmp_path: Path, keep: int) -> None:
    """As a network file system may show it; what is published in one step never looks so on a local one."""
    sender = opened(tmp_path, 1, world=2)
    sender._gather("saving", b"+all of it")
    (path,) = (tmp_path / mailbox_folder(ATTEMPT)).iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    rest = threading.Timer(0.3, lambda: path.write_bytes(whole))
    rest.start()
    answers = opened(tmp_path, 0, world=2)._gather("saving", b"+")
    rest.join()
    assert answers == [b"+", b"+all of it"]


def test_a_damaged_message_is_told_from_one_that_is_on_its_way(tmp_path: Path) -> None:
    sender = opened(tmp_path, 1, world=2)
    sender._gather("saving", b"+all of it")
    (path,) = (tmp_path / mailbox_folder(ATTEMPT)).iterdir()
    path.write_bytes(path.read_bytes().replace(b"all", b"ALL"))
    with pytest.raises(CorruptCheckpointError, match="STATUS_1"):
        opened(tmp_path, 0, world=2)._gather("saving", b"+")


def test_closing_without_the_others_last_message_takes_no_longer_than_the_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    opened(tmp_path, 0, timeout=0.3).close()
    assert time.monotonic() - began < 3
