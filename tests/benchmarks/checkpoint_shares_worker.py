"""A worker that takes checkpoints, shared ones and others, and tells what they have cost."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback

from ef_common.data.checkpointer import Checkpointing
from ef_lightning import ElasticFlowStrategy
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import loader

KINDS = ("shared", "alone")
_NEVER = 1 << 60


class Measure(Callback):
    """Takes checkpoints in both ways, one after the other, and ends the training."""

    def __init__(self, num_rounds: int) -> None:
        self.pauses: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.writes: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._num = num_rounds + 1  # the first ones touch the copies' memory
        self._newest = "alone"

    def on_train_start(self, trainer: Any, module: Any) -> None:
        job = trainer.strategy._fit.checkpoints.job
        job._saved = lambda seconds: self.writes[self._newest].append(seconds)
        job.take, job._share = self._timed("alone", job.take), self._timed("shared", job._share)

    def _timed(self, kind: str, act: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> None:
            self._newest = kind
            begin = time.perf_counter()
            act(*args, **kwargs)
            self.pauses[kind].append(time.perf_counter() - begin)

        return timed

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        job, is_first = trainer.strategy._fit.checkpoints.job, trainer.strategy.session.rank == 0
        job._sharing._least_bytes = 1 if self._newest == "alone" else _NEVER
        done = is_first and min(map(len, self.writes.values())) >= self._num
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(done, all=False)


def train(folder: str, num_rounds: int) -> dict[str, Any]:
    """One of the workers."""
    torch.set_num_threads(1)
    measure = Measure(num_rounds)
    strategy = ElasticFlowStrategy(checkpoint=Checkpointing(folder, every_steps=1), compensation="none")
    module = Module("33m")
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 1e-4)  # type: ignore[method-assign]
    trainer(measure, strategy=strategy, max_epochs=1000).fit(module, loader(80))
    return {"pauses": measure.pauses, "writes": measure.writes}
