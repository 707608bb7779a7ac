"""Writes a folder of weights as Hugging Face's own tools do, so that a reader never sees parts of two exports.

    model.safetensors                     what fits into one file, or
    model-00001-of-0000N.safetensors …    and, when all of them are there,
    model.safetensors.index.json          which says what lies where

The one file, or the index, is what makes the folder whole; it is written last and in one step. An export that is there
already stays as it is until then, and its files are removed after it. Only where both have the same number of shards
would new files take the names of old ones: that is refused, unless the old index may be removed first. Of two exports
at a time, the second is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from hpdcp._base.backend import Backend
from hpdcp._base.errors import (
    CheckpointExistsError,
    CommitUncertainError,
    HpdcpError,
    InvalidArgumentError,
    PeerLostError,
)
from hpdcp._base.timing import log_message
from hpdcp._comm.exchange import Exchange
from hpdcp._convert._export_lease import ExportLease
from hpdcp._convert._export_plan import ExportFile, ExportPlan
from hpdcp._files.huggingface_folder import INDEX, WEIGHTS
from hpdcp._files.publish import publish_or_doubt, read_or_none
from hpdcp._state.mismatches import listed

_SHARD: Final = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_MOST_NAMED: Final = 5

FileContents: TypeAlias = Callable[[ExportFile], Iterator[memoryview]]
"""The bytes of a file's tensors, one after another."""


class Export:
    """One export to one folder, by all ranks of `exchange` together.

    Args:
        overwrite: whether an older export whose shards have the names of new ones may be taken out of use first; the
            folder then holds nothing that loads until the new one is complete.
        write_auxiliary: writes what belongs beside the weights; called by the coordinator right before they become
            whole.
    """

    def __init__(
        self,
        backend: Backend,
        plan: ExportPlan,
        exchange: Exchange,
        *,
        overwrite: bool = False,
        write_auxiliary: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._plan = plan
        self._exchange = exchange
        self._overwrite = overwrite
        self._write_auxiliary = write_auxiliary
        self._written: list[str] = []
        self._lease: ExportLease | None = None

    def write(self, contents: FileContents) -> None:
        """Write it all; every rank returns when the folder is whole, or raises.

        Raises:
            CheckpointExistsError: an older export is in the way, or another one is writing there; nothing was changed.
            SupersededError: another one was begun there meanwhile; this one published nothing.
            InvalidArgumentError: ranks were given different things to export.
            HpdcpError: on every rank; what was written is removed, and an older export is as it was.
        """
        exchange = self._exchange
        least, most = exchange.min_max("comparing what is to be exported", 1, lambda: [self._digest()])
        if least != most:
            raise InvalidArgumentError(
                f"ranks were given different tensors to export to {self._backend.url}: give all of them the same "
                "arguments, and a name_map that answers alike."
            )
        try:
            self._write_leased(contents)
        finally:
            if self._lease is not None and exchange.is_coordinator:
                self._lease.release()

    def _write_leased(self, contents: FileContents) -> None:
        exchange = self._exchange
        exchange.agree("preparing the export", self._prepare if exchange.is_coordinator else lambda: None)
        try:
            exchange.agree("writing the export", lambda: self._write_files(contents))
        except BaseException as error:
            self._discard_together(error)
            raise
        try:
            # On behalf of all: of a coordinator that is interrupted here nobody knows whether it published.
            exchange.gather_broadcast("completing the export", bytes, lambda _: self._complete())
        except Exception as error:
            if not _may_be_whole(error):
                self._discard_together(error)
            raise

    def _digest(self) -> int:
        said = hashlib.blake2b(self._plan.index, digest_size=8)
        for file in self._plan.files:
            said.update(file.header)
        return int.from_bytes(said.digest(), "little") >> 1

    def _prepare(self) -> None:
        self._backend.prepare()
        self._lease = ExportLease.acquire(self._backend)
        named = self._named_by_old_index() if self._plan.is_sharded else set()
        taken = sorted(named & {file.key for file in self._plan.files})
        if taken and not self._overwrite:
            raise CheckpointExistsError(
                f"{self._backend.url} holds an export whose {INDEX} names "
                f"{listed([*map(repr, taken)], most=_MOST_NAMED)}, as the new one would: files of both would be mixed. "
                "Export to another folder, choose a max_shard_size that makes another number of files, or pass "
                "overwrite=True, which removes the old index first, so that nothing loads from there until the new "
                "export is complete."
            )
        if taken:
            self._backend.delete([INDEX])
        if not self._plan.is_sharded:
            self._write_auxiliary()

    def _named_by_old_index(self) -> set[str]:
        data = read_or_none(self._backend, INDEX)
        if data is None:
            return set()
        try:
            return set(json.loads(data)["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # Whatever it means, it may name any shard.
            return {info.key for info in self._backend.list_keys() if _SHARD.fullmatch(info.key)}

    def _write_files(self, contents: FileContents) -> None:
        lease = self._lease = self._lease or ExportLease.of_coordinator(self._backend)
        for file in self._plan.shares(self._exchange.world_size)[self._exchange.rank]:

            def buffers(file: ExportFile = file) -> Iterator[memoryview]:
                yield memoryview(file.header)
                yield from contents(file)
                lease.check()  # before the store completes the file under its name

            self._backend.write(file.key, buffers(), size=file.size, exclusive=False)
            self._written.append(file.key)

    def _complete(self) -> bytes:
        assert self._lease is not None
        self._lease.check()
        if self._plan.is_sharded:
            self._write_auxiliary()
            publish_or_doubt(self._backend, INDEX, self._plan.index)
        try:
            self._remove_older()
        except HpdcpError as error:
            # The export is whole; but a model.safetensors that stays would be read in place of the new shards.
            if self._plan.is_sharded and read_or_none(self._backend, WEIGHTS) is not None:
                raise CommitUncertainError(
                    f"{self._backend.url} holds the new export, and the older {WEIGHTS}, which readers take first, "
                    f"could not be removed: {error}. Remove it."
                ) from error
            log_message(logging.WARNING, f"{self._backend.url}: files of an older export could not be removed: {error}")
        return b""

    def _remove_older(self) -> None:
        """What readers would look at first goes first: the older file or index, then the older shards."""
        ours = self._plan.sizes
        keys = [info.key for info in self._backend.list_keys()]
        self._backend.delete([key for key in keys if key in (WEIGHTS, INDEX) and key not in ours])
        self._backend.delete([key for key in keys if _SHARD.fullmatch(key) and key not in ours])

    def _discard_together(self, error: BaseException) -> None:
        """Remove what this rank wrote, and return when all ranks have.

        The lease is how each rank knows that a file is its own, so the coordinator may not release it before. Where a
        rank is lost there is no waiting for the others.
        """
        self._discard(error)
        if not isinstance(error, PeerLostError):
            with contextlib.suppress(HpdcpError):
                self._exchange.agree("removing what was written", lambda: None)

    def _discard(self, error: BaseException) -> None:
        if not self._plan.is_sharded:
            return  # its one file was written in one step or not at all
        try:
            if self._lease is not None and self._written:
                self._lease.check()  # else they may be another export's by now
                self._backend.delete(self._written)
        except HpdcpError as left:
            error.add_note(f"What this rank had written could not be removed: {left}")


def _may_be_whole(error: Exception) -> bool:
    """Whether the coordinator may have published the index all the same."""
    return isinstance(error, CommitUncertainError) or (isinstance(error, PeerLostError) and not error.causes)
