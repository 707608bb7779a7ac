"""What saves left in a folder, and which of it may be removed: never more than hpdcp can prove its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final

from hpdcp._base.backend import Backend, ByteRange, KeyInfo, checked_key
from hpdcp._base.errors import CheckpointError, CheckpointExistsError, InvalidArgumentError, StorageError
from hpdcp._base.timing import log_message
from hpdcp._comm.mailbox import clear_mailbox
from hpdcp._files import registry
from hpdcp._files.foreign import recognise_folder
from hpdcp._files.lease import SILENT_SECONDS, Holder, may_be_removed
from hpdcp._files.parallel import for_each_file
from hpdcp._files.publish import read_or_none
from hpdcp._format.checksums import HEAD_BYTES
from hpdcp._format.container import PREFIX_BYTES
from hpdcp._format.file_names import (
    LEASE,
    METADATA,
    DataFileName,
    carries_attempt,
    is_attempt,
    is_data_key,
    is_lease_key,
    is_metadata_key,
    mailbox_folder,
)
from hpdcp._format.metadata import Metadata

_REMEMBERED_SECONDS: Final = 30 * 24 * 3600
"""How long after its begin an attempt is known of which no file is seen: a job may pause before it saves again, and an
upload that it left is seen by nobody who does not ask for it."""
_MOST_SUPERSEDED: Final = 1000
"""More tries than fail in a month; of a folder in which more did, the first ones' files stay until it is removed."""


def refuse_taken(backend: Backend, keys: Collection[str], roots: Collection[str], before: bytes | None) -> None:
    """Raise if a file or a folder has one of the names `roots`.

    `keys` are those at the backend's root, and `before` the `.metadata` there.

    Raises:
        CheckpointExistsError: names what is in the way, and what to do.
    """
    taken = [root for root in sorted(roots) if root in keys or backend.list_keys(root, recursive=True)]
    if not taken:
        return
    shown = ", ".join(map(repr, taken[:5]))
    if before is not None:
        raise CheckpointExistsError(
            f"{backend.url} holds a checkpoint whose files have the names that this save would give its own ({shown}): "
            "in this layout they are fixed, so it cannot be replaced in one step. Save elsewhere, or remove it first "
            "(hpdcp rm)."
        )
    raise CheckpointExistsError(
        f"{backend.url} holds {shown}, which this save would write, and which no unfinished save of hpdcp is known to "
        "have left there. Save to another folder, or remove it first."
    )


def refuse_foreign(backend: Backend, keys: Collection[str], metadata: bytes | None) -> None:
    """Raise if `metadata`, the `.metadata` beside the files `keys`, is another program's: a save would replace it.

    Raises:
        CheckpointExistsError: names the program whose checkpoint it is.
    """
    foreign = None if metadata is None else recognise_folder(keys, metadata)
    if foreign is not None:
        raise CheckpointExistsError(
            f"{backend.url} holds {foreign.name}, whose {foreign.key} this save would replace. Save to another folder, "
            "or move those files away first."
        )


def clear_fixed_names(backend: Backend, roots: Iterable[str]) -> None:
    """Remove what an attempt that never committed made under fixed names: of a folder, what a layout puts there only,
    since whoever wrote the lease may mean harm."""
    for root in roots:
        below = [info.key for info in backend.list_keys(root, recursive=True)]
        backend.delete(sorted(registry.fixed_names([root, *below])))


def clear_mailboxes(backend: Backend, attempts: Iterable[str]) -> None:
    """Remove the messages that ended attempts left; once another has leased the folder, none of them can commit."""
    for attempt in attempts:
        folder = mailbox_folder(attempt)
        try:
            checked_key(folder)
        except InvalidArgumentError:
            continue  # whoever wrote the lease may mean harm
        clear_mailbox(backend, folder)


def removable(backend: Backend, names: Iterable[str], attempt: str | None) -> frozenset[str]:
    """Those of `names`, which a file lists as data of `attempt`, that may be removed: what a file says proves nothing.

    A name that carries the attempt is the attempt's. A plain one of an earlier version is where its first bytes name
    the attempt; so is, where the list does not say whose it is (`attempt` is None), one whose first bytes agree with
    its name. Names that a layout gives in every attempt alike count as hpdcp's. What is left of a list is logged.
    """
    listed = sorted(set(filter(may_be_removed, names)))
    sure = set(registry.fixed_names(name for name in listed if not is_data_key(name)))
    doubtful: list[DataFileName] = []
    for name in listed:
        found = DataFileName.parse(name)
        if found is not None and attempt is not None and found.attempt == attempt:
            sure.add(name)
        elif found is not None and (attempt is None or found.attempt is None):
            doubtful.append(found)
    heads = for_each_file(backend, lambda file: _attempt_in(backend, file.key), doubtful)
    for file, named in zip(doubtful, heads, strict=True):
        wanted = file.attempt or attempt or named
        if named is not None and named == wanted and is_attempt(named):
            sure.add(file.key)
    left = [name for name in listed if name not in sure]
    if left:
        log_message(
            logging.WARNING,
            f"{backend.url}: {len(left)} files are listed there as data of a save that is replaced, and neither names "
            f"nor contents prove it; they are left where they are: {', '.join(map(repr, left[:5]))}",
        )
    return frozenset(sure)


def _attempt_in(backend: Backend, key: str) -> str | None:
    """The attempt that a data file's first bytes name."""
    head = bytearray(HEAD_BYTES)
    try:
        head = head[: min(backend.size(key), HEAD_BYTES)]
        backend.read_ranges(key, [ByteRange(0, len(head))], [memoryview(head)])
    except StorageError:
        return None
    return attempt_in_header(head)


def keys_of_checkpoint(backend: Backend, keys: Iterable[str], before: bytes | None) -> frozenset[str]:
    """Every key of what is committed in the folder: what its `.metadata`, or its ranks' metadata, list."""
    owned: set[str] = set()
    documents: list[tuple[str, bytes | None]] = [(METADATA, before)]
    for key in keys:
        if key != LEASE and is_lease_key(key):
            owned.add(key)
        if key != METADATA and is_metadata_key(key):
            documents.append((key, read_or_none(backend, key)))
            owned.add(key)
    for key, data in documents:
        if data is None:
            continue
        try:
            metadata = Metadata.from_bytes(data, where=f"{backend.url}/{key}")
            owned |= removable(backend, metadata.files, metadata.settings.get("attempt", ""))
        except CheckpointError as error:
            log_message(logging.WARNING, f"{error} Its data files are left where they are.")
            owned.discard(key)
    return frozenset(owned)


def orphans(
    backend: Backend, superseded: Collection[Holder], *, keep: set[str], belongs: Callable[[str], bool]
) -> list[str]:
    """Files that superseded attempts left: at once of those that are known to be over, of others after a day's silence.

    To be called after a commit: where the store compares and replaces in one step, whatever an attempt that is over may
    still have under way is refused then. Elsewhere it may be published yet, and needs its files.
    """
    now = time.time()
    attempts = {holder.attempt for holder in superseded}
    over = {holder.attempt for holder in superseded if holder.is_over} if backend.conditional_publish else set()

    def is_left(info: KeyInfo) -> bool:
        if info.key in keep or not is_data_key(info.key) or not belongs(info.key):
            return False
        if carries_attempt(info.key, over):
            return True
        return now - info.modified >= SILENT_SECONDS and _wrote(backend, info, attempts)

    return [info.key for info in backend.list_keys() if is_left(info)]


def _wrote(backend: Backend, info: KeyInfo, attempts: Collection[str]) -> bool:
    """Whether one of the attempts wrote the file: its name says so, or its head where the name is plain."""
    if carries_attempt(info.key, attempts):
        return True
    return DataFileName.parse(info.key) is not None and _attempt_in(backend, info.key) in attempts


def still_to_clear(superseded: Iterable[Holder], keys: Iterable[str], now: float) -> tuple[Holder, ...]:
    """Those whose files or uploads may still lie about, or come yet: of which there are some, or that began lately."""
    written = {name.attempt for key in keys if (name := DataFileName.parse(key)) is not None}
    plain = None in written
    left = [
        holder
        for holder in superseded
        if holder.attempt in written or (plain and holder.process is None) or now - holder.began < _REMEMBERED_SECONDS
    ]
    return tuple(sorted(left, key=lambda holder: holder.began)[-_MOST_SUPERSEDED:])


def attempt_in_header(head: bytes | bytearray) -> str | None:
    """The attempt that a data file's first bytes name; None where they name none."""
    text = bytes(head[PREFIX_BYTES:HEAD_BYTES]).decode("utf-8", "replace")
    marker = '{"__metadata__":{"attempt":"'
    return text[len(marker) :].partition('"')[0] if text.startswith(marker) else None
