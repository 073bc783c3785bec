"""A training with several loaders, and evaluations with several."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ef_lightning import strategy_for
from ef_lightning.joint_reading import LENGTHS
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


def evaluated(pl: Any) -> Any:
    """Class of a module that notes down what it is evaluated on, and logs the sum and the mean of each loader."""

    class Evaluated(module(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            found = [None if part is None else part[0].tolist() for part in parts(batch)]
            if not getattr(self.trainer.strategy, "padding", False):
                stage = self.trainer.state.stage.value
                self.seen.append([stage, batch_idx, dataloader_idx, type(batch).__name__, found])
            for number, indices in enumerate(found):
                if indices:
                    mean = sum(indices) / len(indices)
                    self.log(f"total_{number}", float(sum(indices)), reduce_fx="sum", sync_dist=True)
                    self.log(f"mean_{number}", mean, batch_size=len(indices), sync_dist=True)

        test_step = validation_step

    return Evaluated


def evaluate(host: str, strategy: Any = "elasticflow") -> dict[str, Any]:
    """Validate in each mode in which every step takes a batch of each loader."""
    pl = training.use(host) if strategy == "elasticflow" else importlib.import_module(host)
    found: dict[str, Any] = {}
    for mode in LENGTHS:
        several, trainer = evaluated(pl)(), training.trainer(pl, strategy)
        given = pl.utilities.CombinedLoader({"a": training.loader(31), "b": training.loader(7, 3)}, mode)
        (values,) = trainer.validate(several, given, verbose=False)
        found[mode] = values, several.seen
    return found


def nested(*lengths: int, **kwargs: Any) -> Any:
    """Three loaders of these lengths in a structure."""
    first, second, third = lengths
    rest = [training.loader(second, 2, **kwargs), training.loader(third, 5, **kwargs)]
    return {"a": training.loader(first, **kwargs), "b": rest}


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
