"""Explains a store's errors in helpful words, without anything that must not be logged."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ef_common.errors import AlreadyExists, ElasticFlowError, NotFound, StorageError, StorageFailed, StorageRefused

_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/@\s'\"]*@")
_QUERY = re.compile(r"(?<=[\w/.])\?[^\s'\"<>]*=[^\s'\"<>]*")
_SECRET_NAMES = re.compile(r"key|secret|token|password|passwd|credential|signature", re.IGNORECASE)
_LONGEST = 300

# Tested in this order, against the class names of an error and its causes, and the codes that they carry.
_CODES: Sequence[tuple[frozenset[str], str]] = (
    (
        frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "RefreshError"}),
        "the credentials have expired; renew them",
    ),
    (
        frozenset(
            {"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "CredentialRetrievalError"}
        ),
        "no credentials were found",
    ),
    (
        frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "Forbidden", "403", "401"}),
        "the store refuses these credentials or lacks this right",
    ),
    (
        frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests", "429"}),
        "the store asks to slow down",
    ),
    (frozenset({"NoSuchBucket"}), "there is no such bucket; create it"),
    (frozenset({"QuotaExceeded", "XMinioStorageFull", "StorageFull"}), "the store is full"),
    (
        frozenset({"InternalError", "ServiceUnavailable", "500", "502", "503", "504"}),
        "the store has a failure of its own",
    ),
)
_NUMBERS: Mapping[int, str] = {
    errno.ENOSPC: "the store is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the store is read-only",
    errno.EBUSY: "the store asks to slow down",
    errno.ESTALE: "the mount is stale",
}
_UNREACHABLE = frozenset(
    {"EndpointConnectionError", "ClientConnectorError", "ConnectionRefusedError", "ConnectTimeoutError", "gaierror"}
)


def redact(text: str) -> str:
    """The text without passwords and query strings of the URLs in it.

    >>> redact("s3://me:secret@bucket/run?token=1")
    's3://***@bucket/run?***'
    """
    return _QUERY.sub("?***", _CREDENTIALS_IN_URL.sub("***@", text))


def secrets_of(options: Mapping[str, Any]) -> list[str]:
    """Values of storage options that must not be logged, recognized by their names at any depth."""
    return sorted({value for value in _secrets(options, named=False) if len(value) > 3}, key=len, reverse=True)


def failure(error: BaseException, what: str, *, secrets: Sequence[str] = (), exclusive: bool = False) -> StorageError:
    """One of our errors for any error of a store.

    Args:
        error: As the store raised it.
        what: What was being done to what: "write checkpoints/…".
        secrets: Texts that must not appear in the message.
        exclusive: It was to be done only if nothing was there; some object stores then tell of a condition that failed.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, FileExistsError) or (exclusive and _codes(error) & {"PreconditionFailed", "412"}):
        return AlreadyExists(redact(f"cannot {what}: it exists already"))
    return _kind(error)(f"cannot {redact(what)}: {describe(error, secrets=secrets)}")


def _kind(error: BaseException) -> type[StorageFailed]:
    if isinstance(error, FileNotFoundError):
        return StorageFailed if _codes(error) & {"NoSuchBucket"} else NotFound
    if isinstance(error, (PermissionError, NotADirectoryError)) or getattr(error, "errno", None) == errno.EROFS:
        return StorageRefused
    return StorageFailed


def describe(error: BaseException, *, secrets: Sequence[str] = ()) -> str:
    """Why the operation failed, in one line: the meaning if we know it, and then the store's words."""
    meaning = _meaning(error)
    said = next(
        (text for one in _chain(error) if (text := " ".join(str(one).split())) not in ("", "None")), "no message"
    )
    for secret in secrets:
        said = said.replace(secret, "***")
    said = redact(said)
    if len(said) > _LONGEST:
        said = f"{said[:_LONGEST]}…"
    if isinstance(error, ElasticFlowError):
        return said
    detail = f"{type(error).__name__}: {said}"
    return f"{meaning} ({detail})" if meaning else detail


def _meaning(error: BaseException) -> str | None:
    codes = _codes(error)
    for known, explanation in _CODES:
        if known & codes:
            return explanation
    if codes & _UNREACHABLE:
        return "the store cannot be reached"
    for one in _chain(error):
        meaning = _NUMBERS.get(one.errno) if isinstance(one, OSError) and one.errno is not None else None
        if meaning is not None:
            return meaning
        if isinstance(one, PermissionError):
            return "the store refuses these credentials or lacks this right"
        if isinstance(one, ConnectionError):
            return "the store cannot be reached"
        if isinstance(one, TimeoutError) or "Timeout" in type(one).__name__:
            return "the store did not answer in time"
    return None


def _codes(error: BaseException) -> set[str]:
    """The class names of an error and its causes, and their HTTP status codes if they carry any."""
    found: set[str] = set()
    for one in _chain(error):
        found.update(base.__name__ for base in type(one).__mro__)
        response = getattr(one, "response", None)
        if isinstance(response, Mapping):  # botocore
            found.add(str(response.get("Error", {}).get("Code")))
        code = getattr(one, "code", getattr(one, "status", None))
        if isinstance(code, int | str):  # gcsfs, aiohttp
            found.add(str(code))
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _secrets(value: Any, *, named: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secrets(inner, named=named or bool(_SECRET_NAMES.search(str(name))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, named=named)
    elif named and isinstance(value, str):
        yield value
