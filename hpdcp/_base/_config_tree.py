"""What was set, and where: nested tables of values that know where they come from, and laying one over another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeGuard


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was found, and where: never a table, except an empty one."""

    value: object
    origin: str


Node: TypeAlias = "Given | dict[str, Node]"
Tree: TypeAlias = dict[str, Node]


def with_origin(table: Mapping[str, object], origin: str) -> Tree:
    """The table with `origin` beside each value."""
    return {
        key: with_origin(value, origin) if is_table(value) and value else Given(value, origin)
        for key, value in table.items()
    }


def is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether it has keys that can be merged one by one."""
    # A storage option may be a mapping with other keys; that one is a value of its own, and stays as it is.
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def merge(into: Tree, over: Tree) -> None:
    """Lay `over` over `into`, key by key."""
    for key, node in over.items():
        below = into.get(key)
        if isinstance(below, dict) and isinstance(node, dict):
            merge(below, node)
        elif not (isinstance(below, dict) and isinstance(node, Given) and node.value == {}):
            # Copied, since a layer may be merged again later and must not have grown by then.
            into[key] = _copied(node)


def _copied(node: Node) -> Node:
    return {key: _copied(value) for key, value in node.items()} if isinstance(node, dict) else node


def found_in(node: Node) -> str:
    """Where the value, or the first one of the table, comes from."""
    return node.origin if isinstance(node, Given) else found_in(next(iter(node.values())))


def plain_value(node: Node) -> object:
    """The value, or the table of values, without its origin."""
    return node.value if isinstance(node, Given) else plain_values(node)


def plain_values(tree: Tree) -> dict[str, object]:
    """The table of values without their origins."""
    return {key: plain_value(node) for key, node in tree.items()}


def overlay(below: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`below` with `over` laid over it, key by key."""
    merged = with_origin(below, "")
    merge(merged, with_origin(over, ""))
    return plain_values(merged)
