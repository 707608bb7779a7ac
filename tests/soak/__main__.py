"""Looks for lost and mixed checkpoints until the time is up: kills at random moments, races, damaged and hostile files.

    make soak                              one hour
    make soak SECONDS_OF_SOAK=600 SEED=7   ten minutes, from that seed
    python -m tests.soak --only kill_saves --seconds 60

Runs its campaigns in turn, each with a seed of its own, which it prints: the same seed gives the same moments and the
same inputs. Ends with status 1 when a campaign found something, with the command that found it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_S3 = (sys.executable, "tests/services/s3.py", "--memory", "--")
_NFS = ("tests/services/nfs_run", "--timeout", "900", "--")
_TIMEOUT = 1200.0
"""Seconds after which a campaign counts as hanging."""


@dataclass(frozen=True)
class Campaign:
    """One program, and how much of what it does in one run."""

    name: str
    command: Callable[[Path, int], Sequence[str]]
    """Of an empty folder and a seed."""
    count: int
    unit: str = "kills"
    place: str = "local"


def _module(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "error", "-m", module, *map(str, arguments)]


def _on_nfs(module: str, count: int, seed: int) -> list[str]:
    inner = f'rm -rf "$HPDCP_TEST_NFS_A/soak" && exec "$0" -m {module} "$HPDCP_TEST_NFS_A/soak" {count} {seed}'
    return [*_NFS, "sh", "-c", inner, sys.executable]


CAMPAIGNS = (
    Campaign("kill_saves", lambda at, seed: _module("tests.faults.kill_saves", at / "c", 60, seed), 60),
    Campaign("kill_rank_saves", lambda at, seed: _module("tests.soak.kill_rank_saves", at, 20, seed), 20),
    Campaign(
        "dead_ranks",
        lambda at, seed: _module("tests.soak.dead_ranks", at, "--kills", 20, "--seed", seed),
        20,
    ),
    Campaign("async_kills", lambda at, seed: _module("tests.faults.async_kills", at / "c", 9, seed), 9),
    Campaign("kill_conversions", lambda at, seed: _module("tests.faults.kill_conversions", at, 20, seed), 40),
    Campaign("kill_removals", lambda at, seed: _module("tests.soak.kill_removals", at / "c", 40, seed), 40),
    Campaign(
        "reads_beside_writers",
        lambda at, _: _module("tests.faults.replace_while_reading", at / "c", 200),
        200,
        unit="loads",
    ),
    Campaign(
        "hostile_inputs",
        lambda _, seed: [
            *(sys.executable, "-W", "ignore", "-m", "tests.soak.hostile_inputs"),
            *("--inputs", "2000", "--seed", str(seed)),
        ],
        2000,
        unit="hostile inputs",
    ),
    Campaign(
        "hostile_inputs",
        lambda _, seed: _module("tests.soak.hostile_inputs", "--inputs", 500, "--seed", seed),
        500,
        unit="hostile inputs",
    ),
    Campaign("kill_s3_saves", lambda _, seed: [*_S3, *_module("tests.soak.kill_s3_saves", 20, seed)], 20, place="s3"),
    Campaign("kill_nfs_saves", lambda _, seed: _on_nfs("tests.faults.kill_saves", 20, seed), 20, place="nfs"),
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", action="append", choices=[campaign.name for campaign in CAMPAIGNS])
    chosen = parser.parse_args()
    campaigns = [campaign for campaign in CAMPAIGNS if chosen.only is None or campaign.name in chosen.only]
    done: Counter[str] = Counter()
    found: list[str] = []
    end = time.monotonic() + chosen.seconds
    for seed in itertools.count(chosen.seed):
        for campaign in campaigns:
            if time.monotonic() > end:
                print(f"done: {', '.join(f'{count} {what}' for what, count in done.items()) or 'nothing'}")
                print(f"found: {len(found)}" + "".join(f"\n  {line}" for line in found))
                return 1 if found else 0
            if _run(campaign, seed, found):
                done[f"{campaign.unit} ({campaign.place})"] += campaign.count
    raise AssertionError("unreachable")


def _run(campaign: Campaign, seed: int, found: list[str]) -> bool:
    folder = Path(tempfile.mkdtemp(prefix="hpdcp-soak-"))
    command = list(campaign.command(folder, seed))
    began = time.monotonic()
    # One thread: a process that has started others cannot be forked.
    usual = {"PYTHONPATH": f"{ROOT}:{ROOT / 'backends'}", "OMP_NUM_THREADS": "1", "HPDCP_CONFIG": ""}
    try:
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | usual,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
        )
        failure = "" if run.returncode == 0 else f"status {run.returncode}"
        output = run.stdout
    except subprocess.TimeoutExpired as error:
        failure, output = f"still running after {_TIMEOUT:.0f} s", str(error.stdout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = output.strip().splitlines()[-1:] or [""]
    print(f"{campaign.name} seed {seed} ({time.monotonic() - began:.0f} s): {failure or last[0]}", flush=True)
    if failure:
        print(output[-6000:], flush=True)
        found.append(f"{failure}: {' '.join(command)}")
    return not failure


if __name__ == "__main__":
    raise SystemExit(main())
