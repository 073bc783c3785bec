"""Things that have no counterpart in one process, or none with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

from ef_common.errors import JobFailed, UsageError
from ef_common.launch.environment import read_environment
from ef_lightning import strategy_for
from tests.lightning import training

FEATURES: dict[str, Callable[[Any], Any]] = {}


def feature(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    FEATURES[act.__name__] = act
    return act


def run(host: str) -> dict[str, Any]:
    pl = training.use(host)
    return {name: act(pl) for name, act in FEATURES.items()}


def skip_by_hand(host: str) -> str:
    """One worker alone makes no update: all are told, none waits for another."""
    pl = training.use(host)

    class Skipping(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3 and self.trainer.global_rank == 1:
                return
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    try:
        fit(pl, Skipping())
    except (UsageError, JobFailed) as error:  # the other one may have raised first, and ended the job
        return str(error)
    return "nothing was raised"


def fit(pl: Any, module: Any, **options: Any) -> Any:
    loader = options.pop("loader", None) or training.loader()
    trainer = training.trainer(pl, **options)
    trainer.fit(module, loader)
    return trainer


@feature
def skipped_by_one(pl: Any) -> Any:
    """One worker returns None from a step: it contributes nothing."""

    class Skipping(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            skip = batch_idx in (1, 3) and self.trainer.global_rank == 1
            return None if skip else super().training_step(batch, batch_idx)

    module = Skipping()
    return [fit(pl, module).global_step, training.weights(module)]


@feature
def unused_by_one(pl: Any) -> Any:
    """A layer that only one worker uses."""

    class Uneven(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(1)
                self.extra = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + self.extra(batch[1]).square().mean() if self.trainer.global_rank == 1 else loss

    module = Uneven()
    before = module.extra.weight.tolist()
    fit(pl, module)
    return [module.extra.weight.tolist() != before, training.weights(module)]


@feature
def mixed_precision(pl: Any) -> Any:
    results = []
    for precision in ("bf16-mixed", "16-mixed", "bf16-true"):
        module = training.regression(pl)()
        fit(pl, module, precision=precision)
        results.append([all(torch.tensor(training.weights(module)).isfinite()), training.weights(module)])
    return results


@feature
def buffers_are_those_of_rank_0(pl: Any) -> Any:
    class Normalized(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net.insert(1, nn.BatchNorm1d(8))

    module = Normalized()
    fit(pl, module)
    return training.weights(module)


@feature
def buffers_that_are_replaced(pl: Any) -> Any:
    """A running mean that is another tensor after each step, and a mask that `expand` has made."""

    class Centered(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(4))
            self.register_buffer("mask", torch.ones(1).expand(4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            index, features, target = batch
            self.center = 0.9 * self.center + 0.1 * features.mean(0)
            return super().training_step((index, (features - self.center) * self.mask, target), batch_idx)

    module = Centered()
    fit(pl, module)
    return training.weights(module)


@feature
def two_losses_of_one_forward_pass(pl: Any) -> Any:
    """By hand, with a BatchNorm layer that is frozen: its statistics are needed by both backward passes."""

    class Twice(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net.insert(1, nn.BatchNorm1d(8))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.net[1].eval()
            found = self.net(batch[1])
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward((found - batch[2]).square().mean(), retain_graph=True)
            self.manual_backward(found.abs().mean())
            optimizer.step()

    module = Twice()
    return [fit(pl, module).global_step, training.weights(module)]


@feature
def talking(pl: Any) -> Any:
    """Collectives that users call, in a step and outside."""

    class Talking(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx > 0:
                return
            strategy, rank = self.trainer.strategy, self.trainer.global_rank
            mine = torch.tensor([float(rank), 1.0])
            self.said = {
                "gathered": self.all_gather(mine).tolist(),
                "of_a_tree": self.all_gather({"a": mine})["a"].tolist(),
                "broadcast": strategy.broadcast({"from": rank, "path": Path("x")}, src=1)["from"],
                "mean": strategy.reduce(mine.clone()).tolist(),
                "sum": strategy.reduce(mine.clone(), reduce_op="sum").tolist(),
                "max": strategy.reduce(mine.clone(), reduce_op="max").tolist(),
                "all": strategy.reduce_boolean_decision(rank == 0),
                "any": strategy.reduce_boolean_decision(rank == 0, all=False),
                "world": self.trainer.world_size,
                "zero": self.trainer.is_global_zero == (rank == 0),
            }
            strategy.barrier()

    module = Talking()
    fit(pl, module)
    return module.said


@feature
def data_module(pl: Any) -> Any:
    """`prepare_data` once on each node, or once for all nodes, before anybody's `setup`."""
    return [_prepared(pl, per_node=per_node) for per_node in (True, False)]


def _prepared(pl: Any, *, per_node: bool) -> Any:
    path = (read_environment().run_dir or Path()) / f"prepared-{per_node}"

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.prepare_data_per_node = per_node

        def prepare_data(self) -> None:
            assert not path.exists()
            path.write_text("29")

        def setup(self, stage: str) -> None:
            self.length = int(path.read_text())

        def train_dataloader(self) -> Any:
            return training.loader(self.length)

        def val_dataloader(self) -> Any:
            return training.loader(5)

        def teardown(self, stage: str) -> None:
            path.unlink(missing_ok=True)

    module = training.regression(pl)()
    trainer = training.trainer(pl)
    trainer.fit(module, datamodule=Data())
    return [trainer.global_step, training.weights(module)]


@feature
def own_sampler(pl: Any) -> Any:
    """Rank 0 draws, and everybody takes its order."""
    torch.manual_seed(torch.initial_seed() + int(read_environment().local_rank))  # they would draw differently

    class Seeing(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = [*getattr(self, "seen", []), *self.all_gather(batch[0]).flatten().tolist()]
            return super().training_step(batch, batch_idx)

    module = Seeing()
    sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(29)], 32)
    fit(pl, module, loader=training.loader(29, sampler=sampler, num_workers=1, persistent_workers=True))
    return [len(module.seen), module.seen, training.weights(module)]


def with_rates(
    pl: Any, *, differ: bool, manual: bool = False, kind: Any = float, precision: Any = None, **strategy: Any
) -> Any:
    """A training in which each worker sets a rate of its own after each batch, or all set the first one's.

    Returns:
        The rates of the updates, and the weights.
    """

    class Deciding(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if not manual:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            rate = 0.01 * (1 + batch_idx % 3 + 3 * self.trainer.global_rank * differ)
            self.trainer.optimizers[0].param_groups[1]["lr"] = kind(rate)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.rates.append(float(optimizer.param_groups[1]["lr"]))

        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters()}]
            return torch.optim.SGD(groups, kind(0.02))

    module = Deciding()
    options = {"strategy": strategy_for(pl.__name__)(**strategy), "precision": precision}
    fit(pl, module, loader=training.loader(32), **options)
    return [module.rates, training.weights(module)]


@feature
def rates_that_each_worker_sets(pl: Any) -> Any:
    """All make each update with those of the first one."""
    results = {}
    for name, options in {
        "plain": {},
        "manual": {"manual": True},
        "bf16": {"precision": "bf16-true"},
        "bf16_by_hand": {"precision": "bf16-true", "manual": True},  # the reduction runs in a context of this type
        "tensors": {"kind": torch.tensor},
        "parameters": {"kind": lambda rate: nn.Parameter(torch.tensor(rate))},
        "numpy": {"kind": np.float32},
        "global_batch": {"global_batch_size": 8},
        "deterministic": {"global_batch_size": 8, "deterministic": True},
    }.items():
        results[name] = [with_rates(pl, differ=differ, **options) for differ in (True, False)]
    return results


@feature
def validation_schedules(pl: Any) -> Any:
    class Counting(training.regression(pl)):  # type: ignore[misc]
        def on_validation_epoch_start(self) -> None:
            self.validated = [*getattr(self, "validated", []), self.global_step]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    results = {}
    for name, options in {
        "fraction": {"val_check_interval": 0.5},
        "number": {"val_check_interval": 3},
        "across_epochs": {"val_check_interval": 5, "check_val_every_n_epoch": None},
        "every_second_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
        "not_checked_before": {"num_sanity_val_steps": 0},
        "reloaded": {"reload_dataloaders_every_n_epochs": 1},
        "limited": {"limit_val_batches": 1},
        "off": {"limit_val_batches": 0},
    }.items():
        module = Counting()
        trainer = training.trainer(pl, **options)
        trainer.fit(module, training.loader(32), training.loader(9))
        results[name] = getattr(module, "validated", [])
    return results


@feature
def validation_by_the_clock(pl: Any) -> Any:
    """Rank 0's clock decides for all: their own say never, or after each batch."""
    never = 3600.0

    class Counting(training.regression(pl)):  # type: ignore[misc]
        intervals: tuple[float, float]

        def setup(self, stage: str) -> None:
            self.trainer._val_check_time_interval = self.intervals[self.trainer.global_rank]

        def on_validation_epoch_start(self) -> None:
            self.validated = [*getattr(self, "validated", []), self.global_step]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

    results = {}
    for name, intervals, options in (
        ("always", (0.0, never), {}),
        ("never", (never, 0.0), {}),
        ("accumulating", (0.0, never), {"accumulate_grad_batches": 2}),
        ("every_second_epoch", (0.0, never), {"check_val_every_n_epoch": 2}),
        ("global_batch", (0.0, never), {"strategy": {"global_batch_size": 8}}),
        ("deterministic", (0.0, never), {"strategy": {"global_batch_size": 8, "deterministic": True}}),
    ):
        module = Counting()
        module.intervals = intervals
        strategy = strategy_for(pl.__name__)(**options.pop("strategy", {}))
        trainer = training.trainer(
            pl, strategy, val_check_interval=timedelta(hours=1), num_sanity_val_steps=0, **options
        )
        trainer.fit(module, training.loader(32), training.loader(9))
        results[name] = getattr(module, "validated", [])
    return results
