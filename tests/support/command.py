"""Run the command line in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from hpdcp.cli import main


@dataclass(frozen=True)
class Answer:
    """What a command printed, and how it ended."""

    status: object
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as one JSON document."""
        return json.loads(self.out)

    @property
    def said(self) -> str:
        """stdout and stderr, each run of white space as one space: boxes and lines are broken by width."""
        return " ".join((self.out + self.err).split())


class Command:
    """`hpdcp` with arguments."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: object, status: int = 0) -> Answer:
        """What it answers; its exit status must be `status`."""
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        answer = Answer(ended.value.code, *self._capfd.readouterr())
        assert answer.status == status, answer
        assert "Traceback" not in answer.err
        return answer


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process."""
    return Command(capfd)
