"""Kinds of devices by the names that people and environment variables give them."""

from __future__ import annotations

import contextlib
import importlib

import torch

from hpdcp._base.errors import NotSupportedError


def named_device(kind: str) -> torch.device:
    """The kind of device of that name, as `cuda` or `npu`; NotSupportedError when torch knows none here."""
    if kind == "npu" and not hasattr(torch, "npu"):
        # Before that, torch does not know the name.
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")
    try:
        return torch.device(kind)
    except RuntimeError as error:
        raise NotSupportedError(f"torch {torch.__version__} knows no device {kind!r}: {error}") from error
