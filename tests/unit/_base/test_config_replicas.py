"""`check_replicas`: a word for all names, or one for each pattern, from every source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpdcp._base import renames
from hpdcp._base.config import current, effective, using
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._plan.replica_rules import ALL, OFF, SAMPLE, ReplicaRules


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HPDCP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPDCP_CONFIG", "")


def test_a_table_comes_from_the_file_the_environment_and_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hpdcp.toml").write_text('[check_replicas]\n"bn.*" = "off"\n"*" = "all"\n')
    monkeypatch.setenv("HPDCP_CONFIG", str(tmp_path / "hpdcp.toml"))
    assert current().check_replicas == {"bn.*": "off", "*": "all"}
    monkeypatch.setenv("HPDCP_CHECK_REPLICAS", '{"bn.x": "sample"}')
    assert current().check_replicas == {"bn.*": "off", "*": "all", "bn.x": "sample"}
    with using(check_replicas={"*": "off"}):
        assert current().check_replicas == {"bn.*": "off", "*": "off", "bn.x": "sample"}
        assert {setting.key: setting.value for setting in effective()}["check_replicas"] == current().check_replicas
    with using(check_replicas="all"):
        assert current().check_replicas == "all"
    monkeypatch.setenv("HPDCP_CHECK_REPLICAS", "off")
    assert current().check_replicas == "off"


@pytest.mark.parametrize("wrong", ["large", 1, True, {"bn.*": "never"}, {"bn.*": {"x": "off"}}, ["off"]])
def test_other_words_are_refused(wrong: Any) -> None:
    with (
        pytest.raises(InvalidArgumentError, match="'off', 'sample', 'all', or a table from patterns"),
        using(check_replicas=wrong),
    ):
        pass


def test_small_is_an_earlier_word_for_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "_told", set())
    monkeypatch.setenv("HPDCP_CHECK_REPLICAS", "small")
    with pytest.warns(FutureWarning, match="check_replicas = 'small' is an earlier name of check_replicas = 'sample'"):
        assert current().check_replicas == "sample"
    assert current().check_replicas == "sample"


def test_of_patterns_that_match_the_last_one_counts() -> None:
    rules = ReplicaRules({"*": "all", "bn.*": "off", "bn.[ab]": "sample"})
    assert rules.modes(["w", "bn.a", "bn.c"]).tolist() == [ALL, SAMPLE, OFF]
    exempt = rules.exempt(["w", "bn.a", "bn.c"])
    assert exempt is not None and exempt.tolist() == [False, False, True]
    assert ReplicaRules({"bn.*": "off"}).modes(["w", "BN.a", "bn.a.b"]).tolist() == [SAMPLE, SAMPLE, OFF]


def test_off_for_all_names_exempts_none() -> None:
    assert ReplicaRules("off").is_off
    assert ReplicaRules("off").exempt(["w"]) is None
    assert ReplicaRules({"x": "off"}).exempt(["w"]) is None
    assert not ReplicaRules({"*": "off"}).is_off
