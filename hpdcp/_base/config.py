"""What can be configured, where values come from, and which one wins.

The first that says something about a key decides it:

1. `with hpdcp.config.using(backend="nfs"):`, the innermost first;
2. environment variables: `HPDCP_BACKEND=nfs`, nested keys with a double underscore,
   `HPDCP_BACKENDS__S3__COALESCE_GAP=1048576`. The parts in lower case are the key, so a name with capitals or dashes
   is set in the file or by `using`. Under `HPDCP_BACKENDS__` and `HPDCP_LAYOUTS__`, and in `HPDCP_ROUTES`, a value
   that is JSON is read as JSON, and anything else is text; text that looks like a number is quoted: `'"123456"'`;
3. the TOML file that `HPDCP_CONFIG` names (empty: none), else `~/.config/hpdcp/hpdcp.toml` where it exists;
4. the defaults written under each field of `Config`.

Tables under `backends` and `layouts` are merged key by key, through all four; `routes` is taken whole from the first
that has any. Durations are seconds. Sizes are bytes, as a number or as text with a unit: `"512MiB"` is 512 x 2^20,
`"512MB"` is 512 x 10^6. An unknown key, or a value that does not fit, raises `InvalidArgumentError` naming where it was
found.

`HPDCP_CONFIG`, `HPDCP_RUN_ID` (names a run, for saves without collectives), `HPDCP_TRACE` (see `hpdcp.timing`) and
everything that begins with `HPDCP_TEST_` are not configuration keys.

`using` holds for its own thread and `asyncio` task only; hpdcp reads the configuration once, in the caller's thread,
when a verb is called.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypedDict, TypeGuard, Unpack

from hpdcp._base.errors import InvalidArgumentError

When: TypeAlias = Literal["auto", "always", "never"]
ReplicaCheck: TypeAlias = Literal["off", "small", "all"]

DEFAULT_FILE: Final = "~/.config/hpdcp/hpdcp.toml"


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend is built with, besides the URL."""

    tunables: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the backend's constructor, which checks them; sizes with a unit are numbers by now."""
    storage_options: Mapping[str, object] = field(default_factory=dict)
    """Handed to fsspec untouched. Secrets are better kept in fsspec's own configuration."""

    def over(self, below: BackendSettings) -> BackendSettings:
        """These settings, completed key by key with those of `below`."""
        return BackendSettings(
            _overlay(below.tunables, self.tunables), _overlay(below.storage_options, self.storage_options)
        )


@dataclass(frozen=True, slots=True)
class Route:
    """Sends the checkpoints under a prefix to a backend: one `[[routes]]` table."""

    prefix: str
    """A URL or an absolute path, `~` allowed; matches itself and all below it, by whole path components. `file:///data`
    is `/data`."""
    backend: str = "auto"
    """Name of the backend; `auto` leaves the choice to the scheme or file system, and only `options` apply."""
    options: BackendSettings = field(default_factory=BackendSettings)
    """Laid over `[backends.NAME]`: tunables, and `storage_options`."""

    def matches(self, url: str) -> bool:
        """Whether `url`, in the same form as the prefix (absolute path, or with its scheme), lies under it."""
        scheme, found, rest = self.prefix.partition("://")
        if found and scheme.lower() not in ("file", "local"):
            prefix = f"{scheme.lower()}://{rest}"
        else:
            prefix = os.path.expanduser(rest if found else self.prefix)
        below = prefix if prefix.endswith("/") else prefix + "/"
        return url.startswith(below) or url == below.removesuffix("/")


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration in effect; each field is a key."""

    backend: str = "auto"
    """Backend for every URL. Default `auto`: by `routes`, then the URL's scheme, then the path's file system."""
    layout: str = "safetensors"
    """How tensors become files when saving. Default `safetensors`."""
    broadcast: When = "auto"
    """Whether replicated tensors are read once and broadcast when a load does not say. Default `auto`: yes, unless
    the ranks share one host and the backend its page cache."""
    verify: When = "auto"
    """Whether loading compares checksums. Default `auto`: every block that a remote backend delivers in full;
    `always`: local ones too."""
    allow_pickle: bool = False
    """Whether loading may unpickle objects, which can run code from the checkpoint. Default false."""
    check_replicas: ReplicaCheck = "small"
    """Whether saving compares what several ranks hold under one key. Default `small`: values up to 1 MiB."""
    async_staging_budget: int | None = None
    """Bytes of host memory for staging, per rank. Default None (`"auto"` in text): half of the memory that the host has
    to spare, divided by its ranks."""
    mailbox_deadline: float = 600.0
    """Seconds without any message after which a save coordinated through storage gives up. Default 600."""
    exit_deadline: float = 600.0
    """Seconds a process that ends waits for its checkpoint when other ranks are gone. Default 600."""
    group_timeout: float = 120.0
    """Timeout in seconds of the process groups hpdcp makes. Default 120."""
    keep_replaced_for: float = 0.0
    """Seconds the files of a replaced checkpoint stay, for those still reading it. Default 0."""
    progress: When = "never"
    """Whether `save` and `load` show a bar on the stderr of rank 0, which needs `hpdcp[progress]`. Default `never`;
    `auto`: on a terminal; `always`: elsewhere too, as a line every 10 seconds."""
    routes: tuple[Route, ...] = ()
    """`[[routes]]` tables: which backend serves which prefix; the longest prefix that matches wins. Default none."""
    backends: Mapping[str, BackendSettings] = field(default_factory=dict)
    """`[backends.NAME]` tables: a backend's tunables and its `storage_options`. Default none."""
    layouts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """`[layouts.NAME]` tables: how a layout saves, such as `compressor = "zstd"` under `[layouts.zarr]`. Default
    none."""

    def route_for(self, url: str) -> Route | None:
        """The route with the longest prefix that matches `url`, the earlier of two equal ones; None without any."""
        return max((route for route in self.routes if route.matches(url)), key=lambda r: len(r.prefix), default=None)

    def settings_for(self, backend: str, url: str) -> BackendSettings:
        """What the backend of that name is built with at `url`: its table, and over it the options of the route."""
        settings = self.backends.get(backend, BackendSettings())
        route = self.route_for(url)
        return route.options.over(settings) if route is not None and route.backend in ("auto", backend) else settings


class Settings(TypedDict, total=False):
    """Arguments of `using`: the fields of `Config`, where tables and sizes may also be written as in the file."""

    backend: str
    layout: str
    broadcast: When
    verify: When
    allow_pickle: bool
    check_replicas: ReplicaCheck
    async_staging_budget: int | str | None
    mailbox_deadline: float
    exit_deadline: float
    group_timeout: float
    keep_replaced_for: float
    progress: When
    routes: Sequence[Route | Mapping[str, object]]
    backends: Mapping[str, BackendSettings | Mapping[str, object]]
    layouts: Mapping[str, Mapping[str, object]]


class Setting(NamedTuple):
    """One key's effective value and where it came from."""

    key: str
    """Dotted, as in `backends.s3.coalesce_gap`; `routes[0]` for the first route."""
    value: object
    origin: str

    @property
    def shown(self) -> str:
        """The value as text that is fit for a screen or a log: what looks like a secret is masked."""
        return _masked(self.key.rpartition(".")[2], self.value)

    @property
    def public(self) -> object:
        """The value without what looks like a secret, for programs: what JSON has no word for is text."""
        return _as_json(_cleaned(self.key.rpartition(".")[2], self.value))


def current() -> Config:
    """The configuration in effect here and now.

    Raises:
        InvalidArgumentError: an unknown key, a value that does not fit, or a file that cannot be read.
    """
    return _build(_merged())


def effective() -> list[Setting]:
    """Every key with its value and its origin, for people to look at; of tables, each entry, or an empty one."""
    tree = _merged()
    config = _build(tree)
    found: list[Setting] = []
    for name in _KEYS:
        node = tree.get(name)
        found.append(Setting(name, getattr(config, name), "default" if node is None else _origin(node)))
    for position, route in enumerate(config.routes):
        found.append(Setting(f"routes[{position}]", _plain(route), _origin(tree["routes"])))
    if not config.routes:
        found.append(Setting("routes", [], origin_of("routes")))
    for kind, names in (("backends", config.backends), ("layouts", config.layouts)):
        tables = _table(kind, tree.get(kind, {}))
        inside = [
            each
            for name in sorted(names)
            for each in _settings_of(f"{kind}.{name}", _table(name, tables[name])).values()
        ]
        found += inside or [Setting(kind, {}, origin_of(kind))]
    return found


def layout_settings(layout: str) -> dict[str, Setting]:
    """What the configuration gives the layout of that name, by the name of the option, and where each comes from."""
    tables = _table("layouts", _merged().get("layouts", {}))
    return _settings_of(f"layouts.{layout}", _table(f"layouts.{layout}", tables.get(layout, {})))


def settings_at(backend: str, url: str) -> dict[str, Setting]:
    """What `Config.settings_for` gives the backend of that name at `url`, and where each of it comes from.

    By the name of the tunable, or `storage_options.NAME`.
    """
    tree = _merged()
    config = _build(tree)
    tables = _table("backends", tree.get("backends", {}))
    found = _settings_of(f"backends.{backend}", _table(f"backends.{backend}", tables.get(backend, {})))
    route = config.route_for(url)
    if route is not None and route.backend in ("auto", backend):
        found |= route_settings(config.routes.index(route))
    return found


def route_settings(position: int) -> dict[str, Setting]:
    """What the options of the route at `position` say, by the name of the tunable, and where each comes from."""
    tree = _merged()
    given = _plain(_routes(tree["routes"])[position].options)
    options = _sourced({"options": given}, _origin(tree["routes"]))["options"]
    return _settings_of(f"routes[{position}].options", _table("options", options))


def backend_settings(backend: str) -> dict[str, Setting]:
    """What the table of the backend of that name says, without any route; else as `settings_at`."""
    tables = _table("backends", _merged().get("backends", {}))
    return _settings_of(f"backends.{backend}", _table(f"backends.{backend}", tables.get(backend, {})))


def origin_of(*path: str) -> str:
    """Where the key, as in `("backends", "s3")`, or the first of the keys below it comes from; `default` for none."""
    node: _Node | None = _merged()
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    return "default" if node is None else _origin(node)


def _settings_of(where: str, table: _Tree) -> dict[str, Setting]:
    options = _table(f"{where}.storage_options", table.get("storage_options", {}))
    nodes = {key: node for key, node in table.items() if key != "storage_options"}
    nodes |= {f"storage_options.{key}": node for key, node in options.items()}
    return {key: Setting(f"{where}.{key}", _value(node), _origin(node)) for key, node in sorted(nodes.items())}


@contextmanager
def using(**settings: Unpack[Settings]) -> Iterator[Config]:
    """Lay `settings` over the configuration while the block runs; blocks nest, the innermost wins.

    Raises:
        InvalidArgumentError: an unknown key or a value that does not fit; nothing was changed.
    """
    layer = _sourced({name: _plain(value) for name, value in settings.items()}, "hpdcp.config.using(...)")
    _build(layer)
    token = _OVERRIDES.set((*_OVERRIDES.get(), layer))
    try:
        yield current()
    finally:
        _OVERRIDES.reset(token)


def parse_size(value: object) -> int:
    """Bytes meant by a whole number, or by text such as `"4096"`, `"512MiB"` or `"1.5 GB"`.

    >>> parse_size("512MiB"), parse_size("512MB")
    (536870912, 512000000)

    Raises:
        ValueError: it is neither, is negative, or is not a whole number of bytes.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(value)
        number, prefix, binary = match.groups()
        power = "KMGTP".index(prefix.upper()) + 1 if prefix else 0
        value = Fraction(number) * (1024 if binary else 1000) ** power
    if isinstance(value, (float, Fraction)) and value % 1 == 0:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(value)
    return value


_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i)?B|B)?", re.IGNORECASE)
_SIZE_WITH_UNIT: Final = re.compile(r"\d+(?:\.\d+)?\s*(?:[KMGTP]i?)?B", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_SECRET: Final = re.compile(
    r"secret|token|pass(w|phrase)|credential|sas|connection_?string|authorization|cookie|(^|_)p?key($|_id$)|api_?key"
    r"|account_?key|customer_?key",
    re.IGNORECASE,
)

_PASSWORD: Final = re.compile(r"(://[^/:@]*:)[^/]*(@)")
"""In a URL, as `backend.without_password` has it."""

_NOT_KEYS: Final = ("HPDCP_CONFIG", "HPDCP_RUN_ID", "HPDCP_TRACE")
_NOT_KEY_PREFIX: Final = "HPDCP_TEST_"
_TABLE_PREFIXES: Final = ("backend_", "backends_", "layouts_", "s3_", "nfs_", "local_")
"""How names begin that were meant for a backend's or a layout's table."""


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was found, and where: never a table, except an empty one."""

    value: object
    origin: str


_Node: TypeAlias = "_Given | dict[str, _Node]"
_Tree: TypeAlias = dict[str, _Node]

_OVERRIDES: Final[ContextVar[tuple[_Tree, ...]]] = ContextVar("hpdcp_config_overrides", default=())


@dataclass(frozen=True, slots=True)
class _Key:
    expected: str
    read: Callable[[object], object]
    """The value meant; ValueError when it does not fit."""


def _choice(*allowed: str) -> _Key:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError(value)
        return str(value)

    return _Key("one of " + ", ".join(repr(name) for name in allowed), read)


def _name() -> _Key:
    def read(value: object) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            raise ValueError(value)
        return value

    return _Key("a name of letters, digits, '_', '-' and '.'", read)


def _flag() -> _Key:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}

    def read(value: object) -> bool:
        if isinstance(value, str):
            value = words.get(value.strip().lower())
        if not isinstance(value, bool):
            raise ValueError(value)
        return value

    return _Key("true or false", read)


def _seconds(*, zero: bool) -> _Key:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(value)
        seconds = float(value)
        if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not zero):
            raise ValueError(value)
        return seconds

    return _Key(f"a finite number of seconds, {'zero or more' if zero else 'more than zero'}", read)


def _size_or_auto() -> _Key:
    def read(value: object) -> int | None:
        return None if value is None or value == "auto" else parse_size(value)

    return _Key("a number of bytes, as in 1048576 or '512MiB', or 'auto'", read)


_KEYS: Final[Mapping[str, _Key]] = {
    "backend": _name(),
    "layout": _name(),
    "broadcast": _choice("auto", "always", "never"),
    "verify": _choice("auto", "always", "never"),
    "allow_pickle": _flag(),
    "check_replicas": _choice("off", "small", "all"),
    "async_staging_budget": _size_or_auto(),
    "mailbox_deadline": _seconds(zero=False),
    "exit_deadline": _seconds(zero=False),
    "group_timeout": _seconds(zero=False),
    "keep_replaced_for": _seconds(zero=True),
    "progress": _choice("never", "auto", "always"),
}
"""Keys of one value; `routes`, `backends` and `layouts` hold tables."""


def _merged() -> _Tree:
    tree: _Tree = {}
    for layer in (_file_layer(), _environment_layer(), *_OVERRIDES.get()):
        _merge(tree, layer)
    return tree


def _file_layer() -> _Tree:
    named = os.environ.get("HPDCP_CONFIG")
    if named == "":
        return {}
    path = os.path.abspath(os.path.expanduser(DEFAULT_FILE if named is None else named))
    try:
        status = os.stat(path)
        return _sourced(_parse_file(path, status.st_mtime_ns, status.st_size, status.st_ino), path)
    except FileNotFoundError:
        if named is None:
            return {}
        raise InvalidArgumentError(
            f"HPDCP_CONFIG={named}: expected a TOML file, found none. Correct the path, or unset the variable."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgumentError(
            f"{path}: expected a readable TOML file of hpdcp's configuration; found: {error}"
        ) from error


@functools.lru_cache(maxsize=4)
def _parse_file(path: str, _modified: int, _size: int, _inode: int) -> Mapping[str, object]:
    with open(path, "rb") as file:
        return tomllib.load(file)


def _environment_layer() -> _Tree:
    tree: _Tree = {}
    # Shorter names first, so that HPDCP_BACKENDS__S3__X lies over HPDCP_BACKENDS whatever the order they are listed in.
    for variable in sorted((name for name in os.environ if name.startswith("HPDCP_")), key=lambda n: (len(n), n)):
        if variable in _NOT_KEYS or variable.startswith(_NOT_KEY_PREFIX):
            continue
        origin = f"environment variable {variable}"
        path = variable.removeprefix("HPDCP_").lower().split("__")
        value: object = os.environ[variable]
        if "" in path:
            raise InvalidArgumentError(
                f"{origin}: expected HPDCP_KEY, or HPDCP_KEY__KEY for nested keys; found an empty part. {_known()}"
            )
        if path[0] in ("routes", "backends", "layouts"):
            value = _json_or_text(os.environ[variable])
        for part in reversed(path[1:]):
            value = {part: value}
        _merge(tree, _sourced({path[0]: value}, origin))
    return tree


def _json_or_text(text: str) -> object:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text


def _sourced(table: Mapping[str, object], origin: str) -> _Tree:
    return {
        key: _sourced(value, origin) if _is_table(value) and value else _Given(value, origin)
        for key, value in table.items()
    }


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    # A storage option may be a mapping with other keys; that one is a value of its own, and stays as it is.
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _merge(into: _Tree, over: _Tree) -> None:
    for key, node in over.items():
        below = into.get(key)
        if isinstance(below, dict) and isinstance(node, dict):
            _merge(below, node)
        elif not (isinstance(below, dict) and isinstance(node, _Given) and node.value == {}):
            # Copied, since a layer may be merged again later and must not have grown by then.
            into[key] = _copied(node)


def _copied(node: _Node) -> _Node:
    return {key: _copied(value) for key, value in node.items()} if isinstance(node, dict) else node


def _build(tree: _Tree) -> Config:
    values: dict[str, Any] = {}
    for name, node in tree.items():
        if name == "routes":
            values[name] = _routes(node)
        elif name == "backends":
            tables = _table(name, node)
            values[name] = {
                key: _settings(f"backends.{key}", _table(f"backends.{key}", table)) for key, table in tables.items()
            }
        elif name == "layouts":
            tables = _table(name, node)
            values[name] = {
                key: dict(_settings(f"layouts.{key}", _table(f"layouts.{key}", table)).tunables)
                for key, table in tables.items()
            }
        elif name in _KEYS:
            values[name] = _read(name, _KEYS[name], node)
        else:
            near = difflib.get_close_matches(name, _all_keys(), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            if name.startswith(_TABLE_PREFIXES) and "variable" in _origin(node):
                hint = " Parts of a key are told apart by two underscores: HPDCP_BACKENDS__S3__COALESCE_GAP."
            raise InvalidArgumentError(f"{_origin(node)}: unknown configuration key {name!r}.{hint} {_known()}")
    return replace(Config(), **values)


def _read(name: str, key: _Key, node: _Node) -> object:
    if isinstance(node, _Given):
        try:
            return key.read(node.value)
        except ValueError:
            raise _unfit(name, node, key.expected) from None
    raise _unfit(name, node, key.expected)


def _unfit(name: str, node: _Node, expected: str) -> InvalidArgumentError:
    found = _masked(name.rpartition(".")[2], _value(node))
    return InvalidArgumentError(
        f"{_origin(node)}: configuration key {name!r}: expected {expected}; found {found}. Correct it there."
    )


def _table(name: str, node: _Node) -> _Tree:
    if isinstance(node, dict):
        return node
    if node.value == {}:
        return {}
    raise _unfit(name, node, "a table")


def _settings(where: str, table: _Tree) -> BackendSettings:
    options = table.get("storage_options", {})
    tunables = {key: _bytes_if_size(_value(node)) for key, node in table.items() if key != "storage_options"}
    return BackendSettings(tunables, _values(_table(f"{where}.storage_options", options)))


def _bytes_if_size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) and _SIZE_WITH_UNIT.fullmatch(value.strip()) else value


def _routes(node: _Node) -> tuple[Route, ...]:
    if not isinstance(node, _Given) or not isinstance(node.value, (list, tuple)):
        raise _unfit(
            "routes", node, "a list of tables with 'prefix', 'backend' and 'options' (JSON in the environment)"
        )
    return tuple(_route(f"routes[{at}]", entry, node.origin) for at, entry in enumerate(node.value))


def _route(where: str, entry: object, origin: str) -> Route:
    known = ("prefix", "backend", "options")
    entry = _plain(entry)
    if not _is_table(entry):
        raise _unfit(where, _Given(entry, origin), "a table with 'prefix', 'backend' and 'options'")
    table = _sourced(entry, origin)
    for key in table:
        if key not in known:
            raise InvalidArgumentError(
                f"{origin}: unknown configuration key {where + '.' + key!r}. Known keys of a route: {', '.join(known)}"
            )
    prefix = _value(table.get("prefix", _Given(None, origin)))
    if not isinstance(prefix, str) or not (prefix.startswith(("/", "~")) or "://" in prefix):
        raise _unfit(f"{where}.prefix", _Given(prefix, origin), "an absolute path, or a URL with its scheme")
    backend = _KEYS["backend"]
    return Route(
        prefix,
        str(_read(f"{where}.backend", backend, table.get("backend", _Given("auto", origin)))),
        _settings(f"{where}.options", _table(f"{where}.options", table.get("options", {}))),
    )


def _origin(node: _Node) -> str:
    return node.origin if isinstance(node, _Given) else _origin(next(iter(node.values())))


def _value(node: _Node) -> object:
    return node.value if isinstance(node, _Given) else _values(node)


def _values(tree: _Tree) -> dict[str, object]:
    return {key: _value(node) for key, node in tree.items()}


def _plain(value: object) -> object:
    """`value` as the file would write it."""
    if isinstance(value, BackendSettings):
        options = {"storage_options": dict(value.storage_options)} if value.storage_options else {}
        return dict(value.tunables) | options
    if isinstance(value, Route):
        return {"prefix": value.prefix, "backend": value.backend, "options": _plain(value.options)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


def _overlay(below: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    merged = _sourced(below, "")
    _merge(merged, _sourced(over, ""))
    return _values(merged)


def _masked(key: str, value: object) -> str:
    return _text(_cleaned(key, value))


def _cleaned(key: str, value: object) -> object:
    """The value of that key without what looks like a secret."""
    if isinstance(value, Mapping):
        return {str(name): _cleaned(str(name), entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(key, entry) for entry in value]
    if isinstance(value, (str, bytes)) and _SECRET.search(key):
        return "***"
    return _PASSWORD.sub(r"\1***\2", value) if isinstance(value, str) else value


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_text(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _as_json(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_as_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def _all_keys() -> list[str]:
    return [entry.name for entry in fields(Config)]


def _known() -> str:
    return f"Known keys: {', '.join(_all_keys())}"
