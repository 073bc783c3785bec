"""Trains a small module as a program and by hand, in turns, and reports how long each step took.

Argument: number of turns.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import ef_lightning
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import BATCH_SIZE, loader, mlp
from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent
from tests.benchmarks.step_time_worker import Clock

SIZE = "50k"
NUM_STEPS = 400
WARM_UP_STEPS = 50


def model() -> dict[str, Any]:
    """The same net and optimizer as the module's."""
    torch.manual_seed(0)
    return {"net": mlp(SIZE), "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)}


def forward(inputs: Tensor, targets: Tensor, params: Any) -> Tensor:
    """Its cost."""
    return F.cross_entropy(params["net"](inputs), targets)


class ByHand(Module):
    """The module, with the logs that a program has."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The cost of a batch."""
        loss = super().training_step(batch, batch_idx)
        self.log("loss_step", loss, prog_bar=True)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """There is one, as a program has one."""


SIDES: dict[str, Callable[[], Any]] = {
    "program": lambda: ef_lightning.module(model, forward),
    "by hand": lambda: ByHand(SIZE),
}


def main() -> None:
    """Measure."""
    die_with_parent()
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(int(sys.argv[1])):
        for side in list(SIDES)[:: 1 if turn % 2 else -1]:
            clock = Clock()
            trainer(clock, max_steps=NUM_STEPS).fit(SIDES[side](), loader(2 * NUM_STEPS * BATCH_SIZE))
            found[side] += np.diff(clock.times[WARM_UP_STEPS:]).tolist()
            gc.collect()
    report(found)


if __name__ == "__main__":
    main()
