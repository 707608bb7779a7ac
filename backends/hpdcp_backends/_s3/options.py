"""fsspec's and s3fs's options for S3, as what botocore's client wants of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import fsspec.config
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.session import Session

from hpdcp._base.errors import InvalidArgumentError

_OF_FILES: Final = frozenset({
    "default_block_size", "default_fill_cache", "default_cache_type", "cache_regions", "fixed_upload_size",
    "max_concurrency", "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache",
    "local_expiry_check", "asynchronous", "loop",
})  # fmt: skip
"""Options of s3fs that shape its file objects, caches and event loop, none of which is used here."""
_KNOWN: Final = frozenset({
    "anon", "endpoint_url", "key", "username", "secret", "password", "token", "use_ssl", "client_kwargs",
    "config_kwargs", "s3_additional_kwargs", "requester_pays", "profile", "version_aware", "session",
})  # fmt: skip
_OF_CLIENT: Final = frozenset({
    "region_name", "api_version", "use_ssl", "verify", "endpoint_url", "aws_access_key_id", "aws_secret_access_key",
    "aws_session_token", "aws_account_id",
})  # fmt: skip
_CUSTOMER_KEY: Final = ("SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5")


@dataclass(frozen=True)
class S3Options:
    """What is known of an S3 server and of how to call it, before anything is connected."""

    anonymous: bool
    profile: str | None
    key: str | None
    secret: str | None
    token: str | None
    client: Mapping[str, Any]
    """Keywords for `Session.create_client`."""
    config: Mapping[str, Any]
    """Keywords for `Config`."""
    additional: Mapping[str, Any]
    """Parameters for the requests that take them (`s3_additional_kwargs`, and RequestPayer)."""

    @classmethod
    def parse(cls, given: Mapping[str, object] | None) -> S3Options:
        """The options, over those of fsspec's own configuration for `s3`.

        Raises:
            InvalidArgumentError: an unknown option, two names for one thing, or a value of the wrong kind.
        """
        options: dict[str, Any] = {**fsspec.config.conf.get("s3", {}), **(given or {})}
        unknown = sorted(set(options) - _KNOWN - _OF_FILES)
        if unknown:
            raise InvalidArgumentError(f"storage_options {unknown} are not S3's; known are {sorted(_KNOWN)}.")
        if options.get("session") is not None:
            raise InvalidArgumentError("storage_options session: an open session cannot be used; name a profile.")
        if options.get("version_aware"):
            raise InvalidArgumentError("storage_options version_aware: checkpoints are read as they are now; drop it.")
        client, config = _table(options, "client_kwargs"), _table(options, "config_kwargs")
        strange = sorted(set(client) - _OF_CLIENT)
        if strange:
            raise InvalidArgumentError(f"client_kwargs {strange} are unknown; known are {sorted(_OF_CLIENT)}.")
        additional = dict(_table(options, "s3_additional_kwargs"))
        if options.get("requester_pays"):
            additional.setdefault("RequestPayer", "requester")
        endpoint = _one(options.get("endpoint_url"), client.pop("endpoint_url", None), "endpoint_url")
        if endpoint is not None:
            client["endpoint_url"] = endpoint
        if "use_ssl" in options:
            client.setdefault("use_ssl", options["use_ssl"])
        key = _one(options.get("key"), options.get("username"), client.pop("aws_access_key_id", None), "key")
        secret = _one(
            options.get("secret"), options.get("password"), client.pop("aws_secret_access_key", None), "secret"
        )
        if (key is None) != (secret is None):
            raise InvalidArgumentError("storage_options key and secret go together; only one of them was given.")
        return cls(
            anonymous=bool(options.get("anon")),
            profile=options.get("profile"),
            key=key,
            secret=secret,
            token=_one(options.get("token"), client.pop("aws_session_token", None), "token"),
            client=client,
            config=config,
            additional=additional,
        )

    def __repr__(self) -> str:
        return f"S3Options(client={dict(self.client)}, config={dict(self.config)})"  # no credentials in tracebacks

    def session(self) -> Session:
        """A botocore session that finds credentials as these options and the usual chain say."""
        session = Session(profile=self.profile)
        session.register_component("data_loader", _loader())
        if self.key is not None:
            session.set_credentials(self.key, self.secret, self.token)
        return session

    def connect(self, session: Session, *, connections: int) -> Any:
        """A new client of botocore's: thread-safe, without a retry of its own."""
        settings: dict[str, Any] = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": connections,
            # Also what the socket has to take a block of a body: a server may be busy for a while.
            "connect_timeout": 20,
            "read_timeout": 60,
            "tcp_keepalive": True,
            **self.config,
        }
        # Bodies carry a CRC-32C instead of the SHA-256 that botocore signs them with over http: 1.9 against 0.6 CPU
        # seconds per GiB sent, and the server checks either.
        settings["s3"] = {"payload_signing_enabled": False, **(settings.get("s3") or {})}
        if self.anonymous:
            settings["signature_version"] = UNSIGNED
        try:
            return session.create_client("s3", config=Config(**settings), **self.client)
        except (TypeError, ValueError) as error:
            where, endpoint = self._endpoint(session)
            if endpoint and not endpoint.lower().startswith(("http://", "https://")):
                user, at, host = endpoint.rpartition("@")
                shown = f"***@{host}" if at and user else endpoint
                raise InvalidArgumentError(
                    f"{where} is {shown!r}: http:// or https:// is missing in front of it."
                ) from None  # its text repeats what may be a password
            raise InvalidArgumentError(f"storage_options for S3 cannot be used: {error}.") from error

    def _endpoint(self, session: Session) -> tuple[str, str]:
        """Where the endpoint comes from, in the order in which botocore looks, and what it is; empty for none."""
        if self.client.get("endpoint_url"):
            return "storage_options endpoint_url", str(self.client["endpoint_url"])
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() != "true":
            for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
                if os.environ.get(variable):
                    return f"environment variable {variable}", os.environ[variable]
            profile = session.get_scoped_config()
            if isinstance(profile.get("endpoint_url"), str):
                return "endpoint_url in the configuration of AWS", str(profile["endpoint_url"])
        return "", ""

    def refusals(self) -> list[str]:
        """Options that only botocore honours."""
        found = [name for name in ("proxies", "proxies_config", "client_cert") if self.config.get(name)]
        if self.config.get("signature_version", "s3v4") != "s3v4":
            found.append("signature_version")
        found += [name for name in _CUSTOMER_KEY if name in self.additional]
        return found


@cache
def _loader() -> Any:
    """What parses botocore's description of S3, for all clients: a client costs 75 ms of CPU by itself, 7 with this."""
    return Session().get_component("data_loader")


def frozen(credentials: Credentials) -> tuple[str, str, str | None]:
    """Key, secret and token as they are at this moment; renewed first where they are about to expire."""
    now = credentials.get_frozen_credentials()
    return now.access_key, now.secret_key, now.token


def _table(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = options.get(name) or {}
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"storage_options {name} is a {type(value).__name__}; expected a table.")
    return dict(value)


def _one(*values_and_name: Any) -> Any:
    *values, name = values_and_name
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise InvalidArgumentError(f"storage_options give {name} twice, with different values.")
    return given[0] if given else None
