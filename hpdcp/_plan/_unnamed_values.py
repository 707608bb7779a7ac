"""What a checkpoint holds below a target and the target does not name, where the target asks for all of it.

A mapping in the caller's hands asks for what it names. These ask for every Python value that is stored below them: a
leaf that is no tensor (it takes the place of whatever was stored under its name), an object with a `state_dict()`, a
`PerRank`, and an optimizer's groups. Tensors that nobody names stay out, and with them what is stored around them under
one key that the target lacks. A module names all that it has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch

from hpdcp._format.columns import Entry, EntryKind
from hpdcp._format.metadata import Metadata
from hpdcp._plan._stored_names import StoredNames
from hpdcp._plan._wanted_values import Take, WantedValues
from hpdcp._plan.stored_index import StoredIndex
from hpdcp._state.paths import Path, build_value, decode_path, fqn_of, path_below, text_of
from hpdcp._state.tree import Container, OpenRoot, StateTree


class Parts:
    """Values that together are one, each where it lies inside."""

    def __init__(self) -> None:
        self.expected = 0
        self._found: list[tuple[tuple[int, int], Path, Any]] = []

    def at(self, order: tuple[int, int], path: Path) -> Take:
        """Takes the value that lies at `path`; those of lower `order` come first in what is built."""
        self.expected += 1
        return lambda value: self._found.append((order, path, value))

    def build(self) -> Any:
        """The value; None where no part was expected."""
        if not self._found:
            return None
        ordered = sorted(self._found, key=lambda part: part[0])
        return build_value((path, value) for _, path, value in ordered)


class UnnamedValues:
    """Plans the reads of such values, and where they go."""

    def __init__(self, metadata: Metadata, tree: StateTree, names: StoredNames, values: WantedValues) -> None:
        self._metadata = metadata
        self._stored = StoredIndex(metadata)
        self._tree = tree
        self._names = names
        self._values = values
        self._planned: set[str] = set()

    def rebuild(self, fqn: str, owner: int | None, take: Take, *, exact: int | None = None) -> bool:
        """Whether all that is stored below `fqn` are Python values; then `take` is called with the one they make.

        With the value stored in row `exact` under the very name, unless it is an empty mapping: some ranks had nothing.
        """
        rows: list[tuple[int, Path]] = []
        for name in self._names.all_below(fqn):
            row = self._stored.find(name, owner)
            if row is None:
                if owner is None:
                    return False
                continue  # another rank's
            if self._metadata.entries.kinds[row] != EntryKind.OBJECT:
                return False
            tail = path_below(decode_path(self._metadata.entries.paths[row]), fqn)
            if tail is not None:
                rows.append((row, tail))
        if not rows:
            return False
        parts, whole = Parts(), list[Any]()
        for row, tail in rows:
            self._values.want(row, fqn, (), parts.at(self._metadata.entries.position_key(row), tail))
        if exact is not None:
            self._values.want(exact, fqn, (), whole.append)

        def build() -> None:
            take(whole[0] if whole and not (isinstance(whole[0], Mapping) and not whole[0]) else parts.build())

        self._values.when_taken(build)
        return True

    def plan(self, root: OpenRoot, named: Set[str], read_tensor: Callable[[int, Entry], torch.Tensor | None]) -> None:
        """Everything below `root` but for `named`; `read_tensor` has a row read into a tensor of its own."""
        top = root.container
        whole = self._stored.enclosing_value(top.path, top.owner)
        if whole is not None:
            self._values.want(whole[0], top.fqn, whole[1], functools.partial(self._merge, top), optional=True)
        found: dict[tuple[str, Any], list[tuple[int, Path]]] = {}
        for name in self._names.all_below(top.fqn):
            if name in named or name in self._planned:
                continue
            row = self._stored.find(name, top.owner)
            if row is None:
                continue
            inner = self._tree.containers.get(name)
            if inner is not None:
                if self._metadata.entries.kinds[row] == EntryKind.OBJECT and not inner.is_module:
                    self._planned.add(name)
                    self._values.want(row, name, (), functools.partial(self._merge, inner), optional=True)
                continue
            placed = self._place(top, decode_path(self._metadata.entries.paths[row]), named)
            if placed is not None:
                at, tail = placed
                found.setdefault((at.fqn, tail[0]), []).append((row, tail))
        for (fqn, key), rows in found.items():
            self._add(self._tree.containers[fqn], key, rows, root, read_tensor)

    def _place(self, top: Container, path: Path, named: Set[str]) -> tuple[Container, Path] | None:
        """The innermost mapping of the target that a stored path leads through, and the keys from there on."""
        at, depth = top, None
        for end in range(1, len(path) + 1):
            name = fqn_of(path[:end])
            container = self._tree.containers.get(name)
            if name in named or (container is not None and container.is_module):
                return None
            if container is not None and len(name) >= len(top.fqn):
                at, depth = container, end
        if depth is None or depth == len(path) or not isinstance(at.value, Mapping):
            return None
        return at, Path(path[depth:], path.kinds[depth:])

    def _add(
        self,
        at: Container,
        key: Any,
        rows: list[tuple[int, Path]],
        root: OpenRoot,
        read_tensor: Callable[[int, Entry], torch.Tensor | None],
    ) -> None:
        """Put what these rows make under `key`, unless there are tensors in it."""
        entries = self._metadata.entries
        tensors = [row for row, _ in rows if entries.kinds[row] != EntryKind.OBJECT]
        if any(not root.is_groups or entries.shape(row) for row in tensors):
            return
        parts = Parts()
        for row, tail in rows:
            self._planned.add(entries.fqns[row])
            take = parts.at(entries.position_key(row), Path(tail[1:], tail.kinds[1:]))
            if row not in tensors:
                self._values.want(row, entries.fqns[row], (), take)
                continue
            tensor = read_tensor(row, entries[row])
            if tensor is not None:
                take(tensor)
        self._values.when_taken(lambda: self._tree.add(at, key, parts.build()))

    def _merge(self, container: Container, value: Any) -> None:
        """Put in what a value has that was stored whole and that the target, which is walked, does not name."""
        for at, key, item in self._unnamed_in(container, value):
            self._tree.add(at, key, item)

    def _unnamed_in(self, container: Container, value: Any) -> Iterator[tuple[Container, Any, Any]]:
        held = container.value
        if container.is_module:
            return
        if isinstance(held, Mapping) and isinstance(value, Mapping):
            pairs = list(value.items())
        elif isinstance(held, (list, tuple)) and isinstance(value, (list, tuple)):
            pairs = list(enumerate(value))
        else:
            return
        for key, item in pairs:
            inner = self._tree.containers.get(f"{container.fqn}.{text_of(key)}")
            if inner is not None:
                yield from self._unnamed_in(inner, item)
            elif isinstance(held, Mapping) and key not in held:
                yield container, key, item
