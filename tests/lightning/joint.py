"""A training with several loaders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ef_lightning import strategy_for
from tests.lightning import training


def module(pl: Any) -> Any:
    """Class of a module that trains on all batches at hand, and notes down what is in each."""

    class Several(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append([None if part is None else part[0].tolist() for part in parts(batch)])
            return torch.stack([self.loss(part) for part in parts(batch) if part is not None]).sum()

    return Several


def parts(batch: Any) -> list[Any]:
    """Batches of the loaders, whatever structure they are in."""
    if isinstance(batch, dict):
        return [part for value in batch.values() for part in parts(value)]
    if isinstance(batch, (list, tuple)) and not isinstance(batch[0], Tensor):
        return [part for value in batch for part in parts(value)]
    return [batch]


def loaders() -> Any:
    """Eight batches of one, three of the other."""
    return {"a": training.loader(31), "b": training.loader(7, 3)}


def run(host: str) -> dict[str, Any]:
    """Train in a world of several workers."""
    pl = training.use(host)
    several = module(pl)()
    trainer = training.trainer(pl, strategy_for(host)(compensation="none"))
    trainer.fit(several, loaders())
    return {"weights": training.weights(several), "steps": trainer.global_step, "seen": several.seen}


def gather(host: str) -> dict[str, Any]:
    """Train with a loss over the features of all workers, from loaders whose last batches are short."""
    pl = training.use(host)

    class Gathering(module(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            features = [self.net(part[1]) for part in parts(batch)]
            gathered = [self.all_gather(some, sync_grads=True) for some in features]
            return torch.stack([some.square().mean() for some in gathered]).sum()

    gathering = Gathering()
    trainer = training.trainer(pl, strategy_for(host)(compensation="none"), max_epochs=1)
    trainer.fit(gathering, {"a": training.loader(7), "b": training.loader(31)})
    newest = gathering.seen[-trainer.global_step :]  # the first step is made twice
    return {"weights": training.weights(gathering), "sizes": [[len(part) for part in parts] for parts in newest]}
