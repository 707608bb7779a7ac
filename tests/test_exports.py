"""The public surface: what `__all__` promises is there and documented, and importing it is cheap and private."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest

import hpdcp
from tests.support.ranks import run_python

MODULES = sorted(module.name for module in pkgutil.walk_packages(hpdcp.__path__, "hpdcp."))

NOT_AT_IMPORT = (
    "hpdcp_backends", "s3fs", "zarr", "typer", "rich", "huggingface_hub", "transformers", "torch_npu", "pytest",
)  # fmt: skip
"""What `import hpdcp` must not bring along: backends, and what only an extra or a test needs (torch brings tqdm)."""


@pytest.mark.parametrize("name", sorted(hpdcp.__all__))
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(hpdcp, name)
    if inspect.ismodule(value) or inspect.isclass(value) or callable(value):
        assert (inspect.getdoc(value) or "").strip(), f"hpdcp.{name} has no docstring"


def test_public_names_are_listed_once_and_seen_by_completion() -> None:
    assert len(hpdcp.__all__) == len(set(hpdcp.__all__))
    assert set(hpdcp.__all__) <= set(dir(hpdcp))
    assert {"save", "load"} <= set(hpdcp.__all__)


@pytest.mark.parametrize("name", sorted(name for name in hpdcp.__all__ if inspect.isclass(getattr(hpdcp, name))))
def test_every_public_method_says_what_it_does(name: str) -> None:
    kind = getattr(hpdcp, name)
    bare = [
        method
        for method, function in vars(kind).items()
        if inspect.isfunction(function) and not method.startswith("_") and not inspect.getdoc(getattr(kind, method))
    ]
    assert bare == [], f"methods of hpdcp.{name} without a docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip()
    for exported in getattr(module, "__all__", ()):
        assert hasattr(module, exported), f"{name}.__all__ promises {exported}"


def test_importing_hpdcp_brings_no_backend_and_no_extra() -> None:
    code = f"""
import sys, hpdcp
for name in hpdcp.__all__:
    getattr(hpdcp, name)
print(sorted(name for name in {NOT_AT_IMPORT!r} if name in sys.modules))
"""
    assert run_python(["-c", code]) == "[]\n"
