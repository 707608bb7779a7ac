"""`hpdcp convert`: conversions of `hpdcp.offline_transform`, on one process or on all that torchrun started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

import torch.distributed as dist
import typer
from rich.console import RenderableType
from rich.text import Text

from hpdcp._base import config
from hpdcp._convert.conversion import Conversion
from hpdcp._convert.copy import convert_dcp_to_dcp
from hpdcp._convert.to_checkpoint import convert_full_checkpoint_to_dcp
from hpdcp._convert.to_huggingface import convert_dcp_to_huggingface
from hpdcp._convert.to_torch_file import convert_dcp_to_torch
from hpdcp.commands.name_maps import NameTable, Table, read_name_map
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
    print_json,
    rate_of,
    show,
    size_of,
    summary,
    table_of,
    text_of,
)

_LONGEST_STEP: Final = timedelta(days=7)
"""A rank that is done waits for those that still write, however long that takes: torchrun ends all when one dies."""
_MOST_FILES: Final = 20

Src = Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or URL to read.", show_default=False)]
Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder, file or URL to write.", show_default=False)]
NameMap = Annotated[
    dict[str, Any] | None,
    typer.Option(
        "--name-map",
        metavar="FILE",
        parser=read_name_map,
        help="Rename by a file of JSON or TOML: name → other name; others stay.",
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
    """Make a checkpoint of one file of weights. That is one of torch.save (.pt, .pth, .bin), or a .safetensors file."""
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
    table = NameTable(name_map)
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
        str,
        typer.Option(
            "--max-shard-size", metavar="SIZE", help="Write at most so much into one file: 5GB (10^9), 2GiB (2^30)."
        ),
    ] = "5GB",
    prefix: Annotated[str, typer.Option("--prefix", help="Take only names that begin so, without it: 'model.'.")] = "",
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="NAME", help="Cast floating-point tensors, as to bfloat16.")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Take only names that match; may be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="Leave out names that match; may be repeated."),
    ] = None,
    name_map: NameMap = None,
    copy_from: Annotated[
        str | None,
        typer.Option("--copy-from", metavar="DIR", help="Copy this folder's config, tokenizer, … along."),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Needed to replace an export whose shards have the names of the new ones, as where both have the "
            "same number of shards. Any other export is replaced without it.",
        ),
    ] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a folder of Hugging Face weights of a checkpoint. It holds the tensors, without optimizer state."""
    table = NameTable(name_map)
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
    """Make one file of torch.save of a checkpoint. One process does it; nesting and Python values stay."""
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


def dcp_to_dcp(
    src: Src,
    dst: Dst,
    layout: Annotated[
        str | None,
        typer.Option("--layout", metavar="NAME", help="Write in this layout, such as zarr; default: as configured."),
    ] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Write a checkpoint again, elsewhere or in another layout. It loads as the first one does."""
    with _converting(bar):
        began = time.perf_counter()
        done = convert_dcp_to_dcp(
            src,
            dst,
            layout=layout,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )
        _report(done, time.perf_counter() - began, as_json, "checkpoint")


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
    verb = "would replace" if done.dry_run else "replaced"
    before = f"; {verb} the {kind} that was there" if done.replaced else ""
    if done.dry_run:
        yield text_of(f"would write a {kind}: {done.dst}: {what}{before}", "bold")
    else:
        yield text_of(f"wrote a {kind}: {done.dst}: {what}, in {rate_of(done.nbytes, seconds)}{before}", "bold")


def _left_out(skipped: Mapping[str, str]) -> Iterator[RenderableType]:
    if not skipped:
        return
    table = table_of("left out", "names", "such as", numbers=("names",))
    for reason, count in summary(skipped.values()).items():
        example = next(name for name, why in skipped.items() if why == reason)
        table.add_row(text_of(reason), f"{count:,}", text_of(example))
    yield table
    yield Text()
