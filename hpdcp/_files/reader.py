"""The reader of checkpoints on a byte store: a plan over one backend and the checkpoint's layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from hpdcp._base import arguments, config, progress
from hpdcp._base.backend import Backend, without_password
from hpdcp._base.errors import (
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    HpdcpError,
    IncompleteCheckpointError,
    InvalidArgumentError,
    KeyNotFoundError,
    NotSupportedError,
)
from hpdcp._base.saves_in_flight import wait_for_saves_to
from hpdcp._base.timing import log_message
from hpdcp._files import registry, torch_folder
from hpdcp._files._nearby import nearby_named
from hpdcp._files.foreign import files_explained, recognise_folder
from hpdcp._files.huggingface_folder import choose_file, read_weights
from hpdcp._files.huggingface_names import MISMATCH_ADVICE, ORIGIN, weights_metadata
from hpdcp._files.layout import Layout, Verify
from hpdcp._files.links import check_links
from hpdcp._files.publish import read_or_none
from hpdcp._files.rank_sets import RankMetadataSet
from hpdcp._format.file_names import (
    LEASE,
    METADATA,
    is_attempt,
    is_data_key,
    kept_record_key,
    rank_metadata_key,
    rank_of_metadata_key,
)
from hpdcp._format.metadata import Metadata
from hpdcp._format.signatures import is_pickle
from hpdcp._plan.agreement import check_agreement
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.planner import PlannerContext
from hpdcp._plan.read_targets import ReadTargets
from hpdcp._plan.storage import RankMetadata, StorageReader


class FileSystemReader(StorageReader):
    """Reads checkpoints from files of one backend.

    A folder that torch.distributed.checkpoint saved to is read as it is. A folder without a checkpoint in it, but with
    Hugging Face weights (`model.safetensors`, or shards and their index), counts as a checkpoint of those;
    `HuggingFaceReader` maps their names.

    Args:
        checkpoint_id: folder or URL; may be left out when `load` is given one.
        backend: a name that goes before the configuration's. The layout is the checkpoint's own.
        storage_options: handed to fsspec untouched.
        allow_pickle: whether objects may be unpickled, which can run code from the checkpoint; None: as configured.
        verify: which checksums to compare; None: as configured.
    """

    def __init__(
        self,
        checkpoint_id: str | Path | None = None,
        *,
        backend: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool | None = None,
        verify: str | None = None,
    ) -> None:
        arguments.require_optional_flags(allow_pickle=allow_pickle)
        arguments.require_choice("verify", verify, [choice.value for choice in Verify])
        arguments.require_text(backend=backend)
        arguments.require_mapping(storage_options=storage_options)
        self._backend_name = backend
        self._storage_options = dict(storage_options or {})
        self._url = None if checkpoint_id is None else registry.resolve_checkpoint_id(checkpoint_id)
        self._allow_pickle = allow_pickle
        self._verify = verify
        self._backend: Backend | None = None
        self._metadata: Metadata | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {'no location yet' if self._url is None else without_password(self._url)}>"

    def initialize_reader(self, checkpoint_id: str | Path) -> None:
        self._url = registry.resolve_checkpoint_id(checkpoint_id)
        self._backend = None

    @property
    def allow_pickle(self) -> bool:
        """Whether objects of this checkpoint may be unpickled."""
        return config.current().allow_pickle if self._allow_pickle is None else self._allow_pickle

    @property
    def shares_page_cache(self) -> bool:
        return self.backend.shares_page_cache

    @property
    def max_concurrent_reads(self) -> int:
        return self.backend.max_concurrent_reads

    @property
    def backend(self) -> Backend:
        """The byte store, opened when first asked for."""
        if self._url is None:
            raise InvalidArgumentError(
                f"this {type(self).__name__} has no location to load from: give it or load() a checkpoint_id."
            )
        if self._backend is None:
            self._backend = registry.open_backend(
                self._url, name=self._backend_name, storage_options=self._storage_options
            )
        return self._backend

    def load_metadata(self) -> Metadata:
        wait_for_saves_to(self.backend.url)
        with nearby_named(self.backend):
            return self._load_metadata()

    def _load_metadata(self) -> Metadata:
        with files_explained(self.backend.url):
            data = read_or_none(self.backend, METADATA)
        if data is not None:
            if is_pickle(data):
                return torch_folder.folder_metadata(self.backend, data)
            return Metadata.from_bytes(data, where=f"{self.backend.url}/{METADATA}")
        sizes = {info.key: info.size for info in self.backend.list_keys()}
        # Traces of a save go first: somebody saved beside the weights, and means to go on from there.
        traces = any(key == LEASE or is_data_key(key) or rank_of_metadata_key(key) is not None for key in sizes)
        layout = None if traces else registry.foreign_layout(sizes)
        if layout is not None:
            return layout.foreign_metadata(self.backend)
        weights = None if traces else choose_file(list(sizes), self.backend.url)
        if weights is None:
            raise self._absent(list(sizes))
        return weights_metadata(read_weights(self.backend, file=weights, sizes=sizes))

    def _absent(self, keys: Sequence[str]) -> HpdcpError:
        url = self.backend.url
        data = [key for key in keys if is_data_key(key)]
        if data or LEASE in keys:
            return IncompleteCheckpointError(
                f"{url} has {len(data)} data files but no {METADATA}: the save did not finish. "
                "Load an earlier checkpoint; hpdcp rm removes what this one left."
            )
        weights = next((key for key in keys if key.endswith(".safetensors")), None)
        advice = f"HuggingFaceReader(checkpoint_id, file={weights!r}) reads the weights there." if weights else ""
        foreign = None if weights else recognise_folder(keys)
        if foreign is not None:
            return CheckpointNotFoundError(f"{url} holds no checkpoint of hpdcp, but {foreign}")
        return CheckpointNotFoundError(
            f"{url} holds no checkpoint: there is no {METADATA} in it. {advice or 'Is the path right?'}"
        )

    @property
    def mismatch_advice(self) -> str:
        return MISMATCH_ADVICE if self._metadata is not None and self._metadata.origin == ORIGIN else ""

    def load_rank_metadata(self, rank: int) -> RankMetadata | None:
        with nearby_named(self.backend), files_explained(self.backend.url):
            keys = [info.key for info in self.backend.list_keys()]
        if any(rank_of_metadata_key(key) is not None for key in keys):
            return RankMetadataSet(self.backend, keys, rank)
        return torch_folder.rank_metadata(self.backend, keys, rank)

    def configure_reader(self, metadata: Metadata, context: PlannerContext) -> None:
        if self.backend.process_local and context.world_size > 1:
            raise NotSupportedError(
                f"{self.backend.url} is seen by one process alone, and {context.world_size} ranks are to load from it "
                "together. Load in each for itself with no_dist=True."
            )
        self._metadata = metadata
        self._layout: Layout = registry.find_layout(metadata.settings.get("layout", "safetensors"))()
        if context.is_coordinator and not metadata.has_checksums and self._wanted_checks is Verify.ALWAYS:
            log_message(
                logging.WARNING, f"{self.backend.url} records no checksums: verify='always' has nothing to compare."
            )

    def optimize_local_plan(self, plan: LoadPlan) -> LoadPlan:
        with self.missing_files_explained():
            self._layout.check(self.backend, self._known, plan.planned)
        files = np.unique(self._known.storage.file[plan.item_columns.storage_row]).tolist()
        check_links(self.backend.url, (self._known.storage.file_names[file] for file in files))
        return plan.with_storage_data({"url": self.backend.url})

    def optimize_global_plan(self, plans: Sequence[LoadPlan]) -> list[LoadPlan]:
        check_agreement([{"location": plan.storage_data["url"]} for plan in plans])
        return list(plans)

    def execute_read(self, plan: LoadPlan, targets: ReadTargets) -> None:
        with self.missing_files_explained():
            self._layout.read(progress.counted(self.backend), self._known, plan.planned, targets, self._wanted_checks)

    @property
    def _wanted_checks(self) -> Verify:
        return Verify(self._verify or config.current().verify)

    @property
    def _known(self) -> Metadata:
        if self._metadata is None:
            raise InvalidArgumentError("configure_reader must be called before this reader is used.")
        return self._metadata

    def missing_files_explained(self) -> _MissingFiles:
        """A context in which "no such file" becomes what it means: the checkpoint was replaced, or lost a file."""
        return _MissingFiles(self.backend, self._known)

    def close(self) -> None:
        """Let go of open files."""
        if self._backend is not None:
            self._backend.close()


class _MissingFiles:
    """Turns "no such file" into what it means: the checkpoint was replaced, or a file of it was lost."""

    def __init__(self, backend: Backend, metadata: Metadata) -> None:
        self._backend = backend
        self._metadata = metadata

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (KeyNotFoundError, CorruptCheckpointError)):
            return
        key = self._listing_key()
        data = read_or_none(self._backend, key)
        url = self._backend.url
        attempt = None
        if data is not None and is_pickle(data):
            attempt = torch_folder.version_of(data)
        elif data is not None:
            attempt = Metadata.from_bytes(data, where=f"{url}/{key}").settings.get("attempt")
        if attempt != self._metadata.settings.get("attempt"):
            raise CheckpointReplacedError(
                f"{url} was replaced by another save while it was being read ({error}). Load again."
            ) from error
        if isinstance(error, KeyNotFoundError):
            listing = self._metadata.settings.get("listed_in", key)
            raise CorruptCheckpointError(f"{url} has lost a data file that its {listing} lists: {error}") from error

    def _listing_key(self) -> str:
        """Where the metadata was found, or what has taken its place."""
        settings = self._metadata.settings
        if self._metadata.origin == torch_folder.ORIGIN:
            return settings["listed_in"]
        if "rank" not in settings:
            return METADATA
        rank, attempt = int(settings["rank"]), settings.get("attempt", "")
        kept = kept_record_key(rank, attempt)
        return kept if is_attempt(attempt) and read_or_none(self._backend, kept) else rank_metadata_key(rank)


def open_reader(checkpoint_id: str | Path | None, reader: StorageReader | None, opened: ExitStack) -> StorageReader:
    """As `open_writer`; a reader made here is closed with `opened`.

    Raises:
        InvalidArgumentError: neither is given, or a reader that is none of hpdcp's.
    """
    arguments.require_instance("storage_reader", reader, StorageReader, instead=arguments.READER)
    if reader is None:
        if checkpoint_id is None:
            raise InvalidArgumentError("a load needs a location: pass checkpoint_id= or storage_reader=.")
        return opened.enter_context(closing(FileSystemReader(checkpoint_id)))
    if checkpoint_id is not None:
        reader.initialize_reader(checkpoint_id)
    return reader
