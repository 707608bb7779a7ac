"""Whether and how a load shares what it reads: what callers ask for, and what the coordinator makes of it."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch.distributed as dist

from hpdcp._base.config import When
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._broadcast.reader_choice import Group, choose_sources
from hpdcp._broadcast.walk import transport_dtype
from hpdcp._comm.process_group import backends_of
from hpdcp._devices import device
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import ON_DEVICE, LoadPlan
from hpdcp._state.dtypes import itemsize_of

DEFAULT_BATCH_BYTES: Final = 6 * 1024 * 1024
_CPU: Final = "cpu"
_MODE: Final = "sharing.mode"
_BATCH: Final = "sharing.batch_bytes"
_GIVEN: Final = "sharing.given_groups"
_HOST: Final = "sharing.host"
_CACHED: Final = "sharing.page_cache"
_NEW: Final = "sharing.new_groups"
_WHOLE: Final = "sharing.whole_group_is_given"
_DEVICE: Final = "sharing.device"
_DEFAULT: Final = "sharing.default_device_backend"
_NEW_ON_DEVICE: Final = "sharing.new_device_groups"
_BACKEND: Final = "sharing.new_device_backend"
_WHOLE_ON_DEVICE: Final = "sharing.whole_device_group_is_given"

_OVER_HOSTS: Final = frozenset({"gloo", "mpi"})
"""They send a device's tensors through memory of their own on the host, which hpdcp does better."""


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """What one rank's caller asks for; all ranks must ask for the same."""

    mode: When = "never"
    """`always`, `never`, or `auto`: for groups that span hosts, or whose ranks do not share a page cache."""
    groups: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)
    """Process groups to use, by their ranks ascending, for what they can carry; used as they are and left alone."""
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
            _GIVEN: json.dumps(
                [[ranks, group.group_name, _carried(group)] for ranks, group in sorted(self.groups.items())]
            ),
            _DEVICE: _kind(),
            _DEFAULT: _default_backend(),
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
    meeting = _Meeting(said)
    whole = meeting.whole

    def shares(group: Group) -> bool:
        if mode == "always":
            return True
        return len({said[rank][_HOST] for rank in group}) > 1 or any(said[rank][_CACHED] == "0" for rank in group)

    shared, groups = choose_sources(
        plans,
        metadata,
        itemsize=itemsize_of,
        transport=transport_dtype,
        shares=shares,
        exists=lambda group: meeting.hosts_meet(group) or meeting.devices_meet(group),
        batch_bytes=int(said[0][_BATCH]),
        carries=lambda group: meeting.devices_meet(group) or meeting.devices_may_meet(group),
    )
    over_hosts, on_devices = _used(shared)
    answer = {
        _NEW: json.dumps([group for group in groups if group in over_hosts and not meeting.hosts_meet(group)]),
        _NEW_ON_DEVICE: json.dumps(
            [group for group in groups if group in on_devices and not meeting.devices_meet(group)]
        ),
        _BACKEND: meeting.device_backend,
        _WHOLE: "1" if meeting.is_given(whole, "cpu") else "0",
        _WHOLE_ON_DEVICE: "1" if meeting.is_given(whole, meeting.kind) else "0",
    }
    return [plan.with_storage_data({**plan.storage_data, **answer}) for plan in shared]


class _Meeting:
    """Which ranks can meet in which process groups, by what every rank has said."""

    def __init__(self, said: Sequence[Mapping[str, str]]) -> None:
        self.whole = tuple(range(len(said)))
        self._given: list[dict[Group, tuple[str, list[str]]]] = [
            {tuple(group): (name, carried) for group, name, carried in json.loads(words[_GIVEN])} for words in said
        ]
        kinds = {(words[_DEVICE], words[_DEFAULT]) for words in said}
        kind, backend = kinds.pop() if len(kinds) == 1 else ("", "")
        self.kind = kind
        """Of every rank's device; empty where there is none, or not the same for all."""
        self.device_backend = f"{kind}:{backend}" if backend else ""
        """What carries devices' tensors among all ranks; empty where nothing does."""

    def is_given(self, group: Group, kind: str) -> bool:
        """Whether all members were given the same process group of these ranks, and it carries tensors of `kind`."""
        found = {rank: self._given[rank].get(group) for rank in group}
        names = {None if known is None else known[0] for known in found.values()}
        return len(names) == 1 and all(known is not None and kind in known[1] for known in found.values())

    def hosts_meet(self, group: Group) -> bool:
        return group == self.whole or self.is_given(group, "cpu")

    def devices_meet(self, group: Group) -> bool:
        return self.is_given(group, self.kind) or (group == self.whole and self.devices_may_meet(group))

    def devices_may_meet(self, group: Group) -> bool:
        """Whether a group of these ranks' devices can be made."""
        del group
        return bool(self.device_backend)


def _used(plans: Sequence[LoadPlan]) -> tuple[set[Group], set[Group]]:
    """The groups in which something is sent over hosts, and those in which something is sent from device to device."""
    found: tuple[set[Group], set[Group]] = (set(), set())
    for plan in plans:
        columns = plan.shared_columns
        groups = columns.groups
        on_device = (columns.direct & ON_DEVICE).astype(np.bool_)
        for wire, rows in zip(found, (~on_device, on_device), strict=True):
            wire.update(groups[row] for row in np.unique(columns.group[rows]).tolist())
    return found


def new_groups(plan: LoadPlan) -> tuple[list[Group], list[Group], str]:
    """The groups that every rank has to create for this load, member or not, in order.

    Those over hosts, those of devices, and what the latter are made of.
    """
    words = plan.storage_data
    over_hosts, on_devices = (
        [tuple(group) for group in json.loads(words.get(name, "[]"))] for name in (_NEW, _NEW_ON_DEVICE)
    )
    return over_hosts, on_devices, words.get(_BACKEND, "")


def groups_at_hand(
    plan: LoadPlan, options: SharingOptions, all_ranks: dist.ProcessGroup
) -> tuple[dict[Group, dist.ProcessGroup], dict[Group, dist.ProcessGroup]]:
    """The groups that exist already: those given, and for all ranks theirs, unless every one was given another.

    First those that carry host tensors, `all_ranks` among them, then those that carry this rank's device's.
    """
    whole = tuple(range(dist.get_world_size(all_ranks)))
    found: list[dict[Group, dist.ProcessGroup]] = []
    kind = _kind()
    for carried, given, everybody in ((_CPU, _WHOLE, all_ranks), (kind, _WHOLE_ON_DEVICE, dist.group.WORLD)):
        at_hand = {ranks: group for ranks, group in options.groups.items() if carried in _carried(group)}
        if everybody is not None and plan.storage_data.get(given) != "1" and carried in _carried(everybody):
            at_hand[whole] = everybody
        found.append(at_hand)
    return found[0], found[1]


def _carried(group: dist.ProcessGroup) -> list[str]:
    """Kinds of devices whose tensors the group carries."""
    return [kind for kind, name in backends_of(group).items() if kind == _CPU or name not in _OVER_HOSTS]


def _kind() -> str:
    """Of this rank's device."""
    found = device.current_device()
    return "" if found is None else found.type


def _default_backend() -> str:
    """What carries tensors of this rank's device among all ranks."""
    default = dist.group.WORLD if dist.is_initialized() else None
    if default is None or _kind() not in _carried(default):
        return ""
    return backends_of(default)[_kind()]


@functools.cache
def host_id() -> str:
    """Equal for processes that share a page cache: one kernel's boot, or where that is not told, one host name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def _checked_groups(groups: Mapping[Any, Any]) -> dict[Group, dist.ProcessGroup]:
    found: dict[Group, dist.ProcessGroup] = {}
    for ranks, group in groups.items():
        if not isinstance(ranks, tuple) or not all(type(rank) is int for rank in ranks):
            raise InvalidArgumentError(f"broadcast_groups has the key {ranks!r}; expected a tuple of ranks.")
        if not isinstance(group, dist.ProcessGroup):
            continue  # what torch hands to ranks that are not in the group
        actual = tuple(sorted(dist.get_process_group_ranks(group)))
        if actual != tuple(sorted(ranks)):
            raise InvalidArgumentError(f"broadcast_groups[{ranks}] is a group of the ranks {actual}.")
        found[actual] = group
    return found
