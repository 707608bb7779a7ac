"""What does not fit between a state dict and a checkpoint: gathered first, then said all at once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import Enum
from typing import Final

from hpdcp._base.errors import (
    CoverageError,
    DtypeMismatchError,
    LoadMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    UnsupportedTypeError,
    WorldSizeError,
)
from hpdcp._state.scales import CODES_ADVICE

_MOST_NAMED: Final = 50
"""Names that one warning spells out."""
_MOST_REFUSED: Final = 1000
"""Keys that one error spells out for each way not to fit: all that somebody could still read."""
_FEW: Final = 3
"""Of keys that have one cause."""


_OPTIMIZER_KEY: Final = re.compile(r"(^|\.)(param_groups($|\.)|state\.[0-9]+\.)")


_EXTRA_STATE: Final = "_extra_state"
"""What a module's `get_extra_state()` is called in its state dict."""


class Mismatch(Enum):
    """A way in which a wanted key and the checkpoint do not fit: its error, what to say, and what to do about it."""

    MISSING = (
        MissingKeysError,
        "are not in the checkpoint",
        "Correct their names, or load what is there with StandardLoadPlanner(allow_partial_load=True).",
    )
    SHAPE = (ShapeMismatchError, "are stored as something else", "Build the model as it was when it was saved.")
    HOLE = (CoverageError, "are not stored in full", "Load an earlier checkpoint.")
    DTYPE = (
        DtypeMismatchError,
        "cannot be cast",
        "Use the stored dtype, or StandardLoadPlanner(allow_dtype_cast=True).",
    )
    CODES = (
        DtypeMismatchError,
        "hold quantised codes, which have scales beside them, and cannot be cast",
        f"{CODES_ADVICE} Load both into targets of their stored dtypes, or load weights that are not quantised.",
    )
    CLASS = (
        LoadMismatchError,
        "are stored as a tensor class that is not the target's",
        "What the tensors inside mean only that class knows: make these targets as they were when they were saved.",
    )
    WORLD = (
        WorldSizeError,
        "belong to another number of ranks",
        "Mark the target as PerRank.all(...) to load every rank's value.",
    )
    TIED = (
        LoadMismatchError,
        "share memory with another key, and the two stored tensors differ",
        "Untie the targets, or load one of the two names.",
    )
    REFUSED = (UnsupportedTypeError, "cannot be loaded into", "Materialise or copy these targets first.")

    def __init__(self, error: type[LoadMismatchError | UnsupportedTypeError], what: str, advice: str) -> None:
        self.error = error
        self.what = what
        self.advice = advice


class Problems:
    """What does not fit, gathered over the whole state dict before anything is said."""

    def __init__(self) -> None:
        self._found: dict[Mismatch, list[tuple[str, str]]] = {kind: [] for kind in Mismatch}
        self._explained: dict[Mismatch, tuple[str, Mapping[str, str]]] = {}

    def add(self, kind: Mismatch, key: str, text: str) -> None:
        """Note that `key` does not fit; `text` is what an error says of it, its name included."""
        self._found[kind].append((key, text))

    def withdraw(self, kind: Mismatch, keys: Set[str]) -> None:
        """These keys fit after all."""
        self._found[kind] = [(key, text) for key, text in self._found[kind] if key not in keys]

    def keys(self, kind: Mismatch) -> list[str]:
        """The keys that do not fit in this way, each once."""
        return list(dict.fromkeys(key for key, _ in self._found[kind]))

    def explain(self, kind: Mismatch, how: str, stored: Mapping[str, str]) -> None:
        """What most keys of a kind have in common, which an error says first: `stored` has the right name of each."""
        self._explained[kind] = how, stored

    def forgive(self, *kinds: Mismatch) -> tuple[str, ...]:
        """Forget these kinds, and say which keys they were about."""
        keys = tuple(key for kind in kinds for key, _ in self._found[kind])
        self._found |= {kind: [] for kind in kinds}
        return keys

    def _extra_state_advice(self, kind: Mismatch) -> str:
        """How to load without what modules such as those of Transformer Engine keep, which need not fit."""
        if not any(key.endswith(_EXTRA_STATE) for key, _ in self._found[kind]):
            return ""
        return (
            "Extra states of modules may be of another size in another version, and can be left out: load into "
            f'{{k: v for k, v in model.state_dict().items() if not k.endswith("{_EXTRA_STATE}")}}. '
        )

    def raise_if_any(self) -> None:
        """One error with everything; of the closest class when there is only one kind of problem."""
        found = [kind for kind, keys in self._found.items() if keys]
        if found:
            raise (found[0].error if len(found) == 1 else LoadMismatchError)("; ".join(map(self._said, found)))

    def _said(self, kind: Mismatch) -> str:
        texts = dict(self._found[kind])
        how, stored = self._explained.get(kind, ("", {}))
        pairs = [f"{key!r} (as {stored[key]!r})" for key in texts if key in stored]
        others = [text for key, text in texts.items() if key not in stored]
        if not pairs:
            said = f"{keys_that(len(others), kind.what)}: {listed(others, most=_MOST_REFUSED)}."
            return f"{said} {self._extra_state_advice(kind)}{kind.advice}"
        count = f"{len(pairs)} of the {len(texts)}" if others else f"All {len(texts)}"
        said = f"{count} keys that {kind.what} {how}: {listed(pairs, most=_FEW)}."
        if not others:
            return f"{said} Name the targets as they are stored."
        return f"{said} The others: {listed(others, most=_MOST_REFUSED)}. {self._extra_state_advice(kind)}{kind.advice}"


def keys_that(count: int, what: str) -> str:
    """
    >>> keys_that(1, "are stored twice"), keys_that(2, "hold codes")
    ('1 key is stored twice', '2 keys hold codes')
    """
    verb, _, rest = what.partition(" ")
    return f"{count} keys {what}" if count != 1 else f"1 key {_SINGULAR.get(verb, verb)} {rest}"


_SINGULAR: Final = {"are": "is", "hold": "holds", "belong": "belongs", "share": "shares"}


def listed(texts: Sequence[str], *, most: int = _MOST_NAMED, separator: str = ", ") -> str:
    """The texts as one, the first few spelled out."""
    more = f"{separator}and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


def optimizer_advice(keys: Iterable[str]) -> str:
    """A sentence for keys of optimizers that number or list other parameters on other ranks; empty for others."""
    if not any(_OPTIMIZER_KEY.search(key) for key in keys):
        return ""
    return (
        "Optimizers of ranks with other parameters (pipeline stages, experts) number or list these alike: save "
        "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)), "
        "whose names are the parameters'. "
    )
