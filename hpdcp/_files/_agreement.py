"""What all ranks must have been given alike: one location, one layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpdcp._base.errors import InvalidArgumentError


def check_one_location(said: Sequence[Mapping[str, str]], expected: str) -> None:
    """All ranks must mean the same folder; a relative path may name another one in each rank's working folder."""
    advice = "Give all of them the same checkpoint_id, as an absolute path or a URL."
    _check_alike(said, "url", expected, what="locations", advice=advice)


def check_one_layout(said: Sequence[Mapping[str, str]], expected: str) -> None:
    """All ranks must write in one layout, which the metadata names."""
    _check_alike(said, "layout", expected, what="layouts", advice="Configure the same one on all of them.")


def _check_alike(said: Sequence[Mapping[str, str]], fact: str, expected: str, *, what: str, advice: str) -> None:
    others = {rank: data[fact] for rank, data in enumerate(said) if data.get(fact, expected) != expected}
    if others:
        rank, given = next(iter(others.items()))
        raise InvalidArgumentError(
            f"ranks were given different {what}: rank 0 {expected}, rank {rank} {given} ({len(others)} ranks differ). "
            f"{advice}"
        )
