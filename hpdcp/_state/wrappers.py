"""Tensors made of other tensors, on record and as targets: only the class that was saved takes what was saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from hpdcp._format.columns import EntryTable
from hpdcp._format.metadata import Metadata
from hpdcp._format.strings import StringColumn
from hpdcp._state._classes import class_name
from hpdcp._state._wrapper_kinds import MARK, attributes_of, class_of, described, is_wrapper_kind
from hpdcp._state.mismatches import Mismatch, Problems
from hpdcp._state.paths import Path, decode_path, fqn_of
from hpdcp._state.tree import StateTree

_IN_TEXT: Final = f',"{MARK}'.encode()
"""How such a step begins in a path's text, where a quote inside of a key is escaped."""


def rows_in_wrappers(paths: StringColumn) -> list[int]:
    """Rows whose paths may lead into a tensor; one search of all the text where none does."""
    text = paths.blob.tobytes()
    if _IN_TEXT not in text:
        return []
    places = [match.start() for match in re.finditer(re.escape(_IN_TEXT), text)]
    rows: list[int] = np.unique(np.searchsorted(paths.ends, places, side="right")).tolist()
    return rows


def stored_wrappers(entries: EntryTable) -> Mapping[tuple[str, int | None], str]:
    """(fqn, owner) → kind of every tensor on record that was made of others."""
    found: dict[tuple[str, int | None], str] = {}
    for row in rows_in_wrappers(entries.paths):
        owner = int(entries.owners[row])
        path = decode_path(entries.paths[row])
        for depth, kind in enumerate(path.kinds):
            if is_wrapper_kind(kind):
                found[fqn_of(path[:depth]), None if owner < 0 else owner] = kind
    return found


def leads_into_wrapper(path: Path) -> str | None:
    """What is on record of the tensor that has what is at `path` inside; None: it is in none."""
    return next((described(kind) for kind in path.kinds if is_wrapper_kind(kind)), None)


def refuse_wrappers(entries: EntryTable) -> None:
    """Raise LoadMismatchError where a tensor on record was made of others: without a target there is no class."""
    problems = Problems()
    for (fqn, _), kind in stored_wrappers(entries).items():
        problems.add(Mismatch.CLASS, fqn, f"{fqn!r} (stored as a {class_of(kind)}, wanted without a target)")
    problems.raise_if_any()


def check_wrappers(tree: StateTree, metadata: Metadata, *, rank: int) -> None:
    """Raise LoadMismatchError where a target and what is stored for it are not of one class with equal attributes.

    Checkpoints before 1.3 have the tensors inside such a one as items of a dict. These, and dicts, fill any target
    that has tensors of the same names.
    """
    kinds = stored_wrappers(metadata.entries)
    stored = {fqn: kind for (fqn, owner), kind in kinds.items() if owner is None or owner == rank}
    problems = Problems()
    for fqn, mine in tree.wrappers.items():
        if metadata.find(fqn, tree.containers[fqn].owner) is not None:
            text = f"{fqn!r} (stored as one tensor or value, wanted as a {class_of(mine)})"
            problems.add(Mismatch.CLASS, fqn, text)
    leaves = {leaf.fqn: leaf.value for leaf in tree.leaves} if stored else {}
    for fqn, kind in stored.items():
        wanted = tree.wrappers.get(fqn)
        if wanted == kind:
            continue
        if wanted is not None:
            problems.add(Mismatch.CLASS, fqn, f"{fqn!r} ({_difference(kind, wanted)})")
        elif fqn in leaves or fqn in tree.containers:
            value = leaves[fqn] if fqn in leaves else tree.containers[fqn].value
            plain = "plain tensor" if isinstance(value, torch.Tensor) else class_name(type(value))
            problems.add(Mismatch.CLASS, fqn, f"{fqn!r} (stored as a {class_of(kind)}, wanted as a {plain})")
    problems.raise_if_any()


def _difference(stored: str, wanted: str) -> str:
    if class_of(stored) != class_of(wanted):
        return f"stored as a {class_of(stored)}, wanted as a {class_of(wanted)}"
    return f"stored as a {described(stored)}, wanted with {attributes_of(wanted)}"
