"""Test files whose tests run on several ranks at once: `dcp_*.py` with a constant `RANKS`.

    RANKS = 4

    def test_a_save_of_all_ranks_loads(ranks: Job, folder: Path) -> None: ...

Outside of a rank, pytest collects them as it does other files, and each test is an item like any other, with its
parameters and marks. To run one, it is named to a group of forked ranks (`tests.support.rank_group`), which lives as
long as the tests that follow are of the same file and environment; what the ranks report becomes the item's report.
Fixtures are those of the ranks' own sessions. A module may say what its ranks find in their environment, by its
parameters of module scope:

    def rank_environment(request: pytest.FixtureRequest, parameters: Mapping[str, object]) -> dict[str, str]: ...

where `request` gives the fixtures of this session.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.rank_group import RankGroup, RanksLostError
from tests.support.ranks import is_rank

_FILES: Final = ("dcp_*.py", "_test_dcp_*.py")
_TEST_SECONDS: Final = 120
"""For one test; more than the time limit of the ranks' process group, after which they tell more themselves."""
_GROUPS: Final = pytest.StashKey["_Groups"]()


class RankFile(pytest.Module):
    """A file of tests that run on ranks."""

    def collect(self) -> Iterator[RankItem]:
        if not hasattr(self.obj, "RANKS"):
            return  # another file says how it is run
        # Tests of one environment follow one another, so that ranks are started once for each.
        for case in sorted(super().collect(), key=_parameters_of_the_module):
            assert isinstance(case, pytest.Function)
            fixtures = self.session._fixturemanager.getfixtureinfo(self.parent, _on_ranks, None)
            yield RankItem.from_parent(self, name=case.name, callobj=_on_ranks, fixtureinfo=fixtures, case=case)


class RankItem(pytest.Function):
    """One test, run by all ranks of a group."""

    def __init__(self, *, case: pytest.Function, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._case = case
        self.own_markers.extend(case.own_markers)
        self.keywords.update(case.keywords)

    @property
    def parameters(self) -> Mapping[str, object]:
        callspec = getattr(self._case, "callspec", None)
        return {} if callspec is None else callspec.params

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self._case.reportinfo()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (_RanksFailedError, RanksLostError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)


def _parameters_of_the_module(case: pytest.Item | pytest.Collector) -> list[str]:
    assert isinstance(case, pytest.Function), f"{case}: tests on ranks are functions"
    callspec = getattr(case, "callspec", None)
    definitions = case._fixtureinfo.name2fixturedefs
    return [
        str(value)
        for name, value in (callspec.params.items() if callspec else ())
        if name in definitions and definitions[name][-1].scope == "module"
    ]


class _RanksFailedError(Exception):
    """What the ranks reported."""


class _Groups:
    """The group that was used last, and environments: of each file and parameters, the same for all its tests."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._numbers = itertools.count()
        self._group: RankGroup | None = None
        self._key: object = None

    def of(self, item: RankItem, environment: Mapping[str, str]) -> RankGroup:
        key = (item.path, tuple(sorted(environment.items())))
        if self._group is None or self._key != key:
            self.end()
            folder = self._factory.getbasetemp() / f"ranks{next(self._numbers)}"
            self._group = RankGroup(item.path, item.module.RANKS, environment, folder)
            self._key = key
        return self._group

    def lose(self) -> None:
        """The next test gets another group."""
        self._group = None

    def end(self) -> None:
        group, self._group = self._group, None
        wrong = [] if group is None else group.end()
        if wrong:
            raise _RanksFailedError("\n".join(wrong))


@pytest.fixture
def rank_group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankGroup:
    """The ranks for the test that asks."""
    item = request.node
    assert isinstance(item, RankItem)
    groups = request.config.stash.setdefault(_GROUPS, _Groups(tmp_path_factory))
    environment_of = getattr(item.module, "rank_environment", None)
    return groups.of(item, environment_of(request, item.parameters) if environment_of else {})


def _on_ranks(rank_group: RankGroup, request: pytest.FixtureRequest) -> None:
    """The body of every test on ranks, outside of them."""
    try:
        run_test(request.config, rank_group, request.node.nodeid)
    finally:
        if rank_group.lost:
            request.config.stash[_GROUPS].lose()


def run_test(config: pytest.Config, group: RankGroup, test: str) -> None:
    """Run the test of that id on the group's ranks; fails, or skips, as it does on them."""
    answers = group.run(test, _TEST_SECONDS)
    from_data = config.hook.pytest_report_from_serializable
    reports = [[from_data(config=config, data=data) for data in given] for given, _ in answers]
    print(group.output())
    if any(stop for _, stop in answers):
        group.kill()
    failed = [(rank, report) for rank, those in enumerate(reports) for report in those if report.failed]
    if failed:
        raise _RanksFailedError("\n".join(_told(rank, report) for rank, report in failed))
    skipped = [report for those in reports for report in those if report.skipped]
    if len(skipped) == len(reports):
        _skip(skipped[0])


def _told(rank: int, report: pytest.TestReport) -> str:
    sections = "".join(f"\n--- {name}:\n{text}" for name, text in report.sections)
    return f"===== rank {rank}, {report.when} =====\n{report.longreprtext}{sections}"


def _skip(report: pytest.TestReport) -> None:
    if hasattr(report, "wasxfail"):
        pytest.xfail(report.wasxfail)
    assert isinstance(report.longrepr, tuple)
    pytest.skip(report.longrepr[2].removeprefix("Skipped: "))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    result = yield
    if isinstance(item, RankItem) and (nextitem is None or nextitem.path != item.path):
        item.config.stash[_GROUPS].end()
    return result


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> RankFile | None:
    if is_rank() or not _matches(module_path.name, _FILES):
        return None
    return RankFile.from_parent(parent, path=module_path)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
