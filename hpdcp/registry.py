"""Which backend and which layout a checkpoint gets: tables of names, imported when they are asked for."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from hpdcp import config
from hpdcp.backend import Backend
from hpdcp.errors import InvalidArgumentError, NotSupportedError

_BACKENDS: Final[Mapping[str, str]] = {"local": "hpdcp_backends.local:LocalBackend"}
_LAYOUTS: Final[Mapping[str, str]] = {"safetensors": "hpdcp.checkpoint_io:SafetensorsLayout"}
_EXTRAS: Final[Mapping[str, str]] = {"s3": "s3", "zarr": "zarr"}
# Not urlsplit(), which raises for brackets in a bucket's name.
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOCAL_SCHEMES: Final = frozenset({"", "file", "local"})


def resolve_checkpoint_id(checkpoint_id: str | Path) -> str:
    """The URL, or the absolute path, that `checkpoint_id` names at this moment, in this process's folder.

    Raises:
        InvalidArgumentError: it is empty, not text, or a URL that went through pathlib.
    """
    try:
        text = os.fspath(checkpoint_id)
    except TypeError:
        raise InvalidArgumentError(
            f"checkpoint_id is a {type(checkpoint_id).__name__}; expected a str (a path or a URL) or a pathlib.Path."
        ) from None
    if type(text) is not str or not text.strip() or "\0" in text:
        raise InvalidArgumentError(f"checkpoint_id is {text!r}; expected a path or a URL.")
    scheme = _scheme(text)
    if isinstance(checkpoint_id, os.PathLike):
        head = text.split("/", 1)[0]
        if len(head) > 2 and head.endswith(":"):
            raise InvalidArgumentError(
                f"checkpoint_id is Path({text!r}): pathlib has taken one slash of the URL. Pass the URL as a str."
            )
        scheme = ""
    if scheme not in _LOCAL_SCHEMES:
        return text
    if scheme:
        text = text.split("://", 1)[1]
    return os.path.abspath(os.path.expanduser(text))


def open_backend(url: str, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend for `url` (as `resolve_checkpoint_id` gives it), by name, else by configuration, else by its scheme.

    Raises:
        InvalidArgumentError: no backend of that name; lists the known ones.
        NotSupportedError: no backend for that kind of URL, or its package is not installed.
    """
    settings = config.current()
    route = settings.route_for(url)
    wanted = name or (route.backend if route is not None and route.backend != "auto" else settings.backend)
    if wanted == "auto":
        wanted = _by_scheme(url)
    options = settings.settings_for(wanted, url)
    build: Callable[..., Backend] = _find(wanted, "backend", _BACKENDS, "hpdcp.backends")
    merged = {**options.storage_options, **(storage_options or {})}
    try:
        return build(url, storage_options=merged, **options.tunables)
    except TypeError as error:
        raise InvalidArgumentError(
            f"backend {wanted!r} does not take the settings {sorted(options.tunables)}: {error}."
        ) from error


def find_layout(name: str) -> Callable[[], Any]:
    """The layout class of that name.

    Raises:
        InvalidArgumentError, NotSupportedError: as `open_backend`.
    """
    found: Callable[[], Any] = _find(name, "layout", _LAYOUTS, "hpdcp.layouts")
    return found


def _by_scheme(url: str) -> str:
    scheme = _scheme(url)
    if scheme in _LOCAL_SCHEMES:
        return "local"
    raise NotSupportedError(
        f"{url}: this hpdcp has no backend for {scheme}:// yet; it knows local paths and file:// URLs. "
        "A backend of another package is chosen by its name: hpdcp.config.using(backend=...)."
    )


def _scheme(url: str) -> str:
    found = _SCHEME.match(url)
    return found[1].lower() if found else ""


def _find(name: str, kind: str, known: Mapping[str, str], group: str) -> Callable[..., Any]:
    spec = known.get(name)
    if spec is None:
        others = {point.name: point for point in entry_points(group=group)}
        if name in others:
            loaded: Callable[..., Any] = others[name].load()
            return loaded
        raise InvalidArgumentError(f"no {kind} is called {name!r}; known are {sorted({*known, *others})}.")
    module, _, attribute = spec.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), attribute)
    except ImportError as error:
        extra = _EXTRAS.get(name)
        advice = f' Install it: pip install "hpdcp[{extra}]".' if extra else ""
        raise NotSupportedError(f"the {kind} {name!r} cannot be used: {error}.{advice}") from error
    return found
