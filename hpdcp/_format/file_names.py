"""Names of a checkpoint's files on storage: every one is made and recognised here.

    .metadata                         what the checkpoint holds; published last, so that its presence means whole
    3.metadata                        instead, one for each rank, where ranks save each for itself
    3.<attempt>.metadata              what rank 3 published before that, until all ranks have replaced theirs
    .attempt                          the lease: which attempt saves to the folder now
    3.attempt                         instead, of rank 3, while it saves for itself
    _rank3_.<attempt>.safetensors     data of rank 3; `_rank3_.1.<attempt>.safetensors` is its second such file
    _rank3_.safetensors               the same from earlier versions: read, and never written any more
    .mailbox-<attempt>/...            messages of ranks that exchange through storage

An attempt's id is 16 hexadecimal digits. Names that only a layout knows are the layout's own business.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

METADATA: Final = ".metadata"
LEASE: Final = ".attempt"

_DATA_PREFIX: Final = "_rank"
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
_DATA: Final = re.compile(
    # Fewer digits than an attempt has, which may be all digits.
    r"_rank(?P<rank>\d+)_(\.(?P<part>\d{1,9}))?(\.(?P<attempt>[0-9a-f]{16}))?(?P<suffix>\.[^/.]+)"
)
_KEPT: Final = re.compile(r"(?P<rank>[0-9]+)\.(?P<attempt>[0-9a-f]{16})\.metadata")
_BEGINS_AS_DATA: Final = re.compile(r"_rank\d+_[./]")


def rank_metadata_key(rank: int) -> str:
    """Where `rank` publishes what it stored when it saves without collectives."""
    return f"{rank}{METADATA}"


def rank_of_metadata_key(key: str) -> int | None:
    """The rank in `{rank}.metadata`; None for any other key.

    >>> rank_of_metadata_key("12.metadata"), rank_of_metadata_key(".metadata")
    (12, None)
    """
    rank, dot, rest = key.partition(".")
    return int(rank) if dot + rest == METADATA and rank.isascii() and rank.isdigit() else None


def kept_record_key(rank: int, attempt: str) -> str:
    """Where `rank` keeps what it published in `attempt`, while it may be replaced by a save that others never end."""
    return f"{rank}.{attempt}{METADATA}"


def rank_of_kept_key(key: str) -> int | None:
    """The rank in `{rank}.<attempt>.metadata`; None for any other key.

    >>> rank_of_kept_key("12.00c0ffee00c0ffee.metadata"), rank_of_kept_key("12.metadata")
    (12, None)
    """
    found = _KEPT.fullmatch(key)
    return int(found["rank"]) if found else None


def attempt_of_kept_key(key: str) -> str | None:
    """The attempt in `{rank}.<attempt>.metadata`; None for any other key."""
    found = _KEPT.fullmatch(key)
    return found["attempt"] if found else None


def rank_lease_key(rank: int) -> str:
    """The lease of `rank` while it saves without collectives."""
    return f"{rank}{LEASE}"


def is_lease_key(key: str) -> bool:
    """Whether it is `.attempt`, or `{rank}.attempt`."""
    rank, dot, rest = key.partition(".")
    return key == LEASE or (dot + rest == LEASE and rank.isascii() and rank.isdigit())


def is_metadata_key(key: str) -> bool:
    """Whether it is `.metadata`, `{rank}.metadata`, or what a rank keeps of an earlier save."""
    return key == METADATA or rank_of_metadata_key(key) is not None or rank_of_kept_key(key) is not None


def mailbox_folder(attempt: str) -> str:
    """Where the messages of an attempt lie."""
    return f".mailbox-{attempt}"


def attempt_of_mailbox(folder: str) -> str | None:
    """The attempt whose messages lie in the folder; None where it is none of a mailbox."""
    attempt = folder.removeprefix(".mailbox-")
    return attempt if folder != attempt and is_attempt(attempt) else None


def is_attempt(text: str) -> bool:
    """Whether `text` has the form of an attempt's id."""
    return _ATTEMPT.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class DataFileName:
    """What the name of a rank's data file says."""

    rank: int
    suffix: str
    """With its dot, such as ".safetensors"."""
    attempt: str | None = None
    """None in a plain name."""
    part: int = 0
    """Which of the rank's files with this suffix."""

    @property
    def key(self) -> str:
        """The name.

        >>> DataFileName(3, ".bytes", "00c0ffee00c0ffee", part=1).key
        '_rank3_.1.00c0ffee00c0ffee.bytes'
        """
        part = f".{self.part}" if self.part else ""
        attempt = "" if self.attempt is None else f".{self.attempt}"
        return f"{_DATA_PREFIX}{self.rank}_{part}{attempt}{self.suffix}"

    @classmethod
    def parse(cls, key: str) -> DataFileName | None:
        """What `key` says; None where it is not the name of a data file.

        >>> DataFileName.parse("_rank3_.bytes")
        DataFileName(rank=3, suffix='.bytes', attempt=None, part=0)
        """
        found = _DATA.fullmatch(key)
        return found and cls(int(found["rank"]), found["suffix"], found["attempt"], int(found["part"] or 0))


def is_data_key(key: str) -> bool:
    """Whether `key` is reserved for data files: enough to tell that somebody saved here, not to remove it."""
    return key.startswith(_DATA_PREFIX)


def begins_as_data(key: str) -> bool:
    """Whether hpdcp, or a layout that names files below a rank's, may have made a data file of this name."""
    return _BEGINS_AS_DATA.match(key) is not None


def carries_attempt(key: str, attempts: Container[str]) -> bool:
    """Whether it is the name of a data file, with the id of one of the attempts in it."""
    found = DataFileName.parse(key)
    return found is not None and found.attempt in attempts
