"""Trainings that must give the weights of one process with the batches of all workers together.

Each function makes the module and says how it is trained; `run` trains it with ElasticFlow and once more with
Lightning's own strategy for one device, whose batch is as large as the world's. Its learning rate is meant for that
batch, so nothing is compensated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.training import BATCH_SIZE, regression


@dataclass
class Case:
    """A training.

    Args:
        make: Makes the module.
        trainer: Arguments of the Trainer.
        loader: Arguments of the loader.
        length: Samples.
        compiled: Whether the module is given to `torch.compile` first.
    """

    make: Callable[[], Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    length: int = 29
    compiled: bool = False


CASES: dict[str, Callable[[Any], Case]] = {}


def case(make: Callable[[Any], Case]) -> Callable[[Any], Case]:
    CASES[make.__name__] = make
    return make


@case
def plain(pl: Any) -> Case:
    return Case(regression(pl))


@case
def accumulation(pl: Any) -> Case:
    return Case(regression(pl), {"accumulate_grad_batches": 3})


@case
def accumulation_scheduler(pl: Any) -> Case:
    scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    # Batches of unequal size in one accumulation are weighed a little differently.
    return Case(regression(pl), {"callbacks": [scheduler]}, length=32)


@case
def clipping(pl: Any) -> Case:
    return Case(regression(pl), {"gradient_clip_val": 0.1})


def normalizing(pl: Any, *, width: int = 8) -> Any:
    """Class of a module that changes its gradients as soon as they are there."""

    class Normalizing(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

        def on_after_backward(self) -> None:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm() + 1e-3

    return Normalizing


@case
def gradients_changed_after_backward(pl: Any) -> Case:
    return Case(normalizing(pl))


@case
def large_gradients_changed_after_backward(pl: Any) -> Case:
    return Case(normalizing(pl, width=5_000), {"max_epochs": 1})


@case
def double_precision(pl: Any) -> Case:
    return Case(regression(pl), {"precision": 64})


@case
def schedulers(pl: Any) -> Case:
    class Scheduled(regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            total = self.trainer.estimated_stepping_batches
            step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * total))
            epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return [optimizer], [
                {"scheduler": step, "interval": "step"},
                {"scheduler": epoch, "interval": "epoch"},
                {"scheduler": plateau, "monitor": "loss"},
            ]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", -loss.detach(), on_epoch=True, sync_dist=True)
            return loss

    return Case(Scheduled, {"max_epochs": 3})


def embedding(pl: Any, make_optimizer: Callable[[Any], Any], *, rows: int = 40) -> Any:
    class Embedded(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(5)
                self.net = nn.Embedding(rows, 1, sparse=True)
                self.bag = nn.EmbeddingBag(rows, 1, mode="sum", sparse=True)

        def loss(self, batch: Any) -> Tensor:
            index, _, target = batch
            # The second layer is used for few samples, and the first one for all.
            rows = torch.stack([index % 7, index % 11 + 20], dim=1)
            few = index < 4
            found = self.net(index % 13)
            if bool(few.any()):
                found = found.index_add(0, few.nonzero()[:, 0], self.bag(rows[few]))
            return (found - target).square().mean()

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters())

    return Embedded


@case
def sparse_gradients(pl: Any) -> Case:
    return Case(embedding(pl, lambda parameters: torch.optim.SGD(parameters, 0.05)))


@case
def sparse_adam(pl: Any) -> Case:
    return Case(embedding(pl, lambda parameters: torch.optim.SparseAdam(parameters, 0.05)))


@case
def large_sparse_gradients(pl: Any) -> Case:
    make = embedding(pl, lambda parameters: torch.optim.SparseAdam(parameters, 0.05), rows=30_000)
    return Case(make, {"accumulate_grad_batches": 2, "max_epochs": 1}, length=32)


@case
def batches_limited_by_a_number(pl: Any) -> Case:
    return Case(regression(pl), {"limit_train_batches": 3})


@case
def batches_limited_by_a_fraction(pl: Any) -> Case:
    return Case(regression(pl), {"limit_train_batches": 0.5}, length=32)


@case
def steps_limited(pl: Any) -> Case:
    return Case(regression(pl), {"max_steps": 6, "max_epochs": -1})


@case
def overfitting(pl: Any) -> Case:
    return Case(regression(pl), {"overfit_batches": 1})


@case
def fast_development_run(pl: Any) -> Case:
    return Case(regression(pl), {"fast_dev_run": 2})


@case
def reloaded_loaders(pl: Any) -> Case:
    return Case(regression(pl), {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3})


@case
def last_batch_dropped(pl: Any) -> Case:
    return Case(regression(pl), {}, {"drop_last": True}, length=32)


@case
def data_workers_and_collate(pl: Any) -> Case:
    return Case(regression(pl), {}, {"num_workers": 2, "persistent_workers": True, "collate_fn": _doubled}, length=29)


def _doubled(samples: list[Any]) -> Any:
    index, features, target = torch.utils.data.default_collate(samples)
    return index, 2 * features, target


@case
def smaller_than_the_world(pl: Any) -> Case:
    return Case(regression(pl), {"max_epochs": 3}, length=2)


@case
def shared_and_unused_parameters(pl: Any) -> Case:
    class Shared(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(3, 3)
            self.unused.weight.data.fill_(1.0)
            self.unused.bias.data.fill_(1.0)
            self.again = self.net[2]  # shared: two names, one parameter

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _, features, target = batch
            hidden = self.net[1](self.net[0](features))
            return (self.net[2](hidden) + self.again(hidden**2) - target).square().mean()

    return Case(Shared)


@case
def unfrozen_later(pl: Any) -> Case:
    class Unfrozen(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)

    return Case(Unfrozen, {"max_epochs": 3})


@case
def backbone_finetuning(pl: Any) -> Case:
    class Backbone(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9)

    callback = pl.callbacks.BackboneFinetuning(1, backbone_initial_lr=0.01, verbose=False)
    return Case(Backbone, {"callbacks": [callback], "max_epochs": 3})


@case
def weight_averaging(pl: Any) -> Case:
    return Case(regression(pl), {"callbacks": [pl.callbacks.EMAWeightAveraging(decay=0.9)]})


@case
def compiled(pl: Any) -> Case:
    return Case(regression(pl), compiled=True)


@case
def activation_checkpointing(pl: Any) -> Case:
    class Checkpointed(regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _, features, target = batch
            hidden = checkpoint(self.net[:2], features.requires_grad_(), use_reentrant=batch_idx % 2 == 0)
            return (self.net[2](hidden) - target).square().mean()

    return Case(Checkpointed)


@case
def skipped_by_all(pl: Any) -> Case:
    class Skipping(regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (1, 3) else super().training_step(batch, batch_idx)

    return Case(Skipping)


@case
def closure_called_twice(pl: Any) -> Case:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            super().step()
            loss = closure()
            super().step()
            return loss

    class TwiceModule(regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), 0.02)

    return Case(TwiceModule, length=27)


@case
def adversarial(pl: Any) -> Case:
    """Two optimizers, by hand, as GANs do."""

    class Adversarial(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            with torch.random.fork_rng():
                torch.manual_seed(4)
                self.critic = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            _, features, target = batch
            first, second = self.optimizers()
            for optimizer, sign in ((second, 1.0), (first, -1.0)):
                self.toggle_optimizer(optimizer)
                made = self.net(features)
                loss = sign * (self.critic(target) - self.critic(made)).mean() + self.critic.weight.square().sum()
                optimizer.zero_grad()
                self.manual_backward(loss + (made - target).square().mean())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), 0.02), torch.optim.Adam(self.critic.parameters(), 0.02)

    return Case(Adversarial, length=27)


@case
def skipped_by_hand(pl: Any) -> Case:
    class Skipping(regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx in (1, 3):
                return
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    return Case(Skipping)


def run(host: str) -> dict[str, Any]:
    """Train all cases both ways: weights and counters."""
    pl = training.use(host)
    results = {}
    for name, make in CASES.items():
        ours = train(make(pl), pl, strategy_for(host)(compensation="none"))
        results[name] = [ours, train(make(pl), pl, "auto", 2 * BATCH_SIZE)]
    return results


# By hand, or with a size of the batch that is the user's own.
_NOT_GLOBAL = (
    "accumulation",
    "accumulation_scheduler",
    "adversarial",
    "large_sparse_gradients",
    "skipped_by_hand",
    "closure_called_twice",
)
NUM_GLOBAL = len(CASES) - len(_NOT_GLOBAL)


def run_global(host: str) -> dict[str, Any]:
    """Train cases both ways: a fixed global batch, in forward passes of 3 samples at most, and a loader's batch."""
    pl = training.use(host)
    size = 2 * BATCH_SIZE
    results = {}
    for name, make in CASES.items():
        if name not in _NOT_GLOBAL:
            ours = train(make(pl), pl, strategy_for(host)(global_batch_size=size), 3)
            results[name] = [ours, train(make(pl), pl, "auto", size)]
    return results


def train(chosen: Case, pl: Any, strategy: Any, batch_size: int = BATCH_SIZE) -> dict[str, Any]:
    """Train one case."""
    module = chosen.make()
    trainer = training.trainer(pl, strategy, **chosen.trainer)
    loader = training.loader(chosen.length, batch_size, **chosen.loader)
    trainer.fit(torch.compile(module, backend="eager") if chosen.compiled else module, loader)
    return {
        "weights": training.weights(module),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "batches": trainer.num_training_batches,
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


def finite(values: list[float]) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    assert tensor.isfinite().all()
    return tensor
