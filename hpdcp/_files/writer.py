"""The writer of checkpoints on a byte store: a plan over one backend and one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpdcp._base import config
from hpdcp._base.backend import Backend
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._files import registry
from hpdcp._files._agreement import check_one_layout, check_one_location
from hpdcp._files.folder_save import FolderSave, SaveByAll, SaveByRank, SaveIdentity, SaveSetup
from hpdcp._files.layout import Layout
from hpdcp._format.metadata import Metadata
from hpdcp._plan.planner import PlannerContext, SavePlanner
from hpdcp._plan.save_plan import SavePlan
from hpdcp._plan.storage import StorageWriter
from hpdcp._plan.write_results import WriteResults


class FileSystemWriter(StorageWriter):
    """Writes checkpoints as files of one backend.

    Args:
        checkpoint_id: folder or URL; may be left out when `save` is given one.
        backend, layout: names that go before the configuration's.
        storage_options: handed to fsspec untouched.
    """

    def __init__(
        self,
        checkpoint_id: str | Path | None = None,
        *,
        backend: str | None = None,
        layout: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._backend_name = backend
        self._layout_name = layout
        self._storage_options = dict(storage_options or {})
        self._url = None if checkpoint_id is None else registry.resolve_checkpoint_id(checkpoint_id)
        self._save: FolderSave | None = None
        self.identity: SaveIdentity | None = None
        """Of the next save, where it was settled beforehand."""

    @property
    def place(self) -> str | None:
        return self._url

    def open_place(self) -> Backend:
        if self._url is None:
            raise InvalidArgumentError(
                "this FileSystemWriter has no place to save to: give it or save() a checkpoint_id."
            )
        return registry.open_backend(self._url, name=self._backend_name, storage_options=self._storage_options)

    def arguments(self) -> dict[str, Any]:
        """What makes this writer again, in another process."""
        return {
            "checkpoint_id": self._url,
            "backend": self._backend_name,
            "layout": self._layout_name,
            "storage_options": self._storage_options,
        }

    def initialize_writer(self, checkpoint_id: str | Path) -> None:
        self._url = registry.resolve_checkpoint_id(checkpoint_id)

    def configure_writer(self, context: PlannerContext) -> None:
        settings = config.current()
        backend = self.open_place()
        name = self._layout_name or settings.layout
        layout: Layout = registry.open_layout(name)
        kind = SaveByAll if context.collective else SaveByRank
        self._save = kind(SaveSetup(backend, layout, context, settings.keep_replaced_for, self.identity))

    def optimize_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan.with_storage_data({"url": self._current.backend.url, "layout": self._current.layout.name})

    @property
    def hands_over(self) -> bool:
        return self._current.layout.hands_over

    def arrange_global_plan(
        self, plans: Sequence[SavePlan], metadata: Metadata, locals_: Sequence[SavePlan]
    ) -> tuple[Sequence[SavePlan], Metadata]:
        check_one_layout([plan.storage_data for plan in locals_], self._current.layout.name)
        return self._current.layout.arrange(plans, metadata, locals_)

    def hand_over(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._current.hand_over(plan, planner)

    def optimize_global_plan(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        check_one_location([plan.storage_data for plan in plans], self._current.backend.url)
        decided = self._current.begin(plans)
        return [plan.with_storage_data(decided) for plan in plans]

    def execute_write(self, plan: SavePlan, planner: SavePlanner) -> WriteResults:
        return self._current.write(plan, planner)

    def finalize_checkpoint(self, metadata: Metadata, results: Sequence[WriteResults]) -> Metadata:
        return self._current.commit(metadata)

    def discard(self) -> None:
        if self._save is not None:
            self._save.discard()

    @property
    def _current(self) -> FolderSave:
        if self._save is None:
            raise InvalidArgumentError("configure_writer must be called before this writer is used.")
        return self._save


def open_writer(checkpoint_id: str | Path | None, writer: StorageWriter | None) -> StorageWriter:
    """`writer`, at `checkpoint_id` where that is given; without a writer, the configured one.

    Raises:
        InvalidArgumentError: neither is given.
    """
    if writer is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("a save needs a place: pass checkpoint_id= or storage_writer=.")
        return FileSystemWriter(checkpoint_id)
    if checkpoint_id is not None:
        writer.initialize_writer(checkpoint_id)
    return writer
