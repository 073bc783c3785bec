"""What is known of an evaluation when its metrics are reduced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchmetrics import SumMetric

from ef_lightning.metrics import Contributions


def test_value_that_only_another_worker_has_logged_is_left_to_it() -> None:
    contributions = Contributions(SimpleNamespace(lightning_module=nn.Module(), _results={}))
    theirs = {"logged": {"rare": {"value": torch.tensor(1.0)}}, "metrics": {}}
    contributions.complete({"a": theirs, "b": contributions.own()})
    assert contributions.num_workers == 2


def test_only_metrics_that_the_evaluation_has_updated_are_contributed() -> None:
    module: Any = nn.Module()
    module.old, module.used = SumMetric(), SumMetric()
    module.old.update(1.0)
    contributions = Contributions(SimpleNamespace(lightning_module=module, _results={}))
    module.used.update(2.0)
    module.made_later = SumMetric()
    module.made_later.update(3.0)
    assert set(contributions.own()["metrics"]) == {"used", "made_later"}
    contributions.complete({"a": contributions.own()})
    assert [state["sum_value"].item() for state in contributions.of_the_lost(module.used, present=())] == [2.0]
    assert contributions.of_the_lost(module.used, present=("a",)) == []
    assert contributions.of_the_lost(module.old, present=()) == []
