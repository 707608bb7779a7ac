"""What `Checkpoints.save` writes into the checkpoint's own metadata: step, time, metrics and the user's own JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from hpdcp._base.errors import InvalidArgumentError

STEP: Final = "step"
"""The setting of the metadata that holds it, as JSON."""
_MOST_BYTES: Final = 8 << 10
"""Of it as JSON: who looks at a run reads it for every step."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is recorded of one step."""

    step: int
    saved_at: float
    run: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    user: Any = None

    def to_settings(self) -> dict[str, str]:
        """For `FileSystemWriter(facts=)`.

        Raises:
            InvalidArgumentError: more than 8 KiB.
        """
        metrics = {name: value if math.isfinite(value) else repr(value) for name, value in self.metrics.items()}
        facts = {"step": self.step, "saved_at": self.saved_at, "run": self.run, "metrics": metrics, "user": self.user}
        text = json.dumps(facts)
        if len(text) > _MOST_BYTES:
            raise InvalidArgumentError(
                f"metrics and user of step {self.step} are {len(text)} bytes as JSON; at most {_MOST_BYTES} are kept "
                "beside a checkpoint. Put what is larger into the state."
            )
        return {STEP: text}

    @classmethod
    def from_settings(cls, settings: Mapping[str, str]) -> StepFacts | None:
        """None where there are none that can be read: then no `Checkpoints` saved it.

        >>> StepFacts.from_settings(StepFacts(500, 1.5, "a", {"loss": float("nan")}).to_settings())
        StepFacts(step=500, saved_at=1.5, run='a', metrics={'loss': nan}, user=None)
        >>> StepFacts.from_settings({"step": "[]"}) is None
        True
        """
        try:
            facts = json.loads(settings[STEP])
            metrics = {str(name): float(value) for name, value in facts["metrics"].items()}
            return cls(int(facts["step"]), float(facts["saved_at"]), str(facts["run"]), metrics, facts["user"])
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return None


def checked_metrics(metrics: object) -> dict[str, float]:
    """The metrics as numbers; tensors of one element count as such.

    Raises:
        InvalidArgumentError: not names and numbers.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics is a {type(metrics).__qualname__}; expected a dict, as {{'loss': 0.5}}.")
    found: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        if not isinstance(name, str) or number is None or isinstance(value, str):
            raise InvalidArgumentError(
                f"metrics[{name!r}] is a {type(value).__qualname__}; expected a name and a number, as {{'loss': 0.5}}."
            )
        found[name] = number
    return found


def checked_user(user: object) -> Any:
    """The user's own value, as JSON gives it back.

    Raises:
        InvalidArgumentError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(user, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"user is not JSON ({error}); expected numbers, texts, True, False, None, and lists and dicts of these."
        ) from None
