"""Buffers that each worker sizes for itself."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from ef_common.testing.harness import Job
from tests.lightning import training
from tests.lightning.conftest import HOSTS


def train(host: str) -> dict[str, Any]:
    pl = importlib.import_module(host)

    class Enlarging(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(3.0), persistent=False)
            self.register_buffer("mean", torch.zeros(4))
            self.net[0].requires_grad_(False)

        def loss(self, batch: Any) -> Any:
            self.table = torch.arange(float(len(self.table) + 1 + self.trainer.global_rank))
            self.mean = 0.9 * self.mean + 0.1 * batch[1].detach().mean(0)
            return super().loss(batch)

        def on_train_epoch_start(self) -> None:
            self.net[0].requires_grad_(self.current_epoch > 0)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", super().loss(batch))

    module = Enlarging()
    for _ in range(2):
        training.trainer(pl).fit(module, training.loader(32))
    found = training.trainer(pl).test(module, training.loader(16), verbose=False)
    return {"weights": training.weights(module), "length": len(module.table), "found": found}


@pytest.mark.processes
@pytest.mark.parametrize("host", HOSTS)
def test_tables_that_each_worker_enlarges_for_itself_stay_its_own(job: Job, host: str) -> None:
    first, second = [worker.result() for worker in job.start_world(2, train, host)]
    assert first["weights"] == second["weights"]
    assert first["found"] == second["found"]
    assert first["length"] != second["length"]
