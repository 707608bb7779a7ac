"""What a commit removes: the files it replaced and what dead attempts left a day ago; nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp._base.backend import TEMPORARY_PREFIX, temporary_name
from hpdcp._base.errors import StorageError
from hpdcp._base.processes import ProcessMark
from hpdcp._files import lease, leftovers
from hpdcp._files.commit import Attempt
from hpdcp._files.lease import Lease
from hpdcp._format.file_names import LEASE, METADATA
from hpdcp._format.metadata import Metadata
from hpdcp._format.strings import StringColumn
from hpdcp_backends.generic import GenericBackend
from hpdcp_backends.local import LocalBackend


def state(value: float = 1.0) -> dict[str, object]:
    return {"w": torch.full((4,), value), "step": int(value)}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def loaded(folder: Path, *, no_dist: bool = False) -> float:
    found = {"w": torch.zeros(4)}
    hpdcp.load(found, checkpoint_id=folder, no_dist=no_dist)
    return float(found["w"][0])


def age(*paths: Path, hours: float = 25) -> None:
    then = time.time() - hours * 3600
    for path in paths:
        os.utime(path, (then, then))


def abandon(folder: Path, attempt: str) -> list[Path]:
    """An attempt that claims the folder, writes one file, and is never heard of again."""
    Attempt.begin(LocalBackend(str(folder)), attempt)
    name = f"_rank0_.{attempt}.safetensors"
    (folder / name).write_bytes(b"x" * 5000)
    return [folder / name]


def test_a_commit_removes_exactly_the_files_of_the_checkpoint_it_replaces(tmp_path: Path) -> None:
    old = hpdcp.save(state(), checkpoint_id=tmp_path)
    strangers = ["notes.txt", "_rank7_.safetensors", "_rank0_.bytes.bak", "model.safetensors", ".hidden"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    (tmp_path / "_rank0_.d").mkdir()
    (tmp_path / "_rank0_.d" / "_rank0_.safetensors").write_text("mine")
    age(*(tmp_path / name for name in strangers), tmp_path / "_rank0_.d" / "_rank0_.safetensors")
    new = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {*strangers, "_rank0_.d", METADATA, LEASE, *new.files}
    assert not set(old.files) & set(new.files)
    assert (tmp_path / "_rank0_.d" / "_rank0_.safetensors").read_text() == "mine"


def test_files_of_a_dead_attempt_stay_for_a_day(tmp_path: Path) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    young = abandon(tmp_path, "a" * 16)
    old = abandon(tmp_path, "b" * 16)
    age(*young, hours=23)
    age(*old, hours=25)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert [path.exists() for path in (*young, *old)] == [True, False]
    age(*young, hours=25)
    hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert not young[0].exists()


def process(pid: int, **changes: str) -> dict[str, object]:
    return ProcessMark.of(pid).to_json() | changes


def held_by(folder: Path, process: dict[str, object]) -> None:
    """As if that process had begun the last attempt."""
    (folder / LEASE).write_text(json.dumps(json.loads((folder / LEASE).read_bytes()) | {"process": process}))


def test_files_of_an_attempt_whose_process_is_known_to_be_dead_go_with_the_next_commit(tmp_path: Path) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        mark = process(child.pid)
        left = {kind: abandon(tmp_path, kind * 16)[0] for kind in "abcd"}
        for kind, holder in zip(
            "abcd",
            (mark, mark | {"host": "other", "where": "another boot"}, process(os.getpid()), mark | {"started": "1"}),
            strict=True,
        ):
            # The attempts one after the other, each found by the next.
            begin_again(tmp_path, kind * 16)
            held_by(tmp_path, holder)
        hpdcp.save(state(2.0), checkpoint_id=tmp_path)
        assert {kind for kind in left if left[kind].exists()} == {"a", "b", "c"}, "all but the pid that was given again"
        child.kill()
    hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert {kind for kind in left if left[kind].exists()} == {"b", "c"}, "not one of another host, nor a live one"
    lease.running.discard("c" * 16)
    age(left["b"])
    new = hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *new.files}


def begin_again(folder: Path, attempt: str) -> None:
    Attempt.begin(LocalBackend(str(folder)), attempt)


def test_where_nothing_is_published_in_one_step_dead_attempts_keep_their_files_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What their process has sent may be published yet."""
    monkeypatch.setattr(LocalBackend, "conditional_publish", False)
    hpdcp.save(state(), checkpoint_id=tmp_path)
    [left] = abandon(tmp_path, "a" * 16)
    lease.running.discard("a" * 16)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert left.exists()
    age(left)
    hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert not left.exists()


def test_attempts_that_left_nothing_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    clock = time.time
    backend = LocalBackend(str(tmp_path))
    for number in range(20):
        begun = Attempt.begin(backend, f"{number:016x}")
        assert len(begun.lease.superseded) == number
    monkeypatch.setattr(time, "time", lambda: clock() + 31 * 24 * 3600)
    assert len(Attempt.begin(backend, "f" * 16).lease.superseded) == 0
    monkeypatch.undo()
    monkeypatch.setattr(leftovers, "_MOST_SUPERSEDED", 5)
    assert len(Attempt.begin(backend, "e" * 16).lease.superseded) <= 5


@pytest.mark.parametrize("no_dist", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_removes_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], no_dist: bool
) -> None:
    old = hpdcp.save(state(), checkpoint_id=tmp_path, no_dist=no_dist)
    before = names(tmp_path)
    write = LocalBackend.write
    written: list[str] = []

    def interrupted(backend: LocalBackend, key: str, *given: object, **named: object) -> None:
        if written:
            raise kind
        write(backend, key, *given, **named)  # type: ignore[arg-type]
        written.append(key)

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "write", interrupted)
        with pytest.raises(kind):
            hpdcp.save(state(2.0), checkpoint_id=tmp_path, no_dist=no_dist)
    assert written
    assert names(tmp_path) == before
    assert set(old.files) < before
    assert loaded(tmp_path) == 1.0


@pytest.mark.parametrize("published", [False, True])
def test_an_interrupt_while_it_is_published_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: bool
) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    publish = LocalBackend.publish

    def interrupted(backend: LocalBackend, key: str, data: bytes) -> None:
        if key != METADATA or published:
            publish(backend, key, data)
        if key == METADATA:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert loaded(tmp_path) == 1.0 + published
    new = hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *new.files}


def test_temporary_files_of_dead_processes_go_at_once_and_others_after_a_day(tmp_path: Path) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    with subprocess.Popen(["sleep", "60"]) as child:
        mine = temporary_name()
        dead = mine.replace(ProcessMark.current().token, ProcessMark.of(child.pid).token)
        child.kill()
    old = TEMPORARY_PREFIX + "0123456789abcdef"  # as earlier versions named them
    for name in (mine, dead, old):
        (tmp_path / name).write_bytes(b"x")
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert {mine, old} < names(tmp_path)
    assert dead not in names(tmp_path)
    age(tmp_path / mine, tmp_path / old)
    hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert not names(tmp_path) & {mine, old}


def test_plain_names_of_a_dead_attempt_go_only_when_the_file_says_that_it_is_its_own(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    Attempt.begin(backend, "d" * 16)
    header = b'{"__metadata__":{"attempt":"' + b"d" * 16 + b'","rank":"0"}}'
    (tmp_path / "_rank0_.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "_rank1_.safetensors").write_bytes(b"a user's own file that looks like ours")
    age(tmp_path / "_rank0_.safetensors", tmp_path / "_rank1_.safetensors")
    new = hpdcp.save(state(), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, "_rank1_.safetensors", *new.files}


def test_files_of_attempts_that_the_claim_does_not_name_stay(tmp_path: Path) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    unknown = tmp_path / "_rank0_.0123456789abcdef.safetensors"
    unknown.write_bytes(b"z")
    age(unknown, hours=1000)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert unknown.exists()


def test_an_attempt_ended_between_its_commit_and_its_clean_up_leaves_that_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hpdcp.save(state(), checkpoint_id=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "_clean_up", lambda *_: None)
        middle = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert set(old.files) < names(tmp_path)
    new = hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *new.files}, middle.files


def test_keep_replaced_for_delays_the_removal(tmp_path: Path) -> None:
    with hpdcp.config.using(keep_replaced_for=3600.0):
        first = hpdcp.save(state(), checkpoint_id=tmp_path)
        reader = hpdcp.FileSystemReader(tmp_path)
        known = reader.load_metadata()
        second = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
        third = hpdcp.save(state(3.0), checkpoint_id=tmp_path)
    assert {*first.files, *second.files, *third.files} < names(tmp_path)
    assert set(known.files) <= names(tmp_path)
    claim = Lease.from_bytes((tmp_path / LEASE).read_bytes())
    assert claim is not None and {key for key, _ in claim.replaced} == {*first.files, *second.files}
    fields = json.loads((tmp_path / LEASE).read_bytes())
    fields["replaced"] = [[key, since - 3601] for key, since in fields["replaced"] if key in first.files] + [
        pair for pair in fields["replaced"] if pair[0] in second.files
    ]
    (tmp_path / LEASE).write_text(json.dumps(fields))
    with hpdcp.config.using(keep_replaced_for=3600.0):
        fourth = hpdcp.save(state(4.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *second.files, *third.files, *fourth.files}
    fifth = hpdcp.save(state(5.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *fifth.files}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"attempt": "a", "plain": true, "began": 1e999, "superseded": [], "replaced": [["k", 1' + b"0" * 400 + b"]]}",
        b'{"attempt": "a", "plain": true, "began": {}, "superseded": 3, "replaced": {}}',
        b'{"attempt": "a", "plain": true, "began": 1, "superseded": [], "replaced": [], "replacing": 7}',
    ],
)
def test_a_damaged_claim_stops_no_save_and_removes_nothing(tmp_path: Path, text: bytes) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)
    (tmp_path / "_rank3_.safetensors").write_text("mine")
    age(tmp_path / "_rank3_.safetensors")
    (tmp_path / LEASE).write_bytes(text)
    new = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, "_rank3_.safetensors", *new.files}


@pytest.mark.parametrize("key", ["../outside.txt", "/etc/hostname", METADATA, LEASE, "a\0b", "sub/../../outside.txt"])
def test_a_hostile_claim_or_metadata_removes_nothing_but_data_files(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "ckpt"
    outside = tmp_path / "outside.txt"
    outside.write_text("precious")
    hpdcp.save(state(), checkpoint_id=folder)
    fields = json.loads((folder / LEASE).read_bytes())
    fields |= {"replaced": [[key, 0.0]], "replacing": [key], "superseded": [["../outside", True], ["", True]]}
    (folder / LEASE).write_text(json.dumps(fields))
    new = hpdcp.save(state(2.0), checkpoint_id=folder)
    assert outside.read_text() == "precious"
    assert names(folder) == {METADATA, LEASE, *new.files}
    target = state(-1.0)
    hpdcp.load(target, checkpoint_id=folder)
    assert target["step"] == 2


def test_a_damaged_metadata_is_replaced_and_its_files_are_left(tmp_path: Path) -> None:
    old = hpdcp.save(state(), checkpoint_id=tmp_path)
    data = bytearray((tmp_path / METADATA).read_bytes())
    data[20] ^= 0xFF
    (tmp_path / METADATA).write_bytes(data)
    new = hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert names(tmp_path) == {METADATA, LEASE, *old.files, *new.files}
    assert Metadata.from_bytes((tmp_path / METADATA).read_bytes(), where="x").files == new.files


def test_what_a_writer_that_was_killed_while_publishing_left_goes_after_a_day(tmp_path: Path) -> None:
    old, young, mine = tmp_path / ".hpdcp-tmp-0a", tmp_path / ".hpdcp-tmp-0b", tmp_path / ".hpdcp.tmp"
    hpdcp.save(state(), checkpoint_id=tmp_path)
    for path in (old, young, mine):
        path.write_text("half")
    age(old, mine)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert not old.exists()
    assert young.exists()
    assert mine.exists()


def test_a_save_whose_clean_up_fails_keeps_what_it_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hpdcp.save(state(), checkpoint_id=tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise KeyError("an answer without the field that all others have")

    monkeypatch.setattr(LocalBackend, "remove_leftovers", refuse)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path)
    assert loaded(tmp_path) == 2.0


def test_a_rank_alone_whose_old_files_cannot_be_removed_keeps_what_it_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = hpdcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    delete = LocalBackend.delete

    def fail_once(self: LocalBackend, keys: Iterable[str]) -> None:
        monkeypatch.setattr(LocalBackend, "delete", delete)
        raise StorageError(f"cannot delete {sorted(keys)}: the store is away for a moment")

    monkeypatch.setattr(LocalBackend, "delete", fail_once)
    hpdcp.save(state(2.0), checkpoint_id=tmp_path, no_dist=True)
    assert loaded(tmp_path, no_dist=True) == 2.0
    assert set(old.files) <= names(tmp_path)


@pytest.mark.parametrize(
    "name", ["train.py", "_rank0_.safetensors", "_rank0_.0123456789abcdef.bytes", "out/config.json"]
)
@pytest.mark.parametrize("no_dist", [False, True])
def test_a_strangers_metadata_removes_no_file_that_is_not_proven_its_own(
    tmp_path: Path, name: str, no_dist: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder, outside = tmp_path / "ckpt", tmp_path / "outside"
    outside.mkdir()
    old = hpdcp.save(state(), checkpoint_id=folder, no_dist=no_dist)
    (folder / "out").symlink_to(outside)
    (folder / name).write_text("precious")
    listed = replace(old.storage, file_names=StringColumn.from_strings([name, *list(old.storage.file_names)[1:]]))
    key = "0.metadata" if no_dist else METADATA
    (folder / key).write_bytes(old.with_storage(listed, {}).to_bytes())
    with caplog.at_level("WARNING", logger="hpdcp"):
        hpdcp.save(state(2.0), checkpoint_id=folder, no_dist=no_dist)
    assert (folder / name).read_text() == "precious"
    assert loaded(folder, no_dist=no_dist) == 2.0
    assert name in caplog.text and "left where they are" in caplog.text


def test_plain_names_of_an_earlier_version_go_where_their_first_bytes_name_the_attempt(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(Path(__file__).parents[2] / "golden" / "version_1" / "together", folder)
    mine = folder / "_rank1_.bytes"
    mine.write_text("a file of the user's, by now")
    new = hpdcp.save(state(), checkpoint_id=folder)
    assert names(folder) == {METADATA, LEASE, mine.name, *new.files}


def test_a_process_alone_replaces_what_another_process_saved_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPDCP_RUN_ID", "before the restart")
    hpdcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    monkeypatch.setenv("HPDCP_RUN_ID", "after it")
    new = hpdcp.save(state(2.0), checkpoint_id=tmp_path, no_dist=True)
    assert names(tmp_path) == {"0.metadata", *new.files}
    assert loaded(tmp_path, no_dist=True) == 2.0


def test_deletion_follows_no_link_out_of_the_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "ckpt", tmp_path / "outside"
    for made in (outside / "deep", folder / "inner"):
        made.mkdir(parents=True)
    for path in (outside / "file", outside / "deep" / "file", folder / "inner" / "file"):
        path.write_text("precious")
    (folder / "link").symlink_to(outside)
    (folder / "inner" / "link").symlink_to(outside / "deep")
    for backend in (LocalBackend(str(folder)), GenericBackend(f"file://{folder}")):
        backend.delete(["link/file", "link/deep/file", "inner/link/file"])
    assert (outside / "file").exists() and (outside / "deep" / "file").exists()
    LocalBackend(str(folder)).delete(["inner/file"])
    assert not (folder / "inner" / "file").exists()
