"""The keys of the configuration: what each holds, what it is called, and how it is read from text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

from hpdcp._base._config_kinds import Kind, by_name, choice, flag, name, seconds, size_or_auto
from hpdcp._base._config_tree import overlay
from hpdcp._base._masking import masked
from hpdcp._base.renames import warn_renamed

When: TypeAlias = Literal["auto", "always", "never"]
ReplicaCheck: TypeAlias = Literal["off", "sample", "all"]


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """What a backend is built with, besides the URL."""

    tunables: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the backend's constructor, which checks them; sizes with a unit are numbers by now."""
    storage_options: Mapping[str, object] = field(default_factory=dict)
    """Handed to fsspec untouched. Secrets are better kept in fsspec's own configuration."""

    def __repr__(self) -> str:
        return f"BackendSettings({masked('', {**self.tunables, 'storage_options': self.storage_options})})"

    def over(self, below: BackendSettings) -> BackendSettings:
        """These settings, completed key by key with those of `below`."""
        return BackendSettings(
            overlay(below.tunables, self.tunables), overlay(below.storage_options, self.storage_options)
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

    def __repr__(self) -> str:
        return f"Route(prefix={masked('prefix', self.prefix)}, backend={self.backend!r}, options={self.options!r})"

    def matches(self, url: str) -> bool:
        """Whether `url`, in the same form as the prefix (absolute path, or with its scheme), lies under it."""
        scheme, found, rest = self.prefix.partition("://")
        if found and scheme.lower() not in ("file", "local"):
            prefix = f"{scheme.lower()}://{rest}"
        else:
            prefix = os.path.expanduser(rest if found else self.prefix)
        below = prefix if prefix.endswith("/") else prefix + "/"
        return url.startswith(below) or url == below.removesuffix("/")


def _holds(kind: Kind, *, renamed_from: str = "") -> Mapping[str, Any]:
    """Of a field of `Config` that holds one value: which, and an earlier name that goes on working, with a warning."""
    return {"kind": kind, "renamed_from": renamed_from}


@dataclass(frozen=True, slots=True)
class Config:
    """The configuration in effect; each field is a key."""

    backend: str = field(default="auto", metadata=_holds(name()))
    """Backend for every URL. Default `auto`: by `routes`, then the URL's scheme, then the path's file system."""
    layout: str = field(default="safetensors", metadata=_holds(name()))
    """How tensors become files when saving. Default `safetensors`."""
    broadcast: When = field(default="auto", metadata=_holds(choice("auto", "always", "never")))
    """Whether replicated tensors are read once and broadcast when a load does not say. Default `auto`: yes, unless
    the ranks share one host and the backend its page cache."""
    verify: When = field(default="auto", metadata=_holds(choice("auto", "always", "never")))
    """Whether loading compares checksums. Default `auto`: every block that a remote backend delivers in full;
    `always`: local ones too."""
    allow_pickle: bool = field(default=False, metadata=_holds(flag()))
    """Whether loading may unpickle objects, which can run code from the checkpoint. Default false."""
    check_replicas: ReplicaCheck | Mapping[str, ReplicaCheck] = field(
        default="sample",
        metadata=_holds(by_name("check_replicas", "off", "sample", "all", renamed={"small": "sample"})),
    )
    """Whether saving compares what several ranks hold under one key. Default `sample`: Python values, tensors up to
    64 KiB and 64 KiB of each larger one, spread over it; `all`: every byte; `off`: replicas are taken to be equal. A
    table gives a word to each pattern of names, as in `{"bn.*" = "off"}`: of patterns that match the last one counts,
    what none matches is sampled, and of what a table says `off` of, the copy of the lowest rank is stored."""
    async_staging_budget: int | None = field(default=None, metadata=_holds(size_or_auto()))
    """Bytes of host memory for staging, per rank. Default None (`"auto"` in text): half of the memory that the host has
    to spare, divided by its ranks."""
    mailbox_timeout: float = field(default=600.0, metadata=_holds(seconds(zero=False), renamed_from="mailbox_deadline"))
    """Seconds without any message after which a save coordinated through storage gives up. Default 600."""
    exit_timeout: float = field(default=600.0, metadata=_holds(seconds(zero=False), renamed_from="exit_deadline"))
    """Seconds a process that ends waits for its checkpoint when other ranks are gone. Default 600."""
    group_timeout: float = field(default=120.0, metadata=_holds(seconds(zero=False)))
    """Timeout in seconds of the process groups hpdcp makes. Default 120."""
    keep_replaced_for: float = field(default=0.0, metadata=_holds(seconds(zero=True)))
    """Seconds the files of a replaced checkpoint stay, for those still reading it. Default 0."""
    progress: When = field(default="never", metadata=_holds(choice("never", "auto", "always")))
    """Whether `save` and `load` show a bar on the stderr of rank 0, which needs `hpdcp[progress]`. Default `never`;
    `auto`: on a terminal; `always`: elsewhere too, as a line every 10 seconds."""
    routes: tuple[Route, ...] = ()
    """`[[routes]]` tables: which backend serves which prefix; the longest prefix that matches wins. Default none."""
    backends: Mapping[str, BackendSettings] = field(default_factory=dict)
    """`[backends.NAME]` tables: a backend's tunables and its `storage_options`. Default none."""
    layouts: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """`[layouts.NAME]` tables: how a layout saves, such as `compressor = "zstd"` under `[layouts.zarr]`. Default
    none."""

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self)}
        layouts = f"layouts={masked('layouts', shown.pop('layouts'))}"
        return f"Config({', '.join(f'{name}={value!r}' for name, value in shown.items())}, {layouts})"

    def route_for(self, url: str) -> Route | None:
        """The route with the longest prefix that matches `url`, the earlier of two equal ones; None without any."""
        return max((route for route in self.routes if route.matches(url)), key=lambda r: len(r.prefix), default=None)

    def settings_for(self, backend: str, url: str) -> BackendSettings:
        """What the backend of that name is built with at `url`: its table, and over it the options of the route."""
        settings = self.backends.get(backend, BackendSettings())
        route = self.route_for(url)
        return route.options.over(settings) if route is not None and route.backend in ("auto", backend) else settings

    if not TYPE_CHECKING:  # a type checker knows the names of today

        def __getattr__(self, name):
            """A key by its earlier name."""
            if name not in RENAMED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            warn_renamed(f"Config.{name}", RENAMED[name])
            return getattr(self, RENAMED[name])


KEYS: Final[Mapping[str, Kind]] = {each.name: each.metadata["kind"] for each in fields(Config) if each.metadata}
"""Keys of one value; `routes`, `backends` and `layouts` hold tables."""

RENAMED: Final[Mapping[str, str]] = {
    each.metadata["renamed_from"]: each.name for each in fields(Config) if each.metadata.get("renamed_from")
}
"""Earlier name of a key → the key."""


def all_keys() -> list[str]:
    """The name of every key, those of tables too."""
    return [each.name for each in fields(Config)]


def known_keys() -> str:
    """For messages."""
    return f"Known keys: {', '.join(all_keys())}"


class Settings(TypedDict, total=False):
    """Arguments of `using`: the fields of `Config`, where tables and sizes may also be written as in the file."""

    backend: str
    layout: str
    broadcast: When
    verify: When
    allow_pickle: bool
    check_replicas: ReplicaCheck | Mapping[str, ReplicaCheck]
    async_staging_budget: int | str | None
    mailbox_timeout: float
    exit_timeout: float
    group_timeout: float
    keep_replaced_for: float
    progress: When
    routes: Sequence[Route | Mapping[str, object]]
    backends: Mapping[str, BackendSettings | Mapping[str, object]]
    layouts: Mapping[str, Mapping[str, object]]
    mailbox_deadline: float
    """Earlier name of `mailbox_timeout`."""
    exit_deadline: float
    """Earlier name of `exit_timeout`."""
