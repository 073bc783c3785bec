"""Files that a function of `tf.data` reads are shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ef_common.data.adapters.tf_data import TFDataFiles
from ef_common.errors import UsageError
from tests.adapters.contract import check_stream

pytestmark = pytest.mark.thorough  # TensorFlow is imported

TEXTS = ["a\nb\nc\n", "", "d\n"]


def read(name: str) -> Any:
    import tensorflow as tf

    return tf.data.TextLineDataset(name).map(tf.strings.upper, num_parallel_calls=4)


@pytest.fixture
def pattern(tmp_path: Path) -> str:
    pytest.importorskip("tensorflow")
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    return str(tmp_path / "*.txt")


def test_samples_are_those_of_the_datasets_from_any_offset_on(pattern: str) -> None:
    assert check_stream(TFDataFiles(pattern, read)) == [[b"A", b"B", b"C"], [], [b"D"]]


def test_samples_may_have_several_parts(pattern: str) -> None:
    import tensorflow as tf

    def pairs(name: str) -> Any:
        return tf.data.Dataset.zip((tf.data.TextLineDataset(name), tf.data.Dataset.range(9)))

    files = TFDataFiles(pattern, pairs)
    assert list(files.open(files.shards()[0], 1)) == [(b"b", 1), (b"c", 2)]


def test_dataset_without_an_end_and_what_is_no_dataset_are_refused(pattern: str) -> None:
    import tensorflow as tf

    def unordered(name: str) -> Any:
        return read(name).map(lambda text: text, num_parallel_calls=2, deterministic=False)

    def unordered_within(name: str) -> Any:
        return tf.data.Dataset.range(2).interleave(lambda _: unordered(name), cycle_length=2)

    for make, message in (
        (unordered, "a part with `deterministic=False`.*0.txt"),
        (unordered_within, "a part with `deterministic=False`"),
        (lambda name: read(name).repeat(), "has no end: leave `repeat` out.*0.txt"),
        (lambda name: [1, 2], "Received: list for .*0.txt"),
    ):
        files = TFDataFiles(pattern, make)
        with pytest.raises(UsageError, match=message):
            files.open(files.shards()[0], 0)
