"""One try at one rank's save without collectives: it publishes `{rank}.metadata`, whatever the other ranks do.

No rank knows what another is doing, so there is no lease: a rank touches what this run saved itself, and nothing else.
A process that saves alone has no others, and replaces what one saved so before.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hpdcp._base.backend import Backend
from hpdcp._base.errors import CheckpointExistsError
from hpdcp._base.timing import log_message
from hpdcp._files.leftovers import refuse_foreign, refuse_taken, removable
from hpdcp._files.publish import publish_or_doubt, read_or_none
from hpdcp._files.save_identity import SaveIdentity
from hpdcp._format.file_names import METADATA, rank_metadata_key, rank_of_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext


@dataclass(frozen=True, slots=True)
class RankAttempt:
    """One rank's side of one save of one folder, in which it is its own coordinator."""

    backend: Backend
    identity: SaveIdentity
    rank: int
    replaced: frozenset[str]
    """Data files of this rank's save before, found in the folder."""

    @classmethod
    def begin(
        cls, backend: Backend, identity: SaveIdentity, context: PlannerContext, roots: Collection[str] = ()
    ) -> RankAttempt:
        """Look once at the folder.

        Args:
            roots: names at the root that the save takes, of files and of folders, whatever its attempt.

        Raises:
            CheckpointExistsError: another run saved there, or a name of `roots` is taken; nothing was changed.
        """
        backend.prepare()
        keys = [info.key for info in backend.list_keys()]
        _refuse_strangers(backend, keys, identity.run, context)
        if roots:
            committed = next((key for key in keys if rank_of_metadata_key(key) is not None), METADATA)
            refuse_taken(backend, keys, roots, read_or_none(backend, committed))
        own = rank_metadata_key(context.rank)
        before = read_or_none(backend, own) if own in keys else None
        metadata = None if before is None else Metadata.from_bytes(before, where=own)
        replaced = (
            frozenset[str]()
            if metadata is None
            else removable(backend, metadata.files, metadata.settings.get("attempt", ""))
        )
        return cls(backend, identity, context.rank, replaced)

    def check_fixed_names(self) -> None:
        """Nothing: without a lease nobody can tell whether another save has taken them since `begin`."""

    def facts(self, metadata: Metadata) -> Mapping[str, str]:
        """What the published metadata says of this save."""
        identity = self.identity
        return {
            "rank": str(self.rank),
            "run": identity.run,
            "ordinal": str(identity.ordinal),
            "attempt": identity.attempt,
        }

    def commit(self, metadata: Metadata, *, keep_replaced_for: float) -> None:
        """Publish `metadata` as this rank's, and remove at once what it replaces: nobody could do so later."""
        publish_or_doubt(self.backend, rank_metadata_key(self.rank), metadata.to_bytes())
        try:
            self.backend.delete(self.replaced - set(metadata.files))
        except Exception as error:  # noqa: BLE001  # an error from here would have the published files removed
            log_message(logging.WARNING, f"{self.backend.url}: old files could not be removed: {error}")


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
