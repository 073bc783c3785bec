from __future__ import annotations

import errno

import pytest

from ef_common.errors import AlreadyExists, NotFound, StorageFailed, StorageRefused
from ef_common.storage.failures import describe, failure, redact, secrets_of


class ClientError(Exception):
    """As botocore makes them."""

    def __init__(self, code: str) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}}


class RefreshError(Exception):
    """As google-auth makes them."""


class ReadTimeoutError(Exception):
    """As botocore makes them."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the store is full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the quota is used up"),
        (OSError(errno.EROFS, "Read-only file system"), "the store is read-only"),
        (OSError(errno.ESTALE, "Stale file handle"), "the mount is stale"),
        (PermissionError("denied"), "refuses these credentials"),
        (caused(PermissionError("denied"), ClientError("ExpiredToken")), "the credentials have expired"),
        (RefreshError("no"), "the credentials have expired"),
        (ClientError("SignatureDoesNotMatch"), "refuses these credentials"),
        (caused(OSError(errno.EBUSY, "x"), ClientError("SlowDown")), "asks to slow down"),
        (caused(FileNotFoundError(None), ClientError("NoSuchBucket")), "there is no such bucket"),
        (ClientError("InternalError"), "a failure of its own"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "cannot be reached"),
        (TimeoutError(), "did not answer in time"),
        (ReadTimeoutError("x"), "did not answer in time"),
        (RuntimeError("what now"), "RuntimeError: what now"),
        (RuntimeError(), "RuntimeError: no message"),
    ],
)
def test_describe_says_what_it_means(error: Exception, meaning: str) -> None:
    assert meaning in describe(error)


def test_failure_keeps_missing_existing_and_failed_apart() -> None:
    assert type(failure(FileNotFoundError("x"), "read x")) is NotFound
    assert type(failure(caused(FileNotFoundError("x"), ClientError("NoSuchBucket")), "read x")) is StorageFailed
    assert type(failure(FileExistsError("x"), "create x")) is AlreadyExists
    assert type(failure(ClientError("PreconditionFailed"), "create x", exclusive=True)) is AlreadyExists
    assert type(failure(ClientError("PreconditionFailed"), "read x")) is StorageFailed
    assert type(failure(OSError("x"), "read x")) is StorageFailed


@pytest.mark.parametrize(
    "error", [PermissionError("x"), NotADirectoryError("x"), OSError(errno.EROFS, "Read-only file system")]
)
def test_failure_that_does_not_end_by_itself_is_a_refusal(error: Exception) -> None:
    assert type(failure(error, "write x")) is StorageRefused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("sftp://me:pass@host/run", "sftp://***@host/run"),
        ("https://host/x?X-Amz-Signature=abc&y=1 failed", "https://host/x?*** failed"),
        ("what is this? nobody knows", "what is this? nobody knows"),
        ("/mnt/shared/run", "/mnt/shared/run"),
        ("simplecache::s3://me:pass@bucket/x", "simplecache::s3://***@bucket/x"),
    ],
)
def test_redact_hides_passwords_and_queries(text: str, expected: str) -> None:
    assert redact(text) == expected


def test_secrets_of_options_are_found_at_any_depth_and_hidden() -> None:
    options = {
        "key": "AKIA123",
        "client_kwargs": {"aws_session_token": "tok-456", "region_name": "eu"},
        "token": {"private": "pem-789"},
        "anon": False,
    }
    secrets = secrets_of(options)
    assert set(secrets) == {"AKIA123", "tok-456", "pem-789"}
    said = describe(RuntimeError("AKIA123 with tok-456 and pem-789 in eu"), secrets=secrets)
    assert said == "RuntimeError: *** with *** and *** in eu"


def test_describe_is_one_short_line() -> None:
    said = describe(RuntimeError("line\n" * 1000))
    assert "\n" not in said
    assert len(said) < 400
