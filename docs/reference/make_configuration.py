"""Writes configuration.md beside it, from the docstrings of `hpdcp.config` and of the backends: `make docs`.

Nothing about a key is written here but an example value. `tests/unit/_base/test_config_reference.py` compares the page
with what this would write.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import hpdcp.backend
from hpdcp._base import config
from hpdcp._files import registry

PAGE: Final = Path(__file__).with_name("configuration.md")
COMMAND: Final = "make docs"

EXAMPLES: Final[Mapping[str, object]] = {
    "backend": "nfs",
    "layout": "safetensors",
    "broadcast": "always",
    "verify": "always",
    "allow_pickle": True,
    "check_replicas": "all",
    "async_staging_budget": "64GiB",
    "mailbox_timeout": 1800,
    "exit_timeout": 60,
    "group_timeout": 300,
    "keep_replaced_for": 3600,
    "progress": "auto",
}
"""One value for each key that is no table, as the file has it."""

EXAMPLE_FILE: Final = """\
verify = "always"
progress = "auto"
async_staging_budget = "64GiB"
keep_replaced_for = 600

[backends.s3]
read_in_flight = 32
part_bytes = "32MiB"

[backends.s3.storage_options]
profile = "training"
endpoint_url = "https://objects.example.org"

[[routes]]
prefix = "s3://archive"
options = { read_in_flight = 8, storage_options = { requester_pays = true } }

[[routes]]
prefix = "/mnt/shared/checkpoints"
backend = "nfs"
options = { read_threads = 16 }
"""


def page() -> str:
    """The whole page."""
    return "\n".join([*_head(), *_keys(), *_tables(), *_backends(), *_layouts()]).rstrip() + "\n"


def _head() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield f"<!-- Written by {Path(__file__).name} from docstrings: change those, then run `{COMMAND}`. -->"
    yield ""
    yield _prose(inspect.getdoc(config) or "")
    yield ""
    yield "`hpdcp config show` prints every key with its value and where that comes from; so does"
    yield "`hpdcp.config.effective()`."
    yield ""
    yield "A file:"
    yield ""
    yield f"```toml\n{EXAMPLE_FILE}```"
    yield ""


def _keys() -> Iterator[str]:
    yield "## Keys"
    yield ""
    described = _field_docs(config.Config)
    for field in dataclasses.fields(config.Config):
        if field.name in EXAMPLES:
            yield from _key(field.name, described[field.name], field.default, EXAMPLES[field.name])


def _key(name: str, text: str, default: object, example: object) -> Iterator[str]:
    plain = example if isinstance(example, str) else _toml(example)
    yield f"### `{name}`"
    yield ""
    yield _prose(text)
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield f"| Value | {config.KEYS[name].expected} |"
    yield f"| Default | `{_toml('auto' if default is None else default)}` |"
    yield f"| File | `{name} = {_toml(example)}` |"
    yield f"| Environment | `HPDCP_{name.upper()}={plain}` |"
    yield f"| Code | `with hpdcp.config.using({name}={_python(example)}):` |"
    for earlier in (old for old, new in config.RENAMED.items() if new == name):
        yield f"| Earlier name | `{earlier}`, which goes on working, with a warning |"
    yield ""


def _tables() -> Iterator[str]:
    described = _field_docs(config.Config)
    yield "## Tables"
    yield ""
    yield "### `[[routes]]`"
    yield ""
    yield _prose(described["routes"])
    yield ""
    yield from _fields(config.Route)
    yield "| | |"
    yield "| --- | --- |"
    yield '| File | `[[routes]]`, then `prefix = "s3://archive"`; or `routes = [{ prefix = "s3://archive" }]` |'
    yield '| Environment | `HPDCP_ROUTES=[{"prefix": "s3://archive", "options": {"read_in_flight": 8}}]` |'
    yield '| Code | `with hpdcp.config.using(routes=[{"prefix": "s3://archive", "backend": "s3"}]):` |'
    yield ""
    yield "### `[backends.NAME]`"
    yield ""
    yield _prose(described["backends"])
    yield ""
    yield from _fields(config.BackendSettings)
    yield "In the file and in the environment tunables stand in the table itself, beside `storage_options`."
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield "| File | `[backends.s3]`, then `read_in_flight = 32`; `[backends.s3.storage_options]`, then `anon = true` |"
    yield "| Environment | `HPDCP_BACKENDS__S3__READ_IN_FLIGHT=32`, `HPDCP_BACKENDS__S3__STORAGE_OPTIONS__ANON=true` |"
    given = {"s3": {"read_in_flight": 32, "storage_options": {"anon": True}}}
    yield f"| Code | `with hpdcp.config.using(backends={_python(given)}):` |"
    yield ""
    yield "### `[layouts.NAME]`"
    yield ""
    yield _prose(described["layouts"])
    yield ""
    yield "| | |"
    yield "| --- | --- |"
    yield '| File | `[layouts.zarr]`, then `compressor = "zstd"` |'
    yield "| Environment | `HPDCP_LAYOUTS__ZARR__COMPRESSOR=zstd` |"
    options = {"zarr": {"compressor": "zstd", "level": 5}}
    yield f"| Code | `with hpdcp.config.using(layouts={_python(options)}):` |"
    yield ""


def _fields(record: type) -> Iterator[str]:
    described = _field_docs(record)
    for field in dataclasses.fields(record):
        default = "" if field.default is dataclasses.MISSING else f" (default `{_toml(field.default)}`)"
        yield f"- `{field.name}`{default}: {_line(described.get(field.name, ''))}"
    yield ""


def _backends() -> Iterator[str]:
    yield "## Backends"
    yield ""
    for name, spec in registry._BACKENDS.items():
        module, _, attribute = spec.partition(":")
        yield from _backend(name, getattr(import_module(module), attribute))


def _backend(name: str, kind: type[hpdcp.backend.Backend]) -> Iterator[str]:
    about, told = _sections(inspect.getdoc(kind) or "")
    yield f"### `{name}`"
    yield ""
    yield _prose(about)
    yield ""
    yield f"- `storage_options`: {told['storage_options']}"
    yield ""
    yield f"Tunables, under `[backends.{name}]` or in the environment as `HPDCP_BACKENDS__{name.upper()}__…`:"
    yield ""
    yield "| Tunable | Type | Default | |"
    yield "| --- | --- | --- | --- |"
    for tunable, parameter in tunables(kind).items():
        assert tunable in told, f"the docstring of {kind.__name__} has no entry for {tunable!r} under Args:"
        value = parameter.default
        size = f" ({_size(value)})" if type(value) is int and value >= 1024 else ""
        written = "" if value is None else f"`{_toml(value)}`{size}"
        yield f"| `{tunable}` | `{_cell(str(parameter.annotation))}` | {written} | {_cell(told[tunable])} |"
    yield ""


def _layouts() -> Iterator[str]:
    yield "## Layouts"
    yield ""
    for name, spec in registry._LAYOUTS.items():
        module, _, attribute = spec.partition(":")
        kind = getattr(import_module(module), attribute)
        about, told = _sections(inspect.getdoc(kind) or "")
        yield f"### Layout `{name}`"
        yield ""
        yield _prose(about)
        yield ""
        if not tunables(kind):
            continue
        yield f"Options, under `[layouts.{name}]` or in the environment as `HPDCP_LAYOUTS__{name.upper()}__…`:"
        yield ""
        yield "| Option | Type | Default | |"
        yield "| --- | --- | --- | --- |"
        for option, parameter in tunables(kind).items():
            assert option in told, f"the docstring of {kind.__name__} has no entry for {option!r} under Args:"
            shown = f"`{_cell(str(parameter.annotation))}` | `{_toml(parameter.default)}`"
            yield f"| `{option}` | {shown} | {_cell(told[option])} |"
        yield ""


def tunables(kind: type) -> dict[str, inspect.Parameter]:
    """What a backend's or a layout's constructor takes, beside the URL and the storage options."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "storage_options"}


def _sections(doc: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its `Args:`, and of each argument; several may share one text."""
    about, _, rest = doc.partition("\nArgs:\n")
    told: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", rest, re.MULTILINE):
        for name in names.split(", "):
            told[name] = _line(text)
            if told[name] == "As in `Backend`.":
                told[name] = _line(_field_docs(hpdcp.backend.Backend)[name])
    return about, told


def _field_docs(record: type) -> dict[str, str]:
    """Field → the docstring under it in the source."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else None
            if isinstance(text, str):
                found[field.target.id] = inspect.cleandoc(text)
    return found


def _prose(text: str) -> str:
    # A person's `<name>` would be taken for markup.
    return text.strip().replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _toml(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value) if isinstance(value, (bool, int, float, str)) else json.dumps(list(value))


def _python(value: object) -> str:
    return repr(value).replace("'", '"')


def _size(nbytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} bytes"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
