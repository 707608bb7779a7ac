"""Whether a checkpoint's bytes are those that were saved: the data behind `hpdcp verify`; prints nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpdcp._base.backend import Backend
from hpdcp._base.errors import NotSupportedError
from hpdcp._files.lease import read_lease
from hpdcp._files.reader import FileSystemReader
from hpdcp._format.file_names import (
    METADATA,
    attempt_of_kept_key,
    attempt_of_mailbox,
    carries_attempt,
    is_data_key,
    is_metadata_key,
)
from hpdcp._format.metadata import Metadata
from hpdcp._manage._file_verifier import Damage, FileResult, FileVerifier, layout_of
from hpdcp._manage._opening import FoundMetadata, open_checkpoint

__all__ = ["Damage", "VerifyReport", "verify_checkpoint"]

_THREADS: Final = 4
_PROGRESS_SECONDS: Final = 0.1
"""Between two calls of `on_progress` while no file ends: one file may be all there is."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_checkpoint` found."""

    url: str
    files: int
    nbytes: int
    """Bytes of tensors and values that were read and compared."""
    blocks: int
    """Checksums compared."""
    seconds: float
    damages: tuple[Damage, ...] = ()
    """Empty for a sound checkpoint; by file and offset."""
    orphans: tuple[str, ...] = ()
    """Files that a save left here and that this checkpoint does not use; harmless, and removed by a later save."""

    @property
    def is_sound(self) -> bool:
        """Whether every byte that was saved is there, unchanged."""
        return not self.damages


def verify_checkpoint(
    checkpoint_id: str | Path,
    *,
    reader: FileSystemReader | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read every stored byte and compare it with its checksum; nothing is changed.

    Checks of each data file that it is there, as long as recorded, begins as it was committed, and says in its header
    where its contents lie; and of each block of each tensor and value that its checksum fits. Damage is reported, not
    raised. Of what torch.distributed.checkpoint saved, the CRCs in its own files are compared.

    Args:
        checkpoint_id: folder or URL.
        reader: in place of the configured one.
        on_progress: called with (bytes compared so far, bytes in all), from the calling thread.

    Raises:
        NotSupportedError: files of another origin, without checksums.
        CheckpointError, StorageError: the metadata cannot be read, or the store fails in another way than by lacking
            a file.
    """
    began = time.perf_counter()
    with open_checkpoint(checkpoint_id, reader) as (backend, found):
        metadata = found.metadata
        layout = layout_of(metadata)
        if not metadata.has_checksums and not (layout is not None and layout.checks_extents):
            raise NotSupportedError(
                f"{backend.url} records no checksums to compare its bytes with. `hpdcp inspect` shows that its headers "
                "fit its files; for more, save it with hpdcp."
            )
        result = _verify_files(backend, metadata, on_progress)
        return VerifyReport(
            url=backend.url,
            files=len(metadata.storage.file_names),
            nbytes=result.nbytes,
            blocks=result.blocks,
            seconds=time.perf_counter() - began,
            damages=tuple(sorted(result.damages, key=lambda damage: (damage.key, damage.offset or 0))),
            orphans=tuple(_orphans(backend, found)),
        )


def _verify_files(backend: Backend, metadata: Metadata, on_progress: Callable[[int, int], None] | None) -> FileResult:
    """All files, a few at a time."""
    verifier = FileVerifier(backend, metadata)
    total = int(metadata.storage.length.sum())
    found = FileResult()
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "hpdcp-verify") as pool:
        waiting = {pool.submit(verifier.check_file, file) for file in range(len(metadata.storage.file_names))}
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    found.add(future.result())
                if on_progress is not None:
                    on_progress(verifier.compared if waiting else found.nbytes, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


def _orphans(backend: Backend, found: FoundMetadata) -> Iterator[str]:
    used = set(found.metadata.files)
    lease = read_lease(backend)
    if lease is not None:
        used.update(key for key, _ in lease.replaced)
    infos = backend.list_keys()
    # What ranks keep until all have replaced it; the next save removes it.
    kept = {attempt for info in infos if (attempt := attempt_of_kept_key(info.key)) is not None}
    for info in infos:
        stale = is_metadata_key(info.key) and info.key != METADATA and not found.by_rank
        if stale or (is_data_key(info.key) and info.key not in used and not carries_attempt(info.key, kept)):
            yield info.key
    for folder in backend.list_folders():
        if attempt_of_mailbox(folder) is not None:
            yield from (info.key for info in backend.list_keys(folder))
