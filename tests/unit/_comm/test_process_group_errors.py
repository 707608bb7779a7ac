"""What all ranks raise when some of them failed; and a rank that is alone."""

from __future__ import annotations

from typing import Any

import pytest

from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    CoverageError,
    HpdcpError,
    IncompleteCheckpointError,
    KeyNotFoundError,
    KeyTruncatedError,
    LoadMismatchError,
    MissingKeysError,
    RankFailedError,
    ShapeMismatchError,
    StorageError,
    SupersededError,
    UnsupportedTypeError,
)
from hpdcp._comm.exchange import Alone, Failed, joint_error
from hpdcp._comm.process_group import open_exchange


def failed(*errors: tuple[int, BaseException]) -> list[Failed]:
    """As the causes arrive: through JSON, from wherever they were raised."""
    causes = []
    for rank, error in errors:
        try:
            raise error
        except BaseException as caught:  # noqa: BLE001
            causes.append(Failed.from_json(Failed.of(rank, caught).to_json()))
    return causes


CLASSES: list[tuple[list[BaseException], type[HpdcpError]]] = [
    ([CorruptCheckpointError("x")], CorruptCheckpointError),
    ([CorruptCheckpointError("x"), CorruptCheckpointError("y")], CorruptCheckpointError),
    ([MissingKeysError("x"), ShapeMismatchError("y")], LoadMismatchError),
    ([CoverageError("x"), CoverageError("y"), MissingKeysError("z")], LoadMismatchError),
    ([KeyNotFoundError("x"), StorageError("y")], StorageError),
    ([KeyNotFoundError("x")], KeyNotFoundError),
    ([KeyTruncatedError("x"), CorruptCheckpointError("y")], CorruptCheckpointError),
    ([CorruptCheckpointError("x"), StorageError("y")], RankFailedError),
    ([CorruptCheckpointError("x"), SupersededError("y")], RankFailedError),
    ([ValueError("x")], RankFailedError),
    ([MemoryError()], RankFailedError),
    ([ValueError("x"), UnsupportedTypeError("y")], RankFailedError),
    ([OSError(28, "No space left")], RankFailedError),
]


@pytest.mark.parametrize(("errors", "expected"), CLASSES, ids=lambda value: str(value)[:60])
def test_the_joint_error_is_of_the_closest_class_that_says_something(
    errors: list[BaseException], expected: type[HpdcpError]
) -> None:
    error = joint_error("reading", failed(*enumerate(errors, start=1)), 8)
    assert type(error) is expected


def test_it_names_the_step_each_rank_and_its_cause() -> None:
    error = joint_error("reading", failed((1, CorruptCheckpointError("file a is damaged")), (5, ValueError("odd"))), 8)
    assert str(error) == "reading failed on 2 of 8 ranks: rank 1: file a is damaged; rank 5: ValueError: odd"
    assert isinstance(error, RankFailedError)
    assert error.causes == ((1, "file a is damaged"), (5, "ValueError: odd"))


def test_what_all_ranks_say_alike_is_said_once() -> None:
    causes = failed(*((rank, MissingKeysError("1 keys are not in the checkpoint: 'x'.")) for rank in range(4)))
    error = joint_error("planning the load", causes, 4)
    assert type(error) is MissingKeysError and str(error) == "1 keys are not in the checkpoint: 'x'."


def test_what_the_coordinator_does_for_all_is_said_without_a_rank() -> None:
    error = joint_error("saving", failed((-1, SupersededError("another attempt claimed it"))), 4)
    assert type(error) is SupersededError and str(error) == "another attempt claimed it"
    assert "the coordinator" in error.__notes__[0]


def test_a_thousand_failures_make_a_message_that_can_be_read() -> None:
    causes = failed(*((rank, StorageError(f"cannot write file {rank}")) for rank in range(1000)))
    error = joint_error("saving", causes, 1000)
    assert str(error).count("cannot write") == 8 and "and 992 more ranks" in str(error)


def test_the_first_rank_s_traceback_comes_along() -> None:
    error = joint_error("saving", failed((3, ValueError("deep inside"))), 8)
    (note,) = error.__notes__
    assert note.startswith("Traceback of rank 3:") and "deep inside" in note and "test_process_group_errors" in note


@pytest.mark.parametrize("text", ["", "two\nlines", 'quo"tes', "\x00", "\ud800", "é" * 1000])
def test_any_message_arrives_as_it_was(text: str) -> None:
    assert str(joint_error("saving", failed((-1, StorageError(text))), 2)) == text


def test_a_rank_alone_raises_its_own_error_itself() -> None:
    alone = Alone()
    problem = IncompleteCheckpointError("half")

    def fail(*_: Any) -> Any:
        raise problem

    steps: list[Any] = [
        lambda: alone.agree("a", fail),
        lambda: alone.broadcast("a", fail),
        lambda: alone.gather_broadcast("a", fail, lambda parts: parts[0]),
        lambda: alone.gather_broadcast("a", lambda: b"", fail),
        lambda: alone.gather_scatter("a", fail, lambda parts: parts),
        lambda: alone.gather_scatter("a", lambda: b"", fail),
    ]
    for step in steps:
        with pytest.raises(IncompleteCheckpointError) as caught:
            step()
        assert caught.value is problem


def test_a_rank_alone_gets_what_it_gave() -> None:
    alone = Alone(3, 8)
    assert alone.is_coordinator and (alone.rank, alone.world_size) == (3, 8)
    assert alone.gather_scatter("a", lambda: b"x", lambda parts: [part * 2 for part in parts]) == b"xx"
    assert alone.gather_broadcast("a", lambda: b"x", lambda parts: b"".join(parts) + b"!") == b"x!"
    assert alone.broadcast("a", lambda: b"y") == b"y"
    given = object()
    assert alone.agree("a", lambda: given) is given


@pytest.mark.parametrize(("no_dist", "use_collectives"), [(True, True), (False, True), (False, False), (True, False)])
def test_without_a_process_group_there_is_one_rank(no_dist: bool, use_collectives: bool) -> None:
    exchange = open_exchange(no_dist=no_dist, use_collectives=use_collectives)
    assert isinstance(exchange, Alone) and (exchange.rank, exchange.world_size) == (0, 1)


def test_an_error_that_is_also_a_builtin_is_still_one_after_the_journey() -> None:
    error = joint_error("reading", failed((-1, CheckpointNotFoundError("nothing"))), 2)
    assert isinstance(error, FileNotFoundError)
