"""One try at one save of a folder by all ranks: lease it, publish in one step, clean up after it.

Two small files speak for a folder. `.metadata` says what is committed; `.attempt`, the lease, says who last began to
save there. The name of a data file carries its attempt and never comes twice: what was committed stays as it is until
another `.metadata` has taken its place, and whoever is late, writer or reader, meets nobody else's file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointError, KeyChangedError, SupersededError
from hpdcp._base.timing import log_message
from hpdcp._files.lease import SILENT_SECONDS, Holder, Lease, leased_attempt, read_lease, running
from hpdcp._files.leftovers import (
    clear_fixed_names,
    clear_mailboxes,
    keys_of_checkpoint,
    orphans,
    refuse_foreign,
    refuse_taken,
    removable,
    still_to_clear,
)
from hpdcp._files.publish import doubted, read_or_none
from hpdcp._format.file_names import LEASE, METADATA, carries_attempt, is_lease_key
from hpdcp._format.metadata import Metadata


@dataclass(slots=True)
class Attempt:
    """The coordinator's side of one save of one folder."""

    backend: Backend
    lease: Lease
    before: bytes | None
    """`.metadata` as it was found; None where there was none."""
    replaced_keys: frozenset[str] = field(default_factory=frozenset)
    """What the checkpoint found in the folder consists of."""
    lease_key: str = LEASE

    @classmethod
    def begin(cls, backend: Backend, attempt: str, roots: Collection[str] = ()) -> Attempt:
        """Look once at the folder, clear what attempts that never committed left in the way, and lease it.

        Args:
            roots: names at the root that the save takes, of files and of folders, whatever its attempt.

        Raises:
            CheckpointExistsError: a name of `roots` is taken, or another program saved there; nothing was changed.
        """
        backend.prepare()
        keys = {info.key for info in backend.list_keys()}
        before = read_or_none(backend, METADATA) if METADATA in keys else None
        refuse_foreign(backend, keys, before)
        current = keys_of_checkpoint(backend, keys, before)
        lease = take_lease(backend, keys, attempt, roots, LEASE, before, current)
        return cls(backend, lease, before, current)

    def commit(self, metadata: Metadata, *, keep_replaced_for: float) -> None:
        """Publish `metadata`; the step after which the new checkpoint is the one that loads.

        Raises:
            SupersededError: another attempt leased the folder or committed since `begin`, or the lease is gone; nothing
                was published.
        """
        self._publish(METADATA, metadata)
        self.clean_up(metadata, keep_replaced_for)

    def _publish(self, key: str, metadata: Metadata) -> None:
        self._check_lease()
        published = metadata.to_bytes()
        try:
            with doubted(self.backend, key, published):
                self.backend.publish_if(key, published, expected=self.before)
        except KeyChangedError as error:
            raise self.superseded("another attempt committed there") from error
        finally:
            running.discard(self.lease.attempt)

    def clean_up(self, metadata: Metadata, keep_replaced_for: float) -> None:
        """Remove what the commit of `metadata` replaced, and what dead attempts left."""
        try:
            self._clean_up(metadata, keep_replaced_for)
        except Exception as error:  # noqa: BLE001  # an error from here would have the published files removed
            # The checkpoint is whole and published; what could not be removed only takes room.
            log_message(logging.WARNING, f"{self.backend.url}: old files could not be removed: {error}")

    def forget(self) -> None:
        """Give up, once what was written is removed: this attempt publishes nothing."""
        running.discard(self.lease.attempt)

    def facts(self, metadata: Metadata) -> Mapping[str, str]:
        """What the published metadata says of this save."""
        facts = {"attempt": self.lease.attempt}
        if "world_size" in metadata.settings:
            # A planner that writes another save's state again says how many ranks that one had.
            facts["world_size"] = metadata.settings["world_size"]
        return facts

    def check_fixed_names(self) -> None:
        """Before files with fixed names are added for the whole: they may be another attempt's by now.

        Raises:
            SupersededError: another attempt leased the folder since `begin`, or the lease is gone.
        """
        if self.lease.made:
            self._check_lease()

    def _check_lease(self) -> None:
        holder = leased_attempt(self.backend, self.lease_key)
        if holder is None:
            raise self.superseded("its lease went: somebody removed the checkpoint, or the folder,")
        if holder != self.lease.attempt:
            raise self.superseded("another attempt leased it")

    def superseded(self, why: str) -> SupersededError:
        """The error of an attempt that is not the last any more."""
        return SupersededError(
            f"{self.backend.url}: while this save ran, {why}. This save published nothing and removes its own files; "
            "make sure that only one job saves to a folder at a time."
        )

    def _clean_up(self, metadata: Metadata, keep_replaced_for: float) -> None:
        now = time.time()
        ours = set(metadata.files)
        waiting = {key: since for key, since in self.lease.replaced if key not in ours}
        waiting |= dict.fromkeys(self.replaced_keys - ours, now)
        due = {key for key, since in waiting.items() if now - since >= keep_replaced_for}
        # What the lease lists, anybody may have written; what `.metadata` listed was looked at when it was found.
        self.backend.delete((due & self.replaced_keys) | removable(self.backend, due - self.replaced_keys, None))
        kept = tuple((key, since) for key, since in waiting.items() if key not in due)
        superseded = self.lease.superseded
        if superseded:
            keep = ours | {key for key, _ in kept}
            self.backend.delete(orphans(self.backend, superseded, keep=keep, belongs=self._owns))
        self._remember(replace(self.lease, replaced=kept))
        dead = {holder.attempt for holder in superseded}
        self.backend.remove_leftovers(silent_for=SILENT_SECONDS, belongs=lambda key: carries_attempt(key, dead))

    def _owns(self, key: str) -> bool:
        """Whether data files of this name are this attempt's to look after."""
        del key
        return True

    def _remember(self, lease: Lease) -> None:
        """Leave what a later attempt has to know."""
        if lease != self.lease:
            self.backend.publish(self.lease_key, lease.to_bytes())


def take_lease(
    backend: Backend,
    keys: Collection[str],
    attempt: str,
    roots: Collection[str],
    lease_key: str,
    before: bytes | None,
    current: frozenset[str],
) -> Lease:
    """Publish a lease for `attempt`, once fixed names and messages of those that never committed are out of the way.

    Args:
        keys: what lies at the root.
        before: the metadata that the attempt is to replace.
        current: what the checkpoint that is committed consists of.
    """
    earlier = read_lease(backend, lease_key) if lease_key in keys else None
    committed = _settings_of(before).get("attempt")
    # A `.metadata` that cannot be read may be the lease's own.
    readable = before is None or committed is not None
    made = earlier.made if earlier and earlier.attempt != committed and readable else ()
    refuse_taken(backend, keys, set(roots) - set(made), before)
    clear_fixed_names(backend, made)
    refuse_taken(backend, set(keys) - set(made), set(roots) & set(made), before)
    # Without its process nothing says that it is over: then only a day's silence does.
    last = earlier and (earlier.holder if readable else replace(earlier.holder, process=None))
    found = [*earlier.superseded, last] if earlier and last else []
    if lease_key == LEASE:
        apart = (read_lease(backend, key) for key in keys if key != LEASE and is_lease_key(key))
        found += [holder for lease in apart if lease for holder in (*lease.superseded, lease.holder)]
    superseded = {holder.attempt: holder for holder in found}
    clear_mailboxes(backend, superseded.keys() - {attempt})
    superseded.pop(committed or "", None)
    now = time.time()
    replaced = dict(earlier.replaced) if earlier else {}
    if earlier and earlier.attempt == committed:
        still_there = (key for key in earlier.replacing if key in keys and key not in current)
        replaced = dict.fromkeys(still_there, now) | replaced
    lease = Lease(
        Holder.beginning(attempt, now),
        superseded=still_to_clear(superseded.values(), keys, now),
        replaced=tuple(replaced.items()),
        replacing=tuple(sorted(current)),
        made=tuple(sorted(roots)),
    )
    backend.publish(lease_key, lease.to_bytes())
    return lease


def _settings_of(data: bytes | None) -> Mapping[str, str]:
    if data is None:
        return {}
    try:
        return Metadata.from_bytes(data, where=METADATA).settings
    except CheckpointError:
        return {}
