"""Where values come from, lowest first: the file, the environment, and `using`."""

from __future__ import annotations

import difflib
import functools
import json
import logging
import os
import tomllib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Final

from hpdcp._base._config_schema import RENAMED, all_keys, known_keys
from hpdcp._base._config_tree import Tree, found_in, merge, with_origin
from hpdcp._base.errors import InvalidArgumentError
from hpdcp._base.renames import warn_renamed
from hpdcp._base.timing import log_once

DEFAULT_FILE: Final = "~/.config/hpdcp/hpdcp.toml"

_NOT_KEYS: Final = ("HPDCP_CONFIG", "HPDCP_RUN_ID", "HPDCP_TRACE")
_TABLES: Final = ("routes", "backends", "layouts", "check_replicas")
_OF_TABLES: Final = ("HPDCP_BACKEND_", "HPDCP_BACKENDS_", "HPDCP_LAYOUTS_", "HPDCP_S3_", "HPDCP_NFS_", "HPDCP_LOCAL_")
"""How variables begin that were meant for a backend's or a layout's table."""
_NOT_KEY_PREFIX: Final = "HPDCP_TEST_"

OVERRIDES: Final[ContextVar[tuple[Tree, ...]]] = ContextVar("hpdcp_config_overrides", default=())
"""What `using` lays over the rest, the innermost last."""


def merged_layers() -> Tree:
    """What is set here and now, and where each of it was.

    Raises:
        InvalidArgumentError: the file cannot be read, or a variable has an empty part.
    """
    tree: Tree = {}
    for layer in (_file_layer(), _environment_layer(), *OVERRIDES.get()):
        merge(tree, with_new_names(layer))
    return tree


def with_new_names(layer: Tree) -> Tree:
    """The layer with each key under the name that it has now, which wins where it is set by both; warns of others."""
    earlier = layer.keys() & RENAMED.keys()
    if not earlier:
        return layer
    found = {key: node for key, node in layer.items() if key not in earlier}
    for key in sorted(earlier):
        warn_renamed(f"Configuration key {key!r} ({found_in(layer[key])})", repr(RENAMED[key]), stacklevel=4)
        found.setdefault(RENAMED[key], layer[key])
    return found


def _file_layer() -> Tree:
    named = os.environ.get("HPDCP_CONFIG")
    if named == "":
        return {}
    path = os.path.abspath(os.path.expanduser(DEFAULT_FILE if named is None else named))
    try:
        status = os.stat(path)
        return with_origin(_parse_file(path, status.st_mtime_ns, status.st_size, status.st_ino), path)
    except FileNotFoundError:
        if named is None:
            return {}
        raise InvalidArgumentError(
            f"HPDCP_CONFIG={named}: expected a TOML file, found none. Correct the path, or unset the variable."
        ) from None
    except PermissionError as error:
        if named is not None:
            raise InvalidArgumentError(
                f"HPDCP_CONFIG={named}: this user may not read it ({error.strerror}). Correct the path or its "
                "permissions, or unset the variable."
            ) from error
        log_once(
            logging.WARNING,
            f"{path}: this user may not read it ({error.strerror}): hpdcp goes on without it. An empty HPDCP_CONFIG "
            "says that no file is meant.",
        )
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgumentError(
            f"{path}: expected a readable TOML file of hpdcp's configuration; found: {error}"
        ) from error


@functools.lru_cache(maxsize=4)
def _parse_file(path: str, _modified: int, _size: int, _inode: int) -> Mapping[str, object]:
    with open(path, "rb") as file:
        return tomllib.load(file)


def _environment_layer() -> Tree:
    tree: Tree = {}
    # Shorter names first, so that HPDCP_BACKENDS__S3__X lies over HPDCP_BACKENDS whatever the order they are listed in.
    for variable in sorted((name for name in os.environ if name.startswith("HPDCP_")), key=lambda n: (len(n), n)):
        if variable in _NOT_KEYS or variable.startswith(_NOT_KEY_PREFIX):
            continue
        origin = f"environment variable {variable}"
        path = variable.removeprefix("HPDCP_").lower().split("__")
        value: object = os.environ[variable]
        if path[0] not in all_keys() and path[0] not in RENAMED:
            _warn_unknown(variable)
            continue
        if "" in path:
            raise InvalidArgumentError(
                f"{origin}: expected HPDCP_KEY, or HPDCP_KEY__KEY for nested keys; found an empty part. {known_keys()}"
            )
        if path[0] in _TABLES:
            value = _json_or_text(os.environ[variable])
        for part in reversed(path[1:]):
            value = {part: value}
        merge(tree, with_origin({path[0]: value}, origin))
    return tree


def _warn_unknown(variable: str) -> None:
    """Say once that a variable means nothing here: it may be a newer version's, or the user's own."""
    meant = [f"HPDCP_{key.upper()}" for key in all_keys()]
    near = difflib.get_close_matches(variable, [*meant, *_NOT_KEYS], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    if variable.startswith(_OF_TABLES):
        hint = " Parts of a key are told apart by two underscores: HPDCP_BACKENDS__S3__COALESCE_GAP."
    log_once(
        logging.WARNING,
        f"environment variable {variable}: hpdcp has no such setting, and ignores it.{hint} {known_keys()}",
    )


def _json_or_text(text: str) -> object:
    def refuse(constant: str) -> object:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text
