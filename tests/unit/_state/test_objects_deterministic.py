"""Equal values have equal bytes in every process: replicas are compared by checksum."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpdcp._state.objects import encode

ROOT = Path(__file__).parents[3]


def sample() -> dict[Any, Any]:
    words = [f"word-{index}" for index in range(50)]
    return {
        "set": set(words),
        "frozen": {frozenset({word, (word, 1)}) for word in words},
        "mixed": {1, "1", 2.5, None, b"x" * 1000, (1, "a"), Decimal(3), date(2024, 1, 1), np.float32(1.5)},
        "array": np.arange(5),
        ("key", 1): [torch.float16, range(3)],
    }


def digest() -> str:
    return hashlib.sha256(encode(sample(), key="k").data).hexdigest()


def test_another_process_with_another_hash_seed_writes_the_same_bytes() -> None:
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); from {here.stem} import digest; print(digest())"
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == digest()
