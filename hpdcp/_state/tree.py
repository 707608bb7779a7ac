"""Walking a state dict: which values are stored on their own, under which names, and how they are put back.

Mappings are walked, always, so that ranks may hold different keys and each key is found or missed by its name. A list
or tuple is walked when anything below it is *stateful*: a tensor, a `PerRank`, or an object with `state_dict` and
`load_state_dict`. One without is a single value: so an optimizer's tensors are entries of their own, while its list of
hyper-parameters comes back as it was, grown or shrunk. An empty mapping is a value, and so is one that paths could not
make again (`is_walked_without_tensors` says which), unless there is something stateful below it.

    {"model": {"w": Tensor}, "args": {"lr": 0.1}, "lrs": [0.1, 0.2], 3: (Tensor, {})}
      fqn "model.w"   path ("model", "w")   a tensor
      fqn "args.lr"   path ("args", "lr")   the value 0.1
      fqn "lrs"       path ("lrs",)         the value [0.1, 0.2]
      fqn "3.0"       path (3, 0)           a tensor
      fqn "3.1"       path (3, 1)           the value {}

A path's keys keep their types, and a `Path` also knows which kind of container each key is a step into, so paths alone
rebuild the nesting.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hpdcp._base.errors import MissingKeysError
from hpdcp._format.metadata import PerRank
from hpdcp._state._classes import class_name
from hpdcp._state._holders import Holder
from hpdcp._state._kinds import CONTAINERS, Kind, kind_of
from hpdcp._state._walk import Container, Leaf, OpenRoot, Walk
from hpdcp._state.paths import Keys, Path, build_tree, fqn_of

__all__ = ["Container", "Leaf", "OpenRoot", "StateTree", "flatten_state_dict", "pick", "unflatten_state_dict", "walk"]


class StateTree:
    """A state dict, walked once: its leaves, and the way to put loaded values back in place.

    Calls `state_dict()` of every stateful object once. `assign` writes one value; `finish`, after the last, hands the
    filled state dicts to `load_state_dict`. Both kinds of calls come in the order of the objects' names, not of the
    state dict's keys: the same on all ranks, since such a call may wait for the other ranks' (innermost first).

    Raises InvalidArgumentError when `state_dict` is no mapping, StateDictError when two paths have one fqn, and
    UnsupportedTypeError for a container that contains itself or nests more than `MAX_DEPTH` levels.
    """

    def __init__(self, state_dict: Mapping[Any, Any], *, rank: int) -> None:
        self._walk = Walk(state_dict, rank=rank)
        self._opened: dict[Keys, list[Leaf]] = {}
        self._filled: dict[int, object] = {}

    @property
    def leaves(self) -> list[Leaf]:
        """Every leaf, in the order of the state dict."""
        return self._walk.leaves

    @property
    def every_rank(self) -> list[Leaf]:
        """Every `PerRank.all`, itself the value. A load assigns a list of all ranks' values to each one's path, instead
        of loading the leaves below it."""
        return self._walk.every_rank

    @property
    def containers(self) -> Mapping[str, Container]:
        """Every dict, list and tuple that was walked into, by fqn."""
        return self._walk.containers

    @property
    def wrappers(self) -> Mapping[str, str]:
        """Of every tensor that is made of others, by fqn, what is on record of its class (`_wrapper_kinds`)."""
        return self._walk.wrappers

    @property
    def open_roots(self) -> Sequence[OpenRoot]:
        """The containers that ask for all Python values stored below them, innermost first."""
        return self._walk.open_roots

    def assign(self, path: Sequence[Hashable], value: Any) -> None:
        """Put `value` where the leaf at `path` was: in place in dicts and lists, in a new tuple where there was one.
        A mapping that was a value stays the object it was, and takes the items of a mapping of its class.

        Raises MissingKeysError when no leaf (of the walk, of `every_rank` or of `children`) has that path, and
        UnsupportedTypeError when what holds it does not let items be set.
        """
        holder, key = self._holder_of(path)
        if not self._take_items(holder, key, value):
            holder.put(key, value)

    def children(self, leaf: Leaf) -> list[Leaf]:
        """The items of a leaf that is a dict, list or tuple, as leaves that `assign` knows; none of any other leaf.

        For a value whose items are stored on their own, because it held tensors when it was saved. Call it before
        anything is assigned to the leaf itself.
        """
        if leaf.path not in self._opened:
            self._opened[leaf.path] = self._walk.open(leaf, *self._holder_of(leaf.path))
        return self._opened[leaf.path]

    def add(self, container: Container, key: Hashable, value: Any) -> None:
        """Put `value` into a container that does not name `key` yet."""
        container.holder.put(key, value)

    def _take_items(self, holder: Holder, key: Hashable, value: Any) -> bool:
        """Whether the mapping that is there was filled with the items of `value`; once, should it be elsewhere too."""
        if holder.borrowed or not isinstance(holder.container, (Mapping, list, PerRank)):
            return False
        held: Any = holder.container
        there = held.value if isinstance(held, PerRank) else held[key]
        if type(there) is not type(value) or type(value) not in (dict, OrderedDict) or id(there) in self._filled:
            return False
        self._filled[id(there)] = there
        there.clear()
        there.update(value)
        if type(there) is OrderedDict:
            vars(there).update(vars(value))
        return True

    def finish(self) -> None:
        """Call `load_state_dict` of every stateful object once, innermost first, with its filled state dict.

        What it raises goes to the caller, with a note that names the object. A second call does nothing.
        """
        pending, self._walk.loading = self._walk.loading, []
        for item in pending:
            try:
                item.target.load_state_dict(item.state)
            except BaseException as error:
                error.add_note(f"while loading the state of {item.fqn!r} ({class_name(type(item.target))})")
                raise

    def _holder_of(self, path: Sequence[Hashable]) -> tuple[Holder, Hashable]:
        found = self._walk.holders.get(tuple(path))
        if found is None:
            raise MissingKeysError(f"{fqn_of(path)!r} is not a leaf of this state dict, so nothing can be put there.")
        return found


def walk(state_dict: Mapping[Any, Any], *, rank: int) -> list[Leaf]:
    """Every leaf of `state_dict`, in its order; `rank` owns what is under `PerRank`. Raises as `StateTree` does."""
    return StateTree(state_dict, rank=rank).leaves


def pick(value: Any, subpath: Sequence[Hashable]) -> Any:
    """What lies at `subpath` inside a Python value; MissingKeysError when there is nothing.

    For a value that was stored whole, when the state dict has tensors beside it now.
    """
    for depth, key in enumerate(subpath):
        kind = kind_of(value)
        if kind not in CONTAINERS:
            raise MissingKeysError(
                f"the stored value has nothing at {fqn_of(subpath[: depth + 1])!r}, but a {class_name(type(value))}."
            )
        try:
            if kind is Kind.MAPPING and key not in value:
                raise KeyError(key)  # a defaultdict would make it up
            value = value[key]
        except (LookupError, TypeError) as error:
            raise MissingKeysError(f"the stored value has nothing at {fqn_of(subpath[: depth + 1])!r}.") from error
    return value


def flatten_state_dict(state_dict: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """The state dict as one flat dict by fqn, and the path of each name.

    Follows the rules of `save`: mappings are walked into, and sequences that hold a tensor, a `PerRank` or a stateful
    object; a stateful object is replaced by its state dict, and every other value stays whole. `PerRank` marks and
    tensor subclasses stay as they are; attributes of containers (torch's `_metadata`) are left behind. Raises as
    `StateTree` does.

    >>> flat, mappings = flatten_state_dict({"a": {1: torch.ones(2)}, "steps": [1, 2]})
    >>> list(flat), mappings
    (['a.1', 'steps'], {'a.1': ('a', 1), 'steps': ('steps',)})
    """
    leaves = Walk(state_dict, rank=None).leaves
    return {leaf.fqn: leaf.value for leaf in leaves}, {leaf.fqn: leaf.path for leaf in leaves}


def unflatten_state_dict(flat: Mapping[str, Any], mappings: Mapping[str, Sequence[Hashable]]) -> dict[Any, Any]:
    """What `flatten_state_dict` flattened, from both its results: keys, nesting, order and kinds of containers exact.

    Names of `mappings` that `flat` leaves out are left out of the result. Raises MissingKeysError for names of `flat`
    without a path, and as `build_tree` does.
    """
    unknown = [name for name in flat if name not in mappings]
    if unknown:
        raise MissingKeysError(
            f"no path is given for {', '.join(map(repr, unknown))}: pass the mappings that flattening returned."
        )
    return build_tree((path, flat[name]) for name, path in mappings.items() if name in flat)
