"""The fingerprint of a state dict, which says whether the plan of an earlier save is right for it.

What a plan depends on is small and local (names, shapes, where each tensor lies in which mesh), so each rank can tell
by itself that nothing of it has changed, and one vote of all ranks tells that nothing has changed anywhere.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping, Sequence

from hpdcp._state.paths import encode_path
from hpdcp._state.tensor_columns import TensorColumns
from hpdcp._state.tree import Leaf


def fingerprint(leaves: Sequence[Leaf], tensors: TensorColumns, tied: Mapping[str, str]) -> bytes | None:
    """Equal for two state dicts of one rank when they hold the same boxes under the same names; None: not told apart.

    Covers every name and path with its types, and of `tensors`, a row for each leaf, the dtype, the global shape and
    what decides which boxes of it this rank holds. Values do not count, neither do the lengths of Python values. `tied`
    says which names are other names' tensors. None where `TensorFacts` cannot tell of a tensor: planning in full
    refuses it by name, or finds out more.
    """
    others = [(row, facts) for row, facts in tensors.unusual.items()]
    if any(facts is None for _, facts in others):
        return None
    owned = [(row, leaf.owner) for row, leaf in enumerate(leaves) if leaf.owner is not None]
    held = [holding.facts for holding in tensors.holdings]
    rest = (held, tensors.number.tobytes(), others, owned, tuple(tied.items()))
    try:
        # Version 2 writes equal values as equal bytes; later ones mark which objects are shared.
        data = marshal.dumps(([(*leaf.path, leaf.path.kinds) for leaf in leaves], rest), 2)
    except ValueError:
        # A key of a type that marshal does not know. The path's text, which is what is stored, knows some more.
        data = marshal.dumps(([encode_path(leaf.path) for leaf in leaves], rest), 2)
    return hashlib.blake2b(data, digest_size=32).digest()
