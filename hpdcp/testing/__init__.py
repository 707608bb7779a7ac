"""Contract tests for what others plug into hpdcp: pytest classes to inherit.

    from hpdcp.testing import BackendContract, LayoutContract

    class TestMyBackend(BackendContract): ...
    class TestMyLayout(LayoutContract): ...

Needs pytest, which hpdcp itself does not. Each is imported when it is asked for: a backend's tests need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import pytest

# So that a failing assertion in a contract shows its values; must come before the contract is imported.
pytest.register_assert_rewrite(
    "hpdcp.testing._backend",
    "hpdcp.testing._layout",
    "hpdcp.testing.backend_contract",
    "hpdcp.testing.layout_contract",
)

if TYPE_CHECKING:
    from hpdcp.testing.backend_contract import BackendContract
    from hpdcp.testing.layout_contract import LayoutContract

__all__ = ["BackendContract", "LayoutContract"]

_HOMES: Final = {"BackendContract": "backend_contract", "LayoutContract": "layout_contract"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hpdcp.testing' has no attribute {name!r}")
    return getattr(import_module(f"hpdcp.testing.{_HOMES[name]}"), name)
