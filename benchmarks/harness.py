"""Interleaved runs of several contestants, and a table of medians with ratios.

A question is a script of its own. It gives each contestant as a command line that prints one line `RESULT {json}`;
`compare` runs them in turn, one process group per contestant and repetition, so that all of them meet the same state
of the machine, and prints a table that can be pasted into README.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Figures = dict[str, float]
T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent


class Clock:
    """CPU seconds of each stage: one thread that waits for nothing, on a machine that others may use as well."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
        return result


def torchrun(ranks: int, script: str, *arguments: str) -> list[str]:
    """The command line that starts `script` on `ranks` processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, script, *arguments]


def command(ranks: int, script: str, *arguments: str) -> list[str]:
    """As `torchrun`, and for one rank the script alone."""
    return torchrun(ranks, script, *arguments) if ranks > 1 else [sys.executable, script, *arguments]


def run(command: Sequence[str], *, timeout: float = 900) -> Figures:
    """What `command` prints after `RESULT `; RuntimeError with the end of its output when it prints none."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            found: Figures = json.loads(line.removeprefix("RESULT "))
            return found
    raise RuntimeError(f"{' '.join(command)} printed no result:\n{done.stderr[-3000:]}")


def compare(
    contestants: Mapping[str, Sequence[str]], *, repetitions: int, before_each: Callable[[str], None] | None = None
) -> dict[str, dict[str, list[float]]]:
    """figure → contestant → its values, one for each repetition; contestants take turns."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(repetitions):
        for name, command in contestants.items():
            if before_each is not None:
                before_each(name)
            for figure, value in run(command).items():
                found.setdefault(figure, {}).setdefault(name, []).append(value)
            print(f"repetition {number + 1} of {repetitions}: {name} done", file=sys.stderr)
    return found


def print_table(
    found: Mapping[str, Mapping[str, Sequence[float]]], *, base: str, rates: Mapping[str, float], unit: str = "GB/s"
) -> None:
    """A Markdown table: medians, as a rate where `rates` has the amount, and each contestant's ratio to `base`.

    Ratios are medians of the ratios within one repetition, so that a machine that slows down in between does not show.
    """
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    print("| figure | " + " | ".join(names) + " | " + " | ".join(f"{n} / {base}" for n in names if n != base) + " |")
    print("|---" * (2 * len(names)) + "|")
    for figure, values in found.items():
        cells = [_cell(figure, values.get(name), rates, unit) for name in names]
        ratios = [_ratio(figure, values.get(name), values.get(base), rates) for name in names if name != base]
        print(f"| {figure} | " + " | ".join(cells + ratios) + " |")


def _cell(figure: str, values: Sequence[float] | None, rates: Mapping[str, float], unit: str) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    if figure in rates:
        return f"{rates[figure] / middle / 1e9:.2f} {unit}"
    return f"{middle:.3g}"


def _ratio(figure: str, mine: Sequence[float] | None, base: Sequence[float] | None, rates: Mapping[str, float]) -> str:
    if not mine or not base:
        return "-"
    pairs = [b / a if figure in rates else a / b for a, b in zip(mine, base, strict=True)]
    return f"{statistics.median(pairs):.2f}x"
