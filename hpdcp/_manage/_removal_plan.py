"""What in a folder is a checkpoint's, or a save's that did not finish: only what hpdcp can prove its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hpdcp._base.backend import Backend, ByteRange, KeyInfo, can_be_key
from hpdcp._base.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StorageError,
)
from hpdcp._comm.mailbox import is_message
from hpdcp._files import registry
from hpdcp._files.lease import SILENT_SECONDS, Holder, Lease
from hpdcp._files.leftovers import attempt_in_header, removable
from hpdcp._files.publish import read_or_none
from hpdcp._format.checksums import HEAD_BYTES
from hpdcp._format.file_names import (
    LEASE,
    METADATA,
    DataFileName,
    attempt_of_mailbox,
    begins_as_data,
    carries_attempt,
    is_attempt,
    is_lease_key,
    is_metadata_key,
    rank_of_metadata_key,
)
from hpdcp._format.metadata import Metadata

REMOVAL: Final = "removal-"
"""Begins the attempt in the lease of a removal: it writes nothing, so nobody needs to wait for it."""


@dataclass(frozen=True)
class Removal:
    """What removing a checkpoint removes, or has removed."""

    url: str
    metadata: tuple[str, ...]
    """What makes the checkpoint load, and goes first; empty where a save did not finish."""
    data: tuple[str, ...]
    """Data files and messages, sorted."""
    lease: bool
    """Whether there is a lease to remove, `.attempt`; those of single ranks are among the data."""
    nbytes: int
    """Of all of them together."""
    foreign: tuple[str, ...]
    """Files beside them, which stay. Sub-folders are not looked into, and stay as well."""
    attempts: tuple[str, ...]
    """Whose files these are."""
    dry_run: bool = False
    folder_removed: bool = False
    """Whether the folder itself was removed: only a local one that was left empty is."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Everything that goes, in the order in which it goes."""
        return (*self.metadata, *self.data, *([LEASE] if self.lease else []))

    @property
    def claim(self) -> bool:
        """The earlier name of `lease`."""
        return self.lease


@dataclass
class FolderContents:
    """What lies in the folder, and whose it is."""

    backend: Backend
    infos: Mapping[str, KeyInfo]
    documents: dict[str, bytes] = field(default_factory=dict)
    """`.metadata` or each `{rank}.metadata`, as they were read."""
    listed: dict[str, int] = field(default_factory=dict)
    """Data files that they, or the lease, list, and their recorded sizes, 0 where there is none."""
    published: dict[str, str] = field(default_factory=dict)
    """The attempt that each of them names."""
    leases: dict[str, Lease] = field(default_factory=dict)
    """By key, those that can be read: of the folder, and of ranks that save each for itself."""
    lease_bytes: bytes | None = None
    """The folder's."""
    attempts: set[str] = field(default_factory=set)
    """Those that metadata, leases or, without a lease, files name."""
    unleased: dict[str, float] = field(default_factory=dict)
    """Attempts that only a mailbox names, and when its last message came."""
    messages: dict[str, int] = field(default_factory=dict)
    """Messages of these attempts, and their sizes."""

    @classmethod
    def look(cls, backend: Backend, *, force: bool) -> FolderContents:
        """List the folder and read what says whose its files are; `force`: also where the metadata is damaged.

        Raises:
            CheckpointNotFoundError: no checkpoint is there, nor anything of a save.
            CorruptCheckpointError, UnsupportedFormatError: the metadata cannot be read.
        """
        found = cls(backend, {info.key: info for info in backend.list_keys()})
        found._read_metadata(force=force)
        for key in filter(is_lease_key, found.infos):
            found._read_lease(key)
        found.attempts |= set(found.published.values())
        if not found.leases and METADATA not in found.infos:
            # In earlier versions ranks that saved each for itself had no lease: a file that names its attempt itself is
            # all there is.
            found.attempts |= set(found._unlisted().values())
        found._read_mailboxes()
        if not found.documents and found.lease_bytes is None and not found.attempts:
            raise CheckpointNotFoundError(_nothing_there(backend, list(found.infos)))
        return found

    def _read_mailboxes(self) -> None:
        """Messages of attempts that are known, and of those that ended before they leased the folder."""
        for folder in self.backend.list_folders():
            attempt = attempt_of_mailbox(folder)
            messages = self.backend.list_keys(folder) if attempt is not None else []
            if attempt is not None and attempt not in self.attempts:
                messages = [info for info in messages if is_message(self.backend, info.key)]
            if attempt is None or not messages:
                continue
            if attempt not in self.attempts:
                self.unleased[attempt] = max(info.modified for info in messages)
                self.attempts.add(attempt)
            self.messages |= {info.key: info.size for info in messages}

    def _read_metadata(self, *, force: bool) -> None:
        for key in self.infos:
            if not is_metadata_key(key):
                continue
            data = read_or_none(self.backend, key)
            if data is None:
                continue
            where = f"{self.backend.url}/{key}"
            try:
                metadata = Metadata.from_bytes(data, where=where)
            except CorruptCheckpointError as error:
                if force and LEASE in self.infos:
                    self.documents[key] = data
                    continue
                raise CorruptCheckpointError(
                    f"{where} is no metadata of hpdcp, or damaged, so it does not say which files are the checkpoint's "
                    f"({error}). Nothing was removed. Remove the files by hand, if they are what you think"
                    + (", or pass force: what the lease names goes, files that only the metadata lists stay."
                       if LEASE in self.infos else ".")
                ) from error  # fmt: skip
            self.documents[key] = data
            attempt = metadata.settings.get("attempt", "")
            listed = removable(self.backend, _data_files(metadata.files), attempt)
            self.listed |= {name: metadata.files[name] for name in listed}
            if is_attempt(attempt):
                self.published[key] = attempt

    def _read_lease(self, key: str) -> None:
        data = read_or_none(self.backend, key)
        if key == LEASE:
            self.lease_bytes = data
        lease = None if data is None else Lease.from_bytes(data)
        if lease is None:
            return
        self.leases[key] = lease
        self.attempts |= {holder.attempt for holder in self.holders() if is_attempt(holder.attempt)}
        # `replacing` is what an attempt means to remove once it has committed, or what is committed still.
        kept = [key for key, _ in lease.replaced]
        leased = _data_files([*kept, *lease.replacing, *self._made_by(lease)])
        there = [key for key in leased if key not in self.listed and (key in self.infos or "/" in key)]
        for key in removable(self.backend, there, None):
            self.listed.setdefault(key, 0)

    def holders(self) -> Iterator[Holder]:
        """Every attempt that a lease names, with what tells whether it is over."""
        for lease in self.leases.values():
            yield from (*lease.superseded, lease.holder)

    def _made_by(self, lease: Lease) -> Iterator[str]:
        """What an attempt that has not committed made under names that are the same in every attempt."""
        for root in () if lease.attempt in self.published.values() else lease.made:
            below = [info.key for info in self.backend.list_keys(root, recursive=True)]
            yield from registry.fixed_names([*below, *({root} & self.infos.keys())])

    def _unlisted(self) -> dict[str, str]:
        """Files that nothing lists but that are called as data files are and name an attempt in their header: which."""
        infos = [info for key, info in self.infos.items() if key not in self.listed and DataFileName.parse(key)]
        named = {info.key: self._attempt_of(info) for info in infos}
        return {key: attempt for key, attempt in named.items() if attempt is not None and is_attempt(attempt)}

    def _attempt_of(self, info: KeyInfo) -> str | None:
        head = bytearray(min(info.size, HEAD_BYTES))
        try:
            self.backend.read_ranges(info.key, [ByteRange(0, len(head))], [memoryview(head)])
        except (StorageError, CheckpointError):
            return None
        return attempt_in_header(head)

    def _belongs(self, info: KeyInfo) -> bool:
        """Whether a file that nothing lists is one of the attempts'."""
        found = DataFileName.parse(info.key)
        if found is None:
            return False
        if found.attempt is not None:
            return self.names_attempt(info.key)
        return self._attempt_of(info) in self.attempts

    def names_attempt(self, key: str) -> bool:
        """Whether a data file's name carries the id of one of the attempts."""
        return carries_attempt(key, self.attempts)

    def plan(self) -> Removal:
        """What is to be removed, and what stays."""
        # What other layouts put into sub-folders was not listed here: that one of them is missing does no harm.
        own = {key for key in self.listed if key in self.infos or "/" in key}
        own |= {key for key, info in self.infos.items() if key not in own and self._belongs(info)}
        own |= self.leases.keys() - {LEASE}
        has_lease = self.lease_bytes is not None
        gone = {*own, *self.documents, *self.messages, *([LEASE] if has_lease else [])}
        sizes = self.listed | {key: info.size for key, info in self.infos.items()} | self.messages
        return Removal(
            url=self.backend.url,
            metadata=tuple(sorted(self.documents, key=_removal_order)),
            data=tuple(sorted(own | set(self.messages))),
            lease=has_lease,
            nbytes=sum(sizes.get(key, 0) for key in gone),
            foreign=tuple(sorted(key for key in self.infos if key not in gone)),
            attempts=tuple(sorted(self.attempts)),
        )

    def refuse_if_in_progress(self) -> None:
        """Raise where an attempt that has not committed may still be at work."""
        # Ranks of one save share its attempt, but each publishes for itself.
        unpublished = {
            key: lease.holder
            for key, lease in self.leases.items()
            if self.published.get(key.removesuffix(LEASE) + METADATA) != lease.attempt
        }
        at_work = [
            holder for holder in unpublished.values() if not holder.attempt.startswith(REMOVAL) and not holder.is_over
        ]
        if not self.leases:
            # Of an earlier version, each rank for itself: an attempt that wrote data and that no metadata names.
            at_work = [Holder(attempt, 0.0) for attempt in sorted(self.attempts - set(self.published.values()))]
        at_work += [Holder(attempt, last) for attempt, last in self.unleased.items()]
        if not at_work:
            return
        last = max(holder.began for holder in at_work)
        times = [self.infos[key].modified for key in (*_data_files(self.infos), *filter(is_lease_key, self.infos))]
        silent = time.time() - max([last, *times])
        if silent < SILENT_SECONDS:
            raise CheckpointExistsError(
                f"{self.backend.url}: attempt {at_work[0].attempt} began to save here, has not committed, and was last "
                f"seen {_ago(silent)} ago: it may be in progress. Wait for it; or, if no job saves here any more, "
                "remove it with force (hpdcp rm --force), after which that attempt publishes nothing."
            )


def _removal_order(key: str) -> tuple[bool, bool, int, str]:
    """What ranks keep of an earlier save goes before what replaced it: else it would load again half-way."""
    rank = rank_of_metadata_key(key)
    return key != METADATA, rank is not None, rank or 0, key


def _data_files(keys: Iterable[str]) -> list[str]:
    """Those that hpdcp may have given data files as names: what lists them may have been written to do harm."""
    possible = [key for key in keys if can_be_key(key)]
    fixed = fixed_names(possible)
    return [key for key in possible if begins_as_data(key) or key in fixed]


def fixed_names(keys: Iterable[str]) -> frozenset[str]:
    """Those that a layout gives files in every attempt alike."""
    return registry.fixed_names(key for key in keys if not begins_as_data(key))


def _nothing_there(backend: Backend, keys: Sequence[str]) -> str:
    if not keys:
        what = "it is empty, or not there"
    elif any(key.endswith((".safetensors", ".safetensors.index.json")) for key in keys):
        what = "it holds weights that hpdcp did not save, which stay"
    else:
        what = f"of the {len(keys)} files in it none is hpdcp's"
    return f"{backend.url} holds no checkpoint: {what}. Is the path right?"


def _ago(seconds: float) -> str:
    minutes = max(0, round(seconds / 60))
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
