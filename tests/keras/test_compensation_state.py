"""What a fit of Keras's takes over from the workers that it joins, or from a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

keras = pytest.importorskip("keras")

from ef_common.core.compensation import Compensation  # noqa: E402
from ef_keras.compensation import FitCompensation  # noqa: E402


def compensation() -> FitCompensation:
    """That of a fit with one optimizer."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    fakes: Any = SimpleNamespace()
    return FitCompensation(Compensation("linear"), model, fakes, log=fakes, batch_size=lambda world_size: 4)


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("others", "own"), [([0.5], 0.5), ([0.5, 0.5], 0.5), ([], 1.0)])
def test_momentum_has_the_ratio_that_it_has_elsewhere_with_as_many_optimizers_as_there_are_here(
    others: list[float], own: float, saved: bool
) -> None:
    state = {**compensation().state(), "held": others, "global_batch_size": 8}
    joined = compensation()
    joined.load_state(state, saved=saved)
    assert joined.state()["held"] == [own]
    assert joined.state()["global_batch_size"] == 8
