"""What is on record of the class of a tensor that is made of other tensors (quantised weights, 8-bit optimizer states).

Such a tensor is stored as the tensors in it. Their paths lead through a step whose kind is this text, and says which
class it was, which tensors it is made of, and its plain attributes:

    tensor@torchao.optim.subclass_8bit:OptimState8bit [["codes","scale","qmap"],[true,[64,64]]]

It is compared with that of a target, and never read as a class.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final

import torch

from hpdcp._base.errors import UnsupportedTypeError
from hpdcp._state._array_data import NotTypedError
from hpdcp._state._classes import class_name
from hpdcp._state._typed_json import Encoder, HiddenTensorError, Json, TooDeepError, dumps

MARK: Final = "tensor@"
"""No module has this in its name, so no named tuple's kind begins so."""

_MOST_SHOWN: Final = 1000
"""Characters of a tensor's attributes: of longer ones the beginning and a digest are on record."""
_MOST_SAID: Final = 300
_DEEPEST: Final = 20
_ANYWHERE: Final = frozenset({"device", "requires_grad"})
"""Attributes that do not say what the values mean, and differ between the ranks of a job, or between jobs."""


def wrapper_kind(tensor: Any, fqn: str) -> str:
    """The text for `tensor`; UnsupportedTypeError, naming `fqn`, when some of its values are not in its tensors."""
    names, context = tensor.__tensor_flatten__()
    try:
        text = dumps([list(names), _plain(context, 0)])
    except HiddenTensorError:
        raise UnsupportedTypeError(
            f"{fqn!r} is a {class_name(type(tensor))}, which has a tensor among its attributes that __tensor_flatten__ "
            "does not list, so it would be lost. Store its parts under names of their own."
        ) from None
    if len(text) > _MOST_SHOWN:
        text = f"{text[:_MOST_SHOWN]} {hashlib.blake2b(text.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return f"{MARK}{class_name(type(tensor))} {text}"


def is_wrapper_kind(kind: str) -> bool:
    """Whether a step of that kind leads into a tensor."""
    return kind.startswith(MARK)


def class_of(kind: str) -> str:
    """The class in `kind`, as `module:qualified.name`."""
    return kind.removeprefix(MARK).partition(" ")[0]


def attributes_of(kind: str) -> str:
    """The tensors and attributes in `kind`, as text for a message."""
    text = kind.partition(" ")[2]
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}…"


def described(kind: str) -> str:
    """The class in `kind`, and its attributes, as text for a message."""
    return f"{class_of(kind)} of {attributes_of(kind)}"


def _plain(value: object, depth: int) -> Json:
    """What identifies `value`: plain values by themselves, others by their class."""
    if depth > _DEEPEST or isinstance(value, torch.device):
        return class_name(type(value))
    if isinstance(value, torch.Tensor):
        raise HiddenTensorError
    if isinstance(value, Enum):
        return f"{class_name(type(value))}.{value.name}"
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items() if key not in _ANYWHERE}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return [class_name(type(value)), _plain(held, depth + 1)]
    try:
        return Encoder(None, tensors=False).encode(value, depth)
    except (NotTypedError, TooDeepError):
        return class_name(value if isinstance(value, type) else type(value))
