"""Whether Python values that ranks hold under one name are the same, and where they differ.

Equal are values of one type with equal parts. The order of a dict's or a set's items has no meaning (that of an
OrderedDict has), -0.0 is 0.0, and every NaN is every other one. `1`, `1.0` and `True` are three values. Arrays and
tensors are equal where all their bytes are.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

from hpdcp._base.errors import HpdcpError
from hpdcp._state import objects
from hpdcp._state._classes import class_name
from hpdcp._state._typed_json import Json, dumps

_LONGEST: Final = 4 << 20
"""Bytes of an encoding that is put in order; longer ones, and pickles, are equal where all their bytes are."""
_UNORDERED: Final = frozenset({"$dict", "$Counter", "$set", "$frozenset"})
"""Written as a list of pairs, or of items, in any order."""
_BESIDE: Final = frozenset({"$array", "$tensor", "$bytes"})
"""Written as the number of an attachment, and more."""
_MOST_SHOWN: Final = 60
"""Characters of one side of a difference."""
_SECRET: Final = re.compile("secret|token|passw|pwd|credential|auth|api_?key|bearer|jwt", re.IGNORECASE)
"""Names under which text is not shown."""


def comparable(data: bytes) -> bytes:
    """Of the encoding of a value what is equal for equal values: mostly the encoding itself."""
    if b"{" not in data and b"-0.0" not in data:
        return data
    if len(data) > _LONGEST or objects.is_pickled(data):
        return data
    text, attachments = objects.parts_of(data)
    digests = [hashlib.blake2b(each, digest_size=16).hexdigest() for each in attachments]
    return dumps(_ordered(json.loads(text), digests)).encode("utf-8", "surrogatepass")


def _ordered(tree: Any, digests: Sequence[str]) -> Json:
    """The JSON of a value with everything in one order; attachments, which are numbered in order, by their digests."""
    if isinstance(tree, float):
        return tree + 0.0  # -0.0 becomes 0.0
    if isinstance(tree, list):
        return [_ordered(item, digests) for item in tree]
    if not isinstance(tree, dict):
        return tree  # type: ignore[no-any-return]  # text, an integer, a bool or None
    tag = next(iter(tree), "") if len(tree) == 1 else ""
    if not tag.startswith("$"):
        return {key: _ordered(tree[key], digests) for key in sorted(tree)}
    parts = tree[tag]
    if tag == "$float":
        return {tag: ["nan"]} if math.isnan(struct.unpack(">d", bytes.fromhex(parts[0]))[0]) else tree
    if tag in _BESIDE and type(parts[0]) is int:
        parts = [digests[parts[0]], *parts[1:]]
    found = [_ordered(part, digests) for part in parts]
    if tag in _UNORDERED:
        found.sort(key=dumps)
    if tag == "$defaultdict" and isinstance(found[1], list):
        found[1].sort(key=dumps)
    return {tag: found}


def difference(left: bytes, right: bytes, *, key: str) -> str:
    """Where two encoded values first differ, and what each has there, shortened; empty where that cannot be told."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _first_difference(objects.decode(left, key=key), objects.decode(right, key=key), "", key)
    except HpdcpError:
        return ""


def _first_difference(left: Any, right: Any, path: str, name: str) -> str:
    if type(left) is type(right) and isinstance(left, Mapping):
        for key in [*left, *right]:
            where = f"{path}[{key!r}]"
            if key not in left or key not in right:
                have, have_not = ("with", "without") if key in left else ("without", "with")
                return f"{have} and {have_not} {where}"
            if not _is_equal(left[key], right[key]):
                return _first_difference(left[key], right[key], where, str(key))
        return _sides("the keys in the order ", list(left), list(right), path, "")
    if type(left) is type(right) and isinstance(left, (list, tuple)):
        if len(left) != len(right):
            return _sides("", f"{len(left)} items", f"{len(right)} items", path, "", shown=str)
        at = next((n for n, pair in enumerate(zip(left, right, strict=True)) if not _is_equal(*pair)), None)
        if at is not None:
            return _first_difference(left[at], right[at], f"{path}[{at}]", name)
    if type(left) is type(right) and isinstance(left, (set, frozenset)):
        return _sides("", left - right or set(), right - left or set(), path, name)
    if type(left) is type(right) and isinstance(left, (str, bytes)):
        start = next((n for n, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), 0)
        if start > _MOST_SHOWN // 2:
            return _sides("", left[start - 5 :], right[start - 5 :], f"{path} from item {start - 5} on", name)
    return _sides("", left, right, path, name)


def _sides(what: str, left: object, right: object, path: str, name: str, *, shown: Any = repr) -> str:
    def show(value: object) -> str:
        if _SECRET.search(name) and not isinstance(value, (int, float)):
            return f"a {class_name(type(value))} that is not shown"
        text = " ".join(shown(value).split())
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"

    return f"{what}{show(left)} and {show(right)}{f' at {path}' if path else ''}"


def _is_equal(left: object, right: object) -> bool:
    encoded = (comparable(objects.encode(value, key="").data) for value in (left, right))
    return next(encoded) == next(encoded)
