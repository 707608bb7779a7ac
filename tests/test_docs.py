"""What the documentation says is true: its code runs, its links lead somewhere, its columns are those on disk."""

from __future__ import annotations

import inspect
import logging
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base import config
from hpdcp._files import registry
from hpdcp._format.container import unpack_columns
from tests.support.rank_group import run_forked_ranks
from tests.support.ranks import ROOT, forked_python, run_python
from tests.support.s3 import S3Server

PAGES = sorted([ROOT / "README.md", ROOT / "backends/README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BUCKET = "s3://my-bucket"
RUNNABLE = [ROOT / "README.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]


def blocks(page: Path) -> list[tuple[str, str]]:
    """(name of the file it is to be put into, code) of every python block."""
    return BLOCK.findall(page.read_text())


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def wants_a_bucket(page: Path) -> bool:
    return any(BUCKET in code for file, code in blocks(page) if not file)


# torch's own save says so in a process without ranks; a page compares it with ours.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("page", [page for page in RUNNABLE if blocks(page) and not wants_a_bucket(page)], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    if page.name == "README.md":
        # Its first lines are an excerpt of a script.
        namespace |= {"hpdcp": hpdcp, "model": {}, "optimizer": {}, "step": 0, "state": {}}
    logger = logging.getLogger("hpdcp")
    level = logger.level
    try:
        for number, (file, code) in enumerate(blocks(page)):
            if not file:
                exec(compile(code, f"{name_of(page)}, block {number}", "exec"), namespace)
    finally:
        logger.setLevel(level)  # a page sets it


@pytest.mark.parametrize("page", [page for page in RUNNABLE if wants_a_bucket(page)], ids=name_of)
def test_the_code_of_a_page_about_s3_runs_against_a_server(page: Path, tmp_path: Path, s3_server: S3Server) -> None:
    # In a process of its own, whose variables name the server.
    place = s3_server.new_prefix()
    script = tmp_path / "page.py"
    script.write_text("\n".join(code for file, code in blocks(page) if not file).replace(BUCKET, place))
    forked_python([str(script)], timeout=120, environment=s3_server.environment())
    assert any(key.endswith("/.metadata") for key in s3_server.objects(place))


@pytest.mark.parametrize("page", [page for page in PAGES if TOML.search(page.read_text())], ids=name_of)
def test_the_configuration_that_a_page_shows_is_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "hpdcp.toml"))
    for text in TOML.findall(page.read_text()):
        if "project" in tomllib.loads(text):
            continue  # of a package that brings a backend
        (tmp_path / "hpdcp.toml").write_text(text)
        found = config.current()
        assert found != config.Config(), text
        places = [("", name) for name in found.backends]
        places += [(r.prefix, "s3" if r.prefix.startswith("s3:") else r.backend) for r in found.routes]
        for url, name in places:
            taken = inspect.signature(registry._find(name, "backend", registry._BACKENDS, "")).parameters
            assert set(found.settings_for(name, url).tunables) <= set(taken), text


def test_the_readmes_script_trains_on_four_ranks_and_resumes_on_two(tmp_path: Path) -> None:
    ((_, code),) = [block for block in blocks(ROOT / "README.md") if block[0] == "train.py"]
    folder = str(tmp_path / "sharded")
    assert code.count('"checkpoints/sharded"') == 3
    script = tmp_path / "train.py"
    script.write_text(code.replace("checkpoints/sharded", folder))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    first = run_python([*torchrun, "--nproc-per-node=4", str(script)], timeout=120)
    then = run_forked_ranks(2, [str(script), "resume"], timeout=120)
    assert first.count("step 3,") == 4
    assert then.count("step 6,") == 2
    assert hpdcp.FileSystemReader(folder).load_metadata().world_size == 2


def test_the_tutorial_quotes_the_script_that_it_tells_of() -> None:
    lines = [line.strip() for line in (ROOT / "docs/tutorial/train_and_resume.py").read_text().splitlines()]
    script = "\n".join(lines)
    quoted = ["\n".join(map(str.strip, code.splitlines())) for _, code in blocks(ROOT / "docs/tutorial/README.md")]
    assert quoted and [code for code in quoted if code not in script] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_paths_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:hpdcp|backends|tests|docs|benchmarks)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`|\$ )make ([a-z]+)", page.read_text())}
    assert named and named <= targets


def test_the_module_map_has_every_package_and_every_public_module() -> None:
    text = (ROOT / "docs/explanation/modules.md").read_text()
    packages = {f"`{path.parent.name}`" for path in (ROOT / "hpdcp").glob("*/__init__.py")}
    facades = {f"`hpdcp.{path.stem}`" for path in (ROOT / "hpdcp").glob("[a-z]*.py") if path.stem != "cli"}
    assert [name for name in sorted(packages | facades) if name not in text] == []


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent.name != "changes"]
    unlisted = [page for page in pages if f"({page.relative_to(ROOT / 'docs')})" not in index]
    assert unlisted == [ROOT / "docs/README.md"]


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference/README.md").read_text()
    assert [name for name in hpdcp.__all__ if not re.search(rf"`(hpdcp\.)?{name}\b", text)] == []


def test_the_format_page_has_every_column_and_every_setting(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "n": 1, "own": hpdcp.PerRank(2)}
    hpdcp.save(state, checkpoint_id=tmp_path / "together")
    hpdcp.save(state, checkpoint_id=tmp_path / "apart", no_dist=True)
    text = (ROOT / "docs/explanation/format.md").read_text()
    spelled = set(re.findall(r"`([\w.]+)`", text))
    # `entry.fqn.blob`, `.ends` stands for entry.fqn.blob and entry.fqn.ends
    spelled |= {name.removesuffix(".blob") + ".ends" for name in spelled if name.endswith(".blob")}
    for file in (tmp_path / "together/.metadata", tmp_path / "apart/0.metadata"):
        columns, settings = unpack_columns(file.read_bytes(), where=str(file))
        assert set(columns) <= spelled
        assert set(settings) <= spelled
        described = {name for name in spelled if name.split(".")[0] in ("entry", "chunk", "storage", "file")}
        assert {name for name in described if "." in name} <= {*columns}


def test_the_extra_that_the_readme_installs_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {name for page in PAGES for name in re.findall(r"(?:hpdcp|\.)\[(\w+)\]", page.read_text())}
    assert named <= set(extras)
