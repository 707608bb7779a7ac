"""How the packages of the core lie: faces without underscore, `__init__` modules that only say what a package is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "hpdcp"
PACKAGES = sorted(path.parent for path in CORE.glob("_*/__init__.py"))
FACADES = sorted(path for path in CORE.glob("*.py") if path.stem not in {"__init__", "__main__", "cli"})
SOURCES = sorted([*CORE.rglob("*.py"), *(ROOT / "backends" / "hpdcp_backends").rglob("*.py")])


def imported(path: Path) -> Iterator[str]:
    """Every name that the file imports, with the module it comes from."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def hidden_from(path: Path, name: str) -> bool:
    """Whether `name` is, or lies in, a module with an underscore of a package that the file is not in."""
    parts = name.split(".")
    for depth in range(2, len(parts)):
        if not parts[depth].startswith("_"):
            continue
        package = ROOT.joinpath(*(["backends"] if parts[0] == "hpdcp_backends" else []), *parts[:depth])
        if (package / f"{parts[depth]}.py").exists() and package not in path.parents:
            return True
    return False


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_with_an_underscore_are_imported_by_their_own_package_only(path: Path) -> None:
    assert [name for name in imported(path) if hidden_from(path, name)] == []


def test_a_hidden_module_is_told_from_a_face(tmp_path: Path) -> None:
    hidden = next(path for package in PACKAGES for path in sorted(package.glob("_[a-z]*.py")))
    name = f"hpdcp.{hidden.parent.name}.{hidden.stem}"
    assert hidden_from(CORE / "cli.py", f"{name}.anything") and hidden_from(CORE / "cli.py", name)
    assert not hidden_from(hidden.parent / "anything.py", f"{name}.anything")
    assert not hidden_from(CORE / "cli.py", "hpdcp._base.errors.HpdcpError")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_says_what_it_is_and_which_modules_are_its_face(package: Path) -> None:
    tree = ast.parse((package / "__init__.py").read_text("utf-8"))
    text = ast.get_docstring(tree) or ""
    assert len(tree.body) == 1, "it imports nothing: the command line and the mailbox must not load torch"
    faces = {path.stem for path in package.glob("[a-z]*.py")}
    assert [face for face in sorted(faces) if f"`{face}`" not in text] == []


@pytest.mark.parametrize("path", FACADES, ids=lambda path: path.name)
def test_a_module_without_underscore_lists_names_and_holds_no_code(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    kinds = {type(node) for node in tree.body}
    assert kinds == {ast.Expr, ast.ImportFrom, ast.Assign}
    names = {name.asname or name.name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names}
    (exported,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert names == set(ast.literal_eval(exported))
