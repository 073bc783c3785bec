"""What a `forward` may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ef_common.errors import UsageError
from ef_common.program.outcome import check_tensor, outcome_of


def test_scalar_is_the_loss() -> None:
    assert outcome_of(np.float32(2), name="forward()") == {"loss": 2}


def test_dict_begins_with_its_loss() -> None:
    assert list(outcome_of({"accuracy": 1.0, "loss": 2.0}, name="forward()")) == ["loss", "accuracy"]


def test_dict_of_an_evaluation_needs_no_loss() -> None:
    assert outcome_of({"accuracy": 1}, name="evaluate()", needs_loss=False) == {"accuracy": 1}


MISTAKES: list[tuple[Any, str]] = [
    ({"accuracy": 1.0}, r'with the cost as "loss". Received: a dict of \[\'accuracy\'\]'),
    (np.zeros(3), r"'loss' of shape \(3,\)"),
    ({"loss": 1.0, "hits": np.zeros((2, 1))}, r"'hits' of shape \(2, 1\)"),
    (None, "Received: NoneType"),
    ((1.0, 2.0), "Received: tuple"),
]


@pytest.mark.parametrize(("returned", "message"), MISTAKES)
def test_what_is_no_scalar_raises(returned: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        outcome_of(returned, name="forward()")


def test_loss_of_another_framework_raises_naming_its_type() -> None:
    with pytest.raises(UsageError, match=r"a tensor of torch.* Received: numpy\.float32"):
        check_tensor(np.float32(1), lambda value: False, name="forward()", framework="torch")
