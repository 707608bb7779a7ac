"""What can be configured, where values come from, and which one wins."""

from hpdcp._base.config import (
    DEFAULT_FILE,
    BackendSettings,
    Config,
    ReplicaCheck,
    Route,
    Setting,
    Settings,
    When,
    current,
    effective,
    parse_size,
    using,
)

__all__ = [
    "BackendSettings",
    "Config",
    "DEFAULT_FILE",
    "ReplicaCheck",
    "Route",
    "Setting",
    "Settings",
    "When",
    "current",
    "effective",
    "parse_size",
    "using",
]
