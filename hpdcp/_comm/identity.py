"""Who this process is among the ranks, and ids that are equal on all of them.

Ids are agreed through the store of the default process group: whoever asks first decides. That is no collective, so
nobody waits for anybody.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store


def rank_and_world_size(*, no_dist: bool) -> tuple[int, int]:
    """This process's rank and the number of ranks; 0 and 1 with `no_dist` or without a process group."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def default_store() -> Store:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def own_connection(store: Store) -> Store:
    """The same store over a connection of its own, where there can be one.

    Whoever waits for a key of a connection keeps others from using it, and training may.
    """
    return store.clone() if hasattr(store, "clone") else store


def attempt_id(location: str, ordinal: int, *, alone: bool) -> str:
    """A new id for save number `ordinal` to `location`, the same on all ranks; `alone`: on this one only."""
    nonce = uuid.uuid4().hex[:16]
    if alone or not dist.is_available() or not dist.is_initialized():
        return nonce
    name = hashlib.blake2b(f"{location}\n{ordinal}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return default_store().compare_set(f"hpdcp/attempt/{name}", "", nonce).decode()


def run_id() -> str:
    """Equal on all ranks of this run, different in any other; `HPDCP_RUN_ID` names it where that is set."""
    named = os.environ.get("HPDCP_RUN_ID")
    if named:
        return f"{named}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if dist.is_available() and dist.is_initialized():
        return default_store().compare_set("hpdcp/run", "", uuid.uuid4().hex).decode()
    return _OWN_ID


_OWN_ID: Final = uuid.uuid4().hex
