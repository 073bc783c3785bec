"""States of the generators that every program has."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ef_common.collectives.codec import ARRAYS
from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.seeds import python_states, set_python_states
from ef_common.data.torch_determinism import set_torch_states, torch_states
from ef_lightning.random_state import random_state, restore_random_state


def draws() -> list[float]:
    """With a number of NumPy's that comes in pairs."""
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.normal())]


def as_tensors(states: dict[str, Any]) -> Any:
    kind, keys, *others = states["numpy"]
    return TENSORS.loads(TENSORS.dumps({**states, "numpy": [kind, torch.from_numpy(keys), *others]}))


def as_floats(states: dict[str, Any]) -> Any:
    kind, keys, *others = states["numpy"]
    return ARRAYS.loads(ARRAYS.dumps({**states, "numpy": [kind, keys, *map(float, others)]}))


@pytest.mark.parametrize("change", [lambda states: ARRAYS.loads(ARRAYS.dumps(states)), as_tensors, as_floats])
@pytest.mark.parametrize("num_before", [0, 1])
def test_generators_go_on_from_states_in_each_form_that_checkpoints_have(change: Any, num_before: int) -> None:
    random.seed(1)
    np.random.seed(1)
    np.random.normal(size=num_before)
    states = change(python_states())
    expected = draws()
    draws()
    set_python_states(states)
    assert draws() == expected


def test_generators_of_torch_go_on() -> None:
    states = torch_states()
    expected = torch.rand(3)
    set_torch_states(states)
    assert torch.equal(torch.rand(3), expected)


def test_worker_that_is_not_rank_0_draws_other_numbers_than_it_and_the_same_each_time() -> None:
    saved = random_state()
    found = []
    for rank in (0, 1, 2, 1):
        restore_random_state(saved, rank=rank)
        found.append([*draws(), float(torch.rand(()))])
    assert found[1] == found[3]
    assert len({tuple(numbers) for numbers in found}) == 3
