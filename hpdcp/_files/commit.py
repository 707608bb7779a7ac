"""One try at one save of a folder: claim it, publish it in one step, clean up after it.

Two small files speak for a folder. `.metadata` says what is committed; `.attempt` says who last began to save there
and which attempts it left behind. No data file is opened for writing twice, so whatever was committed stays as it is
until another `.metadata` has taken its place.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hpdcp._base.backend import Backend, ByteRange, KeyInfo, checked_key
from hpdcp._base.errors import (
    CheckpointError,
    CheckpointExistsError,
    CommitUncertainError,
    InvalidArgumentError,
    KeyNotFoundError,
    StorageError,
    SupersededError,
)
from hpdcp._base.timing import log_message
from hpdcp._comm.mailbox import clear_mailbox
from hpdcp._files import registry
from hpdcp._format.checksums import HEAD_BYTES
from hpdcp._format.container import PREFIX_BYTES
from hpdcp._format.file_names import (
    LEASE,
    METADATA,
    carries_attempt,
    is_data_key,
    mailbox_folder,
    rank_of_metadata_key,
)
from hpdcp._format.metadata import Metadata

SILENT_SECONDS: Final = 24 * 3600
"""How long a superseded attempt must have written nothing before its files are removed: its process may still live."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What `.attempt` says."""

    attempt: str
    plain: bool
    """Whether the attempt was free to take the plain file names."""
    began: float
    """Seconds since the epoch, by the coordinator's clock."""
    superseded: tuple[tuple[str, bool], ...] = ()
    """(attempt, plain) of earlier tries that never committed and whose files may still lie about."""
    replaced: tuple[tuple[str, float], ...] = ()
    """(key, since) of files a commit replaced and that `keep_replaced_for` still keeps."""
    replacing: tuple[str, ...] = ()
    """Keys of the checkpoint found when the attempt began: one that is ended between its commit and the removal of
    these leaves them to the next."""
    made: tuple[str, ...] = ()
    """Files and folders at the root that the attempt makes under fixed names, and that were not there before."""

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "attempt": self.attempt,
                "plain": self.plain,
                "began": self.began,
                "superseded": self.superseded,
                "replaced": self.replaced,
                "replacing": self.replacing,
                **({"made": self.made} if self.made else {}),
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Claim | None:
        """None when it cannot be read: then nothing is known of earlier attempts, and nothing of theirs is removed."""
        try:
            fields = json.loads(data)
            return cls(
                str(fields["attempt"]),
                bool(fields["plain"]),
                float(fields["began"]),
                tuple((str(attempt), bool(plain)) for attempt, plain in fields["superseded"]),
                tuple((str(key), float(since)) for key, since in fields["replaced"] if _may_be_data(str(key))),
                tuple(key for key in map(str, fields.get("replacing", ())) if _may_be_data(key)),
                tuple(name for name in map(str, fields.get("made", ())) if _may_be_data(name) and "/" not in name),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


@dataclass(slots=True)
class Attempt:
    """The coordinator's side of one save of one folder."""

    backend: Backend
    claim: Claim
    before: bytes | None
    """`.metadata` as it was found; None where there was none."""
    replaced_keys: frozenset[str] = field(default_factory=frozenset)
    """What the checkpoint found in the folder consists of."""

    @classmethod
    def begin(cls, backend: Backend, attempt: str, roots: Collection[str] = ()) -> Attempt:
        """Look once at the folder, decide which names may be taken, and claim it.

        Args:
            roots: names at the root that the save takes, of files and of folders, whatever its attempt.

        Raises:
            CheckpointExistsError: a name of `roots` is taken; nothing was changed.
        """
        backend.prepare()
        keys = {info.key for info in backend.list_keys()}
        before = read_or_none(backend, METADATA) if METADATA in keys else None
        earlier = _read_claim(backend) if LEASE in keys else None
        committed = _settings_of(before).get("attempt")
        # A `.metadata` that cannot be read may be the claim's own.
        readable = before is None or committed is not None
        rests = earlier.made if earlier and earlier.attempt != committed and readable else ()
        refuse_taken(backend, keys, set(roots) - set(rests), before)
        _clear_rests(backend, rests)
        refuse_taken(backend, keys - set(rests), set(roots) & set(rests), before)
        superseded = dict(earlier.superseded) if earlier else {}
        if earlier and earlier.attempt != committed:
            superseded[earlier.attempt] = earlier.plain
        _clear_mailboxes(backend, {*superseded, *([earlier.attempt] if earlier else [])} - {attempt})
        superseded.pop(committed or "", None)
        current = _keys_of_checkpoint(backend, keys, before)
        now = time.time()
        replaced = dict(earlier.replaced) if earlier else {}
        if earlier and earlier.attempt == committed:
            left = (key for key in earlier.replacing if key in keys and key not in current)
            replaced = dict.fromkeys(left, now) | replaced
        claim = Claim(
            attempt,
            plain=not keys and backend.conditional_create,
            began=now,
            superseded=tuple(superseded.items()),
            replaced=tuple(replaced.items()),
            replacing=tuple(sorted(current)),
            made=tuple(sorted(roots)),
        )
        backend.publish(LEASE, claim.to_bytes())
        return cls(backend, claim, before, current)

    def commit(self, metadata: Metadata, *, keep_replaced_for: float) -> None:
        """Publish `metadata`; the step after which the new checkpoint is the one that loads.

        Raises:
            SupersededError: another attempt claimed the folder or committed since `begin`; nothing was published.
        """
        if not self.is_current:
            raise self.superseded("another attempt claimed it")
        if read_or_none(self.backend, METADATA) != self.before:
            raise self.superseded("another attempt committed there")
        publish_or_doubt(self.backend, METADATA, metadata.to_bytes())
        try:
            self._clean_up(metadata, keep_replaced_for)
        except Exception as error:  # noqa: BLE001  # an error from here would have the published files removed
            # The checkpoint is whole and published; what could not be removed only takes room.
            log_message(logging.WARNING, f"{self.backend.url}: old files could not be removed: {error}")

    @property
    def plain(self) -> bool:
        """Whether data files may take plain names."""
        return self.claim.plain

    def facts(self, metadata: Metadata) -> Mapping[str, str]:
        """What the published metadata says of this save."""
        facts = {"attempt": self.claim.attempt}
        if "world_size" in metadata.settings:
            # A planner that writes another save's state again says how many ranks that one had.
            facts["world_size"] = metadata.settings["world_size"]
        return facts

    def check_fixed_names(self) -> None:
        """Before files with fixed names are added for the whole: they may be another attempt's by now.

        Raises:
            SupersededError: another attempt claimed the folder since `begin`.
        """
        if self.claim.made and not self.is_current:
            raise self.superseded("another attempt claimed it")

    @property
    def is_current(self) -> bool:
        """Whether no other attempt has claimed the folder since."""
        return claimed_attempt(self.backend) == self.claim.attempt

    def superseded(self, why: str) -> SupersededError:
        """The error of an attempt that is not the last any more."""
        return SupersededError(
            f"{self.backend.url}: while this save ran, {why}. This save published nothing and removes its own files; "
            "make sure that only one job saves to a folder at a time."
        )

    def _clean_up(self, metadata: Metadata, keep_replaced_for: float) -> None:
        now = time.time()
        ours = set(metadata.files)
        waiting = {key: since for key, since in self.claim.replaced if key not in ours}
        waiting |= dict.fromkeys(self.replaced_keys - ours, now)
        due = [key for key, since in waiting.items() if now - since >= keep_replaced_for]
        self.backend.delete(due)
        kept = tuple((key, since) for key, since in waiting.items() if key not in set(due))
        if self.claim.superseded:
            self.backend.delete(_orphans(self.backend, self.claim.superseded, keep=ours | {key for key, _ in kept}))
        if kept != self.claim.replaced:
            self.backend.publish(LEASE, replace(self.claim, replaced=kept).to_bytes())
        dead = [attempt for attempt, _ in self.claim.superseded]
        self.backend.remove_leftovers(silent_for=SILENT_SECONDS, belongs=lambda key: carries_attempt(key, dead))


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


def _clear_rests(backend: Backend, rests: Iterable[str]) -> None:
    """Remove what an attempt that never committed made under fixed names: of a folder, what a layout puts there only,
    since whoever wrote the claim may mean harm."""
    for root in rests:
        below = [info.key for info in backend.list_keys(root, recursive=True)]
        backend.delete(sorted(registry.fixed_names([root, *below])))


def publish_or_doubt(backend: Backend, key: str, data: bytes) -> None:
    """Publish `data`; an error means that the old bytes are there and stay, unless it is a CommitUncertainError."""
    try:
        backend.publish(key, data)
    except StorageError as error:
        try:
            if read_or_none(backend, key) != data and not error.may_be_done:
                raise
        except StorageError as second:
            if second is error:
                raise
        raise CommitUncertainError(
            f"{backend.url}: publishing {key} failed half-way ({error}). The new checkpoint may be in place and not "
            "yet safe against a power failure, or appear later; none of its files were removed. Save again once the "
            "storage is sound."
        ) from error


def read_or_none(backend: Backend, key: str) -> bytes | None:
    """The key's bytes; None when it is not there."""
    try:
        return backend.read(key)
    except KeyNotFoundError:
        return None


def attempt_in_header(head: bytes | bytearray) -> str | None:
    """The attempt that a data file's first bytes name; None where they name none."""
    text = bytes(head[PREFIX_BYTES:HEAD_BYTES]).decode("utf-8", "replace")
    marker = '{"__metadata__":{"attempt":"'
    return text[len(marker) :].partition('"')[0] if text.startswith(marker) else None


def _may_be_data(key: str) -> bool:
    """Whether a key that a file in the folder lists may be removed: whoever wrote that file may mean harm."""
    try:
        return checked_key(key) not in (METADATA, LEASE)
    except InvalidArgumentError:
        return False


def claimed_attempt(backend: Backend) -> str | None:
    """The attempt that last claimed the folder; None where none did."""
    claim = _read_claim(backend)
    return None if claim is None else claim.attempt


def _read_claim(backend: Backend) -> Claim | None:
    data = read_or_none(backend, LEASE)
    return None if data is None else Claim.from_bytes(data)


def _settings_of(data: bytes | None) -> Mapping[str, str]:
    if data is None:
        return {}
    try:
        return Metadata.from_bytes(data, where=METADATA).settings
    except CheckpointError:
        return {}


def _clear_mailboxes(backend: Backend, attempts: Iterable[str]) -> None:
    """Remove the messages that ended attempts left; once another has claimed the folder, none of them can commit."""
    for attempt in attempts:
        folder = mailbox_folder(attempt)
        try:
            checked_key(folder)
        except InvalidArgumentError:
            continue  # whoever wrote the claim may mean harm
        clear_mailbox(backend, folder)


def _keys_of_checkpoint(backend: Backend, keys: Iterable[str], before: bytes | None) -> frozenset[str]:
    """Every key of what is committed in the folder: what its `.metadata`, or its ranks' metadata, list."""
    owned: set[str] = set()
    documents: list[tuple[str, bytes | None]] = [(METADATA, before)]
    for key in keys:
        if rank_of_metadata_key(key) is not None:
            documents.append((key, read_or_none(backend, key)))
            owned.add(key)
    for key, data in documents:
        if data is None:
            continue
        try:
            owned.update(filter(_may_be_data, Metadata.from_bytes(data, where=f"{backend.url}/{key}").files))
        except CheckpointError as error:
            log_message(logging.WARNING, f"{error} Its data files are left where they are.")
            owned.discard(key)
    return frozenset(owned)


def _orphans(backend: Backend, superseded: Sequence[tuple[str, bool]], *, keep: set[str]) -> list[str]:
    """Files that superseded attempts left, and have not touched for a day."""
    now = time.time()
    old = [info for info in backend.list_keys() if info.key not in keep and now - info.modified >= SILENT_SECONDS]
    return [info.key for info in old if is_data_key(info.key) and _belongs(backend, info, dict(superseded))]


def _belongs(backend: Backend, info: KeyInfo, superseded: Mapping[str, bool]) -> bool:
    if carries_attempt(info.key, superseded):
        return True
    head = bytearray(min(info.size, HEAD_BYTES))
    try:
        backend.read_ranges(info.key, [ByteRange(0, len(head))], [memoryview(head)])
    except StorageError:
        return False
    return superseded.get(attempt_in_header(head) or "", False)
