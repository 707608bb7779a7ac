"""`hpdcp convert`: conversions of `hpdcp.offline_transform`, on one process or on all that torchrun started."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import typer

from hpdcp._base import config
from hpdcp._base.errors import PeerLostError
from hpdcp.commands.conversion_report import report
from hpdcp.commands.convert_options import (
    AllowPickle,
    CopyFrom,
    Dst,
    DstBackend,
    DstOptions,
    Dtype,
    Exclude,
    Include,
    LayoutName,
    MaxShardSize,
    NameMap,
    NoDist,
    Overwrite,
    PrefixOfAll,
    PrefixOfSafetensors,
    PrefixTaken,
    Src,
    SrcBackend,
    SrcOptions,
)
from hpdcp.commands.name_maps import NameTable
from hpdcp.commands.options import AsJson, Bar, DryRun, ShowBar
from hpdcp.commands.output import leave_to_rank_0, print_json, show
from hpdcp.commands.run_options import located

if TYPE_CHECKING:
    from hpdcp._convert.conversion import Conversion

_LONGEST_STEP: Final = timedelta(days=7)
"""A rank that is done waits for those that still write, however long that takes: torchrun ends all when one dies."""
_LONGEST_WAIT: Final = timedelta(seconds=120)
"""For the other processes to start; many import torch from a busy file system at the same time."""
_PATIENCE: Final = timedelta(seconds=5)
"""After which it is said what is waited for."""
_NO_DIST_ADVICE: Final = "Pass --no-dist to convert in this process alone."


def hf_to_dcp(
    src: Src,
    dst: Dst,
    prefix: PrefixOfAll = "",
    name_map: NameMap = None,
    dry_run: DryRun = False,
    no_dist: NoDist = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a checkpoint of a folder of Hugging Face weights."""
    table = NameTable(name_map)

    def convert() -> Conversion:
        from hpdcp._convert.to_checkpoint import convert_full_checkpoint_to_dcp

        return convert_full_checkpoint_to_dcp(
            src,
            dst,
            "huggingface",
            prefix=prefix,
            name_map=table.part_of,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )

    _run(convert, "checkpoint", bar, as_json)
    table.tell_of_unused(src)


def torch_to_dcp(
    src: Src,
    dst: Dst,
    prefix: PrefixOfSafetensors = "",
    name_map: NameMap = None,
    dry_run: DryRun = False,
    no_dist: NoDist = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a checkpoint of what torch saved: one file (.pt, .pth, .bin, .safetensors), or a folder of its DCP."""
    table = NameTable(name_map)

    def convert() -> Conversion:
        from hpdcp._convert.to_checkpoint import convert_full_checkpoint_to_dcp

        return convert_full_checkpoint_to_dcp(
            src,
            dst,
            "torch",
            prefix=prefix,
            name_map=table.part_of,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )

    _run(convert, "checkpoint", bar, as_json)
    table.tell_of_unused(src)


def dcp_to_hf(
    src: Src,
    dst: Dst,
    max_shard_size: MaxShardSize = "5GB",
    prefix: PrefixTaken = "",
    dtype: Dtype = None,
    include: Include = None,
    exclude: Exclude = None,
    name_map: NameMap = None,
    copy_from: CopyFrom = None,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    no_dist: NoDist = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make a folder of Hugging Face weights of a checkpoint. It holds the tensors, without optimizer state."""
    table = NameTable(name_map)

    def convert() -> Conversion:
        from hpdcp._convert.to_huggingface import convert_dcp_to_huggingface

        return convert_dcp_to_huggingface(
            located(src, src_backend, src_storage_options),
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

    _run(convert, "folder of weights", bar, as_json)
    table.tell_of_unused(src)


def dcp_to_torch(
    src: Src,
    dst: Dst,
    allow_pickle: AllowPickle = False,
    dry_run: DryRun = False,
    no_dist: NoDist = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Make one file of torch.save of a checkpoint. One process does it; nesting and Python values stay."""
    leave_to_rank_0()

    def convert() -> Conversion:
        from hpdcp._convert.to_torch_file import convert_dcp_to_torch

        return convert_dcp_to_torch(
            located(src, src_backend, src_storage_options),
            dst,
            allow_pickle=allow_pickle or None,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )

    _run(convert, "file", bar, as_json, alone=True)


def dcp_to_dcp(
    src: Src,
    dst: Dst,
    layout: LayoutName = None,
    dry_run: DryRun = False,
    no_dist: NoDist = False,
    as_json: AsJson = False,
    bar: Bar = ShowBar.AUTO,
    src_backend: SrcBackend = None,
    dst_backend: DstBackend = None,
    src_storage_options: SrcOptions = None,
    dst_storage_options: DstOptions = None,
) -> None:
    """Write a checkpoint again, elsewhere or in another layout. It loads as the first one does."""

    def convert() -> Conversion:
        from hpdcp._convert.copy import convert_dcp_to_dcp

        return convert_dcp_to_dcp(
            located(src, src_backend, src_storage_options),
            dst,
            layout=layout,
            dry_run=dry_run,
            src_backend=src_backend,
            dst_backend=dst_backend,
            src_storage_options=src_storage_options,
            dst_storage_options=dst_storage_options,
        )

    _run(convert, "checkpoint", bar, as_json)


def _run(convert: Callable[[], Conversion], kind: str, bar: ShowBar, as_json: bool, *, alone: bool = False) -> None:
    """Convert, `alone` or on all processes that torchrun started, and print what was made."""
    with config.using(progress=bar.value), _process_group(alone=alone):
        began = time.perf_counter()
        done = convert()
        seconds = time.perf_counter() - began
    if as_json:
        print_json({**asdict(done), "nbytes": done.nbytes, "seconds": seconds})
    else:
        show(*report(done, seconds, kind))


@contextmanager
def _process_group(*, alone: bool) -> Iterator[None]:
    if alone or "TORCHELASTIC_RUN_ID" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        yield
        return
    import torch.distributed as dist

    _join()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _join() -> None:
    """Meet the other processes that torchrun started.

    Raises:
        PeerLostError: they did not come, as where a rank of a training job started this command by itself.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    who = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']} that torchrun started, by its environment"
    waiting = threading.Timer(
        _PATIENCE.total_seconds(),
        lambda: typer.echo(f"hpdcp: this is {who}: waiting for the others. {_NO_DIST_ADVICE}", err=True),
    )
    waiting.daemon = True
    waiting.start()
    try:
        store, rank, world_size = next(rendezvous("env://", timeout=_LONGEST_WAIT))
        # A prefix of its own: the trainer that started this process may have a group in the same store.
        store = PrefixStore("hpdcp-convert", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_LONGEST_WAIT)
    except (RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0]
        message = f"this is {who}, and the others did not come ({reason}). {_NO_DIST_ADVICE}"
        if os.environ["LOCAL_RANK"] != "0":  # whose errors are not printed, since all ranks raise the same
            typer.echo(f"hpdcp: {message}", err=True)
        raise PeerLostError(message) from error
    finally:
        waiting.cancel()
    dist.distributed_c10d._set_pg_timeout(_LONGEST_STEP, dist.group.WORLD)  # no public name
