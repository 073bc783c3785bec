"""Learning rate and exchange of a Keras training follow the batch that a job chooses while it trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.collectives.gradients.arrays import ArrayBuckets
from ef_common.core.compensation import Compensation
from ef_common.core.view import Member, View
from ef_common.events import EventLog

keras = pytest.importorskip("keras")

from ef_keras.compensation import FitCompensation  # noqa: E402
from ef_keras.reducer import Reducer  # noqa: E402

VIEW = View(1, tuple(Member(name, name, "") for name in "abcd"))


class AnyReducer(Reducer):
    def reduce(self, optimizer: Any, gradients: Any, variables: Any) -> None: ...


def test_learning_rate_follows_a_batch_that_is_chosen_after_it_has_settled() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    session: Any = SimpleNamespace(completed_in=VIEW, rank=0)
    settings, local = Compensation.of("linear"), [24]
    compensation = FitCompensation(settings, model, session, log=EventLog(None, "a"), batch_size=lambda _: local[-1])
    found = []
    for chosen in (24, 12, 24):
        local.append(chosen)
        for step in range(settings.ramp_steps + 1):
            compensation.commit(VIEW, step=step)
        logs: dict[str, Any] = {}
        compensation.show(logs)
        found.append((logs["global_batch_size"], logs["lr_scale"]))
    assert found == [(96.0, 1.0), (48.0, pytest.approx(0.5)), (96.0, pytest.approx(1.0))]


@pytest.mark.parametrize("measures", [True, False])
def test_batch_is_asked_for_in_the_exchanges_in_which_the_noise_is_measured(*, measures: bool) -> None:
    session: Any = SimpleNamespace(world_size=1)
    reducer = AnyReducer(session, None, lambda view: [1.0])
    reducer.measures, reducer.asks = lambda: measures, lambda: 24.5
    assert reducer.begin(ArrayBuckets([(2,)])).asks == (24.5 if measures else 0.0)
