"""Which backend and which layout a checkpoint gets: tables of names, imported when they are asked for."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from hpdcp._base import config
from hpdcp._base.backend import Backend, remember_secrets, without_password
from hpdcp._base.errors import InvalidArgumentError, NotSupportedError
from hpdcp._base.locations import FSSPEC_WRAPPERS, LOCAL_SCHEMES, local_path, split_scheme
from hpdcp._base.mounts import is_nfs

if TYPE_CHECKING:
    from hpdcp._files.layout import Layout

_BACKENDS: Final[Mapping[str, str]] = {
    "local": "hpdcp_backends.local:LocalBackend",
    "nfs": "hpdcp_backends.nfs:NfsBackend",
    "s3": "hpdcp_backends.s3:S3Backend",
    "fsspec": "hpdcp_backends.generic:GenericBackend",
}
_LAYOUTS: Final[Mapping[str, str]] = {
    "safetensors": "hpdcp._files.safetensors_layout:SafetensorsLayout",
    "torch": "hpdcp._files.torch_layout:TorchLayout",
    "zarr": "hpdcp_backends.zarr_layout:ZarrLayout",
}
_EXTRAS: Final[Mapping[str, str]] = {"s3": "s3", "zarr": "zarr"}
_OWN_SCHEMES: Final[Mapping[str, str]] = {"s3": "s3", "s3a": "s3"}
"""Schemes with a backend made for them; others go through fsspec."""
_ADDRESSED: Final = frozenset({
    "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "tos", "tosfs", "sftp", "ssh", "ftp", "smb",
    "webhdfs", "webdav",
})  # fmt: skip
"""Schemes whose URLs name a bucket, container, share or host first."""
_ONE_SLASH: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_CHAIN: Final = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]*(?:://.*)?::.*[A-Za-z][A-Za-z0-9+.-]*://|(?:" + "|".join(sorted(FSSPEC_WRAPPERS)) + ")::",
    re.DOTALL,
)
"""`zip://inner::s3://bucket/outer`, `simplecache::s3://…`, `simplecache::/folder`; not `a::b`, nor `s3://bucket/a::b`."""


def resolve_checkpoint_id(checkpoint_id: str | Path) -> str:
    """The URL, or the absolute path, that `checkpoint_id` names at this moment, in this process's folder.

    One location has one name: the scheme is in lower case, slashes at the end are gone and doubled ones are one; `~`
    and `..` of a local path are resolved. What remains is literal: `#`, `?`, `%` and brackets are part of names. The
    root of a bucket (`s3://bucket`) is a location like any other.

    Raises:
        InvalidArgumentError: it is empty, not text, a URL that went through pathlib, names no bucket or host, has `.`
            or `..` in it, or is one of fsspec's chains.
    """
    try:
        text: object = os.fspath(checkpoint_id)
    except TypeError:
        raise InvalidArgumentError(
            f"checkpoint_id is a {type(checkpoint_id).__name__}; expected a str (a path or a URL) or a pathlib.Path."
        ) from None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise InvalidArgumentError(f"checkpoint_id is {text!r}; expected a path or a URL.")
    text = str.__str__(text)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise InvalidArgumentError(
            f"checkpoint_id is {text!r}, which has a lone surrogate: no file has such a name."
        ) from None
    if isinstance(checkpoint_id, os.PathLike):
        head = text.split("/", 1)[0]
        if len(head) > 2 and head.endswith(":"):
            raise InvalidArgumentError(
                f"checkpoint_id is Path({text!r}): pathlib has taken one slash of the URL. Pass the URL as a str."
            )
        return local_path(text)
    shown = without_password(text)
    if _CHAIN.match(text):
        raise InvalidArgumentError(
            f"{shown} is a chain of file systems. A cache in between would answer with old bytes, and in an archive "
            "nothing is replaced in one step: give the URL of the files themselves."
            + (f" (A folder of that name is given as ./{shown})" if "://" not in text else "")
        )
    scheme, path = split_scheme(text)
    if not scheme and _ONE_SLASH.match(text):
        raise InvalidArgumentError(
            f"checkpoint_id is {shown!r}: a URL has two slashes after its scheme. (A folder of that name is given "
            f"as ./{shown})"
        )
    if _is_local(scheme):
        return local_path(text)
    address, *folders = path.split("/")
    if not address and scheme in _ADDRESSED:
        raise InvalidArgumentError(f"{shown} names no bucket or host: expected {scheme}://NAME/folder.")
    if {".", ".."} & set(folders):
        raise InvalidArgumentError(f"{shown} has '.' or '..' in it, which means nothing there: write the URL without.")
    return f"{scheme}://" + "/".join([address, *filter(None, folders)])


def open_backend(url: str, *, name: str | None = None, storage_options: Mapping[str, Any] | None = None) -> Backend:
    """The backend for `url` (as `resolve_checkpoint_id` gives it): the one named here, else the one configured, else by
    the configuration's routes, the URL's scheme, and the file system that a local path stands on.

    Raises:
        InvalidArgumentError: no backend of that name, or none for that scheme; lists the known ones.
        NotSupportedError: a package it needs is not installed.
    """
    settings = config.current()
    wanted = backend_name(url, name)
    options = settings.settings_for(wanted, url)
    build: Callable[..., Backend] = _find(wanted, "backend", _BACKENDS, "hpdcp.backends")
    merged = {**options.storage_options, **(storage_options or {})}
    remember_secrets({**merged, **options.tunables})
    _refuse_unknown_tables("backend", settings.backends, _BACKENDS)
    if not options.tunables and not options.storage_options:
        return build(url, storage_options=merged)
    given = config.settings_at(wanted, url)
    _refuse_unknown(wanted, build, given)
    told = "; ".join(f"{setting.key} = {setting.shown} ({setting.origin})" for setting in given.values())
    told = f"The configuration gives backend {wanted!r} this: {told}. Correct it there."
    try:
        return build(url, storage_options=merged, **options.tunables)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{error} {told}") from error
    except TypeError as error:
        raise InvalidArgumentError(f"backend {wanted!r} cannot be opened: {error}. {told}") from error


def backend_name(url: str, name: str | None = None) -> str:
    """The name of the backend that `open_backend` opens; InvalidArgumentError where none serves the scheme."""
    settings = config.current()
    wanted = name or settings.backend
    if wanted == "auto":
        route = settings.route_for(url)
        wanted = route.backend if route is not None else "auto"
    return _by_place(url) if wanted == "auto" else wanted


def _refuse_unknown_tables(kind: str, tables: Iterable[str], built_in: Mapping[str, str]) -> None:
    """A table for a backend or layout that does not exist has no effect, which is not what whoever wrote it meant."""
    group = f"{kind}s"
    for name in tables:
        if name not in built_in and name not in (others := entry_points(group=f"hpdcp.{group}").names):
            known = sorted({*built_in, *others})
            raise InvalidArgumentError(
                f"{config.origin_of(group, name)}: configuration key '{group}.{name}': no {kind} is called "
                f"{name!r}; known are {known}.{_near(name, known)}"
            )


def _refuse_unknown(
    name: str, build: Callable[..., Any], given: Mapping[str, config.Setting], *, kind: str = "backend"
) -> None:
    """A setting that the constructor has no keyword for; one that takes any keyword judges for itself."""
    parameters = list(inspect.signature(build).parameters.values())
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    if kind == "backend":
        parameters = parameters[1:]  # the URL
    keywords = [parameter.name for parameter in parameters if parameter.name != "storage_options"]
    for key, setting in given.items():
        if key in keywords or key.startswith("storage_options."):
            continue
        raise InvalidArgumentError(
            f"{setting.origin}: configuration key {setting.key!r}: {kind} {name!r} has no setting {key!r}."
            f"{_near(key, keywords)} Known: {', '.join(keywords)}."
        )


def _near(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the known names; empty where none is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def check_configuration() -> None:
    """Raise for what the configuration gives backends and layouts that none of them takes, before any is opened.

    Names alone: values are checked by the constructors. What needs a package that is not installed is left aside.

    Raises:
        InvalidArgumentError: no such backend or layout, or no such setting of it; names the key and where it stands.
    """
    settings = config.current()
    _refuse_unknown_tables("backend", settings.backends, _BACKENDS)
    _refuse_unknown_tables("layout", settings.layouts, _LAYOUTS)
    for name in settings.backends:
        _refuse_unknown_of_backend(name, config.backend_settings(name))
    for name in settings.layouts:
        with contextlib.suppress(NotSupportedError):
            _refuse_unknown(name, find_layout(name), config.layout_settings(name), kind="layout")
    for position, route in enumerate(settings.routes):
        wanted = route.backend if route.backend != "auto" else settings.backend
        candidates = [wanted] if wanted != "auto" else _by_prefix(route.prefix)
        refused: list[InvalidArgumentError] = []
        for name in candidates:
            try:
                _refuse_unknown_of_backend(name, config.route_settings(position))
            except InvalidArgumentError as error:
                refused.append(error)
        if len(refused) == len(candidates):
            raise refused[0]


def _by_prefix(prefix: str) -> list[str]:
    """The backends that locations under the prefix may get; local ones depend on where file systems are mounted."""
    return ["local", "nfs"] if _is_local(split_scheme(prefix)[0]) else [_by_place(prefix)]


def _refuse_unknown_of_backend(name: str, given: Mapping[str, config.Setting]) -> None:
    with contextlib.suppress(NotSupportedError):
        _refuse_unknown(name, _find(name, "backend", _BACKENDS, "hpdcp.backends"), given)


def find_layout(name: str) -> type[Layout]:
    """The layout class of that name.

    Raises:
        InvalidArgumentError, NotSupportedError: as `open_backend`.
    """
    return cast("type[Layout]", _find(name, "layout", _LAYOUTS, "hpdcp.layouts"))


def _all_layouts() -> Iterator[type[Layout]]:
    """Every layout that can be imported here, the built-in ones first."""
    for name in dict.fromkeys([*_LAYOUTS, *entry_points(group="hpdcp.layouts").names]):
        try:
            layout = find_layout(name)
        except NotSupportedError:
            continue
        yield layout


def foreign_layout(keys: Collection[str]) -> type[Layout] | None:
    """The layout in whose format another program wrote these keys, which lie at a folder's root; None for none."""
    return next((layout for layout in _all_layouts() if layout.recognizes(keys)), None)


def fixed_names(keys: Iterable[str]) -> frozenset[str]:
    """Those of the keys that some layout gives files whatever their attempt (`Layout.is_fixed_name`).

    Imports layouts, and so torch, only where there are keys to judge.
    """
    wanted = list(keys)
    layouts = list(_all_layouts()) if wanted else []
    return frozenset(key for key in wanted if any(layout.is_fixed_name(key) for layout in layouts))


def open_layout(name: str) -> Layout:
    """A layout of that name for one save, with the options that the configuration has for it.

    Raises:
        InvalidArgumentError, NotSupportedError: as `open_backend`.
    """
    build: Callable[..., Layout] = find_layout(name)
    _refuse_unknown_tables("layout", config.current().layouts, _LAYOUTS)
    given = config.layout_settings(name)
    if not given:
        return build()
    _refuse_unknown(name, build, given, kind="layout")
    try:
        return build(**{key: setting.value for key, setting in given.items()})
    except InvalidArgumentError as error:
        told = "; ".join(f"{setting.key} = {setting.shown} ({setting.origin})" for setting in given.values())
        raise InvalidArgumentError(
            f"{error} The configuration gives layout {name!r} this: {told}. Correct it there."
        ) from error


def _by_place(url: str) -> str:
    scheme, _ = split_scheme(url)
    if _is_local(scheme):
        return "nfs" if is_nfs(url) else "local"
    if scheme in _OWN_SCHEMES:
        return _OWN_SCHEMES[scheme]
    import fsspec  # only now: a local checkpoint has no use for it

    known = sorted(set(fsspec.available_protocols()) - FSSPEC_WRAPPERS)
    if scheme in known:
        return "fsspec"
    near = difflib.get_close_matches(scheme, known, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(f'{name}://' for name in near)}?" if near else ""
    others = ", ".join(name for name in known if name not in {*LOCAL_SCHEMES, *_OWN_SCHEMES})
    raise InvalidArgumentError(
        f"{without_password(url)}: nothing here serves {scheme}://.{hint} Known are local paths and file://, s3://, "
        f"and by fsspec's packages {others}. "
        "A backend of another package is chosen by its name: hpdcp.config.using(backend=...)."
    )


def _is_local(scheme: str) -> bool:
    return not scheme or scheme in LOCAL_SCHEMES


def _find(name: str, kind: str, known: Mapping[str, str], group: str) -> Callable[..., Any]:
    spec = known.get(name)
    if spec is None:
        others = {point.name: point for point in entry_points(group=group)}
        if name in others:
            return _load(others[name], kind)
        names = sorted({*known, *others})
        raise InvalidArgumentError(f"no {kind} is called {name!r}; known are {names}.{_near(name, names)}")
    module, _, attribute = spec.partition(":")
    try:
        found: Callable[..., Any] = getattr(import_module(module), attribute)
    except ImportError as error:
        extra = _EXTRAS.get(name)
        advice = f' Install it: pip install "hpdcp[{extra}]".' if extra else ""
        raise NotSupportedError(f"the {kind} {name!r} cannot be used: {error}.{advice}") from error
    return found


def _load(point: EntryPoint, kind: str) -> Callable[..., Any]:
    try:
        loaded: Callable[..., Any] = point.load()
    except (ImportError, AttributeError) as error:
        package = point.dist.name if point.dist is not None else "its package"
        raise NotSupportedError(f"the {kind} {point.name!r} of {package} cannot be used: {error}.") from error
    return loaded
