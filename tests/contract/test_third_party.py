"""A backend and a layout of another package: installed with pip, found by name, and as good as hpdcp's own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hpdcp
from hpdcp import config, registry
from hpdcp.backend import Backend
from hpdcp.errors import InvalidArgumentError, NotSupportedError
from hpdcp.inspect import inspect_checkpoint
from hpdcp.testing import BackendContract, LayoutContract

PROJECT = Path(__file__).parents[1] / "support" / "third_party"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The distribution in a folder of its own that this process, and its workers, import from."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    options = ["--disable-pip-version-check", "--root-user-action=ignore", "--target", site]
    done = subprocess.run([*pip, *options, PROJECT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(site))
    for module in [name for name in sys.modules if name.partition(".")[0] == "cupboard_hpdcp"]:
        del sys.modules[module]


class TestCupboard(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Backend:
        backend = registry.open_backend(f"cupboard://{tmp_path}/run", name="cupboard")
        backend.prepare()
        return backend

    def reopen(self, backend: Backend) -> Backend:
        return registry.open_backend(backend.url, name="cupboard")


class TestDrawers(LayoutContract):
    layout = "drawers"
    least_files = 4


def state(fill: float) -> dict[str, Any]:
    return {"w": torch.full((4, 3), fill) + torch.arange(3), "half": torch.full((5,), fill).bfloat16(), "step": fill}


def assert_loads(url: str | Path, expected: float) -> None:
    target = state(0.0)
    hpdcp.load(target, checkpoint_id=url)
    assert torch.equal(target["w"], state(expected)["w"])
    assert torch.equal(target["half"], state(expected)["half"])
    assert target["step"] == expected


def test_it_is_chosen_by_its_name(tmp_path: Path) -> None:
    url = f"cupboard://{tmp_path}/step_1"
    with config.using(backend="cupboard"):
        metadata = hpdcp.save(state(1.0), checkpoint_id=url)
        hpdcp.save(state(2.0), checkpoint_id=url)
        assert_loads(url, 2.0)
    assert metadata.files
    assert [path.name for path in tmp_path.iterdir()] == ["cupboard.sqlite"]


def test_it_is_chosen_by_a_route_with_options_of_its_own(tmp_path: Path) -> None:
    options = {"patience": 5.0, "storage_options": {"label": "blue"}}
    route = {"prefix": "cupboard://", "backend": "cupboard", "options": options}
    with config.using(routes=[route]):
        url = registry.resolve_checkpoint_id(f"CUPBOARD://{tmp_path}/step_1/")
        with registry.open_backend(url) as backend:
            assert backend.name == "cupboard"
            assert vars(backend)["label"] == "blue"
        hpdcp.save(state(3.0), checkpoint_id=url)
        assert_loads(url, 3.0)
        assert inspect_checkpoint(url).url == url


def test_its_layout_is_chosen_by_name_and_found_again_by_what_is_stored(tmp_path: Path) -> None:
    with config.using(layout="drawers"):
        metadata = hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert len(metadata.files) == 3
    assert all(name.endswith(".drawer") for name in metadata.files)
    assert_loads(tmp_path, 4.0)
    hpdcp.save(state(5.0), checkpoint_id=tmp_path)
    assert_loads(tmp_path, 5.0)
    assert not list(tmp_path.glob("*.drawer"))


def test_the_background_worker_finds_both(tmp_path: Path) -> None:
    url = f"cupboard://{tmp_path}/step_1"
    with config.using(backend="cupboard", layout="drawers"):
        metadata = hpdcp.async_save(state(6.0), checkpoint_id=url).get_result(120)
        assert all(name.endswith(".drawer") for name in metadata.files)
        assert_loads(url, 6.0)


def test_its_options_are_checked_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no storage_options but label.*colour"):
        registry.open_backend(f"cupboard://{tmp_path}/x", name="cupboard", storage_options={"colour": "red"})


def test_one_that_cannot_be_imported_names_its_package(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"'locked' of cupboard-hpdcp.*no_such_module"):
        registry.open_backend(str(tmp_path), name="locked")


def test_it_is_listed_among_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"cupboard.*local.*locked"):
        registry.open_backend("/x", name="nosuch")
