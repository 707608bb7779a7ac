"""What ranks tell one another of broadcasts: what each asks for, and what the coordinator makes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist

from hpdcp._base.arguments import require_mapping, require_optional_flags
from hpdcp._base.config import When
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._broadcast import _facts
from hpdcp._plan.shared_boxes import Group

DEFAULT_BATCH_BYTES: Final = 6 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class BroadcastOptions:
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
    ) -> BroadcastOptions:
        """From the arguments of `load`; `alone` names the argument that keeps ranks apart, if one does.

        Raises:
            InvalidArgumentError: they contradict one another.
        """
        require_optional_flags(broadcast_replicated_tensors=replicated_tensors)
        require_mapping(broadcast_groups=groups)
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

    def request(self, *, shares_page_cache: bool) -> BroadcastRequest:
        """What the coordinator is told, with the rank's plan."""
        return BroadcastRequest(
            mode=self.mode,
            batch_bytes=self.batch_bytes,
            groups=tuple(
                KnownGroup(ranks, group.group_name, _facts.carried_kinds(group))
                for ranks, group in sorted(self.groups.items())
            ),
            host=_facts.host_id(),
            shares_page_cache=shares_page_cache,
            device_kind=_facts.device_kind(),
            device_backend=_facts.device_backend(),
        )


@dataclass(frozen=True, slots=True)
class KnownGroup:
    """A process group that a rank's caller has passed."""

    ranks: Group
    name: str
    """The same on all its members."""
    carries: tuple[str, ...]
    """Kinds of devices whose tensors it carries, such as "cpu"."""


@dataclass(frozen=True, slots=True)
class BroadcastRequest:
    """What one rank asks for, and what the coordinator must know of it."""

    mode: When
    batch_bytes: int
    groups: tuple[KnownGroup, ...]
    host: str
    """Equal for ranks that could share a page cache."""
    shares_page_cache: bool
    """Whether the storage lets ranks of one host share it."""
    device_kind: str
    """Of the device this rank computes on; empty: none."""
    device_backend: str
    """What carries that device's tensors among all ranks; empty: nothing does."""

    def to_bytes(self) -> bytes:
        """For the exchange between ranks."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BroadcastRequest:
        fields = json.loads(data)
        groups = tuple(
            KnownGroup(tuple(group["ranks"]), group["name"], tuple(group["carries"])) for group in fields.pop("groups")
        )
        return cls(groups=groups, **fields)


@dataclass(frozen=True, slots=True)
class BroadcastDecision:
    """Which process groups a load uses, the same for every rank."""

    new_groups: tuple[Group, ...] = ()
    """Those that every rank has to create, member or not, in this order; they carry host tensors."""
    new_device_groups: tuple[Group, ...] = ()
    """Likewise, created next; they carry the devices' tensors."""
    device_backend: str = ""
    """What the latter are made of."""
    uses_given_world: bool = False
    """Whether host tensors for all ranks go through a group that every one of them was given."""
    uses_given_device_world: bool = False
    """Likewise for devices' tensors."""

    def to_bytes(self) -> bytes:
        """For the exchange between ranks."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> BroadcastDecision:
        fields = json.loads(data)
        new_groups, new_device_groups = (
            tuple(tuple(ranks) for ranks in fields.pop(name)) for name in ("new_groups", "new_device_groups")
        )
        return cls(new_groups, new_device_groups, **fields)


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
