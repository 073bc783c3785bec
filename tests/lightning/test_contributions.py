"""What is known of an evaluation when its metrics are reduced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn
from torchmetrics import SumMetric

from ef_lightning.contributions import Contributions


def test_only_metrics_that_the_evaluation_has_updated_are_contributed() -> None:
    module: Any = nn.Module()
    module.old, module.used = SumMetric(), SumMetric()
    module.old.update(1.0)
    taken: list[Any] = []
    contributions = Contributions(SimpleNamespace(lightning_module=module, _results={}), taken.append)
    module.used.update(2.0)
    module.made_later = SumMetric()
    module.made_later.update(3.0)
    own = contributions.own(5)
    assert set(own["metrics"]) == {"used", "made_later"}
    contributions.complete({"a": own})
    assert taken == [[own]]
    assert (contributions.num_samples, contributions.num_workers) == (5, 1)
    assert [state["sum_value"].item() for state in contributions.of_the_lost(module.used, present=())] == [2.0]
    assert contributions.of_the_lost(module.used, present=("a",)) == []
    assert contributions.of_the_lost(module.old, present=()) == []
