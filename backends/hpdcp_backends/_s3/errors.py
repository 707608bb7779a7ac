"""What S3 servers and clients answer when they fail, as one record, and as hpdcp's errors."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Final

from botocore import exceptions as botocore_errors

from hpdcp._base.errors import HpdcpError, KeyNotFoundError, StorageError

_TEMPORARY_STATUS: Final = frozenset({429, 500, 502, 503, 504})
_TEMPORARY_CODES: Final = frozenset({
    "SlowDown", "InternalError", "InternalFailure", "ServiceUnavailable", "Throttling", "ThrottlingException",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "RequestTimeout", "RequestTimeoutException", "IncompleteBody",
    "OperationAborted", "ConditionalRequestConflict",
    "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "ClientDisconnected",
})  # fmt: skip
"""Also where the status is a 400: the body did not arrive whole, or arrived damaged."""

MISSING: Final = frozenset({"NoSuchKey", "404", "NotFound"})
"""Of a key. HEAD answers have no body, and so no code but the status."""

CONDITION_FAILED: Final = frozenset({"PreconditionFailed", "412"}) | MISSING
"""Of a request under a condition: the key holds something else, or nothing."""

_BUCKET: Final = "Create the bucket, or correct its name or the endpoint."
_KEYS: Final = "Check the access key and the secret (storage_options key and secret, AWS_ACCESS_KEY_ID, the profile)."
_PERMISSION: Final = (
    "Ask for s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket and s3:AbortMultipartUpload there. Without "
    "s3:ListBucket a key that is missing looks like this, too."
)
_EXPIRED: Final = "Get new credentials (such as `aws sso login`), or configure a source that renews them."
_CHECKSUMS: Final = (
    "If this server is older than S3's checksum headers, set "
    'storage_options={"config_kwargs": {"request_checksum_calculation": "when_required"}}.'
)
_ADVICE: Final = {
    "NoSuchBucket": _BUCKET,
    "InvalidBucketName": "S3 allows no such name of a bucket: correct the URL.",
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS + " A proxy that changes the Host header has the same effect.",
    "AccessDenied": _PERMISSION,
    "403": _PERMISSION + " Wrong keys look the same in this request.",
    "Forbidden": _PERMISSION,
    "AllAccessDisabled": _PERMISSION,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": _EXPIRED,
    "CredentialRetrievalError": _EXPIRED,
    "TokenRetrievalError": _EXPIRED,
    "SSOTokenLoadError": _EXPIRED,
    "UnauthorizedSSOTokenError": _EXPIRED,
    "RequestTimeTooSkewed": "This machine's clock and the server's differ too much: set the clock (NTP).",
    "AuthorizationHeaderMalformed": "The region is another one: set client_kwargs region_name, or AWS_DEFAULT_REGION.",
    "PermanentRedirect": "The bucket lives elsewhere: set client_kwargs region_name and endpoint_url.",
    "301": "The bucket lives elsewhere: set client_kwargs region_name and endpoint_url.",
    "KeyTooLongError": "The server takes no name as long as this: choose a shorter path.",
    "EntityTooLarge": "The object is larger than the server takes: split what is saved over more ranks.",
    "QuotaExceeded": "Free space, or ask for a larger quota.",
    "InvalidStorageClass": "Correct StorageClass in s3_additional_kwargs.",
    "NotImplemented": "The server lacks this feature of S3. " + _CHECKSUMS,
    "InvalidRequest": _CHECKSUMS,
    "MissingContentLength": _CHECKSUMS,
    "NoSuchUpload": "The upload was aborted by somebody else, such as a lifecycle rule of the bucket: save again.",
    "NoCredentialsError": "No credentials were found: give storage_options key and secret, set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, configure a profile, or say anon=True for a public bucket.",
    "PartialCredentialsError": "Give the access key and the secret together.",
    "ProfileNotFound": "Correct storage_options profile, or AWS_PROFILE.",
    "ParamValidationError": "Correct the bucket's name in the URL.",
    "CertificateError": "Trust the server's certificate: client_kwargs verify=FILE, or AWS_CA_BUNDLE.",
    "EndpointConnectionError": "Nothing answers at the endpoint: check its host and port (endpoint_url in "
    "storage_options, AWS_ENDPOINT_URL), and the network.",
    "ReadTimeoutError": "The endpoint takes connections and does not answer: check that a server of S3 listens there "
    "(endpoint_url in storage_options, AWS_ENDPOINT_URL), and that it is not overloaded.",
    "SSLError": "No TLS is spoken there: check https:// against http:// in the endpoint, and its port.",
    "ConnectTimeoutError": "Nothing answers at the endpoint: check its host and port, and the network.",
}
_ERRNO: Final = {
    "AccessDenied": errno.EACCES,
    "403": errno.EACCES,
    "Forbidden": errno.EACCES,
    "AllAccessDisabled": errno.EACCES,
    "InvalidAccessKeyId": errno.EACCES,
    "SignatureDoesNotMatch": errno.EACCES,
    "ExpiredToken": errno.EACCES,
    "NoCredentialsError": errno.EACCES,
    "QuotaExceeded": errno.EDQUOT,
    "XMinioStorageFull": errno.ENOSPC,
    "InsufficientStorage": errno.ENOSPC,
    "507": errno.ENOSPC,
    "KeyTooLongError": errno.ENAMETOOLONG,
    "EntityTooLarge": errno.EFBIG,
}
_LONGEST_MESSAGE: Final = 300


class RequestFailedError(Exception):
    """One request that failed; never leaves the backend."""

    def __init__(
        self, code: str, message: str, *, status: int | None = None, temporary: bool = False, unreachable: bool = False
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        """S3's own, else the name of the client's exception."""
        self.message = message if len(message) <= _LONGEST_MESSAGE else message[:_LONGEST_MESSAGE] + "…"
        self.status = status
        """Of the answer; None where there was none."""
        self.temporary = temporary
        """Whether the same request may succeed a moment later."""
        self.unreachable = unreachable
        """Whether no connection was made, so that the server has not seen the request."""
        self.may_be_done = False
        """Whether the server may do what was asked all the same, at this try or at one before it."""

    @property
    def doubtful(self) -> bool:
        """Whether the server may have done what was asked all the same."""
        return self.temporary and not self.unreachable


class StoppedError(Exception):
    """The work a request was part of has failed elsewhere, or was interrupted."""


@dataclass(frozen=True, slots=True)
class Location:
    """What messages say of where."""

    url: str
    bucket: str
    endpoint: str

    def error(self, failure: RequestFailedError, *, doing: str, key: str | None) -> StorageError:
        """`failure` as an error that names key, bucket, endpoint, and the next step."""
        what = self.url if key is None else f"{key!r} in {self.url}"
        kind: type[StorageError] = StorageError
        if key is not None and failure.code in MISSING:
            kind = KeyNotFoundError
        reason = f"bucket {self.bucket!r} at {self.endpoint}: {failure.code}"
        if failure.message and failure.message != failure.code:
            reason += f" ({failure.message.rstrip('.')})"
        error = kind(f"cannot {doing} {what}: {reason}. {_ADVICE.get(failure.code, '')}".rstrip())
        error.errno = errno.ENOENT if kind is KeyNotFoundError else _ERRNO.get(failure.code)
        return error


def answered(code: str, status: int | None, message: str) -> RequestFailedError:
    """The failure that a server's answer reports."""
    temporary = status in _TEMPORARY_STATUS or code in _TEMPORARY_CODES
    return RequestFailedError(code, message, status=status, temporary=temporary)


def failed_connection(name: str, message: str, *, unreachable: bool) -> RequestFailedError:
    """The failure of a connection that was refused, cut or silent, or whose certificate is not trusted."""
    if "certificate" in message.lower():
        return RequestFailedError("CertificateError", message)
    return RequestFailedError(name, message, temporary=True, unreachable=unreachable)


def from_botocore(error: Exception) -> RequestFailedError:
    """Any exception of a botocore call, or of reading its answer, as one record; others of ours are raised as are."""
    if isinstance(error, HpdcpError | StoppedError):
        raise error
    if isinstance(error, RequestFailedError):
        return error
    name = type(error).__name__
    if isinstance(error, botocore_errors.ClientError):
        told = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return answered(str(told.get("Code") or status or name), status, str(told.get("Message", "")))
    unreachable = isinstance(
        error,
        botocore_errors.EndpointConnectionError
        | botocore_errors.ConnectTimeoutError
        | botocore_errors.ProxyConnectionError
        # The handshake: nothing was sent.
        | botocore_errors.SSLError,
    )
    # urllib3's errors that botocore lets through while a body is read are OSErrors or name their module.
    connection = isinstance(error, botocore_errors.HTTPClientError | botocore_errors.IncompleteReadError | OSError)
    if unreachable or connection or type(error).__module__.startswith(("urllib3", "http.client")):
        return failed_connection(name, str(error), unreachable=unreachable)
    if isinstance(error, botocore_errors.BotoCoreError):
        return RequestFailedError(name, str(error))
    raise error
