"""The command line opens a place by another backend, and with options of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpdcp
from hpdcp.cli import main


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, *capfd.readouterr()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    hpdcp.save({"step": 3}, checkpoint_id=tmp_path / "step_3")
    return tmp_path / "step_3"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_backend_and_its_options_are_given_by_hand(
    verb: str, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = tmp_path / "options.json"
    options.write_text('{"auto_mkdir": true}')
    for given in ('{"auto_mkdir": true}', f"@{options}"):
        code, out, _ = run(capfd, verb, checkpoint, "--json", "--backend", "fsspec", "--storage-options", given)
        assert code == 0
        assert json.loads(out)["url"] == str(checkpoint)
    code, _, err = run(capfd, verb, checkpoint, "--storage-options", '{"auto_mkdir": true}')
    assert code == 2
    assert "auto_mkdir" in err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "a list"),
        ("secret", "not JSON"),
        ("@/no/such/file", "/no/such/file"),
    ],
)
def test_options_that_cannot_be_read_are_wrong_usage_and_are_not_repeated(
    given: str, says: str, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capfd, "inspect", checkpoint, "--storage-options", given)
    assert code == 2
    assert says in err
    assert "secret" not in err


def test_an_unknown_backend_lists_the_known_ones(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capfd, "verify", checkpoint, "--backend", "nosuch")
    assert code == 2
    assert "fsspec" in err
