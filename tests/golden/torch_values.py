"""What the golden checkpoints of torch hold beside `values`: never change a value here either."""

from __future__ import annotations

from typing import Any

import torch


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after one step, the same in every process and on every machine."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number + 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 2.0)
    optimizer.step()
    return model, optimizer


def plain() -> dict[str, Any]:
    """Python values that `torch.load(weights_only=True)` reads."""
    return {
        "int": 2**40,
        "negative": -5,
        "float": [0.1, float("inf"), -0.0],
        "text": "über ключ 键 🙂",
        "bytes": bytes(range(256)),
        "tuple": (1, "a", None, True),
        "nothing": None,
        "deep": {"a": {"b": [1, {"c": "d"}]}},
    }
