"""The process groups that one load sends through: those at hand, and those made for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from hpdcp._base.errors import PeerLostError
from hpdcp._broadcast import _facts
from hpdcp._broadcast.terms import BroadcastDecision, BroadcastOptions
from hpdcp._comm.process_group import hang_up
from hpdcp._plan.shared_boxes import Group


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """The process groups of one load that this rank is a member of."""

    over_hosts: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)
    """They carry host tensors."""
    on_devices: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)
    """They carry tensors of the ranks' devices."""

    def of(self, ranks: Group, *, on_device: bool) -> dist.ProcessGroup:
        """The one of these ranks."""
        return (self.on_devices if on_device else self.over_hosts)[ranks]

    def hang_up(self) -> None:
        """Close this rank's connections between hosts, in all of these groups: whoever waits for it raises now."""
        for group in self.over_hosts.values():
            hang_up(group)


@contextlib.contextmanager
def open_groups(
    decision: BroadcastDecision, options: BroadcastOptions, all_ranks: dist.ProcessGroup, *, timeout: timedelta
) -> Iterator[ProcessGroups]:
    """All groups that the coordinator decided on; every rank enters. Those made for this load end with it.

    Raises:
        PeerLostError: a group could not be made, since a rank died or did not come.
    """
    over_hosts, on_devices = _groups_at_hand(decision, options, all_ranks)
    me, backend = dist.get_rank(all_ranks), decision.device_backend
    with contextlib.ExitStack() as opened:
        try:
            host_groups = opened.enter_context(
                broadcast_groups_for_load(decision.new_groups, over_hosts, me=me, timeout=timeout)
            )
            device_groups = opened.enter_context(
                broadcast_groups_for_load(
                    decision.new_device_groups, on_devices, me=me, timeout=timeout, backend=backend
                )
            )
        except BaseException:
            # The others may have them all, and wait for this rank.
            hang_up(all_ranks)
            raise
        yield ProcessGroups(host_groups, device_groups)


def _groups_at_hand(
    decision: BroadcastDecision, options: BroadcastOptions, all_ranks: dist.ProcessGroup
) -> tuple[dict[Group, dist.ProcessGroup], dict[Group, dist.ProcessGroup]]:
    """The groups that exist already: those given, and for all ranks theirs, unless every one was given another.

    First those that carry host tensors, `all_ranks` among them, then those that carry this rank's device's.
    """
    everybody = tuple(range(dist.get_world_size(all_ranks)))
    found: list[dict[Group, dist.ProcessGroup]] = []
    for kind, uses_given, world in (
        (_facts.CPU, decision.uses_given_world, all_ranks),
        (_facts.device_kind(), decision.uses_given_device_world, dist.group.WORLD),
    ):
        at_hand = {ranks: group for ranks, group in options.groups.items() if kind in _facts.carried_kinds(group)}
        if world is not None and not uses_given and kind in _facts.carried_kinds(world):
            at_hand[everybody] = world
        found.append(at_hand)
    return found[0], found[1]


@contextlib.contextmanager
def broadcast_groups_for_load(
    new: Sequence[Group],
    given: Mapping[Group, dist.ProcessGroup],
    *,
    me: int,
    timeout: timedelta,
    backend: str = "gloo",
) -> Iterator[dict[Group, dist.ProcessGroup]]:
    """The `given` groups and those of `new`, which is the same on every rank; every rank enters, member or not.

    Those of `new` are created in order, and destroyed at the end in order of their ranks. A rank that is no member of
    one keeps nothing of it. Given groups are left alone.

    Raises:
        PeerLostError: a group could not be made, since a rank died or did not come.
    """
    groups = dict(given)
    created: list[Group] = []
    try:
        for ranks in new:
            with peer_errors(me, f"making a process group of the ranks {ranks}"):
                made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
            if me in ranks:
                groups[ranks] = made
                created.append(ranks)
        yield groups
    finally:
        for ranks in sorted(created):
            dist.destroy_process_group(groups.pop(ranks))


@contextlib.contextmanager
def peer_errors(me: int, doing: str) -> Iterator[None]:
    """What a process group raises becomes a PeerLostError that says what rank `me` was doing."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"rank {me} lost the other ranks while {doing}: {error}. A rank died or took longer than the group's "
            "timeout; look at the other ranks' output for the first error."
        ) from error
