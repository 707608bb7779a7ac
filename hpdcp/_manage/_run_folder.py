"""The steps of one run, as listings and the heads of metadata files tell of them.

For a thousand steps that is one listing of folders, one of marks, and a small read of each `.metadata`: never a
request for every file, of which there may be thousands in each step.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hpdcp._base.backend import Backend, ByteRange
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    KeyNotFoundError,
    KeyTruncatedError,
    UnsupportedFormatError,
)
from hpdcp._files import registry
from hpdcp._files.lease import SILENT_SECONDS, Lease
from hpdcp._files.parallel import for_each_file
from hpdcp._files.publish import read_or_none
from hpdcp._format.container import PREFIX_BYTES
from hpdcp._format.file_names import LEASE, METADATA, begins_as_data, rank_of_metadata_key
from hpdcp._format.metadata import Metadata, check_format
from hpdcp._format.signatures import is_pickle
from hpdcp._manage._marks import MARKS, Marks
from hpdcp._manage._removal_plan import REMOVAL
from hpdcp._manage._step_facts import STEP, StepFacts
from hpdcp._manage._step_names import StepNames
from hpdcp._manage.step_record import StepRecord, StepState

_HEAD_BYTES: Final = 32 << 10
"""Of a `.metadata`, in which its settings are: some 20 columns, and at most 8 KiB of a step's facts, escaped."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a run, and each of its steps, is opened: as `FileSystemReader` takes it."""

    backend: str | None = None
    storage_options: Mapping[str, Any] | None = None

    def open(self, url: str) -> Backend:
        """The byte store at `url`."""
        return registry.open_backend(url, name=self.backend, storage_options=self.storage_options)


@contextlib.contextmanager
def open_run(location: str | Path, name: str | None, opening: Opening) -> Iterator[RunFolder]:
    """The steps of a run, from one process alone.

    Args:
        name: how they are called; None: as most folders with a number are called there.

    Raises:
        CheckpointNotFoundError: no folder there is called so.
    """
    with opening.open(registry.resolve_checkpoint_id(location)) as backend:
        folders = backend.list_folders()
        names = StepNames.of(name, folders)
        if not names.steps(folders):
            raise CheckpointNotFoundError(
                f"{backend.url} has no folder called as {names.pattern!r}. Is the path right?"
            )
        yield RunFolder(backend, names)


class RunFolder:
    """Looks at the steps below one location."""

    def __init__(self, backend: Backend, names: StepNames) -> None:
        self.backend = backend
        self.names = names

    @property
    def url(self) -> str:
        return self.backend.url

    def url_of(self, folder: str) -> str:
        """The location of a step."""
        return f"{self.url.rstrip('/')}/{folder}"

    def look(self) -> list[StepRecord]:
        """The steps, ascending; nothing where the location is not there yet."""
        try:
            folders = self.backend.list_folders()
        except CheckpointNotFoundError:
            return []
        steps = self.names.steps(folders)
        read = for_each_file(self.backend, lambda pair: self._read(*pair), list(steps.items()))
        marks = Marks.look(self.backend) if MARKS in folders else Marks()
        return [
            replace(
                record,
                held=record.folder in marks.held,
                being_read=record.folder in marks.reading,
                being_removed=record.folder in marks.removing,
            )
            for record in read
            if record is not None
        ]

    def is_still_whole(self, record: StepRecord) -> bool:
        """Whether the step is there as it was, by one request."""
        now = self._read(record.step, record.folder)
        return now is not None and now.is_whole and now.attempt == record.attempt

    def problem(self, record: StepRecord) -> str:
        """Why the step would not load, from its metadata and one listing; empty where nothing tells against it."""
        if record.being_removed:
            return "it is being removed"
        if not record.is_whole:
            return record.why
        key = f"{record.folder}/{METADATA}"
        data = read_or_none(self.backend, key)
        if data is None:
            return "it has just been removed"
        try:
            files = Metadata.from_bytes(data, where=f"{self.url}/{key}").files
        except CorruptCheckpointError as error:
            return str(error)
        below = any("/" in name for name in files)
        sizes = {
            info.key.removeprefix(f"{record.folder}/"): info.size
            for info in self.backend.list_keys(record.folder, recursive=below)
        }
        for name, size in files.items():
            if name not in sizes:
                return f"its file {name!r} is missing"
            if sizes[name] != size:
                return f"its file {name!r} is {sizes[name]} bytes long, recorded were {size}"
        return ""

    def _read(self, step: int, folder: str) -> StepRecord | None:
        """What is in a step's folder; None where nothing is, or where it is a folder no longer."""
        try:
            settings = self._settings(f"{folder}/{METADATA}")
        except CorruptCheckpointError as error:
            return StepRecord(step, folder, StepState.DAMAGED, str(error))
        except UnsupportedFormatError as error:
            return StepRecord(step, folder, StepState.UNREADABLE, str(error))
        if settings is None:
            return self._read_unfinished(step, folder)
        if not settings:
            return StepRecord(step, folder, StepState.FOREIGN, "another program saved a checkpoint there")
        facts = StepFacts.from_settings(settings)
        if facts is None and STEP in settings:
            return StepRecord(step, folder, StepState.DAMAGED, f"what it records as {STEP!r} cannot be read")
        if facts is not None and facts.step != step:
            return StepRecord(
                step, folder, StepState.FOREIGN, f"it records that it is step {facts.step}: was the folder renamed?"
            )
        ranks = settings.get("world_size", "")
        found = StepRecord(
            step,
            folder,
            StepState.WHOLE,
            attempt=settings.get("attempt", ""),
            ranks=int(ranks) if ranks.isascii() and ranks.isdigit() and len(ranks) < 10 else 0,
        )
        if facts is None:
            return found
        return replace(found, saved_at=facts.saved_at, metrics=dict(facts.metrics), user=facts.user, run=facts.run)

    def _settings(self, key: str) -> Mapping[str, str] | None:
        """The settings of a metadata file, from its first bytes; None where there is no such file, and none of them
        where it is another program's."""
        head = bytearray(_HEAD_BYTES)
        where = f"{self.url}/{key}"
        try:
            self.backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
            data = bytes(head)
        except KeyTruncatedError:
            data = read_or_none(self.backend, key) or b""
        except KeyNotFoundError:
            return None
        if is_pickle(data):
            return {}
        length = int.from_bytes(data[:PREFIX_BYTES], "little")
        if PREFIX_BYTES + length > len(data) == _HEAD_BYTES:
            data = read_or_none(self.backend, key) or b""
        try:
            settings = json.loads(data[PREFIX_BYTES : PREFIX_BYTES + length])["__metadata__"]
            found = {str(name): str(value) for name, value in settings.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CorruptCheckpointError(f"{where} is damaged: its header cannot be read.") from None
        check_format(found, where=where)
        return found

    def _read_unfinished(self, step: int, folder: str) -> StepRecord | None:
        infos = {info.key.removeprefix(f"{folder}/"): info for info in self.backend.list_keys(folder)}
        if METADATA in infos:
            return StepRecord(step, folder, StepState.SAVING, "its save is committing just now")
        data = [key for key in infos if begins_as_data(key)]
        if any(rank_of_metadata_key(key) is not None for key in infos):
            why = "ranks saved it each for itself, which hpdcp.load reads and no run does"
            return StepRecord(step, folder, StepState.FOREIGN, why)
        if LEASE not in infos and not data:
            return StepRecord(step, folder, StepState.FOREIGN, "no checkpoint is in it") if infos else None
        lease = Lease.from_bytes(read_or_none(self.backend, f"{folder}/{LEASE}") or b"")
        if lease is not None and lease.attempt.startswith(REMOVAL):
            return StepRecord(step, folder, StepState.TORN, "its removal was cut off")
        if lease is not None and lease.holder.is_over:
            return StepRecord(step, folder, StepState.TORN, "its save ended before it committed")
        last = max(info.modified for key, info in infos.items() if key == LEASE or key in data)
        silent = time.time() - last
        if abs(silent) < SILENT_SECONDS:
            why = f"a save began here, was last seen {max(0.0, silent) / 60:.0f} min ago, and has not finished"
            return StepRecord(step, folder, StepState.SAVING, why)
        return StepRecord(step, folder, StepState.TORN, "the save did not finish")
