"""The one kind of device that needs lines of its own: `torch_npu` is an extra, and must be made for this torch."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Final

import torch

from hpdcp._base.errors import NotSupportedError

NPU: Final = "npu"
_PACKAGE: Final = "torch_npu"


@functools.cache
def check_torch_npu() -> None:
    """Import `torch_npu`, unless someone else has registered devices of that name, and compare its version.

    Raises:
        NotSupportedError: it cannot be imported, or is made for another torch.
    """
    if hasattr(torch, NPU) and _PACKAGE not in sys.modules:
        return
    try:
        package = importlib.import_module(_PACKAGE)
    except Exception as error:
        # An ImportError where it is not installed; where it was built for another torch, whatever its libraries raise.
        raise NotSupportedError(
            f"tensors on an Ascend NPU need torch_npu, which could not be imported beside torch {torch.__version__}: "
            f"{type(error).__name__}: {error}. {_advice()}"
        ) from error
    found = str(getattr(package, "__version__", "unknown"))
    if found.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise NotSupportedError(
            f"torch_npu {found} is made for another torch than {torch.__version__}, which is installed here. "
            f"{_advice()}"
        )


def _advice() -> str:
    minor = ".".join(torch.__version__.split(".")[:2])
    return (
        f'Install the one made for it: pip install "hpdcp[npu]" "torch_npu=={minor}.*", or another torch with its own.'
    )
