"""Checkpoints of Lightning's trainer: saved in the background, on any URL, and resharded where they are loaded.

    Trainer(strategy=HpdcpModelParallelStrategy(data_parallel_size=4))    shards: FSDP2, tensor parallelism
    Trainer(plugins=[HpdcpCheckpointIO()])                                one device, or DDP: rank 0 saves the whole

A checkpoint is a folder that `hpdcp.load`, `hpdcp inspect` and the conversions take like any other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, wait
from typing import Any, Final

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from hpdcp._background.async_save import async_save
from hpdcp._background.response import AsyncSaveResponse
from hpdcp._base.errors import HpdcpError, NotSupportedError
from hpdcp._base.timing import log_message
from hpdcp._convert.to_state_dict import dcp_to_full_state_dict
from hpdcp._engine.verbs import load
from hpdcp._files.reader import FileSystemReader
from hpdcp._files.writer import FileSystemWriter
from hpdcp._manage.remove import remove_checkpoint
from hpdcp._plan.standard_load_planner import StandardLoadPlanner

__all__ = ["HpdcpCheckpointIO", "HpdcpModelParallelStrategy"]

_TRAINER: Final = "trainer"
"""Under it lies what rank 0 saved beside weights and optimizers: loops, callbacks, schedulers, hyperparameters."""


class HpdcpCheckpointIO(CheckpointIO):
    """For strategies in which one rank saves the whole state: one device, and DDP.

    A save returns once the state is copied. The next one waits for it and raises its failure, and so does the end of
    the run. A checkpoint that Lightning removes behind a save goes only once that is published.

    Args:
        storage_options: for every save, load and removal, as `FileSystemWriter` takes them.
        allow_pickle: as `FileSystemReader` takes it. A load with `weights_only=True` unpickles nothing anyway.
    """

    def __init__(self, *, storage_options: Mapping[str, Any] | None = None, allow_pickle: bool | None = None) -> None:
        self._options = storage_options
        self._allow_pickle = allow_pickle
        self._last: AsyncSaveResponse | None = None
        self._removals: list[Future[None]] = []
        """Behind the save in flight."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        self.start(checkpoint, os.fspath(path), storage_options, no_dist=True)

    def start(self, state: Mapping[str, Any], path: str, storage_options: Any | None, *, no_dist: bool) -> None:
        """Save in the background, once the save before it is published."""
        self.wait()
        writer = FileSystemWriter(path, storage_options=storage_options or self._options)
        self._last = async_save(state, storage_writer=writer, no_dist=no_dist)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: torch.device | str | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The whole state, on the CPU or where `map_location` says; a file is one of Lightning's own."""
        self.wait()
        path = os.fspath(path)
        if os.path.isfile(path):
            # Lightning's own signature knows functions only; torch.load, which it calls, takes devices.
            where: Any = map_location
            return dict(TorchCheckpointIO().load_checkpoint(path, where, weights_only))
        allow_pickle = False if weights_only else self._allow_pickle
        state = dcp_to_full_state_dict(path, src_storage_options=self._options, allow_pickle=allow_pickle)
        if map_location is None:
            return state
        if not isinstance(map_location, (torch.device, str)):
            raise NotSupportedError(f"map_location is {map_location!r}; hpdcp's checkpoints take a device.")
        moved: dict[str, Any] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), state)
        return moved

    def load_part(self, path: str, pattern: str) -> dict[str, Any]:
        """Only the names that match the pattern."""
        return dcp_to_full_state_dict(
            path, include=[pattern], src_storage_options=self._options, allow_pickle=self._allow_pickle
        )

    def reader(self, path: str) -> FileSystemReader:
        """For `hpdcp.load`."""
        return FileSystemReader(path, storage_options=self._options, allow_pickle=self._allow_pickle)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove it behind the save in flight; where that fails, the checkpoint stays, for it may be the last one."""
        path = os.fspath(path)
        if self._last is None:
            self._remove(path)
        else:
            removal: Future[None] = Future()
            self._removals.append(removal)
            self._last.future.add_done_callback(lambda save: self._remove_behind(save, path, removal))

    def wait(self) -> None:
        """Return when nothing is in flight.

        Raises:
            HpdcpError: the last save failed, and nobody has heard of it.
        """
        last, self._last = self._last, None
        removals, self._removals = self._removals, []
        try:
            if last is not None:
                last.get_result()
        finally:
            wait(removals)

    def teardown(self) -> None:
        self.wait()

    def _remove_behind(self, save: Future[Any], path: str, removal: Future[None]) -> None:
        failure = Future.exception(save)  # without being counted as somebody who heard of it
        try:
            if failure is None:
                self._remove(path)
            else:
                log_message(logging.WARNING, f"{path} stays, since the save that was to replace it failed: {failure}")
        except HpdcpError as error:
            log_message(logging.WARNING, f"{path} could not be removed: {error}")
        finally:
            removal.set_result(None)

    def _remove(self, path: str) -> None:
        if os.path.isfile(path):
            TorchCheckpointIO().remove_checkpoint(path)
        else:
            remove_checkpoint(path, storage_options=self._options)


class HpdcpModelParallelStrategy(ModelParallelStrategy):
    """FSDP2, tensor parallelism, or both: every rank saves its shards, and any number of ranks loads them.

    Args:
        checkpoint_io: how to reach the storage; None: as configured.
        arguments: as Lightning's `ModelParallelStrategy` takes them.
    """

    def __init__(self, *, checkpoint_io: HpdcpCheckpointIO | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._hpdcp = checkpoint_io or HpdcpCheckpointIO()
        self.checkpoint_io = self._hpdcp

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        path = self.broadcast(os.fspath(filepath))
        sharded = ("state_dict", "optimizer_states")
        state: dict[str, Any] = {name: checkpoint.pop(name) for name in sharded if name in checkpoint}
        if self.is_global_zero:
            # Of these every rank has a copy, with times and paths that may differ.
            state[_TRAINER] = checkpoint
        self._hpdcp.start(state, path, storage_options, no_dist=False)

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = self.broadcast(os.fspath(checkpoint_path))
        if os.path.isfile(path):
            return dict(super().load_checkpoint(path, weights_only))
        self._hpdcp.wait()
        assert self.model is not None
        assert self.lightning_module is not None
        model = self.model
        optimizers = [get_optimizer_state_dict(model, optimizer) for optimizer in self.optimizers]
        # Of the model these are its own tensors, which are filled in place.
        state = {"state_dict": get_model_state_dict(model), "optimizer_states": optimizers}
        planner = StandardLoadPlanner(allow_partial_load=not self.lightning_module.strict_loading)
        load(state, storage_reader=self._hpdcp.reader(path), planner=planner)
        for optimizer, loaded in zip(self.optimizers, optimizers, strict=True):
            set_optimizer_state_dict(model, optimizer, optim_state_dict=loaded)
        rest: dict[str, Any] = self._hpdcp.load_part(path, f"{_TRAINER}.*")[_TRAINER]
        return rest

    def teardown(self) -> None:
        self._hpdcp.wait()
        super().teardown()
