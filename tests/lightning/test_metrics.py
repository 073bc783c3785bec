"""Metrics are connected to the session as often as an evaluation begins, and are left as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torchmetrics import SumMetric

from ef_common.core.view import SOLO
from ef_common.launch.engines import NoGroups
from ef_common.session import Session
from ef_lightning.metrics import MetricSync


def twice(value: Tensor, group: Any = None) -> list[Tensor]:
    """A way of the user's own to synchronize."""
    return [value, value]


METRICS: dict[str, tuple[Callable[[], SumMetric], float]] = {
    "ordinary": (SumMetric, 2.0),
    "with a way of its own": (lambda: SumMetric(dist_sync_fn=twice, distributed_available_fn=lambda: True), 4.0),
}
"""Each with the value that it has here, after an update with 2."""


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("times", [2, 2000])
def test_metric_that_is_connected_again_and_again_computes_and_is_left_as_it_was(name: str, times: int) -> None:
    make, value = METRICS[name]
    module: Any = nn.Module()
    module.metric = make()
    before = dict(vars(module.metric))
    sync = MetricSync(Session(SOLO.members[0], channel=None, groups=NoGroups()))
    for _ in range(times):
        sync.connect(module)
    module.metric.update(2.0)
    assert module.metric.compute() == value
    sync.disconnect()
    after = vars(module.metric)
    for field in ("dist_sync_fn", "distributed_available_fn"):
        assert after[field] is before[field]
    assert "_sync_dist" not in after


def test_metric_that_is_made_later_is_connected_too() -> None:
    module: Any = nn.Module()
    module.first = SumMetric()
    sync = MetricSync(Session(SOLO.members[0], channel=None, groups=NoGroups()))
    sync.connect(module)
    module.second = SumMetric()
    sync.connect(module)
    assert module.second.dist_sync_fn == sync.gather
    sync.disconnect()
    assert module.second.dist_sync_fn is None
