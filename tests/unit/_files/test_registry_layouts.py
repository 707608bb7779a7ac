"""What the registry asks of all layouts together: whose names these are, and what another program wrote."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from hpdcp._files import registry
from hpdcp._files.safetensors_layout import SafetensorsLayout
from hpdcp_backends.zarr_layout import ZarrLayout


class TrunkLayout(SafetensorsLayout):
    name = "trunk"

    @classmethod
    def recognizes(cls, keys: object) -> bool:
        return "trunk.lid" in keys  # type: ignore[operator]

    @classmethod
    def is_fixed_name(cls, key: str) -> bool:
        return key.endswith("trunk.lid")


@pytest.fixture
def brought_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout of another package, and one whose package is broken."""
    points = EntryPoints(
        [
            EntryPoint("broken", "no_such_module:Layout", "hpdcp.layouts"),
            EntryPoint("trunk", f"{__name__}:TrunkLayout", "hpdcp.layouts"),
        ]
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    monkeypatch.setattr(EntryPoint, "load", lambda point: TrunkLayout if point.name == "trunk" else _missing())


def _missing() -> None:
    raise ImportError("no_such_module")


def test_a_layout_is_asked_whether_a_folder_holds_what_another_program_wrote() -> None:
    assert registry.foreign_layout(["notes.txt", "zarr.json"]) is ZarrLayout
    assert registry.foreign_layout([".zgroup"]) is ZarrLayout
    assert registry.foreign_layout(["model.safetensors", "trunk.lid"]) is None


def test_names_that_a_layout_gives_whatever_the_attempt_are_told_from_others() -> None:
    keys = ["zarr.json", "c", "w/zarr.json", "w/c/0/1", "w/c/0/x", "notes.txt", "w/zarr.json\n", "xzarr.json"]
    assert registry.fixed_names(keys) == {"zarr.json", "c", "w/zarr.json", "w/c/0/1"}


@pytest.mark.usefixtures("brought_by_others")
def test_layouts_of_other_packages_are_asked_as_well_and_broken_ones_left_out() -> None:
    assert registry.foreign_layout(["trunk.lid"]) is TrunkLayout
    assert registry.fixed_names(["a/trunk.lid", "w/c/0", "other"]) == {"a/trunk.lid", "w/c/0"}


def test_where_there_is_nothing_to_judge_no_layout_is_imported() -> None:
    code = (
        "import sys\n"
        "from hpdcp._files import registry\n"
        "assert registry.fixed_names([]) == frozenset()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
