"""One try at one rank's save without collectives: it publishes `{rank}.metadata`, whatever the other ranks do.

No rank knows what another is doing, so a rank touches what itself has saved, and nothing else. While it saves it has a
lease of its own, `{rank}.attempt`, by which the next one finds what it leaves if it is killed.

What a rank replaces it keeps, as `{rank}.<attempt>.metadata` and its data files, until all ranks have published: a job
that is killed in between leaves the old save whole. A process that saves alone has no others, and replaces what one
saved so before in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointError, CheckpointExistsError, StorageError
from hpdcp._base.timing import log_message
from hpdcp._files.commit import Attempt, take_lease
from hpdcp._files.lease import Lease, leased_attempt
from hpdcp._files.leftovers import refuse_foreign, removable
from hpdcp._files.publish import read_or_none
from hpdcp._files.rank_sets import REPLACES, RankRecord, clear_older, due_records, read_records, remove_records
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._format.file_names import (
    METADATA,
    DataFileName,
    is_attempt,
    kept_record_key,
    rank_lease_key,
    rank_metadata_key,
    rank_of_kept_key,
    rank_of_metadata_key,
)
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext


@dataclass(kw_only=True)
class RankAttempt(Attempt):
    """One rank's side of one save of one folder, in which it is its own coordinator."""

    identity: SaveIdentity
    rank: int
    kept: RankRecord | None
    """What the commit replaces and keeps, under the key where it keeps it; None where there is nothing, or no other
    rank that could fail to replace its own."""
    kept_before: frozenset[str]
    """Keys of records that this rank has kept since earlier saves, and may remove now."""

    @classmethod
    def begin_rank(
        cls,
        backend: Backend,
        identity: SaveIdentity,
        context: PlannerContext,
        roots: Collection[str] = (),
        *,
        keep_replaced_for: float,
    ) -> RankAttempt:
        """Look once at the folder, and lease this rank's part of it.

        Args:
            roots: names at the root that the save takes, of files and of folders, whatever its attempt.

        Raises:
            CheckpointExistsError: another run saved there, or a name of `roots` is taken; nothing was changed.
        """
        backend.prepare()
        infos = backend.list_keys()
        keys = [info.key for info in infos]
        _refuse_strangers(backend, keys, identity.run, context)
        own, lease_key = rank_metadata_key(context.rank), rank_lease_key(context.rank)
        before = read_or_none(backend, own) if own in keys else None
        metadata = None if before is None else Metadata.from_bytes(before, where=own)
        attempt = "" if metadata is None else metadata.settings.get("attempt", "")
        kept = None
        replaced = frozenset[str]()
        if metadata is not None and context.world_size > 1 and is_attempt(attempt):
            kept = RankRecord(kept_record_key(context.rank, attempt), context.rank, metadata)
        elif metadata is not None:
            replaced = removable(backend, metadata.files, attempt)
        kept_before = frozenset(
            key for key in due_records(infos, keep_replaced_for) if rank_of_kept_key(key) == context.rank
        )
        if context.rank == 0:
            clear_older(backend, infos, kept_for=keep_replaced_for)
        lease = take_lease(backend, keys, identity.attempt, roots, lease_key, before, replaced)
        return cls(
            backend,
            lease,
            before,
            replaced,
            lease_key,
            identity=identity,
            rank=context.rank,
            kept=kept,
            kept_before=kept_before,
        )

    def facts(self, metadata: Metadata) -> Mapping[str, str]:
        """What the published metadata says of this save."""
        identity = self.identity
        return {
            "rank": str(self.rank),
            "run": identity.run,
            "ordinal": str(identity.ordinal),
            "set": identity.attempt,
            "attempt": identity.attempt,
            **({REPLACES: self.kept.attempt} if self.kept else {}),
        }

    def commit(self, metadata: Metadata, *, keep_replaced_for: float) -> None:
        """Publish `metadata` as this rank's.

        Raises:
            SupersededError: another process saved as this rank since `begin_rank`, or the lease is gone; nothing was
                published.
        """
        if self.kept is not None and self.before is not None:
            self._check_lease()
            self.backend.publish(self.kept.key, self.before)
        self._publish(rank_metadata_key(self.rank), metadata)
        self.clean_up(metadata, keep_replaced_for)

    def all_published(self, keep_replaced_for: float) -> None:
        """Once every rank has published: remove what this one kept, but for what was replaced just now and is to stay
        for some seconds."""
        try:
            before = {key: self.rank for key in self.kept_before if self.kept is None or key != self.kept.key}
            gone = read_records(self.backend, before)
            if self.kept is not None and keep_replaced_for <= 0:
                gone.append(self.kept)
            remove_records(self.backend, gone)
        except (CheckpointError, StorageError) as error:
            log_message(logging.WARNING, f"{self.backend.url}: parts of replaced saves could not be removed: {error}")

    def _owns(self, key: str) -> bool:
        name = DataFileName.parse(key)
        return name is None or name.rank == self.rank

    def _remember(self, lease: Lease) -> None:
        """Leave a lease only where there is something to know: of ranks there may be thousands."""
        left = self.backend.conditional_publish and all(holder.is_over for holder in lease.superseded)
        if lease.replaced or (lease.superseded and not left):
            super()._remember(lease)
        else:
            self.backend.delete([self.lease_key])

    def forget(self) -> None:
        super().forget()
        if self.kept is not None and read_or_none(self.backend, rank_metadata_key(self.rank)) == self.before:
            self.backend.delete([self.kept.key])
        empty = not self.lease.superseded and not self.lease.replaced
        if empty and leased_attempt(self.backend, self.lease_key) == self.lease.attempt:
            self.backend.delete([self.lease_key])


def _refuse_strangers(backend: Backend, keys: Sequence[str], run: str, context: PlannerContext) -> None:
    """Without collectives nobody can say that another run's checkpoint is done with, so it is not touched."""
    url = backend.url
    advice = f"Save to an empty folder, or remove the old checkpoint first: hpdcp rm {url}."
    if METADATA in keys:
        refuse_foreign(backend, keys, read_or_none(backend, METADATA))
        raise CheckpointExistsError(f"{url} holds a checkpoint that all ranks saved together. {advice}")
    rank, world_size = context.rank, context.world_size
    there = sorted(found for key in keys if (found := rank_of_metadata_key(key)) is not None)
    # One's own, the first and those beyond this world tell a stranger; opening all would be ranks squared.
    for other in sorted({*there[:1], *(r for r in there if r >= world_size), *({rank} & set(there))}):
        key = rank_metadata_key(other)
        data = read_or_none(backend, key)
        if data is None:
            continue
        settings = Metadata.from_bytes(data, where=f"{url}/{key}").settings
        same_world = settings.get("world_size") == str(world_size)
        if same_world and world_size == 1:
            continue  # nobody else's part can be missing from it: it is replaced in one step, whoever saved it
        if settings.get("run") != run or not same_world:
            raise CheckpointExistsError(
                f"{url} holds {key}, which another run saved (run {settings.get('run')!r}, this is {run!r}). "
                f"{advice} A restarted job that may overwrite its own sets HPDCP_RUN_ID."
            )
