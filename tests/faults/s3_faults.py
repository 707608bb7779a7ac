"""What the tests of S3 faults share: backends that give up soon, and what must hold however a call ended."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, Literal

import torch

import hpdcp
from hpdcp._base.backend import Backend
from hpdcp._format.metadata import Metadata
from hpdcp._manage.verify import verify_checkpoint
from hpdcp_backends.s3 import S3Backend
from tests.support.proxy import (
    Answer,
    CutAnswer,
    CutRequest,
    Fault,
    LoseAnswer,
)
from tests.support.s3 import S3Server

Engine = Literal["obstore", "botocore"]
ENGINES: Final[tuple[Engine, ...]] = ("obstore", "botocore")

PART: Final = 5 << 20
"""The smallest part S3 takes."""
LARGE: Final = 2 * PART + 12345
"""Of three parts."""

ONCE: Final[dict[str, Fault]] = {
    "its request is cut at once": CutRequest(),
    "its answer is cut": CutAnswer(),
    "its answer is lost": LoseAnswer(),
    "the server fails": Answer(500, "InternalError"),
    "the server is overloaded": Answer(503, "SlowDown"),
}
"""What a call survives when it happens once."""


_IMPATIENT: Final[dict[str, object]] = {"retries": 2, "retry_seconds": 10}
_SMALL: Final[dict[str, object]] = {"part_bytes": PART, "put_below": PART}


def open_s3(server: S3Server, prefix: str, engine: Engine = "obstore") -> Backend:
    """The backend for `prefix`, with small parts, and retries that are over within a second."""
    options = server.storage_options(config_kwargs={"read_timeout": 3})
    return S3Backend(prefix, storage_options=options, engine=engine, **_SMALL, **_IMPATIENT)  # type: ignore[arg-type]


def settings(server: S3Server, engine: Engine = "obstore", *, patient: bool = False) -> dict[str, Any]:
    """The same as arguments of `hpdcp.config.using`; patient: retries as they are by default."""
    options = server.storage_options(config_kwargs={"read_timeout": 3})
    table = {"engine": engine, "storage_options": options, **_SMALL, **({} if patient else _IMPATIENT)}
    return {"backends": {"s3": table}}


ROWS: Final = 5 * PART // 2 // 4096
"""So many rows of 1024 float32 numbers take two and a half parts."""


def state(step: int) -> dict[str, object]:
    """A state of several parts, every value of which depends on `step`."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.rand(ROWS, 1024, generator=generator),
        "bias": torch.full((1000,), step, dtype=torch.int64),
        "step": step,
    }


def loaded_step(url: str) -> int:
    """The step that loads from `url`; AssertionError when what it gives is not all of one step."""
    target = state(0)
    hpdcp.load(target, checkpoint_id=url)
    step = target["step"]
    assert isinstance(step, int)
    expected = state(step)
    assert torch.equal(target["weight"], expected["weight"])  # type: ignore[arg-type]
    assert torch.equal(target["bias"], expected["bias"])  # type: ignore[arg-type]
    return step


def check_sound(server: S3Server, url: str, metadata: Metadata) -> None:
    """What `metadata` names is there, whole; and nothing else is, not even an upload half done."""
    assert verify_checkpoint(url).damages == ()
    assert set(server.objects(url)) == {*metadata.files, ".metadata", ".attempt"}
    assert server.open_uploads(url) == []


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def pieces(data: bytes, size: int = 1 << 20) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(data), size):
        yield view[start : start + size]


def by_name(faults: dict[str, Fault]) -> dict[str, Any]:
    """Arguments of `pytest.mark.parametrize` for a table of faults."""
    return {"argvalues": list(faults.values()), "ids": [name.replace(" ", "-") for name in faults]}
