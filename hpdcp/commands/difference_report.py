"""What `hpdcp diff` prints of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import RenderableType
from rich.text import Text

from hpdcp._manage.compare import Aspect, Comparison, Difference, ValueDifference
from hpdcp.commands.output import count_of, cut_off, rate_of, shape_of, size_of, summary, table_of, text_of

_ARRANGED: Final = {
    Aspect.LAYOUT: "stored in other boxes",
    Aspect.TIES: "tied on one side only",
    Aspect.NESTING: "nested in another way",
    Aspect.DTYPE: "of another dtype",
}
_WHY: Final = ("which does not count without --layout", "which does not count with --ignore-dtype")


def as_document(found: Comparison) -> dict[str, Any]:
    """One document for programs."""
    document = asdict(found)
    for each in [*document["differences"], *document["arrangement"]]:
        each["aspect"] = each["aspect"].name.lower()
        for key, value in (each["elements"] or {}).items():
            if isinstance(value, float) and not math.isfinite(value):
                each["elements"][key] = str(value)  # JSON has no word for it
    return {**document, "is_equal": found.is_equal}


def report(found: Comparison, limit: int | None) -> Iterator[RenderableType]:
    """Tables for people, of at most `limit` rows."""
    yield text_of(f"A: {found.url_a}")
    yield text_of(f"B: {found.url_b}")
    yield Text()
    table = table_of("name", "differs in", "A", "B", "how")
    told = {(each.fqn, each.owner) for each in found.differences if each.aspect in (Aspect.VALUES, Aspect.SHAPE)}
    for each in found.differences[:limit]:
        how = _how(each.elements)
        if each.aspect is Aspect.DTYPE:
            how = _how_dtypes(found, has_a_row=(each.fqn, each.owner) in told)
        table.add_row(text_of(_name(each)), each.aspect.value, text_of(each.a), text_of(each.b), text_of(how))
    yield from cut_off(table, len(found.differences), "difference")
    for aspect, count in _counted(found.arrangement).items():
        yield text_of(f"{count_of(count, 'name')} {_ARRANGED[aspect]}, {_WHY[aspect is Aspect.DTYPE]}", "dim")
    compared = count_of(found.names, "name")
    if found.nbytes:
        compared += f", {size_of(found.nbytes)} of values in {rate_of(found.nbytes, found.seconds)}"
    if found.trusted_nbytes:
        compared += f", {size_of(found.trusted_nbytes)} by their checksums alone"
    hint = _prefix_hint(found)
    if hint:
        yield text_of(hint)
    if found.is_equal:
        what = "equal" if found.values else "alike (values were not compared: --values)"
        yield text_of(f"{what}: {compared}", "bold green")
    else:
        names = len({(each.fqn, each.owner) for each in found.differences})
        yield text_of(f"DIFFERENT: {count_of(names, 'name')}; compared: {compared}", "bold red")


def _name(difference: Difference) -> str:
    return difference.fqn + ("" if difference.owner is None else f" of rank {difference.owner}")


def _how_dtypes(found: Comparison, *, has_a_row: bool) -> str:
    if not found.across_dtypes:
        return "values not compared: --ignore-dtype"
    return "" if has_a_row else "values are the same, or within the tolerance"


def _how(elements: ValueDifference | None) -> str:
    if elements is None:
        return ""
    share = f"{elements.differing:,} of {elements.elements:,}, first {shape_of(elements.first)}"
    if elements.max_abs is not None:
        share += f", by up to {elements.max_abs:.3g}" if elements.max_abs else ", in bits alone"
    if elements.max_rel:
        share += f" ({elements.max_rel:.2g} of b)"
    return share + (f", {elements.one_nan:,} NaN on one side" if elements.one_nan else "")


def _prefix_hint(found: Comparison) -> str:
    """What to try where no name is common since all have one more word in front on one side; else empty."""
    if found.names:
        return ""
    sides = [
        [each.fqn for each in found.differences if each.aspect is aspect]
        for aspect in (Aspect.ONLY_IN_A, Aspect.ONLY_IN_B)
    ]
    for (longer, shorter), flag in zip((sides, sides[::-1]), ("a", "b"), strict=True):
        for name in (name for name in longer if shorter and name.endswith(f".{shorter[0]}")):
            prefix = name.removesuffix(shorter[0])
            if {prefix + short for short in shorter} <= set(longer):
                return (
                    f"Every name of one side is one of the other with {prefix!r} in front: try --prefix-{flag} {prefix}"
                )
    return ""


def _counted(differences: Sequence[Difference]) -> dict[Aspect, int]:
    counts = summary(each.aspect.name for each in differences)
    return {Aspect[name]: count for name, count in counts.items()}
