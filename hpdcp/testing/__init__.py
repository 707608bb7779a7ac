"""Contract tests for what others plug into hpdcp: pytest classes to inherit.

    from hpdcp.testing import BackendContract, LayoutContract

    class TestMyBackend(BackendContract): ...
    class TestMyLayout(LayoutContract): ...

Needs pytest, which hpdcp itself does not.
"""

import pytest

# So that a failing assertion in a contract shows its values; must come before the contract is imported.
pytest.register_assert_rewrite("hpdcp.testing.backend_contract", "hpdcp.testing.layout_contract")

from hpdcp.testing.backend_contract import BackendContract  # noqa: E402 - see above
from hpdcp.testing.layout_contract import LayoutContract  # noqa: E402 - see above

__all__ = ["BackendContract", "LayoutContract"]
