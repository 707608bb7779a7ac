"""What commands about a run take, and a location that may be `RUN@STEP`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's folder or URL.", show_default=False)]
Step = Annotated[int, typer.Argument(metavar="STEP", help="The step's number.", min=0, show_default=False)]
StepName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="PATTERN",
        help="How the steps' folders are called, as in 'step_{step}'. Else as most folders with a number are called.",
    ),
]


def located(url: str, backend: str | None, storage_options: Mapping[str, Any] | None) -> str:
    """Where `RUN@latest` or `RUN@500` lies, as rank 0 finds it; any other location as it is."""
    if "@" not in url:
        return url
    from hpdcp._comm.process_group import open_exchange
    from hpdcp._manage.run_steps import locate_step

    def locate() -> bytes:
        return str(locate_step(url, backend=backend, storage_options=storage_options)).encode()

    exchange = open_exchange(no_dist=False, use_collectives=True)
    return exchange.broadcast("looking for a step of the run", locate).decode()
