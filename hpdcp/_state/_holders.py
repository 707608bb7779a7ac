"""Containers on the way to a state dict's leaves, and how a value is put back into one."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._format.metadata import PerRank
from hpdcp._state._classes import class_name


class Stateful(Protocol):
    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass(slots=True)
class Loading:
    """A stateful object, and the state dict that is filled for it."""

    target: Stateful
    state: Any
    fqn: str | None = None
    """Where the walk met it first."""


class Holder:
    """A container on the way to leaves, and where it sits itself, so that an immutable one can be replaced."""

    __slots__ = ("container", "key", "parent")

    def __init__(self, container: Any, parent: Holder | None, key: Hashable) -> None:
        self.container = container
        self.parent = parent
        self.key = key

    def put(self, key: Hashable, value: Any) -> None:
        held = self.container
        if isinstance(held, PerRank):
            held.value = value
        elif isinstance(held, Loading):
            held.state = value
        elif isinstance(held, tuple) and self.parent is not None:
            self.container = _replaced(held, cast(int, key), value)
            self.parent.put(self.key, self.container)
        elif isinstance(held, (MutableMapping, list)):
            cast("MutableMapping[Hashable, Any]", held)[key] = value
        else:
            raise UnsupportedTypeError(
                f"{key!r} cannot be put back into a {class_name(type(held))}, which does not let its items be set. "
                "Use a dict or a list."
            )


def _replaced(held: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    items = [*held]
    items[index] = value
    if hasattr(type(held), "n_sequence_fields"):
        # Named tuples made in C (torch.return_types) cannot be made any other way.
        return type(held)(items)
    return tuple.__new__(type(held), items)
