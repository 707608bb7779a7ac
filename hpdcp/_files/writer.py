"""The save of a folder: a plan as files of one backend in one layout, published in one step."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpdcp._base import arguments, config, progress
from hpdcp._base.backend import Backend, without_password
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._base.saves_in_flight import wait_for_saves_to
from hpdcp._files import registry
from hpdcp._files._rank_commit import RankAttempt
from hpdcp._files.commit import Attempt
from hpdcp._files.layout import FileNaming, Layout
from hpdcp._files.lease import leased_attempt
from hpdcp._files.save_identity import SaveIdentity, new_identity
from hpdcp._format.file_names import LEASE, carries_attempt, is_data_key, rank_lease_key
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.write_results import WriteResults


@dataclass(frozen=True, slots=True)
class SaveStart:
    """What the coordinator decides for all ranks of one save."""

    attempt: str
    layout_settings: Mapping[str, str]
    """The coordinator's `Layout.settings`."""

    def to_bytes(self) -> bytes:
        return json.dumps([self.attempt, dict(self.layout_settings)]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> SaveStart:
        return cls(*json.loads(data))


@dataclass(slots=True)
class _Save:
    """The save that a writer is about, as one rank knows it."""

    context: PlannerContext
    backend: Backend
    layout: Layout
    identity: SaveIdentity
    keep_replaced_for: float
    """Seconds."""
    attempt: Attempt | None = None
    """From `begin` on, on the rank that publishes."""
    naming: FileNaming | None = None
    """From `join` on."""


class FileSystemWriter(StorageWriter):
    """Writes checkpoints as files of one backend.

    All ranks together: the coordinator leases the folder and publishes `.metadata`. Without collectives each rank
    publishes `{rank}.metadata` and knows only what it finds in the folder.

    Args:
        checkpoint_id: folder or URL; may be left out when `save` is given one.
        backend, layout: names that go before the configuration's.
        storage_options: passed to fsspec as they are.
        facts: small texts for the metadata's settings (`Metadata.settings`), by names that hpdcp itself has no use
            for. Those of the coordinator, rank 0, are stored.
    """

    def __init__(
        self,
        checkpoint_id: str | Path | None = None,
        *,
        backend: str | None = None,
        layout: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        arguments.require_text(backend=backend, layout=layout)
        arguments.require_mapping(storage_options=storage_options, facts=facts)
        self._backend_name = backend
        self._layout_name = layout
        self._storage_options = dict(storage_options or {})
        self._facts = dict(facts or {})
        self._url = None if checkpoint_id is None else registry.resolve_checkpoint_id(checkpoint_id)
        self._save: _Save | None = None
        self.identity: SaveIdentity | None = None
        """Of the next save, where it was settled beforehand."""

    def arguments(self) -> dict[str, Any]:
        """What makes this writer again, in another process."""
        return {
            "checkpoint_id": self._url,
            "backend": self._backend_name,
            "layout": self._layout_name,
            "storage_options": self._storage_options,
            "facts": self._facts,
        }

    @property
    def location(self) -> str | None:
        return self._url

    @property
    def place(self) -> str | None:
        return self.location

    def open_location(self) -> Backend:
        if self._url is None:
            raise InvalidArgumentError(
                "this FileSystemWriter has no location to save to: give it or save() a checkpoint_id."
            )
        return registry.open_backend(self._url, name=self._backend_name, storage_options=self._storage_options)

    def open_place(self) -> Backend:
        return self.open_location()

    def cache_key(self) -> Hashable:
        # Beside this only the configuration, which is in the key of every plan.
        layout = registry.find_layout(self._layout_name or config.current().layout)
        backend = None if self._url is None else registry.backend_name(self._url, self._backend_name)
        return self._layout_name, layout, backend, repr(sorted(self._storage_options))

    # The steps of a save, in the order in which `StorageWriter` lists them.

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'no location yet' if self._url is None else without_password(self._url)}>"

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        self._url = registry.resolve_checkpoint_id(checkpoint_id)

    def configure_writer(self, context: PlannerContext) -> None:
        settings = config.current()
        backend = self.open_location()
        layout = registry.open_layout(self._layout_name or settings.layout)
        if context.world_size > 1:
            _refuse_many_ranks(backend, layout, context)
        # Without collectives saves are counted, before anything of this rank can fail: a rank whose save does fail
        # stays in step with the others.
        identity = self.identity or new_identity(backend.url, context)
        self._save = _Save(context, backend, layout, identity, settings.keep_replaced_for)

    def agreement(self) -> Mapping[str, str]:
        save = self._current
        return {"location": save.backend.url, "layout": save.layout.name}

    def arrange_global_plan(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        return self._current.layout.arrange(plans, metadata, locals_)

    def begin(self, metadata: Metadata) -> bytes:
        save = self._current
        # One that was called earlier and publishes later would replace what this one saves.
        wait_for_saves_to(save.backend.url)
        roots = save.layout.roots([metadata.entries])
        if save.context.collective:
            save.attempt = Attempt.begin(save.backend, save.identity.attempt, roots)
        else:
            save.attempt = RankAttempt.begin_rank(
                save.backend, save.identity, save.context, roots, keep_replaced_for=save.keep_replaced_for
            )
        return SaveStart(save.identity.attempt, save.layout.settings).to_bytes()

    def join(self, begun: bytes) -> None:
        save, start = self._current, SaveStart.from_bytes(begun)
        save.naming = FileNaming(save.context.rank, start.attempt)
        save.layout.adopt(start.layout_settings)

    @property
    def redistributes(self) -> bool:
        return self._current.layout.redistributes

    def redistribute(self, plan: SavePlan, planner: SavePlanner) -> None:
        save, naming = self._joined
        save.layout.redistribute(save.backend, plan, planner, naming)

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        save, naming = self._joined
        return save.layout.write(progress.counted(save.backend), plan, planner, naming)

    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        save, naming = self._joined
        assert save.attempt is not None
        save.attempt.check_fixed_names()
        facts = {"layout": save.layout.name, "world_size": str(save.context.world_size), **save.layout.settings}
        described = metadata.with_storage(metadata.storage, {**self._facts, **facts, **save.attempt.facts(metadata)})
        added = save.layout.finish(save.backend, described, naming.attempt)
        files = {record.key: (record.size, record.mark) for record in added}
        published = described.with_storage(metadata.storage.with_files(files), {})
        save.attempt.commit(published, keep_replaced_for=save.keep_replaced_for)
        return published

    def all_published(self) -> None:
        save = self._current
        if isinstance(save.attempt, RankAttempt):
            save.attempt.all_published(save.keep_replaced_for)

    def discard(self) -> None:
        if self._save is None or self._save.naming is None:
            return
        save, naming = self._joined
        written = save.layout.written()
        ours = [key for key in written if carries_attempt(key, {naming.attempt})]
        fixed = [key for key in written if not is_data_key(key)]
        lease = LEASE if save.context.collective else rank_lease_key(save.context.rank)
        # By now another save may have files of fixed names: it leased the folder, and they are not ours to remove.
        if fixed and leased_attempt(save.backend, lease) == naming.attempt:
            ours += fixed
        save.backend.delete(ours)
        if save.attempt is not None:
            save.attempt.forget()

    @property
    def _current(self) -> _Save:
        if self._save is None:
            raise InvalidArgumentError("configure_writer must be called before this writer is used.")
        return self._save

    @property
    def _joined(self) -> tuple[_Save, FileNaming]:
        save = self._current
        if save.naming is None:
            raise InvalidArgumentError("join must be called before this writer writes.")
        return save, save.naming


def _refuse_many_ranks(backend: Backend, layout: Layout, context: PlannerContext) -> None:
    """Raise where one rank alone could save there, or in this layout."""
    if backend.process_local:
        raise NotSupportedError(
            f"{backend.url} is seen by one process alone, and {context.world_size} ranks are to save there together. "
            "Choose another location, or save each for itself with no_dist=True."
        )
    if layout.needs_all_ranks and not context.collective:
        raise NotSupportedError(
            f"layout {layout.name!r} needs the plans of all ranks, and without collectives no rank knows another's. "
            "Save with use_collectives=True, in layout 'safetensors', or from one process alone (no_dist=True)."
        )


def open_writer(checkpoint_id: str | Path | None, writer: StorageWriter | None) -> StorageWriter:
    """`writer`, at `checkpoint_id` where that is given; without a writer, the configured one.

    Raises:
        InvalidArgumentError: neither is given, or a writer that is none of hpdcp's.
    """
    arguments.require_instance("storage_writer", writer, StorageWriter, instead=arguments.WRITER)
    if writer is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("a save needs a location: pass checkpoint_id= or storage_writer=.")
        return FileSystemWriter(checkpoint_id)
    if checkpoint_id is not None:
        writer.initialize_writer(checkpoint_id)
    return writer
