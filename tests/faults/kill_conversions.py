"""Kill conversions at random moments, so many of each kind; what loads afterwards is old, new or nothing, and whole.

python kill_conversions.py FOLDER KILLS SEED
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import CheckpointError
from tests.faults.forking import fork, wait

FILES = 5


def weights(step: int) -> dict[str, torch.Tensor]:
    """Every element of a step's weights is the step."""
    return {f"layers.{number}.weight": torch.full((300, 1000), float(step)) for number in range(FILES)}


def step_of(load: Callable[[], dict[str, torch.Tensor]]) -> int | None:
    """The step that loads; None where none does."""
    try:
        found = load()
    except CheckpointError:
        return None
    values = {float(value) for tensor in found.values() for value in (tensor.min(), tensor.max())}
    assert len(values) == 1, f"a mixture of the steps {values} loads"
    assert found.keys() == weights(0).keys()
    return int(values.pop())


def main(folder: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    sources = {step: folder / f"source{step}" for step in (1, 2)}
    for step, source in sources.items():
        hpdcp.save(weights(step), checkpoint_id=source / "dcp")
        offline_transform.convert_dcp_to_huggingface(source / "dcp", source / "hf", max_shard_size="2MB")
    # Different numbers of files, so that neither export takes names of the other.
    shard = {1: "2MB", 2: "3MB"}

    def to_hf(step: int, target: Path, again: bool = False) -> None:
        offline_transform.convert_dcp_to_huggingface(
            sources[step] / "dcp", target, max_shard_size=shard[step], overwrite=again
        )

    def to_dcp(step: int, target: Path, again: bool = False) -> None:
        offline_transform.convert_full_checkpoint_to_dcp(sources[step] / "hf", target)

    kinds: dict[str, tuple[Callable[..., None], Callable[[Path], dict[str, torch.Tensor]]]] = {
        "hf": (to_hf, offline_transform.parse_checkpoint_from_huggingface),
        "dcp": (to_dcp, offline_transform.dcp_to_full_state_dict),
    }
    took = {}
    for name, (convert, _) in kinds.items():
        began = time.monotonic()
        convert(1, folder / name)
        took[name] = time.monotonic() - began
        shutil.rmtree(folder / name)
    outcomes: dict[tuple[str, str], int] = {}
    for number in range(kills):
        for name, (convert, load) in kinds.items():
            target = folder / name
            before = chance.choice([None, 1])
            shutil.rmtree(target, ignore_errors=True)
            if before is not None:
                convert(before, target)
            pid = fork(lambda convert=convert, target=target: convert(2, target))
            # From its start to some time past its end, each stretch of it once.
            time.sleep(1.5 * took[name] * (number + chance.random()) / kills)
            os.kill(pid, signal.SIGKILL)
            killed = wait(pid) == -signal.SIGKILL
            found = step_of(lambda load=load, target=target: load(target)) if target.exists() else None
            assert found in ({before, 2} if killed else {2}), f"{name}: {found} loads, {before} was there"
            convert(2, target, again=True)
            assert step_of(lambda load=load, target=target: load(target)) == 2
            said = "ended" if not killed else "new" if found == 2 else "old or nothing"
            outcomes[name, said] = outcomes.get((name, said), 0) + 1
    print(outcomes)
    assert all((name, "old or nothing") in outcomes for name in kinds), outcomes


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
