"""A folder of weights is replaced so that a reader never sees parts of two exports, and nothing else is touched."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

import hpdcp
from hpdcp import offline_transform
from hpdcp._base.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUncertainError,
    CorruptCheckpointError,
    InvalidArgumentError,
    StorageError,
    SupersededError,
)
from hpdcp._convert._export_lease import LEASE
from hpdcp._convert._export_plan import parse_size, plan_export
from hpdcp._files.huggingface_folder import read_weights
from hpdcp_backends.local import LocalBackend
from tests.support.huggingface import INDEX
from tests.unit._convert.test_round_trips import differing, read_folder

SINGLE, TWO, THREE = 10**6, 60, 40
"""Sizes that make one, two, and three files of `weights`."""


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((5,), float(value + number)) for number in range(6)}


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def export(folder: Path, value: float, size: int, **options: bool) -> offline_transform.Conversion:
    return offline_transform.save_state_dict_as_huggingface_format(folder, weights(value), size, **options)


def test_one_file_has_no_index_and_several_have_one_that_names_every_tensor(tmp_path: Path) -> None:
    export(tmp_path / "one", 0, SINGLE)
    assert files_of(tmp_path / "one") == {"model.safetensors"}
    export(tmp_path / "two", 0, TWO)
    assert files_of(tmp_path / "two") == {INDEX, *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))}
    index = json.loads((tmp_path / "two" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 6 * 5 * 4}
    assert index["weight_map"].keys() == weights(0).keys()
    assert differing(weights(0), read_folder(tmp_path / "two")) == []


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(100), "c": torch.ones(2)}
    offline_transform.save_state_dict_as_huggingface_format(tmp_path, state, 50)
    where = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert where["b"] not in (where["a"], where["c"])
    assert all(path.stat().st_size > 0 for path in tmp_path.iterdir())


@pytest.mark.parametrize("before", [SINGLE, TWO, THREE])
@pytest.mark.parametrize("after", [SINGLE, TWO, THREE])
def test_an_older_export_is_replaced_and_its_files_removed(tmp_path: Path, before: int, after: int) -> None:
    others = {
        "config.json",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "optimizer.safetensors",
        "model-x.safetensors",
    }
    for name in others:
        (tmp_path / name).write_text("a user's")
    export(tmp_path, 0, before)
    if before == after != SINGLE:
        listing = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(CheckpointExistsError, match=r"model-00001-of-0000\d.*overwrite=True"):
            export(tmp_path, 1, after)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == listing
    done = export(tmp_path, 1, after, overwrite=True)
    assert files_of(tmp_path) == {*others, *done.files}
    assert differing(weights(1), read_folder(tmp_path)) == []


class CutError(StorageError):
    pass


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Makes the store fail at its n-th change from now on, as a process that is killed there would leave it."""

    def at(count: int) -> list[str]:
        changes: list[str] = []

        def change(name: str) -> None:
            changes.append(name)
            if len(changes) > count:
                raise CutError("killed")

        create, publish, delete = LocalBackend.write, LocalBackend.publish, LocalBackend.delete

        def cut_write(
            self: LocalBackend, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool
        ) -> None:
            change(f"write {key}")
            create(self, key, buffers, size=size, exclusive=exclusive)

        def cut_publish(self: LocalBackend, key: str, data: bytes) -> None:
            change(f"publish {key}")
            publish(self, key, data)

        def cut_delete(self: LocalBackend, keys: Iterable[str]) -> None:
            for key in keys:
                change(f"delete {key}")
                delete(self, [key])

        monkeypatch.setattr(LocalBackend, "write", cut_write)
        monkeypatch.setattr(LocalBackend, "publish", cut_publish)
        monkeypatch.setattr(LocalBackend, "delete", cut_delete)
        return changes

    return at


def loaded_value(folder: Path) -> float | None:
    """The value of the export that a reader finds; None where nothing loads; fails for a mixture."""
    try:
        found = offline_transform.parse_checkpoint_from_huggingface(folder)
    except (CheckpointError, StorageError):
        return None
    value = float(found["w0"][0])
    assert differing(weights(value), found) == []
    return value


@pytest.mark.parametrize("shards", [SINGLE, TWO])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_exports_at_a_time_the_second_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, overwrite: bool
) -> None:
    """Both would write shards of the same names, and both would report success over a mixture."""
    refused: list[str] = []
    write = LocalBackend.write

    def write_as_another_begins(
        self: LocalBackend, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool
    ) -> None:
        if not exclusive and not refused:
            refused.append(key)
            with pytest.raises(CheckpointExistsError, match="another export is writing there"):
                export(tmp_path, 2, shards, overwrite=overwrite)
        write(self, key, buffers, size=size, exclusive=exclusive)

    monkeypatch.setattr(LocalBackend, "write", write_as_another_begins)
    done = export(tmp_path, 1, shards)
    assert refused
    assert loaded_value(tmp_path) == 1
    assert files_of(tmp_path) == {*done.files}


@pytest.mark.parametrize("exclusively", [True, False])
def test_an_export_whose_lease_another_one_took_publishes_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusively: bool
) -> None:
    """As where a lease was removed, or two began in one moment on a store that creates nothing exclusively."""
    monkeypatch.setattr(LocalBackend, "conditional_create", exclusively)
    write, taken = LocalBackend.write, list[str]()

    def write_after_another(
        self: LocalBackend, key: str, buffers: Iterable[memoryview], *, size: int, exclusive: bool
    ) -> None:
        if not exclusive and not taken:
            taken.append(key)
            (tmp_path / LEASE).unlink()
            export(tmp_path, 2, TWO)
        write(self, key, buffers, size=size, exclusive=exclusive)

    monkeypatch.setattr(LocalBackend, "write", write_after_another)
    with pytest.raises(SupersededError):
        export(tmp_path, 1, TWO)
    assert loaded_value(tmp_path) == 2


def test_the_lease_of_a_process_that_was_killed_is_taken_over_and_a_live_one_s_is_not(tmp_path: Path) -> None:
    held = (
        "import sys, time; from hpdcp._convert._export_lease import *; from hpdcp_backends.local import *; "
        "lease = ExportLease.acquire(LocalBackend(sys.argv[1])); print(flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", held, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(CheckpointExistsError, match=f"of process {other.pid} on"):
            export(tmp_path, 1, TWO)
        other.kill()
    export(tmp_path, 1, TWO)
    assert loaded_value(tmp_path) == 1


@pytest.mark.parametrize("held", [b"", b"{", b"[]", b'{"export": "x", "began": "soon"}', b'{"began": 1e999}'])
def test_a_lease_that_cannot_be_read_is_somebody_s(tmp_path: Path, held: bytes) -> None:
    (tmp_path / LEASE).write_bytes(held)
    with pytest.raises(CheckpointExistsError, match=f"remove {LEASE}"):
        export(tmp_path, 1, TWO)
    assert files_of(tmp_path) == {LEASE}


def test_a_lease_of_another_host_holds_for_a_day(tmp_path: Path) -> None:
    lease = {"export": "x", "host": "far", "where": "there", "pid": 1, "started": "1"}
    (tmp_path / LEASE).write_text(json.dumps(lease | {"began": time.time() - 23 * 3600}))
    with pytest.raises(CheckpointExistsError, match="process 1 on 'far'"):
        export(tmp_path, 1, TWO)
    (tmp_path / LEASE).write_text(json.dumps(lease | {"began": time.time() - 25 * 3600}))
    export(tmp_path, 1, TWO)
    assert loaded_value(tmp_path) == 1


@pytest.mark.parametrize("before", [None, SINGLE, TWO, THREE])
@pytest.mark.parametrize("after", [SINGLE, TWO, THREE])
def test_wherever_an_export_is_cut_off_a_reader_finds_the_old_or_the_new_one_or_nothing(
    tmp_path: Path,
    interrupted: Callable[[int], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
    after: int,
) -> None:
    for count in range(20):
        folder = tmp_path / str(count)
        if before is not None:
            export(folder, 1, before)
        changes = interrupted(count)
        try:
            export(folder, 2, after, overwrite=True)
            whole = True
        except (StorageError, CommitUncertainError):
            whole = False
        monkeypatch.undo()
        found = loaded_value(folder) if folder.exists() else None
        same_names = before == after != SINGLE
        if whole and len(changes) <= count:
            assert found == 2
            return
        expected = {2, before and 1} | ({None} if before is None or same_names else set())
        assert found in expected, f"after {changes[:count]}"
        export(folder, 3, after, overwrite=True)
        assert loaded_value(folder) == 3
    raise AssertionError("the export never ended")


def test_a_failure_removes_the_shards_that_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalBackend, key: str, data: bytes) -> None:
        raise CutError("full")

    monkeypatch.setattr(LocalBackend, "publish", refuse)
    with pytest.raises(StorageError, match="full"):
        export(tmp_path, 1, TWO)
    assert files_of(tmp_path) == set()


def test_an_index_that_cannot_be_read_may_name_any_shard(tmp_path: Path) -> None:
    export(tmp_path, 0, TWO)
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(CheckpointExistsError):
        export(tmp_path, 1, TWO)


@pytest.mark.parametrize("text", ["5GB", "500MB", " 1.5 KB ", "2tb", "0.5mb", "7.25Gb", "1KB"])
def test_sizes_mean_what_they_mean_to_huggingface_hub(text: str) -> None:
    base = pytest.importorskip("huggingface_hub.serialization._base")
    assert parse_size(text) == base.parse_size_to_int(text)


def test_sizes_in_powers_of_1024_and_plain_numbers_are_understood() -> None:
    assert [parse_size(text) for text in ("1KiB", "2 MiB", "3GiB", "1.5TiB")] == [
        1 << 10, 2 << 20, 3 << 30, 3 << 39,
    ]  # fmt: skip
    assert parse_size(12) == 12


@pytest.mark.parametrize(
    "size", ["", "5", "GB", "5 bytes", "-5GB", "5PB", "nanGB", "infGB", "1e3MB", 0, -1, True, "0GB", "0.1e"]
)
def test_other_sizes_are_refused(size: int | str) -> None:
    with pytest.raises(InvalidArgumentError, match="max_shard_size"):
        parse_size(size)


def test_nothing_to_export_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no tensor"):
        plan_export([], "5GB")


def test_other_files_are_copied_along_and_weights_and_hidden_ones_are_not(tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name, data in {
        "config.json": "{}", "tokenizer.model": "t", "1_Pooling/config.json": "p", "modeling.py": "m", "empty.txt": "",
        "pytorch_model.bin": "w", "model.safetensors.index.json": "i", "onnx/model.onnx": "o", ".cache/x": "c",
        ".gitattributes": "g", "out/old.json": "inside the destination",
    }.items():  # fmt: skip
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(data)
    hpdcp.save(weights(0), checkpoint_id=tmp_path / "dcp")
    done = offline_transform.convert_dcp_to_huggingface(
        tmp_path / "dcp", model / "out", copy_from=model, max_shard_size=TWO
    )
    copied = {"config.json", "tokenizer.model", "1_Pooling/config.json", "modeling.py", "empty.txt"}
    assert set(done.copied) == copied
    written = {str(path.relative_to(model / "out")) for path in (model / "out").rglob("*") if path.is_file()}
    assert written == {*copied, *done.files, "old.json"}
    assert (model / "out" / "1_Pooling" / "config.json").read_text() == "p"
    assert read_weights(LocalBackend(str(model / "out"))).listed_in == INDEX


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_among_the_other_files_leads_to_nothing_outside_the_folder(tmp_path: Path, inside: bool) -> None:
    """A stranger's folder may link to a private key, which would be published with the export."""
    model, key = tmp_path / "model", tmp_path / "id_ed25519"
    model.mkdir()
    key.write_text("secret")
    (model / "config.json").write_text("{}")
    (model / "notes.txt").symlink_to("config.json" if inside else key)
    hpdcp.save(weights(0), checkpoint_id=tmp_path / "dcp")

    def convert() -> offline_transform.Conversion:
        return offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "out", copy_from=model)

    if inside:
        assert set(convert().copied) == {"config.json", "notes.txt"}
        return
    with pytest.raises(CorruptCheckpointError, match=r"'notes\.txt'.*out of the folder"):
        convert()
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_nothing_and_says_what_would_be_written(tmp_path: Path) -> None:
    hpdcp.save({"model": weights(0), "step": 3}, checkpoint_id=tmp_path / "dcp")
    arguments = {"prefix": "model.", "max_shard_size": TWO}
    dry = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", dry_run=True, **arguments)
    assert not (tmp_path / "hf").exists()
    done = offline_transform.convert_dcp_to_huggingface(tmp_path / "dcp", tmp_path / "hf", **arguments)
    assert (dry.dry_run, done.dry_run) == (True, False)
    assert (dry.files, dry.tensors, dry.skipped) == (done.files, done.tensors, done.skipped)
    assert done.skipped == {"step": "a Python value"}
    into = offline_transform.convert_full_checkpoint_to_dcp(tmp_path / "hf", tmp_path / "new", dry_run=True)
    assert into.dry_run
    assert dict(into.tensors) == dict(done.tensors)
    assert not (tmp_path / "new").exists()


def test_progress_is_told_in_bytes_up_to_the_whole(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    hpdcp.save(weights(0), checkpoint_id=tmp_path / "dcp")
    offline_transform.convert_dcp_to_huggingface(
        tmp_path / "dcp", tmp_path / "hf", progress=lambda *so_far: told.append(so_far)
    )
    assert told[-1] == (120, 120)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    told.clear()
    offline_transform.convert_full_checkpoint_to_dcp(
        tmp_path / "hf", tmp_path / "dcp2", progress=lambda *so_far: told.append(so_far)
    )
    assert told[-1] == (120, 120)
