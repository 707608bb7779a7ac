"""Links in folders that a stranger may have made: where they may lead.

A link names any file of this host, a private key as well. What is read through one may be copied into an export, or
loaded as weights, so a link has to stay where the folder's maker could have put the content himself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final

from hpdcp._base.errors import CorruptCheckpointError

_BLOB: Final = re.compile(r".*/models--[^/]+/blobs/[0-9a-fA-F]{40}(?:[0-9a-fA-F]{24})?")
"""A file of the Hub's cache, named by the hash of its content: whoever can name it knows what is in it."""


def check_links(url: str, keys: Iterable[str]) -> None:
    """Raise where a file of the folder is a link, or lies behind one, that leads out of it.

    Links may lead to a file of the folder, and from a snapshot of the Hub's cache, or from wherever its client made
    them, to the cache's blobs. Only folders of this host have links.

    Raises:
        CorruptCheckpointError: names the file and where it leads.
    """
    if "://" in url:
        return
    root = os.path.realpath(url)
    inside = [root + os.sep]
    cache, kind = os.path.split(os.path.dirname(root))
    if kind == "snapshots":
        inside.append(os.path.join(cache, "blobs") + os.sep)
    for key in keys:
        real = os.path.realpath(os.path.join(root, key))
        if not real.startswith(tuple(inside)) and not _BLOB.fullmatch(real):
            raise CorruptCheckpointError(
                f"{key!r} in {url} is a link to {real}, out of the folder, and is not followed: a folder that somebody "
                "else made could name any file that way. Put the file itself into the folder, if you trust it."
            )
