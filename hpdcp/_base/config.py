"""What can be configured, where values come from, and which one wins.

The first that says something about a key decides it:

1. `with hpdcp.config.using(backend="nfs"):`, the innermost first;
2. environment variables: `HPDCP_BACKEND=nfs`, nested keys with a double underscore,
   `HPDCP_BACKENDS__S3__COALESCE_GAP=1048576`. The parts in lower case are the key, so a name with capitals or dashes
   is set in the file or by `using`. Under `HPDCP_BACKENDS__` and `HPDCP_LAYOUTS__`, in `HPDCP_ROUTES` and in
   `HPDCP_CHECK_REPLICAS`, a value that is JSON is read as JSON, and anything else is text; text that looks like a
   number is quoted: `'"123456"'`;
3. the TOML file that `HPDCP_CONFIG` names (empty: none), else `~/.config/hpdcp/hpdcp.toml` where it exists;
4. the defaults written under each field of `Config`.

Tables under `backends` and `layouts` are merged key by key, through all four; `routes` is taken whole from the first
that has any. Durations are seconds. Sizes are bytes, as a number or as text with a unit: `"512MiB"` is 512 x 2^20,
`"512MB"` is 512 x 10^6. An unknown key, or a value that does not fit, raises `InvalidArgumentError` naming where it was
found; a variable of the environment that is no key is ignored, with one warning, and so is a file that this user may
not read, unless `HPDCP_CONFIG` names it. A key that was renamed goes on working under its earlier name, with one
warning for each place.

`HPDCP_CONFIG`, `HPDCP_RUN_ID` (names a run, for saves without collectives), `HPDCP_TRACE` (see `hpdcp.timing`) and
everything that begins with `HPDCP_TEST_` are not configuration keys.

`using` holds for its own thread and `asyncio` task only; hpdcp reads the configuration once, in the caller's thread,
when a verb is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Unpack

from hpdcp._base._config_build import as_written, build_config, routes_of, table_of
from hpdcp._base._config_kinds import parse_size
from hpdcp._base._config_layers import DEFAULT_FILE, OVERRIDES, merged_layers, with_new_names
from hpdcp._base._config_schema import KEYS, RENAMED, BackendSettings, Config, ReplicaCheck, Route, Settings, When
from hpdcp._base._config_tree import Node, Tree, found_in, plain_value, with_origin
from hpdcp._base._masking import as_json, cleaned, masked

__all__ = [
    "DEFAULT_FILE",
    "KEYS",
    "RENAMED",
    "BackendSettings",
    "Config",
    "ReplicaCheck",
    "Route",
    "Setting",
    "Settings",
    "When",
    "backend_settings",
    "current",
    "effective",
    "layout_settings",
    "origin_of",
    "parse_size",
    "route_settings",
    "settings_at",
    "using",
]


class Setting(NamedTuple):
    """One key's effective value and where it came from."""

    key: str
    """Dotted, as in `backends.s3.coalesce_gap`; `routes[0]` for the first route."""
    value: object
    origin: str

    def __repr__(self) -> str:
        return f"Setting(key={self.key!r}, value={self.shown}, origin={self.origin!r})"

    @property
    def shown(self) -> str:
        """The value as text that is fit for a screen or a log: what looks like a secret is masked."""
        return masked(self.key.rpartition(".")[2], self.value)

    @property
    def public(self) -> object:
        """The value without what looks like a secret, for programs: what JSON has no word for is text."""
        return as_json(cleaned(self.key.rpartition(".")[2], self.value))


def current() -> Config:
    """The configuration in effect here and now.

    Raises:
        InvalidArgumentError: an unknown key, a value that does not fit, or a file that cannot be read.
    """
    return build_config(merged_layers())


def effective() -> list[Setting]:
    """Every key with its value and its origin, for people to look at; of tables, each entry, or an empty one."""
    tree = merged_layers()
    config = build_config(tree)
    found: list[Setting] = []
    for name in KEYS:
        node = tree.get(name)
        found.append(Setting(name, getattr(config, name), "default" if node is None else found_in(node)))
    for position, route in enumerate(config.routes):
        found.append(Setting(f"routes[{position}]", as_written(route), found_in(tree["routes"])))
    if not config.routes:
        found.append(Setting("routes", [], origin_of("routes")))
    for kind, names in (("backends", config.backends), ("layouts", config.layouts)):
        tables = table_of(kind, tree.get(kind, {}))
        inside = [
            each
            for name in sorted(names)
            for each in _settings_of(f"{kind}.{name}", table_of(name, tables[name])).values()
        ]
        found += inside or [Setting(kind, {}, origin_of(kind))]
    return found


def layout_settings(layout: str) -> dict[str, Setting]:
    """What the configuration gives the layout of that name, by the name of the option, and where each comes from."""
    tables = table_of("layouts", merged_layers().get("layouts", {}))
    return _settings_of(f"layouts.{layout}", table_of(f"layouts.{layout}", tables.get(layout, {})))


def settings_at(backend: str, url: str) -> dict[str, Setting]:
    """What `Config.settings_for` gives the backend of that name at `url`, and where each of it comes from.

    By the name of the tunable, or `storage_options.NAME`.
    """
    tree = merged_layers()
    config = build_config(tree)
    tables = table_of("backends", tree.get("backends", {}))
    found = _settings_of(f"backends.{backend}", table_of(f"backends.{backend}", tables.get(backend, {})))
    route = config.route_for(url)
    if route is not None and route.backend in ("auto", backend):
        found |= route_settings(config.routes.index(route))
    return found


def route_settings(position: int) -> dict[str, Setting]:
    """What the options of the route at `position` say, by the name of the tunable, and where each comes from."""
    tree = merged_layers()
    given = as_written(routes_of(tree["routes"])[position].options)
    options = with_origin({"options": given}, found_in(tree["routes"]))["options"]
    return _settings_of(f"routes[{position}].options", table_of("options", options))


def backend_settings(backend: str) -> dict[str, Setting]:
    """What the table of the backend of that name says, without any route; else as `settings_at`."""
    tables = table_of("backends", merged_layers().get("backends", {}))
    return _settings_of(f"backends.{backend}", table_of(f"backends.{backend}", tables.get(backend, {})))


def origin_of(*path: str) -> str:
    """Where the key, as in `("backends", "s3")`, or the first of the keys below it comes from; `default` for none."""
    node: Node | None = merged_layers()
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return "default" if node is None else found_in(node)


def _settings_of(where: str, table: Tree) -> dict[str, Setting]:
    options = table_of(f"{where}.storage_options", table.get("storage_options", {}))
    nodes = {key: node for key, node in table.items() if key != "storage_options"}
    nodes |= {f"storage_options.{key}": node for key, node in options.items()}
    return {key: Setting(f"{where}.{key}", plain_value(node), found_in(node)) for key, node in sorted(nodes.items())}


@contextmanager
def using(**settings: Unpack[Settings]) -> Iterator[Config]:
    """Lay `settings` over the configuration while the block runs; blocks nest, the innermost wins.

    Raises:
        InvalidArgumentError: an unknown key or a value that does not fit; nothing was changed.
    """
    layer = with_origin({name: as_written(value) for name, value in settings.items()}, "hpdcp.config.using(...)")
    build_config(with_new_names(layer))
    token = OVERRIDES.set((*OVERRIDES.get(), layer))
    try:
        yield current()
    finally:
        OVERRIDES.reset(token)
