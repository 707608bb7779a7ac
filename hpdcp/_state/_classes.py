"""Classes by name, found without running code."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class MissingClassError(Exception):
    """JSON names a class whose module is not imported, or no longer has it; carries the name and the reason."""


def find_class(name: str, *, import_module: bool = False) -> type:
    """The class called `module:qualified.name`, without running code unless `import_module`; else MissingClassError."""
    module_name, _, path = name.partition(":")
    if import_module and module_name not in sys.modules:
        try:
            importlib.import_module(module_name)
        except Exception as error:  # importing a module may fail in any way at all
            raise MissingClassError(f"{name}, whose module cannot be imported ({error!r})") from error
    module = sys.modules.get(module_name)
    if not isinstance(module, ModuleType):
        raise MissingClassError(f"{name}, whose module is not imported: import {module_name} before loading")
    found: object = module
    for part in path.split("."):
        found = vars(found).get(part) if found is module or isinstance(found, type) else None
    if not isinstance(found, type):
        raise MissingClassError(f"{name}, which module {module_name} does not have here")
    return found


def is_namedtuple(kind: type) -> bool:
    """Whether `kind` is a named tuple and nothing more: made by `namedtuple` or `NamedTuple`, not derived from one."""
    return kind.__bases__ == (tuple,) and isinstance(vars(kind).get("_fields"), tuple)


def class_name(kind: type) -> str:
    """`module:qualified.name`, by which `find_class` finds it where it can be found at all."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_reachable(kind: type) -> bool:
    """Whether `find_class` finds the class by its name."""
    try:
        return find_class(class_name(kind)) is kind
    except MissingClassError:
        return False
