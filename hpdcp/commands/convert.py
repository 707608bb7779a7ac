"""`hpdcp convert`: conversions of `hpdcp.offline_transform`, on one process or on all that torchrun started."""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import torch.distributed as dist
import typer
from rich.console import RenderableType
from rich.text import Text

from hpdcp import config
from hpdcp.commands.options import (
    AsJson,
    Bar,
    DryRun,
    DstBackend,
    DstOptions,
    ShowBar,
    SrcBackend,
    SrcOptions,
)
from hpdcp.commands.output import (
    count_of,
    cut_off,
    leave_to_rank_0,
    note,
    print_json,
    rate_of,
    show,
    size_of,
    summary,
    table_of,
    text_of,
)
from hpdcp.huggingface_names import Part
from hpdcp.offline_transform import (
    Conversion,
    convert_dcp_to_huggingface,
    convert_dcp_to_torch,
    convert_full_checkpoint_to_dcp,
)

_LONGEST_STEP: Final = timedelta(days=7)
"""A rank that is done waits for those that still write, however long that takes: torchrun ends all when one dies."""
_MOST_FILES: Final = 20
_MOST_NAMES: Final = 5

Named: TypeAlias = str | Part | None
Table: TypeAlias = dict[str, Named]


def _read_name_map(text: str) -> Table:
    """A table of names: JSON, or TOML where the file is called so."""
    example = """{"old.name": "new.name"}"""
    try:
        data = Path(text).expanduser().read_text("utf-8")
        table: object = tomllib.loads(data) if text.lower().endswith(".toml") else json.loads(data)
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{text!r} cannot be read: {error}.") from None
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is neither JSON nor, by its name, TOML: {error}.") from None
    if not isinstance(table, dict):
        raise typer.BadParameter(f"{text!r} holds a {type(table).__name__}; expected one table, such as {example}.")
    return {name: _wanted(text, name, value) for name, value in table.items()}


def _wanted(file: str, name: str, value: object) -> Named:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict) and set(value) == {"name", "offsets"}:
        where, offsets = value["name"], value["offsets"]
        if isinstance(where, str) and isinstance(offsets, list) and all(type(each) is int for each in offsets):
            return Part(where, tuple(offsets))
    quoted = f' In TOML, a name with dots is quoted: "{name}.…" = "…".' if isinstance(value, dict) else ""
    raise typer.BadParameter(
        f"{file!r} maps {name!r} to {json.dumps(value, default=str)[:80]}; expected another name, null (JSON) to "
        f'leave it out, or {{"name": …, "offsets": […]}} for a part of a larger tensor.{quoted}'
    )


Src = Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or URL to read.", show_default=False)]
Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder, file or URL to write.", show_default=False)]
NameMap = Annotated[
    dict[str, Any] | None,
    typer.Option(
        "--name-map", metavar="FILE", parser=_read_name_map, help="JSON or TOML: name → other name; others stay."
    ),
]


def hf_to_dcp(
    src: Src,
    dst: Dst,
    prefix: Annotated[str, typer.Option("--prefix", help="Put before every name, as in 'model.'.")] = "",
    name_map: NameMap = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a checkpoint of a folder of Hugging Face weights."""
    _to_dcp(
        "huggingface", src, dst, prefix, name_map, dry_run, as_json, bar,
        src_backend=src_backend, dst_backend=dst_backend,
        src_storage_options=src_storage_options, dst_storage_options=dst_storage_options,
    )  # fmt: skip


def torch_to_dcp(
    src: Src,
    dst: Dst,
    prefix: Annotated[str, typer.Option("--prefix", help="Put before every name; .safetensors only.")] = "",
    name_map: NameMap = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a checkpoint of one file of torch.save (.pt, .pth, .bin), or of one .safetensors file."""
    _to_dcp(
        "torch", src, dst, prefix, name_map, dry_run, as_json, bar,
        src_backend=src_backend, dst_backend=dst_backend,
        src_storage_options=src_storage_options, dst_storage_options=dst_storage_options,
    )  # fmt: skip


def _to_dcp(
    platform: Literal["huggingface", "torch"],
    src: str,
    dst: str,
    prefix: str,
    name_map: Table | None,
    dry_run: bool,
    as_json: bool,
    bar: ShowBar,
    **access: Any,
) -> None:
    table = _Lookup(name_map)
    with _converting(bar):
        began = time.perf_counter()
        done = convert_full_checkpoint_to_dcp(
            src, dst, platform, prefix=prefix, name_map=table.part_of, dry_run=dry_run, **access
        )
        _report(done, time.perf_counter() - began, as_json, "checkpoint")
    table.tell_of_unused(src)


def dcp_to_hf(
    src: Src,
    dst: Dst,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Most bytes of one file: 5GB (10^9), 2GiB (2^30).")
    ] = "5GB",
    prefix: Annotated[str, typer.Option("--prefix", help="Only names that begin so, without it: 'model.'.")] = "",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Cast floating-point tensors, as to bfloat16.")
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="PATTERN", help="Only names that match; may be repeated.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="No names that match; may be repeated.")
    ] = None,
    name_map: NameMap = None,
    copy_from: Annotated[
        str | None,
        typer.Option("--copy-from", metavar="DIR", help="Copy this folder's config, tokenizer, … along."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an export even where file names are the same.")
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a folder of Hugging Face weights of a checkpoint: its tensors, without optimizer state."""
    table = _Lookup(name_map)
    with _converting(bar):
        began = time.perf_counter()
        done = convert_dcp_to_huggingface(
            src,
            dst,
            max_shard_size=max_shard_size,
            prefix=prefix,
            dtype=dtype,
            include=include or (),
            exclude=exclude or (),
            name_map=table.name_of,
            copy_from=copy_from,
            overwrite=overwrite,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )
        _report(done, time.perf_counter() - began, as_json, "folder of weights")
    table.tell_of_unused(src)


def dcp_to_torch(
    src: Src,
    dst: Dst,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Unpickle Python values that need it, which can run code from SRC."),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make one file of torch.save of a checkpoint, in one process: nesting and Python values as they were saved."""
    leave_to_rank_0()
    with config.using(progress=bar.value):
        began = time.perf_counter()
        done = convert_dcp_to_torch(
            src,
            dst,
            allow_pickle=allow_pickle or None,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )
        _report(done, time.perf_counter() - began, as_json, "file")


class _Lookup:
    """A table of names as a function, which knows what was never asked for: a typing error in a name, mostly."""

    def __init__(self, table: Table | None) -> None:
        self._table = table
        self._asked: set[str] = set()

    @property
    def part_of(self) -> Callable[[str], Named] | None:
        """As conversions into checkpoints take it."""
        return None if self._table is None else self._find

    @property
    def name_of(self) -> Callable[[str], str | None] | None:
        """As conversions into folders take it.

        Raises:
            typer.BadParameter: the table speaks of parts.
        """
        if self._table is None:
            return None
        part = next((name for name, value in self._table.items() if isinstance(value, Part)), None)
        if part is not None:
            raise typer.BadParameter(f"--name-map makes {part!r} a part of a larger tensor; expected a name.")

        def name_of(name: str) -> str | None:
            found = self._find(name)
            assert not isinstance(found, Part)
            return found

        return name_of

    def _find(self, name: str) -> Named:
        assert self._table is not None
        self._asked.add(name)
        return self._table.get(name, name)

    def tell_of_unused(self, src: str) -> None:
        """Say which names of the table `src` does not hold."""
        unused = [name for name in self._table or () if name not in self._asked]
        if unused:
            named = ", ".join(map(repr, unused[:_MOST_NAMES])) + (", …" if len(unused) > _MOST_NAMES else "")
            note(f"{count_of(len(unused), 'name')} of --name-map met no tensor of {src}: {named}.")


@contextmanager
def _converting(bar: ShowBar) -> Iterator[None]:
    """A process group of what torchrun started, and bars as they are wanted."""
    with config.using(progress=bar.value):
        if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            yield
            return
        dist.init_process_group("gloo", timeout=_LONGEST_STEP)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _report(done: Conversion, seconds: float, as_json: bool, kind: str) -> None:
    if as_json:
        print_json({**asdict(done), "nbytes": done.nbytes, "seconds": seconds})
    else:
        show(*_described(done, seconds, kind))


def _described(done: Conversion, seconds: float, kind: str) -> Iterator[RenderableType]:
    if done.files:
        table = table_of("file", "bytes", numbers=("bytes",))
        for key, size in list(done.files.items())[:_MOST_FILES]:
            table.add_row(text_of(key), size_of(size))
        yield from cut_off(table, len(done.files))
    yield from _left_out(done.skipped)
    if done.copied:
        yield text_of(f"copied along: {', '.join(done.copied)}")
    files = f" in {count_of(len(done.files), 'file')}" if done.files else ""
    what = f"{count_of(len(done.tensors), 'tensor')}, {size_of(done.nbytes)}{files}"
    if done.dry_run:
        yield text_of(f"would write a {kind}: {done.dst}: {what}", "bold")
    else:
        yield text_of(f"wrote a {kind}: {done.dst}: {what}, in {rate_of(done.nbytes, seconds)}", "bold")


def _left_out(skipped: Mapping[str, str]) -> Iterator[RenderableType]:
    if not skipped:
        return
    table = table_of("left out", "names", "such as", numbers=("names",))
    for reason, count in summary(skipped.values()).items():
        example = next(name for name, why in skipped.items() if why == reason)
        table.add_row(text_of(reason), f"{count:,}", text_of(example))
    yield table
    yield Text()
