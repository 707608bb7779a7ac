"""Containers on the way to a state dict's leaves, and how a value is put back into one."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import torch

from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._format.metadata import PerRank
from hpdcp._state._classes import class_name

_COPIED: Final = frozenset({dict, OrderedDict, list})


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

    @property
    def is_module(self) -> bool:
        """A module names all that it has, and refuses more."""
        return isinstance(self.target, torch.nn.Module)


class Holder:
    """A container on the way to leaves, and where it sits itself, so that another can take its place."""

    __slots__ = ("borrowed", "container", "key", "parent")

    def __init__(self, container: Any, parent: Holder | None, key: Hashable) -> None:
        self.container = container
        self.parent = parent
        self.key = key
        self.borrowed: bool = parent is not None and (parent.borrowed or isinstance(parent.container, Loading))
        """It came out of a `state_dict()`, and may be the object's own: what is loaded goes into a copy, since the
        object might empty its own before it takes what it is given."""

    def put(self, key: Hashable, value: Any) -> None:
        """Set an item: in place in dicts and lists of the caller, in a copy of what is borrowed, in a new tuple."""
        held = self.container
        if self.borrowed and type(held) in _COPIED and self.parent is not None:
            held = self.container = copy.copy(held)
            self.borrowed = False
            self.parent.put(self.key, held)
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
