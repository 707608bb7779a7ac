"""Names of tensors as paths of nodes in a zarr hierarchy.

A node's path is the keys on the way to the tensor, one component for each. What zarr reserves, what stores cannot name
and what is hpdcp's own at a checkpoint's root is escaped by `%XX`, the bytes of its UTF-8, so that every path means one
name. State that a rank keeps for itself lies under `%rank0`, a component that no name gets by escaping.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Final

_LONGEST: Final = 200
"""Bytes of a component; file systems end at 255, and backends put a prefix before what is being written."""
_UNSAFE: Final = re.compile(r"[%/\\\x00-\x1f\x7f\ud800-\udfff]")
_RESERVED: Final = frozenset({"c", "zarr.json"})
_FIXED: Final = re.compile(r"(?:.*/)?(?:zarr\.json|c(?:/[0-9]+)*)", re.DOTALL)
_MARKS: Final = frozenset({"zarr.json", ".zgroup", ".zarray"})
_OURS: Final = re.compile(r"_rank|[0-9]+\.(metadata|attempt)\Z")


def escape(component: object, *, root: bool = False) -> str:
    """One key as a component of a path; `root`: directly under the checkpoint's root.

    >>> escape("layers.0.weight"), escape(3), escape("a/b"), escape("c"), escape(".."), escape("50%")
    ('layers.0.weight', '3', 'a%2Fb', '%63', '%2E.', '50%25')
    """
    text = str(component)
    first = (
        text in _RESERVED or text.startswith((".", "__")) or (root and _OURS.match(text) is not None)
    )  # a leading "." hides files, and "__" is zarr's own
    escaped = _UNSAFE.sub(lambda found: _hex(found[0]), text)
    if first:
        escaped = _hex(text[0]) + escaped[1:]
    if not escaped:
        return "%"
    encoded = escaped.encode()
    if len(encoded) > _LONGEST:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return encoded[: _LONGEST - 40].decode("utf-8", "ignore") + f"%{digest}%"
    return escaped


def node_path(path: Sequence[object], owner: int | None) -> str:
    """Where the tensor at `path` of a state dict is in the hierarchy.

    >>> node_path(["model", "layers.0.weight"], None), node_path(["rng"], 3)
    ('model/layers.0.weight', '%rank3/rng')
    """
    parts = [escape(component, root=owner is None and not at) for at, component in enumerate(path)]
    return "/".join(parts if owner is None else [f"%rank{owner}", *parts])


def is_fixed_name(key: str) -> bool:
    """Whether arrays and groups of zarr, version 3, have files of this name, whoever wrote them.

    >>> is_fixed_name("model/w/zarr.json"), is_fixed_name("step/c"), is_fixed_name("w/c/0/1"), is_fixed_name("w/c/a")
    (True, True, True, False)
    """
    return _FIXED.fullmatch(key) is not None


def is_root(keys: Collection[str]) -> bool:
    """Whether a folder with these keys is an array or a group of zarr, version 2 or 3."""
    return not _MARKS.isdisjoint(keys)


def _hex(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
