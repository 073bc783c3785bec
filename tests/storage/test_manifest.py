from __future__ import annotations

import json
from typing import Any

import pytest

from ef_common.core.lineage import CheckpointId
from ef_common.errors import InvalidCheckpoint, NewerFormat
from ef_common.storage.manifest import Manifest, StoredFile, sealed

MANIFEST = Manifest(
    id=CheckpointId(2, 5, 123),
    files={"weights": StoredFile(7, "abc"), "more": StoredFile(0, "def")},
    writer="w",
    created=1.5,
    parent="run-000001-generation-000001-step-000000010",
    progress={"epoch": 3, "returned": [[1, 2]], "seed": None},
    metrics={"loss": 0.25, "broken": float("nan")},
    model="m",
    versions={"elasticflow": "0.1"},
)


def test_decode_of_encoded_is_the_same_but_for_numbers_that_are_none() -> None:
    found = Manifest.decode(MANIFEST.encode())
    assert found.metrics == {"loss": 0.25, "broken": None}
    assert found.encode() == MANIFEST.encode()
    assert (found.id, found.files, found.progress) == (MANIFEST.id, MANIFEST.files, MANIFEST.progress)
    assert found.size == 7


def test_decode_of_any_truncation_is_invalid() -> None:
    data = MANIFEST.encode()
    for length in range(len(data.rstrip())):
        with pytest.raises(InvalidCheckpoint):
            Manifest.decode(data[:length])


@pytest.mark.parametrize("bit", range(8))
def test_decode_of_any_flipped_bit_is_invalid_or_harmless(bit: int) -> None:
    """White space between the parts may change; what is said may not."""
    data = MANIFEST.encode()
    seen = 0
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        try:
            found = Manifest.decode(bytes(changed))
        except InvalidCheckpoint:
            seen += 1
        except NewerFormat:  # the number of the format itself was hit
            assert chr(data[place]) == "1"
        else:
            assert found.encode() == data
    assert seen > len(data) / 2


def test_decode_of_a_newer_format_says_so_whatever_else_is_in_it() -> None:
    with pytest.raises(NewerFormat, match=r"reads format 2\. Received: format=3"):
        Manifest.decode(json.dumps({"format": 3, "stored": "otherwise"}).encode())


@pytest.mark.parametrize(
    "inner",
    [
        {},
        {"id": 3},
        {**json.loads(MANIFEST.encode())["manifest"], "files": {"../../etc/passwd": {"size": 1, "checksum": ""}}},
        {**json.loads(MANIFEST.encode())["manifest"], "id": {"run": 1}},
        {**json.loads(MANIFEST.encode())["manifest"], "created": 10**400},
        {**json.loads(MANIFEST.encode())["manifest"], "files": {"a": {"size": -1, "checksum": ""}}},
        {**json.loads(MANIFEST.encode())["manifest"], "files": {"a": {"size": 1, "pieces": [[2, ""], [-1, ""]]}}},
    ],
)
def test_decode_of_what_is_not_a_manifest_is_invalid(inner: dict[str, Any]) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(sealed(inner, "manifest"))


@pytest.mark.parametrize("value", [b"NaN", b"1e999", b"[" * 100_000 + b"]" * 100_000])
def test_decode_of_values_that_nobody_writes_is_invalid(value: bytes) -> None:
    with pytest.raises(InvalidCheckpoint):
        Manifest.decode(b'{"format": 1, "checksum": "", "manifest": {"created": %s}}' % value)


def test_encode_of_progress_that_is_not_json_raises() -> None:
    with pytest.raises(TypeError):
        Manifest(MANIFEST.id, {}, "w", 0.0, progress={"a": object()}).encode()
