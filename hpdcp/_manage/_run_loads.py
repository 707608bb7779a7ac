"""Load a step of a run: the newest that is sound, or a given one. Rank 0 looks for it and marks that it is read."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    UnsupportedFormatError,
)
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import Exchange
from hpdcp._engine.load import find_metadata
from hpdcp._engine.verbs import load
from hpdcp._files.parallel import in_parallel
from hpdcp._files.reader import FileSystemReader
from hpdcp._manage._file_verifier import FileVerifier
from hpdcp._manage._holding import whole_step
from hpdcp._manage._marks import READING, marked
from hpdcp._manage._run_folder import Opening, RunFolder
from hpdcp._manage.step_record import StepRecord, StepState
from hpdcp._plan.planner import LoadPlanner

_DAMAGE: Final = (
    CorruptCheckpointError,
    CheckpointReplacedError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
)
"""What is wrong with one checkpoint, and not with the store or the state."""
_THREADS: Final = 4
"""Files that a rank verifies at a time."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What all loads of a run share."""

    opening: Opening
    planner: LoadPlanner | None = None
    verify: bool = False

    def reader(self, url: str) -> FileSystemReader:
        """Of one step."""
        return FileSystemReader(url, backend=self.opening.backend, storage_options=self.opening.storage_options)


@dataclass
class _Search:
    """On rank 0: which steps are left to try."""

    folder: RunFolder
    records: list[StepRecord]
    marks: contextlib.ExitStack
    """Closed with it is the mark of the step that is being read."""
    passed: dict[int, str] = field(default_factory=dict)
    """Step → why it was passed over, of those that are, or were, whole."""

    def next(self) -> str | None:
        """The location of the next one to try, which is marked as being read; None: there is none left."""
        while self.records:
            record = self.records.pop()
            if record.state is StepState.UNREADABLE:
                raise UnsupportedFormatError(record.why)
            problem = self.folder.problem(record) or enter_mark(self.folder, record.folder, self.marks)
            if not problem:
                return self.folder.url_of(record.folder)
            # What never was whole is no loss; what was, and is so no more, is not to be taken for a new run.
            if record.is_whole or record.state is StepState.DAMAGED:
                self.passed[record.step] = problem
            log_message(logging.WARNING, f"{self.folder.url_of(record.folder)} is passed over: {problem}")
        if self.passed:
            told = "; ".join(f"step {step}: {why}" for step, why in list(self.passed.items())[:5])
            raise CorruptCheckpointError(
                f"{self.folder.url} has checkpoints, but none can be loaded ({told}). Remove them, or give another "
                "location, to start anew."
            )
        return None

    def give_up(self, step: int, why: str) -> None:
        """The step that `next` named last cannot be loaded."""
        self.marks.close()
        self.passed[step] = why


def enter_mark(folder: RunFolder, name: str, marks: contextlib.ExitStack) -> str:
    """Mark a step as being read until `marks` is closed; why it cannot be read, where somebody removes it."""
    try:
        found = marks.enter_context(marked(folder.backend, READING, name))
    except StorageError as error:
        # A place where this process may not write is one where nobody prunes on its behalf either.
        log_message(logging.INFO, f"{folder.url}: that {name} is being read could not be marked: {error}")
        return ""
    if name in found.removing:
        marks.close()
        return "it is being removed"
    return ""


def load_newest(
    location: str, looking: Callable[[], RunFolder], state: Mapping[Any, Any], options: LoadOptions, exchange: Exchange
) -> int | None:
    """As `Checkpoints.load_latest`; `looking` is called on rank 0 alone."""
    searches: list[_Search] = []
    marks = contextlib.ExitStack()

    def choose() -> bytes:
        if not searches:
            folder = looking()
            searches.append(_Search(folder, folder.look(), marks))
        search = searches[0]
        url = search.next()
        return json.dumps(None if url is None else [url, search.folder.names.step(url.rpartition("/")[2])]).encode()

    with marks:
        while True:
            chosen = json.loads(exchange.broadcast("choosing a checkpoint of the run", choose))
            if chosen is None:
                return None
            url, step = chosen
            try:
                if options.verify:
                    _verify(url, options, exchange)
                load(state, storage_reader=options.reader(url), planner=options.planner)
            except _DAMAGE as error:
                # Raised on all ranks alike.
                for search in searches:
                    search.give_up(step, str(error))
                if exchange.is_coordinator:
                    log_message(logging.WARNING, f"{url} is passed over: {error}")
                continue
            return int(step)


def load_step(
    step: int, looking: Callable[[], RunFolder], state: Mapping[Any, Any], options: LoadOptions, exchange: Exchange
) -> None:
    """As `Checkpoints.load`; `looking` is called on rank 0 alone."""
    with contextlib.ExitStack() as marks:

        def find() -> bytes:
            folder = looking()
            record = whole_step(folder, step)
            problem = enter_mark(folder, record.folder, marks)
            if problem:
                raise CheckpointNotFoundError(f"{folder.url_of(record.folder)} cannot be loaded: {problem}.")
            return folder.url_of(record.folder).encode()

        url = exchange.broadcast("looking for a step of the run", find).decode()
        load(state, storage_reader=options.reader(url), planner=options.planner)


def _verify(url: str, options: LoadOptions, exchange: Exchange) -> None:
    """Compare every checksum, each rank those of some of the files.

    Raises:
        CorruptCheckpointError: on all ranks; names what is damaged.
    """
    with contextlib.closing(options.reader(url)) as reader:
        metadata, _ = find_metadata(lambda: reader, exchange)
        if metadata is None:
            return

        def mine() -> bytes:
            verifier = FileVerifier(reader.backend, metadata)
            files = range(len(metadata.storage.file_names))[exchange.rank :: exchange.world_size]
            results = in_parallel(verifier.check_file, files, threads=_THREADS)
            damages = [damage for result in results for damage in result.damages]
            return json.dumps([f"{damage.key}: {damage.problem}" for damage in damages]).encode()

        def join(answers: list[bytes]) -> bytes:
            found = [damage for answer in answers for damage in json.loads(answer)]
            if found:
                raise CorruptCheckpointError(f"{url} is damaged: {'; '.join(found[:5])}. Load an earlier checkpoint.")
            return b""

        exchange.gather_broadcast("verifying a checkpoint", mine, join)
