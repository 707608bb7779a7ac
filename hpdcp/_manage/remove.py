"""Remove a checkpoint and nothing else: the library behind `hpdcp rm`.

What goes is what hpdcp can prove its own: the files that the metadata lists, files of attempts that the lease or the
metadata names, their messages, the metadata and the lease. A name alone proves nothing, so all other files stay.

    1. a lease of this removal, which lists the files    a save in progress here finds it and publishes nothing;
                                                         a removal that is cut off here is taken up by the next one
    2. `.metadata` or every `{rank}.metadata` goes       from here on nothing loads
    3. data files and messages go, the lease goes last
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpdcp._base.arguments import require_flags
from hpdcp._base.backend import Backend
from hpdcp._base.errors import StorageError, SupersededError
from hpdcp._base.saves_in_flight import wait_for_saves_to
from hpdcp._files import registry
from hpdcp._files.lease import SILENT_SECONDS, Holder, Lease
from hpdcp._files.publish import read_or_none
from hpdcp._format.file_names import LEASE
from hpdcp._manage._removal_plan import REMOVAL, FolderContents, Removal, fixed_names

__all__ = ["Removal", "remove_checkpoint"]


def remove_checkpoint(
    checkpoint_id: str | Path,
    *,
    backend: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    force: bool = False,
    dry_run: bool = False,
    confirm: Callable[[Removal], bool] | None = None,
) -> Removal:
    """Remove the checkpoint, or what a save that did not finish left, and keep every other file.

    Args:
        checkpoint_id: folder or URL.
        backend, storage_options: as `FileSystemReader` takes them.
        force: also while a save may be in progress there, which then publishes nothing, unless its ranks save each
            for itself: those look at no lease; and where the metadata is damaged, so that files which only it lists
            stay.
        dry_run: change nothing.
        confirm: called with what is to be removed, before anything is; nothing is when it answers False.

    Returns:
        What was removed; with `dry_run`, or not confirmed, what would be (`dry_run` is then True).

    Raises:
        CheckpointNotFoundError: no checkpoint is there, nor anything of a save.
        CheckpointExistsError: a save may be in progress there; nothing was changed.
        CorruptCheckpointError, UnsupportedFormatError: the metadata cannot be read; nothing was changed.
        SupersededError: another save took the lease or changed the folder meanwhile; says what was removed.
        StorageError: the store failed; nothing loads if anything was removed, and a second call removes the rest.
    """
    require_flags(force=force, dry_run=dry_run)
    url = registry.resolve_checkpoint_id(checkpoint_id)
    with closing(registry.open_backend(url, name=backend, storage_options=storage_options)) as opened:
        wait_for_saves_to(opened.url)
        contents = FolderContents.look(opened, force=force)
        planned = contents.plan()
        if not force:
            contents.refuse_if_in_progress()
        if dry_run or (confirm is not None and not confirm(planned)):
            return replace(planned, dry_run=True)
        _Execution(opened, contents, planned).run()
        with contextlib.suppress(StorageError):
            # Temporary files only take room, and those that live writers may be at stay.
            opened.remove_leftovers(silent_for=0 if force else SILENT_SECONDS, belongs=contents.names_attempt)
        return replace(planned, folder_removed=_remove_empty_folder(url))


class _Execution:
    """One removal, step by step."""

    def __init__(self, backend: Backend, contents: FolderContents, planned: Removal) -> None:
        self._backend = backend
        self._contents = contents
        self._planned = planned

    def run(self) -> None:
        backend, planned = self._backend, self._planned
        now = time.time()
        ours = Lease(
            Holder(REMOVAL + uuid.uuid4().hex[:16], now),
            superseded=tuple(self._contents.holders()),
            replaced=tuple((key, now) for key in planned.data if key not in self._contents.messages),
            made=tuple(sorted({key.partition("/")[0] for key in fixed_names(planned.data)})),
        ).to_bytes()
        if read_or_none(backend, LEASE) != self._contents.lease_bytes:
            raise self._overtaken("took the lease", "Nothing was removed.")
        backend.publish(LEASE, ours)
        for key, data in self._contents.documents.items():
            if read_or_none(backend, key) not in (data, None):
                raise self._overtaken(f"published {key}", "Nothing was removed.")
        backend.delete(planned.metadata)
        backend.delete(planned.data)
        if read_or_none(backend, LEASE) != ours:
            raise self._overtaken("took the lease", "The old checkpoint was removed; what is new there stays.")
        backend.delete([LEASE])

    def _overtaken(self, what: str, state: str) -> SupersededError:
        return SupersededError(f"{self._backend.url}: meanwhile another save {what}. {state}")


def _remove_empty_folder(url: str) -> bool:
    if "://" in url:
        return False
    try:
        os.rmdir(url)  # refuses where anything is left
    except OSError:
        return False
    return True
