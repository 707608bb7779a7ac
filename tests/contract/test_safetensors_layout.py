"""The default layout keeps every promise of a layout."""

from __future__ import annotations

from hpdcp.testing import LayoutContract


class TestSafetensorsLayout(LayoutContract):
    layout = "safetensors"
