"""Keys that were renamed go on working under their earlier names, with one warning for each place."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from hpdcp._base import renames
from hpdcp._base.config import RENAMED, Config, current, effective, using


@pytest.fixture(autouse=True)
def _nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renames, "_told", set())
    monkeypatch.setenv("HPDCP_CONFIG", "")


def test_every_earlier_name_is_of_a_key_and_is_none_itself() -> None:
    assert RENAMED == {"mailbox_deadline": "mailbox_timeout", "exit_deadline": "exit_timeout"}
    assert set(RENAMED.values()) <= set(Config.__slots__)


def test_an_earlier_name_in_the_file_works_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hpdcp.toml"
    file.write_text("mailbox_deadline = 7\n")
    monkeypatch.setenv("HPDCP_CONFIG", str(file))
    with pytest.warns(FutureWarning, match=r"'mailbox_deadline' \(.*hpdcp.toml\) is an earlier name of 'mailbox_timeo"):
        assert current().mailbox_timeout == 7
    assert current().mailbox_timeout == 7  # a second warning would be an error
    (setting,) = (each for each in effective() if each.key == "mailbox_timeout")
    assert (setting.value, setting.origin) == (7, str(file))


def test_an_earlier_name_in_the_environment_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_EXIT_DEADLINE", "8")
    with pytest.warns(FutureWarning, match="environment variable HPDCP_EXIT_DEADLINE"):
        assert current().exit_timeout == 8


def test_an_earlier_name_in_code_works_and_lies_over_the_new_one_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPDCP_EXIT_TIMEOUT", "8")
    with pytest.warns(FutureWarning, match="exit_deadline"), using(exit_deadline=9) as config:
        assert config.exit_timeout == 9


def test_the_new_name_wins_over_the_earlier_one_in_the_same_place() -> None:
    with pytest.warns(FutureWarning), using(exit_deadline=9, exit_timeout=10) as config:
        assert config.exit_timeout == 10


def test_an_attribute_by_its_earlier_name_is_the_key_s_value() -> None:
    config = Config(mailbox_timeout=3.0)
    with pytest.warns(FutureWarning, match="Config.mailbox_deadline is an earlier name of mailbox_timeout") as told:
        assert config.mailbox_deadline == 3.0  # type: ignore[attr-defined]
    assert told[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        config.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_warning_is_given_once_for_each_name() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for old in ("a", "a", "b"):
            renames.warn_renamed(old, "c")
    assert [str(each.message).split()[0] for each in told] == ["a", "b"]
