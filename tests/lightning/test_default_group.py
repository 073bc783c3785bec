"""Code of users that asks `torch.distributed`, in the hooks of a training."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import SumMetric

from ef_common.testing.harness import Job
from tests.lightning import training
from tests.lightning.conftest import HOSTS


def ask(host: str) -> dict[str, Any]:
    pl = importlib.import_module(host)

    class Asking(training.regression(pl)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.in_setup = [dist.is_initialized(), dist.get_rank(), dist.get_world_size()]
            self.seen: list[int] = []
            self.metric = [SumMetric()]  # Lightning does not know it

        def train_dataloader(self) -> Any:
            return training.loader(16)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            total = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(total)
            self.total = float(total)
            self.seen += batch[0].tolist()
            self.metric[0].update(float(len(batch[0])))
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            names: list[Any] = [f"rank {dist.get_rank()}"]
            dist.broadcast_object_list(names, src=1)
            self.name = names[0]
            self.samples = float(self.metric[0].compute())

    module = Asking()
    trainer = training.trainer(pl, max_epochs=1)
    trainer.fit(module)
    return {
        "in_setup": module.in_setup,
        "total": module.total,
        "seen": module.seen,
        "name": module.name,
        "samples": module.samples,
        "after": dist.is_initialized(),
        "weights": training.weights(module),
    }


@pytest.mark.processes
@pytest.mark.parametrize("host", HOSTS)
def test_code_of_users_finds_a_default_group(job: Job, host: str) -> None:
    first, second = [worker.result() for worker in job.start_world(2, ask, host)]
    job.audit()
    assert sorted([first["in_setup"], second["in_setup"]]) == [[True, 0, 2], [True, 1, 2]]
    assert sorted(first["seen"] + second["seen"]) == list(range(16))
    for result in (first, second):
        assert (result["total"], result["name"], result["samples"], result["after"]) == (3.0, "rank 1", 16.0, False)
    assert first["weights"] == second["weights"]
