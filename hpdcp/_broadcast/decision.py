"""Whether and how a load broadcasts what several ranks want: decided by the coordinator for everyone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpdcp._base.errors import InvalidArgumentError
from hpdcp._broadcast._facts import CPU
from hpdcp._broadcast.reader_choice import GroupRules, choose_readers
from hpdcp._broadcast.terms import BroadcastDecision, BroadcastRequest, KnownGroup
from hpdcp._format.metadata import Metadata
from hpdcp._plan.load_plan import LoadPlan
from hpdcp._plan.shared_boxes import ON_DEVICE, Group


def decide_broadcasts(
    plans: Sequence[LoadPlan], requests: Sequence[BroadcastRequest], metadata: Metadata
) -> list[LoadPlan]:
    """The ranks' plans with a reader rank for everything that is to be shared, and the groups to create.

    Raises:
        InvalidArgumentError: ranks were called with different arguments.
    """
    _check_alike([request.mode for request in requests], "broadcast_replicated_tensors")
    _check_alike([request.batch_bytes for request in requests], "broadcast_batch_bytes")
    mode = requests[0].mode
    everybody = tuple(range(len(requests)))
    if mode == "never" or (mode == "auto" and not _saves_reads(everybody, requests)):
        return _with_decision(plans, BroadcastDecision())
    meeting = _Meeting(requests)
    shared, groups = choose_readers(
        plans,
        metadata,
        GroupRules(
            batch_bytes=requests[0].batch_bytes,
            shares=lambda group: mode == "always" or _saves_reads(group, requests),
            exists=lambda group: meeting.hosts_meet(group) or meeting.devices_meet(group),
            carries_devices=lambda group: meeting.devices_meet(group) or meeting.devices_may_meet,
        ),
    )
    over_hosts, on_devices = _used_groups(shared)
    decision = BroadcastDecision(
        new_groups=tuple(group for group in groups if group in over_hosts and not meeting.hosts_meet(group)),
        new_device_groups=tuple(group for group in groups if group in on_devices and not meeting.devices_meet(group)),
        device_backend=meeting.device_backend,
        uses_given_world=meeting.is_given(everybody, CPU),
        uses_given_device_world=meeting.is_given(everybody, meeting.device_kind),
    )
    return _with_decision(shared, decision)


def _with_decision(plans: Sequence[LoadPlan], decision: BroadcastDecision) -> list[LoadPlan]:
    terms = decision.to_bytes()
    return [plan.with_broadcast_terms(terms) for plan in plans]


def _check_alike(values: Sequence[object], argument: str) -> None:
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise InvalidArgumentError(
            f"load was called with different {argument}: rank 0 means {values[0]}, rank {other} means {values[other]}. "
            "Pass the same on all ranks."
        )


def _saves_reads(group: Group, requests: Sequence[BroadcastRequest]) -> bool:
    """Whether these ranks would fetch the same bytes several times if each read for itself."""
    hosts = {requests[rank].host for rank in group}
    return len(hosts) > 1 or not all(requests[rank].shares_page_cache for rank in group)


class _Meeting:
    """Which ranks can meet in which process groups, by what every rank has said."""

    def __init__(self, requests: Sequence[BroadcastRequest]) -> None:
        self._everybody = tuple(range(len(requests)))
        self._given: list[dict[Group, KnownGroup]] = [
            {group.ranks: group for group in request.groups} for request in requests
        ]
        kinds = {(request.device_kind, request.device_backend) for request in requests}
        kind, backend = kinds.pop() if len(kinds) == 1 else ("", "")
        self.device_kind = kind
        """Of every rank's device; empty where there is none, or not the same for all."""
        self.device_backend = f"{kind}:{backend}" if backend else ""
        """What carries devices' tensors among all ranks; empty where nothing does."""

    @property
    def devices_may_meet(self) -> bool:
        """Whether groups of ranks' devices can be made."""
        return bool(self.device_backend)

    def is_given(self, group: Group, kind: str) -> bool:
        """Whether all members were given the same process group of these ranks, and it carries tensors of `kind`."""
        found = [self._given[rank].get(group) for rank in group]
        names = {None if known is None else known.name for known in found}
        return len(names) == 1 and all(known is not None and kind in known.carries for known in found)

    def hosts_meet(self, group: Group) -> bool:
        """Whether a process group of these ranks' hosts is there."""
        return group == self._everybody or self.is_given(group, CPU)

    def devices_meet(self, group: Group) -> bool:
        """Whether a process group of these ranks' devices is there."""
        return self.is_given(group, self.device_kind) or (group == self._everybody and self.devices_may_meet)


def _used_groups(plans: Sequence[LoadPlan]) -> tuple[set[Group], set[Group]]:
    """The groups in which something is sent over hosts, and those in which something is sent from device to device."""
    found: tuple[set[Group], set[Group]] = (set(), set())
    for plan in plans:
        columns = plan.shared_columns
        groups = columns.groups
        on_device = (columns.direct & ON_DEVICE).astype(np.bool_)
        for wire, rows in zip(found, (~on_device, on_device), strict=True):
            wire.update(groups[row] for row in np.unique(columns.group[rows]).tolist())
    return found
