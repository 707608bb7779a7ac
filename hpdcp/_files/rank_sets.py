"""What ranks that save each for itself have published, and the newest save of which all parts are there.

Each rank replaces its `{rank}.metadata` in its own time. What it replaced stays beside it, as
`{rank}.<attempt>.metadata`, and so do the data files, until every rank has published the same save.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hpdcp._base.backend import Backend, KeyInfo
from hpdcp._base.errors import CheckpointError, CheckpointReplacedError, IncompleteCheckpointError, StorageError
from hpdcp._base.timing import log_message
from hpdcp._files.leftovers import removable
from hpdcp._files.parallel import for_each_file
from hpdcp._files.publish import read_or_none
from hpdcp._format.file_names import rank_of_kept_key, rank_of_metadata_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.replicas import merge_rank_metadata
from hpdcp._plan.storage import RankMetadata

_Facts = tuple[str | None, str | None, int, str | None]

REPLACES: Final = "replaces"
"""The setting that names the attempt whose record a rank's record took the place of."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's part of one save."""

    key: str
    rank: int
    metadata: Metadata

    @property
    def attempt(self) -> str:
        return self.metadata.settings.get("attempt", "")

    @property
    def facts(self) -> _Facts:
        """Run, ordinal, world size and set: the same in all parts of one save."""
        settings = self.metadata.settings
        # A run that its name alone tells may have been started again, and count its saves from 1 again.
        return settings.get("run"), settings.get("ordinal"), self.metadata.world_size, settings.get("set")


class RankMetadataSet(RankMetadata):
    """The newest save of which every rank's part is there."""

    def __init__(self, backend: Backend, keys: Collection[str], rank: int) -> None:
        """`keys` are those at the root, `{rank}.metadata` of at least one rank among them.

        Raises:
            IncompleteCheckpointError: of no save all parts are there.
            CheckpointReplacedError: another save removed what it replaced, while this looked.
        """
        self._rank = rank
        current = _read_current(backend, keys)
        parts = _newest_whole(current, ())
        self.superseded = parts is None
        if parts is None:
            parts = _newest_whole(current, _read_kept(backend, keys))
        if parts is None:
            raise _not_whole(backend, current)
        self._parts: Final = parts
        self.keys = [part.key for part in parts]
        self.save_id = repr(parts[0].facts)

    def own(self, world_size: int) -> Metadata | None:
        whole = len(self._parts) == world_size and self._rank < world_size
        return self._parts[self._rank].metadata if whole else None

    def merged(self) -> Metadata:
        return merge_rank_metadata([part.metadata for part in self._parts])


def clear_older(backend: Backend, infos: Sequence[KeyInfo], *, kept_for: float) -> None:
    """Remove what all ranks kept of saves older than the newest whole one, if it was replaced `kept_for` seconds ago.

    For one rank, before it saves: where ranks end a save without a word, none of them knows when the last one has.
    """
    due = due_records(infos, kept_for)
    if not due:
        return
    try:
        keys = [info.key for info in infos]
        current, kept = _read_current(backend, keys), _read_kept(backend, keys)
        whole = _newest_whole(current, kept)
        if whole is None:
            return
        wanted: set[str] = set()
        for line, part in zip(_lineages(current, kept), whole, strict=True):
            wanted |= {f"{record.rank} {record.attempt}" for record in line[: line.index(part) + 1]}
        remove_records(backend, [r for r in kept if r.key in due and f"{r.rank} {r.attempt}" not in wanted])
    except (CheckpointError, StorageError) as error:
        log_message(logging.WARNING, f"{backend.url}: parts of replaced saves could not be removed: {error}")


def due_records(infos: Iterable[KeyInfo], kept_for: float) -> frozenset[str]:
    """Keys of kept records that were replaced at least `kept_for` seconds ago."""
    now = time.time()
    # Without a time to wait, no clock is asked: the store's may be ahead.
    due = (info for info in infos if kept_for <= 0 or now - info.modified >= kept_for)
    return frozenset(info.key for info in due if rank_of_kept_key(info.key) is not None)


def remove_records(backend: Backend, records: Sequence[RankRecord]) -> None:
    """Remove kept records and their data files; the data first, so that whoever is ended here leaves word of it."""
    data = [removable(backend, record.metadata.files, record.attempt) for record in records]
    backend.delete(sorted(frozenset[str]().union(*data)))
    backend.delete(sorted(record.key for record in records))


def read_records(backend: Backend, ranks: Mapping[str, int]) -> list[RankRecord]:
    """Those of the records under these keys, each of its rank, that are there still; in the order given."""

    def read(key: str) -> RankRecord | None:
        data = read_or_none(backend, key)
        if data is None:
            return None
        return RankRecord(key, ranks[key], Metadata.from_bytes(data, where=f"{backend.url}/{key}"))

    return [record for record in for_each_file(backend, read, list(ranks)) if record is not None]


def _read_current(backend: Backend, keys: Iterable[str]) -> list[RankRecord]:
    found = {key: rank for key in keys if (rank := rank_of_metadata_key(key)) is not None}
    return read_records(backend, dict(sorted(found.items(), key=lambda item: item[1])))


def _read_kept(backend: Backend, keys: Iterable[str]) -> list[RankRecord]:
    wanted = {key: rank for key in keys if (rank := rank_of_kept_key(key)) is not None}
    found = read_records(backend, wanted)
    if len(found) != len(wanted):
        raise CheckpointReplacedError(f"{backend.url} was replaced by another save while it was looked at. Load again.")
    return found


def _lineages(current: Iterable[RankRecord], kept: Iterable[RankRecord]) -> list[list[RankRecord]]:
    """Each rank's records, the newest first."""
    before: dict[int, dict[str, RankRecord]] = {}
    for record in kept:
        before.setdefault(record.rank, {})[record.attempt] = record
    return [_lineage(record, before.get(record.rank, {})) for record in current]


def _lineage(current: RankRecord, kept: dict[str, RankRecord]) -> list[RankRecord]:
    found, left = [current], dict(kept)
    # A rank that was ended just before it published has kept what is current.
    left.pop(current.attempt, None)
    while (earlier := left.pop(found[-1].metadata.settings.get(REPLACES, ""), None)) is not None:
        found.append(earlier)
    return found


def _newest_whole(current: Sequence[RankRecord], kept: Sequence[RankRecord]) -> list[RankRecord] | None:
    lineages = _lineages(current, kept)
    for newest in lineages[0] if lineages else ():
        parts = [part for line in lineages for part in line if part.facts == newest.facts]
        if [part.rank for part in parts] == list(range(newest.metadata.world_size)) and len(parts) == len(lineages):
            return parts
    return None


def _not_whole(backend: Backend, current: Sequence[RankRecord]) -> IncompleteCheckpointError:
    listed = ", ".join(f"rank {r.rank}: run {r.facts[0]}, save {r.facts[1]}, {r.facts[2]} ranks" for r in current)
    return IncompleteCheckpointError(
        f"{backend.url} holds rank metadata that is not one whole save ({listed[:600]}). A save did not finish, or two "
        "were mixed; load an earlier checkpoint."
    )
