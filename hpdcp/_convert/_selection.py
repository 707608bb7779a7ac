"""Which tensors of a checkpoint become Hugging Face weights, under which names and in which dtype."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from hpdcp._base.errors import InvalidArgumentError, UnsupportedTypeError
from hpdcp._base.natural_order import natural_key
from hpdcp._convert.tensor_streams import StreamRequest, TensorStreamer
from hpdcp._format.columns import EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._state.dtypes import find_dtype
from hpdcp._state.geometry import Box
from hpdcp._state.mismatches import listed
from hpdcp._state.scales import CODES_ADVICE, scale_beside

NameOf = Mapping[str, str] | Callable[[str], str | None]

_OPTIMIZERS: Final = ("optimizer", "optimizers", "optim")
_STANDS_FOR_ALL: Final = (re.compile(r"(^|\.)shared\."), re.compile(r"emb|wte", re.IGNORECASE))
"""Of tied weights, transformers stores the embedding and ties output layers to it; where encoder and decoder have one
each, it stores the one they share."""

_SHORT_DTYPES: Final = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32", "fp64": "float64",
    "f64": "float64", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip
"""What other tools call dtypes of torch."""


@dataclass(frozen=True, slots=True)
class SelectedTensor:
    """One tensor to export."""

    name: str
    """Its name in the export."""
    request: StreamRequest
    dtype: torch.dtype
    """In the export."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Selection:
    """What is exported, in order, and what is not."""

    tensors: tuple[SelectedTensor, ...]
    skipped: Mapping[str, str]
    """Stored name → why it is left out."""


@dataclass(frozen=True)
class SelectionRules:
    """What the caller chose."""

    prefix: str = ""
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    name_map: NameOf | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, given in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(given, str):
                raise InvalidArgumentError(f"{name} is {given!r}; expected a list of patterns, such as [{given!r}].")

    def why_not(self, fqn: str) -> str | None:
        """Why a name is left out; None where it is not."""
        if not fqn.startswith(self.prefix):
            return f"not under the prefix {self.prefix!r}"
        name = fqn.removeprefix(self.prefix)
        if self.include and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.include):
            return "not among include"
        found = next((pattern for pattern in self.exclude if fnmatch.fnmatchcase(name, pattern)), None)
        return None if found is None else f"excluded by {found!r}"

    def name_of(self, fqn: str) -> str | None:
        """The name in the export of one that is not left out by `why_not`; None where the map leaves it out."""
        name = fqn.removeprefix(self.prefix)
        mapped: object = name
        if callable(self.name_map):
            mapped = self.name_map(name)
        elif self.name_map is not None:
            mapped = self.name_map.get(name, name)
        if mapped is None:
            return None
        if not isinstance(mapped, str) or mapped in ("", "__metadata__"):
            raise InvalidArgumentError(
                f"name_map maps {name!r} to {mapped!r}; expected another name, or None to leave it out."
            )
        return mapped


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that is meant by its name.

    Raises:
        InvalidArgumentError: there is none of that name, or nothing is cast to it.
    """
    found = find_dtype(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not (found.is_floating_point or found.is_complex):
        near = "" if isinstance(found, torch.dtype) else _near_dtype(str(dtype))
        hint = f" Did you mean {near!r}?" if near else ""
        raise InvalidArgumentError(
            f"dtype is {dtype!r}; expected a floating-point or complex one, such as 'bfloat16': tensors of integers "
            f"and bools are never cast.{hint}"
        )
    return found


def _near_dtype(name: str) -> str:
    """torch's name for what other tools call so, or the nearest one; empty where none is near.

    >>> _near_dtype("bf16"), _near_dtype("FP16"), _near_dtype("float23"), _near_dtype("apple")
    ('bfloat16', 'float16', 'float32', '')
    """
    lower = name.lower().removeprefix("torch.")
    if lower in _SHORT_DTYPES:
        return _SHORT_DTYPES[lower]
    known = [
        key
        for key, value in vars(torch).items()
        if isinstance(value, torch.dtype) and value.is_floating_point and str(value) == f"torch.{key}"
    ]
    return next(iter(difflib.get_close_matches(lower, known, n=1)), "")


def select_tensors(streamer: TensorStreamer, rules: SelectionRules) -> Selection:
    """What `rules` choose, sorted by name, numbers by their value.

    Left out always: Python values, what each rank kept for itself, optimizer state, and of tied names all but one.

    Raises:
        InvalidArgumentError: nothing is chosen, a pattern of `include` meets nothing, or two tensors get one name.
        UnsupportedTypeError: a tensor cannot be cast to the dtype that was asked for.
    """
    metadata = streamer.metadata
    skipped: dict[str, str] = {}
    names: dict[int, list[tuple[str, str]]] = {}
    optimizers = _optimizers(metadata, rules.prefix)
    for row, fqn in enumerate(metadata.entries.fqns):
        reason = _kind_skipped(metadata, row) or (
            "optimizer state" if fqn.startswith(optimizers) else rules.why_not(fqn)
        )
        name = rules.name_of(fqn) if reason is None else None
        if name is None:
            skipped[fqn] = reason or "left out by name_map"
        else:
            names.setdefault(metadata.resolve(row), []).append((name, fqn))
    _check_found(metadata, rules, names)
    chosen: dict[str, tuple[str, int]] = {}
    for row, tied in names.items():
        name, fqn = min(tied, key=lambda pair: preference(pair[0]))
        skipped |= {other: f"tied to {name!r}, stored once" for _, other in tied if other != fqn}
        if name in chosen:
            raise InvalidArgumentError(
                f"{chosen[name][0]!r} and {fqn!r} would both be called {name!r}; give each its own name."
            )
        chosen[name] = (fqn, row)
    found = [_selected(streamer, name, row, rules.dtype) for name, (_, row) in chosen.items()]
    _check_codes(metadata, found, {row: [fqn for _, fqn in tied] for row, tied in names.items()})
    return Selection(tuple(sorted(found, key=lambda each: natural_key(each.name))), skipped)


def preference(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """Sorts the names of tied tensors by how well each stands for all of them.

    >>> min(["lm_head.weight", "encoder.embed_tokens.weight", "shared.weight"], key=preference)
    'shared.weight'
    """
    ranks = (rank for rank, pattern in enumerate(_STANDS_FOR_ALL) if pattern.search(name))
    return next(ranks, len(_STANDS_FOR_ALL)), natural_key(name)


def _kind_skipped(metadata: Metadata, row: int) -> str | None:
    if int(metadata.entries.owners[row]) >= 0:
        return "kept by each rank for itself"
    return "a Python value" if metadata.entries.kinds[row] == EntryKind.OBJECT else None


def _optimizers(metadata: Metadata, prefix: str) -> tuple[str, ...]:
    """Prefixes of optimizer state, unless the caller asks for what is in it.

    What has `param_groups` and `state` beside each other is one, by whatever name, and what is called so.
    """
    names = list(metadata.entries.fqns)
    parents = {match[1] for name in names if (match := re.match(r"(|.*?\.)param_groups(?:\.|$)", name))}
    found = {parent for parent in parents if any(name.startswith(f"{parent}state.") for name in names)}
    found = {f"{parent}{inner}" for parent in found for inner in ("state.", "param_groups")} | {
        f"{name}." for name in _OPTIMIZERS
    }
    return tuple(sorted(root for root in found if not prefix.startswith(root)))


def _check_found(metadata: Metadata, rules: SelectionRules, names: Mapping[int, Sequence[tuple[str, str]]]) -> None:
    if not names:
        tops = sorted({fqn.split(".")[0] for fqn in metadata.entries.fqns})
        raise InvalidArgumentError(
            f"no tensor is left to export: prefix {rules.prefix!r}, include {list(rules.include)}, exclude "
            f"{list(rules.exclude)}. Stored names begin with {listed([*map(repr, tops)])}."
        )
    fqns = [fqn for tied in names.values() for _, fqn in tied]
    for pattern in rules.include:
        if not any(fnmatch.fnmatchcase(fqn.removeprefix(rules.prefix), pattern) for fqn in fqns):
            raise InvalidArgumentError(
                f"no tensor matches {pattern!r} of include; patterns are compared with whole names, without the prefix."
            )
    if rules.prefix and all(fqn.removeprefix(rules.prefix).startswith(".") for fqn in fqns):
        raise InvalidArgumentError(f"prefix {rules.prefix!r} leaves names that begin with a dot: end it with one.")


def _check_codes(metadata: Metadata, found: Sequence[SelectedTensor], fqns: Mapping[int, Sequence[str]]) -> None:
    """Raise unless quantised tensors stay as they are, and beside their scales."""
    exported = {each.name for each in found}
    for each in found:
        row = each.request.row
        stored = metadata.entries.dtype(row)
        scales = (scale_beside(fqn, stored, lambda other: metadata.find(other, None) is not None) for fqn in fqns[row])
        scale = next(filter(None, scales), None)
        if scale is None:
            continue
        what = f"{metadata.entries.fqns[row]!r} holds quantised codes of {stored}, scaled by {scale!r}"
        if each.request.dtype is not None:
            raise UnsupportedTypeError(
                f"{what}, and cannot be cast to {each.dtype}. {CODES_ADVICE} Leave out dtype=, or exclude both."
            )
        if scale_beside(each.name, stored, exported.__contains__) is None:
            raise InvalidArgumentError(
                f"{what}, which is left out or renamed apart from it: nothing in the folder would tell that they are "
                "codes. Include the scale under the codes' name and the same ending, or exclude both."
            )


def _selected(streamer: TensorStreamer, name: str, row: int, cast: torch.dtype | None) -> SelectedTensor:
    stored, shape = streamer.dtype(row), streamer.metadata.entries.shape(row)
    family = cast is not None and (
        (cast.is_floating_point and stored.is_floating_point) or (cast.is_complex and stored.is_complex)
    )
    dtype = cast if family and cast is not None and cast != stored else None
    if dtype is not None:
        try:
            torch.zeros(1, dtype=torch.uint8).expand(stored.itemsize).contiguous().view(stored).to(dtype)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedTypeError(
                f"{streamer.metadata.entries.fqns[row]!r} is {stored}, which torch cannot cast to {dtype}: {error}."
            ) from error
    return SelectedTensor(name, StreamRequest(row, Box.whole(shape), dtype), dtype or stored, shape)
