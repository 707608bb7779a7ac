"""One try at one rank's save without collectives: it publishes `{rank}.metadata`, whatever the other ranks do.

No rank knows what another is doing, so a rank touches what itself has saved, and nothing else. While it saves it has a
lease of its own, `{rank}.attempt`, by which the next one finds what it leaves if it is killed. A process that saves
alone has no others, and replaces what one saved so before.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointExistsError
from hpdcp._files.commit import Attempt, take_lease
from hpdcp._files.lease import Lease, leased_attempt
from hpdcp._files.leftovers import refuse_foreign, removable
from hpdcp._files.publish import read_or_none
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._format.file_names import METADATA, DataFileName, rank_lease_key, rank_metadata_key, rank_of_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext


@dataclass(kw_only=True)
class RankAttempt(Attempt):
    """One rank's side of one save of one folder, in which it is its own coordinator."""

    identity: SaveIdentity
    rank: int

    @classmethod
    def begin_rank(
        cls, backend: Backend, identity: SaveIdentity, context: PlannerContext, roots: Collection[str] = ()
    ) -> RankAttempt:
        """Look once at the folder, and lease this rank's part of it.

        Args:
            roots: names at the root that the save takes, of files and of folders, whatever its attempt.

        Raises:
            CheckpointExistsError: another run saved there, or a name of `roots` is taken; nothing was changed.
        """
        backend.prepare()
        keys = [info.key for info in backend.list_keys()]
        _refuse_strangers(backend, keys, identity.run, context)
        own, lease_key = rank_metadata_key(context.rank), rank_lease_key(context.rank)
        before = read_or_none(backend, own) if own in keys else None
        metadata = None if before is None else Metadata.from_bytes(before, where=own)
        replaced = (
            frozenset[str]()
            if metadata is None
            else removable(backend, metadata.files, metadata.settings.get("attempt", ""))
        )
        lease = take_lease(backend, keys, identity.attempt, roots, lease_key, before, replaced)
        return cls(backend, lease, before, replaced, lease_key, identity=identity, rank=context.rank)

    def facts(self, metadata: Metadata) -> Mapping[str, str]:
        """What the published metadata says of this save."""
        identity = self.identity
        return {
            "rank": str(self.rank),
            "run": identity.run,
            "ordinal": str(identity.ordinal),
            "set": identity.attempt,
            "attempt": identity.attempt,
        }

    def commit(self, metadata: Metadata, *, keep_replaced_for: float) -> None:
        """Publish `metadata` as this rank's.

        Raises:
            SupersededError: another process saved as this rank since `begin_rank`, or the lease is gone; nothing was
                published.
        """
        self._publish(rank_metadata_key(self.rank), metadata)
        self.clean_up(metadata, keep_replaced_for)

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
