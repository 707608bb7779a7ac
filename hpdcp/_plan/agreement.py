"""What all ranks must have been given alike, compared by the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpdcp._base.errors import InvalidArgumentError


def check_agreement(said: Sequence[Mapping[str, str]]) -> None:
    """Raise unless all ranks, in order, say the same of everything that rank 0 names.

    Raises:
        InvalidArgumentError: names what differs, and one rank that was given another than rank 0.
    """
    for name, expected in said[0].items():
        others = {rank: mine[name] for rank, mine in enumerate(said) if mine.get(name, expected) != expected}
        if others:
            rank, given = next(iter(others.items()))
            raise InvalidArgumentError(
                f"ranks were given different {name}s: rank 0 {expected}, rank {rank} {given} ({len(others)} ranks "
                "differ). Give all of them the same; a path must be absolute, or it means another folder wherever a "
                "rank works in another."
            )
