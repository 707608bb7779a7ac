"""Secrets in what people read: URLs are masked by their shape, and values that were given as options wherever they turn
up, since a store's own error may quote what it was given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

_MASK: Final = "***"

_CONTAINER_FIRST: Final = frozenset({"abfs", "abfss", "wasb", "wasbs"})
"""Schemes that write a container, no user, before the `@`."""
_USER: Final = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]+)(:/+)[^/\s]*@")
"""Up to the last `@` before a slash; a URL with one slash is a mistake that the error about it shows."""
_QUERY: Final = re.compile(r"([?&;])([A-Za-z0-9_.~%+-]+)=([^\s&;#'\",)]+)")
_SHOWN_IN_QUERIES: Final = frozenset({"alt", "delimiter", "part", "partnumber", "prefix", "region", "versionid"})

_SHOWN: Final = frozenset({
    "addressing_style", "alt", "backend", "block_size", "blocksize", "broadcast", "bucket", "cache_dir",
    "check_replicas", "cname", "compression", "compressor", "container", "device", "encoding", "endpoint",
    "endpoint_override", "endpoint_url", "engine", "folder", "host", "hostname", "layout", "level", "limit",
    "location", "method", "mode", "mount", "path", "port", "prefix", "profile", "profile_name", "progress",
    "protocol", "region", "region_name", "retries", "retry_mode", "scheme", "serversideencryption",
    "signature_version", "since", "storageclass", "tier", "url", "use_ssl", "verify", "version",
})  # fmt: skip
"""Names of settings whose text may be shown, in lower case; text under any other name may be a secret."""
_SECRET: Final = re.compile(
    r"secret|token|pass|pwd|credential|sas|connection_?string|auth|cookie|header|session|jwt|bearer|(^|_)(pat|sig|pin)($|_)"
    r"|signature$|(^|_)p?key($|_id$)|api_?key|account_?key|customer_?key",
    re.IGNORECASE,
)
_WORDS: Final = frozenset(
    {"all", "always", "auto", "false", "never", "no", "none", "off", "on", "sample", "small", "true"}
)
"""Text that is no secret under any name."""
_ENVIRONMENT: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN")
_SHORTEST: Final = 8
"""Characters of a value that is looked for in texts: a shorter one would be found in words."""
_MOST_REMEMBERED: Final = 256

_remembered: dict[str, None] = {}


def may_be_shown(name: str, value: object) -> bool:
    """Whether the value of the setting `name` may be read by people: text under names that are known, and numbers."""
    if isinstance(value, (str, bytes)):
        return name.lower() in _SHOWN or value in _WORDS
    return isinstance(value, bool) or value is None or not _SECRET.search(name)


def remember(options: Mapping[str, object]) -> None:
    """Mask these options' values from now on in every text that goes through `scrubbed`."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            remember({str(key): entry for key, entry in value.items()})
        elif isinstance(value, (list, tuple)):
            remember({f"{name}": entry for entry in value if isinstance(entry, (str, bytes))})
        elif isinstance(value, (str, bytes)) and not may_be_shown(name, value):
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if len(text.strip()) >= _SHORTEST and len(_remembered) < _MOST_REMEMBERED:
                _remembered[text.strip()] = None


def masked_url(text: str) -> str:
    """The text with what URLs in it say of users and in their queries masked.

    >>> masked_url("ftp://me:secret@host/run"), masked_url("s3://bucket/a:b@c")
    ('ftp://***@host/run', 's3://bucket/a:b@c')
    >>> masked_url("https:/me:secret@host"), masked_url("https://host/run?sig=x&versionId=7")
    ('https:/***@host', 'https://host/run?sig=***&versionId=7')
    """
    if "@" in text:
        text = _USER.sub(_without_user, text)
    return _QUERY.sub(_without_value, text) if "=" in text else text


def scrubbed(text: str) -> str:
    """The text as it may be shown: URLs masked, and every secret that is known by its value."""
    known = [*_remembered, *(os.environ.get(name, "").strip() for name in _ENVIRONMENT)]
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            # As an error quotes it, too.
            for form in (secret, repr(secret)[1:-1]):
                if form in text:
                    text = text.replace(form, _MASK)
    return masked_url(text)


def _without_user(found: re.Match[str]) -> str:
    if found[1].lower() in _CONTAINER_FIRST:
        return found[0]
    return f"{found[1]}{found[2]}{_MASK}@"


def _without_value(found: re.Match[str]) -> str:
    shown = found[3] if found[2].lower() in _SHOWN_IN_QUERIES else _MASK
    return f"{found[1]}{found[2]}={shown}"
