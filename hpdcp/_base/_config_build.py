"""A `Config` from what was set; what does not fit is refused, with where it was found."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpdcp._base._config_kinds import SIZE_WITH_UNIT, Kind, parse_size
from hpdcp._base._config_schema import KEYS, BackendSettings, Config, Route, all_keys, known_keys
from hpdcp._base._config_tree import Given, Node, Tree, found_in, is_table, plain_value, plain_values, with_origin
from hpdcp._base._masking import masked
from hpdcp._base.errors import InvalidArgumentError


def build_config(tree: Tree) -> Config:
    """The defaults, with what was set.

    Raises:
        InvalidArgumentError: an unknown key, or a value that does not fit.
    """
    values: dict[str, Any] = {}
    for name, node in tree.items():
        if name == "routes":
            values[name] = routes_of(node)
        elif name == "backends":
            tables = table_of(name, node)
            values[name] = {
                key: _settings(f"backends.{key}", table_of(f"backends.{key}", table)) for key, table in tables.items()
            }
        elif name == "layouts":
            tables = table_of(name, node)
            values[name] = {
                key: dict(_settings(f"layouts.{key}", table_of(f"layouts.{key}", table)).tunables)
                for key, table in tables.items()
            }
        elif name in KEYS:
            values[name] = _read(name, KEYS[name], node)
        else:
            near = difflib.get_close_matches(name, all_keys(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidArgumentError(f"{found_in(node)}: unknown configuration key {name!r}.{hint} {known_keys()}")
    return replace(Config(), **values)


def _read(name: str, key: Kind, node: Node) -> object:
    if isinstance(node, Given) or key.may_be_table:
        try:
            return key.read(plain_value(node))
        except ValueError:
            raise _unfit(name, node, key.expected) from None
    raise _unfit(name, node, key.expected)


def _unfit(name: str, node: Node, expected: str) -> InvalidArgumentError:
    found = masked(name.rpartition(".")[2], plain_value(node))
    return InvalidArgumentError(
        f"{found_in(node)}: configuration key {name!r}: expected {expected}; found {found}. Correct it there."
    )


def table_of(name: str, node: Node) -> Tree:
    """The table under the key `name`; InvalidArgumentError where something else is there."""
    if isinstance(node, dict):
        return node
    if node.value == {}:
        return {}
    raise _unfit(name, node, "a table")


def _settings(where: str, table: Tree) -> BackendSettings:
    options = table.get("storage_options", {})
    tunables = {key: _bytes_if_size(plain_value(node)) for key, node in table.items() if key != "storage_options"}
    return BackendSettings(tunables, plain_values(table_of(f"{where}.storage_options", options)))


def _bytes_if_size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) and SIZE_WITH_UNIT.fullmatch(value.strip()) else value


def routes_of(node: Node) -> tuple[Route, ...]:
    """What `routes` says; InvalidArgumentError where that is no list of routes."""
    if not isinstance(node, Given) or not isinstance(node.value, (list, tuple)):
        raise _unfit(
            "routes", node, "a list of tables with 'prefix', 'backend' and 'options' (JSON in the environment)"
        )
    return tuple(_route(f"routes[{at}]", entry, node.origin) for at, entry in enumerate(node.value))


def _route(where: str, entry: object, origin: str) -> Route:
    known = ("prefix", "backend", "options")
    entry = as_written(entry)
    if not is_table(entry):
        raise _unfit(where, Given(entry, origin), "a table with 'prefix', 'backend' and 'options'")
    table = with_origin(entry, origin)
    for key in table:
        if key not in known:
            raise InvalidArgumentError(
                f"{origin}: unknown configuration key {where + '.' + key!r}. Known keys of a route: {', '.join(known)}"
            )
    prefix = plain_value(table.get("prefix", Given(None, origin)))
    if not isinstance(prefix, str) or not (prefix.startswith(("/", "~")) or "://" in prefix):
        raise _unfit(f"{where}.prefix", Given(prefix, origin), "an absolute path, or a URL with its scheme")
    backend = KEYS["backend"]
    return Route(
        prefix,
        str(_read(f"{where}.backend", backend, table.get("backend", Given("auto", origin)))),
        _settings(f"{where}.options", table_of(f"{where}.options", table.get("options", {}))),
    )


def as_written(value: object) -> object:
    """`value` as the file would write it."""
    if isinstance(value, BackendSettings):
        options = {"storage_options": dict(value.storage_options)} if value.storage_options else {}
        return dict(value.tunables) | options
    if isinstance(value, Route):
        return {"prefix": value.prefix, "backend": value.backend, "options": as_written(value.options)}
    if isinstance(value, Mapping):
        return {key: as_written(entry) for key, entry in value.items()}
    return value
