"""Arguments and options of `hpdcp convert`, each defined once."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from hpdcp.commands.name_maps import read_name_map
from hpdcp.commands.options import backend_option, storage_options_option


def _leave_torchrun(given: bool) -> bool:
    if given:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
    return given


Src = Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or URL to read.", show_default=False)]
Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder, file or URL to write.", show_default=False)]

SrcBackend = Annotated[str | None, backend_option("--src-backend", "the source's backend")]
DstBackend = Annotated[str | None, backend_option("--dst-backend", "the destination's backend")]
SrcOptions = Annotated[dict[str, Any] | None, storage_options_option("--src-storage-options", "the source")]
DstOptions = Annotated[dict[str, Any] | None, storage_options_option("--dst-storage-options", "the destination")]

PrefixOfAll = Annotated[str, typer.Option("--prefix", help="Put before every name, as in 'model.'.")]
PrefixOfSafetensors = Annotated[str, typer.Option("--prefix", help="Put before every name; .safetensors only.")]
PrefixTaken = Annotated[str, typer.Option("--prefix", help="Take only names that begin so, without it: 'model.'.")]
NameMap = Annotated[
    dict[str, Any] | None,
    typer.Option(
        "--name-map",
        metavar="FILE",
        parser=read_name_map,
        help="Rename by a file of JSON or TOML: name → other name; others stay.",
    ),
]
Include = Annotated[
    list[str] | None, typer.Option("--include", metavar="PATTERN", help="Take only names that match; may be repeated.")
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out names that match; may be repeated.")
]
MaxShardSize = Annotated[
    str,
    typer.Option(
        "--max-shard-size", metavar="SIZE", help="Write at most so much into one file: 5GB (10^9), 2GiB (2^30)."
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="Cast floating-point tensors, as to bfloat16.")
]
CopyFrom = Annotated[
    str | None,
    typer.Option("--copy-from", metavar="DIR", help="Copy this folder's auxiliary files too: config, tokenizer, …"),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Needed to replace an export whose shards have the names of the new ones, as where both have the "
        "same number of shards. Any other export is replaced without it.",
    ),
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Unpickle Python values that need it, which can run code from SRC.")
]
NoDist = Annotated[
    bool,
    typer.Option(
        "--no-dist",
        callback=_leave_torchrun,
        is_eager=True,
        help="Convert in this process alone, though torchrun's variables are set, as in a command that a rank starts.",
    ),
]
LayoutName = Annotated[
    str | None,
    typer.Option("--layout", metavar="NAME", help="Write in this layout, such as zarr; default: as configured."),
]
