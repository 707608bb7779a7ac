"""Whether and how a load shares what it reads: what callers ask for, and what the coordinator makes of it."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from hpdcp.broadcast import transport_dtype
from hpdcp.config import When
from hpdcp.errors import InvalidArgumentError
from hpdcp.load_plan import LoadPlan
from hpdcp.metadata import Metadata
from hpdcp.sources import Group, choose_sources

DEFAULT_BATCH_BYTES: Final = 6 * 1024 * 1024
_MODE: Final = "sharing.mode"
_BATCH: Final = "sharing.batch_bytes"
_GIVEN: Final = "sharing.given_groups"
_HOST: Final = "sharing.host"
_CACHED: Final = "sharing.page_cache"
_NEW: Final = "sharing.new_groups"
_WHOLE: Final = "sharing.whole_group_is_given"


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """What one rank's caller asks for; all ranks must ask for the same."""

    mode: When = "never"
    """`always`, `never`, or `auto`: for groups that span hosts, or whose ranks do not share a page cache."""
    groups: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups to use, by their ranks ascending; used as they are and left alone."""
    batch_bytes: int = DEFAULT_BATCH_BYTES
    """Shards below this many bytes are sent together; 0: each by itself."""

    @classmethod
    def from_flags(
        cls,
        *,
        configured: When,
        replicated_tensors: bool | None,
        groups: Mapping[Any, Any] | None,
        batch_bytes: int,
        alone: str | None,
    ) -> SharingOptions:
        """From the arguments of `load`; `alone` names the argument that keeps ranks apart, if one does.

        Raises:
            InvalidArgumentError: they contradict one another.
        """
        if type(batch_bytes) is not int or batch_bytes < 0:
            raise InvalidArgumentError(
                f"broadcast_batch_bytes is {batch_bytes!r}; expected a number of bytes, 0 for no batches."
            )
        if groups is not None and replicated_tensors is False:
            raise InvalidArgumentError(
                "broadcast_groups are given, but broadcast_replicated_tensors is False. Leave one of them out."
            )
        asked = bool(replicated_tensors) or groups is not None
        if alone is not None:
            if asked:
                raise InvalidArgumentError(
                    f"broadcasting needs all ranks, but {alone} is given. Leave out the broadcast arguments."
                )
            return cls("never", batch_bytes=batch_bytes)
        mode: When = "always" if asked else "never" if replicated_tensors is False else configured
        return cls(mode, _checked_groups(groups or {}), batch_bytes)

    def said(self, *, shares_page_cache: bool) -> dict[str, str]:
        """What the coordinator is told, with the rank's plan."""
        return {
            _MODE: self.mode,
            _BATCH: str(self.batch_bytes),
            _GIVEN: json.dumps([[ranks, group.group_name] for ranks, group in sorted(self.groups.items())]),
            _HOST: host_id(),
            _CACHED: "1" if shares_page_cache else "0",
        }


def share(plans: Sequence[LoadPlan], said: Sequence[Mapping[str, str]], metadata: Metadata) -> list[LoadPlan]:
    """On the coordinator: the plans with a source for everything that is to be shared, and the groups to create.

    Raises:
        InvalidArgumentError: ranks were called with different arguments.
    """
    for name, argument in ((_MODE, "broadcast_replicated_tensors"), (_BATCH, "broadcast_batch_bytes")):
        values = {words[name]: rank for rank, words in reversed(list(enumerate(said)))}
        if len(values) > 1:
            (first, rank), (second, other) = sorted(values.items(), key=lambda pair: pair[1])[:2]
            raise InvalidArgumentError(
                f"load was called with different {argument}: rank {rank} means {first}, rank {other} means {second}. "
                "Pass the same on all ranks."
            )
    mode = said[0][_MODE]
    apart = len({words[_HOST] for words in said}) > 1 or any(words[_CACHED] == "0" for words in said)
    if mode == "never" or (mode == "auto" and not apart):
        return list(plans)
    given: list[dict[Group, str]] = [
        {tuple(group): name for group, name in json.loads(words[_GIVEN])} for words in said
    ]
    whole = tuple(range(len(plans)))

    @functools.cache
    def agreed(group: Group) -> bool:
        """Whether all members were given the same process group for these ranks."""
        names = {given[rank].get(group) for rank in group}
        return len(names) == 1 and None not in names

    def exists(group: Group) -> bool:
        return group == whole or agreed(group)

    def shares(group: Group) -> bool:
        if mode == "always":
            return True
        return len({said[rank][_HOST] for rank in group}) > 1 or any(said[rank][_CACHED] == "0" for rank in group)

    shared, groups = choose_sources(
        plans,
        metadata,
        itemsize=lambda name: _dtype(name).itemsize,
        transport=transport_dtype,
        shares=shares,
        exists=exists,
        batch_bytes=int(said[0][_BATCH]),
    )
    answer = {
        _NEW: json.dumps([group for group in groups if not exists(group)]),
        _WHOLE: "1" if agreed(whole) else "0",
    }
    return [plan.with_storage_data({**plan.storage_data, **answer}) for plan in shared]


def new_groups(plan: LoadPlan) -> list[Group]:
    """The groups that every rank has to create for this load, member or not, in order."""
    return [tuple(group) for group in json.loads(plan.storage_data.get(_NEW, "[]"))]


def groups_at_hand(
    plan: LoadPlan, options: SharingOptions, all_ranks: dist.ProcessGroup
) -> dict[Group, dist.ProcessGroup]:
    """The groups that exist already: those given, and for all ranks theirs, unless every one was given another."""
    found = dict(options.groups)
    if plan.storage_data.get(_WHOLE) != "1":
        found[tuple(range(dist.get_world_size(all_ranks)))] = all_ranks
    return found


@functools.cache
def host_id() -> str:
    """Equal for processes that share a page cache: one kernel's boot, or where that is not told, one host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else torch.uint8


def _checked_groups(groups: Mapping[Any, Any]) -> dict[Group, dist.ProcessGroup]:
    found: dict[Group, dist.ProcessGroup] = {}
    for ranks, group in groups.items():
        if not isinstance(ranks, tuple) or not all(type(rank) is int for rank in ranks):
            raise InvalidArgumentError(f"broadcast_groups has the key {ranks!r}; expected a tuple of ranks.")
        if not isinstance(group, dist.ProcessGroup):
            continue  # what torch hands to ranks that are not in the group
        if "cpu" not in dist.get_backend_config(group):
            continue  # it cannot carry host tensors; one is created that can
        actual = tuple(sorted(dist.get_process_group_ranks(group)))
        if actual != tuple(sorted(ranks)):
            raise InvalidArgumentError(f"broadcast_groups[{ranks}] is a group of the ranks {actual}.")
        found[actual] = group
    return found
