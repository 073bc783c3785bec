"""Parts of a row of batches hold the samples that they should, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ef_common.errors import UnsupportedError

keras = pytest.importorskip("keras")

from ef_keras.rows import Rows  # noqa: E402


def batch(start: int, stop: int) -> Any:
    x = np.arange(start, stop)
    return {"x": x, "squares": (x**2)[:, None]}, None, x + 1


def test_samples_of_several_batches_are_taken_with_all_of_their_parts() -> None:
    rows = Rows([batch(0, 4), batch(4, 8)])
    inputs, missing, y = rows.take([1, 2, 5])
    assert len(rows) == 8
    assert missing is None
    assert [np.array(part).ravel().tolist() for part in (inputs["x"], inputs["squares"], y)] == [
        [1, 2, 5],
        [1, 4, 25],
        [2, 3, 6],
    ]


@pytest.mark.parametrize("other", [np.arange(3), np.float32(1.0)], ids=["of another length", "a number"])
def test_batch_whose_parts_do_not_have_a_row_for_each_sample_is_refused(other: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"batches cannot be cut.*leave out global_batch_size.*\(8,\)"):
        Rows([(np.arange(8), other)])


def test_batch_of_numbers_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"batches cannot be cut.*\[\(\)\]"):
        Rows([(np.float32(1.0),)])
