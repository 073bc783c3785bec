"""A fixed global batch in one process: what training sees, and what is refused before it begins."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from ef_common.collectives.gradients.buckets import bits
from ef_common.collectives.gradients.deterministic import DeterministicReducer
from ef_common.core.view import View
from ef_common.data.sample import Sample
from ef_common.data.torch_loader import PlannedLoader
from ef_common.errors import UnsupportedError, UsageError
from ef_lightning import Compensation, strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])
Regression = training.regression(pl)
strategy = strategy_for(HOSTS[0])

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Watched(Regression):  # type: ignore[misc, valid-type]
    """Notes the size of each forward pass, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.sizes.append(len(batch[0]))
        self.batches.append(batch_idx)
        loss = self.loss(batch)
        self.log("seen", float(len(batch[0])), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_forward_pass_is_larger_than_a_batch_of_the_loader(deterministic: bool) -> None:
    module = Watched()
    trainer = training.trainer(pl, strategy(global_batch_size=12, deterministic=deterministic), max_epochs=1)
    trainer.fit(module, training.loader(29, 4))
    assert module.sizes == [4, 4, 4, 4, 4, 4, 3, 2]  # no single sample is left: BatchNorm could not be trained on it
    assert sum(module.sizes) == 29
    assert module.batches == [0, 0, 0, 1, 1, 1, 2, 2]
    assert (trainer.global_step, trainer.num_training_batches) == (3, 3)


@pytest.mark.parametrize("deterministic", [False, True])
def test_loader_with_a_batch_sampler_of_torch_reads_each_sample(deterministic: bool) -> None:
    module, data = Watched(), training.data(24)
    trainer = training.trainer(pl, strategy(global_batch_size=8, deterministic=deterministic), max_epochs=1)
    trainer.fit(module, DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, drop_last=False)))
    assert module.sizes == [4] * 6


def test_value_of_a_step_is_that_of_its_first_pass() -> None:
    class Seeing(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.seen.append(float(trainer.callback_metrics["loss_step"]))

    class First(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            is_first = batch_idx not in self.batches
            loss = super().training_step(batch, batch_idx)
            if is_first:
                firsts.append(loss.item())
            return loss

    firsts: list[float] = []
    seeing = Seeing()
    trainer = training.trainer(pl, strategy(global_batch_size=12), max_epochs=1, callbacks=[seeing])
    trainer.fit(First(), training.loader(29, 4))
    assert seeing.seen == pytest.approx(firsts)
    assert len(firsts) == 3


def test_what_is_logged_is_that_of_the_whole_batch() -> None:
    module, plain = Watched(), Watched()
    ours = training.trainer(pl, strategy(global_batch_size=12), max_epochs=1)
    ours.fit(module, training.loader(29, 4))
    theirs = training.trainer(pl, "auto", max_epochs=1)
    theirs.fit(plain, training.loader(29, 12))
    assert ours.callback_metrics["seen"] == 29
    torch.testing.assert_close(ours.callback_metrics["loss_epoch"], theirs.callback_metrics["loss_epoch"])


class Centered(Regression):  # type: ignore[misc, valid-type]
    """Subtracts a running mean, which is written into its buffer, or takes its place."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("center", torch.zeros(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index, features, target = batch
        if self.replaces:
            self.center = 0.5 * self.center + features.mean(0)
        else:
            self.center.mul_(0.5).add_(features.mean(0))
        return self.loss((index, features - self.center, target))


def test_tensors_in_the_place_of_buffers_have_the_same_bits() -> None:
    weights = []
    for replaces in (False, True):
        module = Centered(replaces=replaces)
        trainer = training.trainer(pl, strategy(global_batch_size=8, deterministic=True), max_epochs=1)
        trainer.fit(module, training.loader())
        weights.append(training.weights(module))
    assert weights[0] == weights[1]


def test_buffers_and_gradients_of_every_type_are_exact() -> None:
    class Holding(Regression):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
            self.register_buffer("serial", torch.tensor([1234567890, -(2**53) - 1]))
            self.register_buffer("passes", torch.tensor(2**40))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("rotations", torch.polar(torch.ones(5), torch.linspace(0.0, 1.0, 5)))
            self.register_buffer("turned", torch.zeros((), dtype=torch.complex64))
            self.register_buffer("table", torch.tensor([0.1, 1 / 3, float("-inf"), float("nan")]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.passes += 1
            self.turned += 1j
            away = self.shift - (1 + 2j)
            return self.loss(batch) + (away * away.conj()).real.sum()

    module = Holding()
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    trainer = training.trainer(pl, strategy(global_batch_size=12, deterministic=True), max_epochs=1)
    trainer.fit(module, training.loader(12, 4))  # three passes of a third
    for name in ("serial", "flags", "rotations", "table"):
        assert torch.equal(bits(getattr(module, name)), bits(kept[name])), name
    assert int(module.passes) == 2**40 + 1
    torch.testing.assert_close(module.turned, torch.tensor(1j))
    torch.testing.assert_close(module.shift.detach(), torch.full((3,), 0.1 + 0.2j))


def test_buffer_that_a_pass_which_only_keeps_step_has_replaced_is_the_batchs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Regression):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.center = self.center + 1.0
            return self.loss(batch)

    module, finish = Counting(), DeterministicReducer.finish

    def finish_after_padding(self: DeterministicReducer) -> View:
        self.before_pass()
        module.center = torch.tensor(9.0)
        return finish(self)

    monkeypatch.setattr(DeterministicReducer, "finish", finish_after_padding)
    trainer = training.trainer(pl, strategy(global_batch_size=12, deterministic=True), max_epochs=1)
    trainer.fit(module, training.loader(24, 4))
    assert float(module.center) == 2.0


@pytest.mark.parametrize("num_threads", [1, 2])
def test_settings_of_torch_are_as_before_afterwards(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        trainer = training.trainer(pl, strategy(global_batch_size=8, deterministic=True), max_epochs=1)
        trainer.fit(Regression(), training.loader())
        assert torch.get_num_threads() == num_threads
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(before)


def test_parameters_have_one_hook_in_training_and_none_afterwards() -> None:
    class Counting(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.counts: list[list[int]] = []

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.counts.append(num_hooks(module))

    module, counting = Regression(), Counting()
    settings = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3, "callbacks": [counting]}
    trainer = training.trainer(pl, strategy(global_batch_size=8, deterministic=True), **settings)
    trainer.fit(module, training.loader())
    assert counting.counts == [[1, 1, 1, 1]] * 3
    assert num_hooks(module) == [0, 0, 0, 0]


def num_hooks(module: Any) -> list[int]:
    return [len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters()]


def test_one_process_with_fewer_samples_in_a_batch_has_other_bits() -> None:
    """The bits are a function of the micro-batches too, as they must be."""
    found = []
    for batch_size in (2, 4, 4):
        module = Regression()
        trainer = training.trainer(pl, strategy(global_batch_size=8, deterministic=True))
        trainer.fit(module, training.loader(29, batch_size))
        found.append(training.weights(module))
    assert found[1] == found[2]
    assert found[0] != found[1]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


def test_a_reference_batch_scales_the_rate_of_a_global_batch() -> None:
    settings = Compensation("linear", reference_batch_size=4)
    module, plain = Regression(), Regression()
    training.trainer(pl, strategy(global_batch_size=8, compensation=settings)).fit(module, training.loader())
    plain.configure_optimizers = lambda: torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    training.trainer(pl, "auto").fit(plain, training.loader(29, 8))
    np.testing.assert_allclose(training.weights(module), training.weights(plain), rtol=1e-4)


class Noise(Dataset[float]):
    """Samples of random numbers, from everywhere."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_in_a_sample_are_a_function_of_its_key(num_workers: int) -> None:
    planned = PlannedLoader(DataLoader(Noise(), 2, num_workers=num_workers), seeded=True)
    samples = [Sample(index, (7, 0, index)) for index in range(4)]
    try:
        planned.read(lambda start: iter([samples[:2], samples[2:]]))
        first, second = planned.next(), planned.next()
        planned.read(lambda start: iter([samples[1:3], [samples[0]._replace(key=(7, 1, 0))]]))
        between, other_epoch = planned.next(), planned.next()
        apart = planned.fetch([samples[3]])
    finally:
        planned.close()
    assert torch.equal(between, torch.stack([first[1], second[0]]))
    assert torch.equal(apart, second[1:])
    assert not torch.isclose(other_epoch[0], first[0]).any()


# ---------------------------------------------------------------- refusals

SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"global_batch_size": 0}, "positive number of samples. Received: global_batch_size=0"),
    "fraction": ({"global_batch_size": 1.5}, "Received: global_batch_size=1.5"),
    "deterministic_alone": ({"deterministic": True}, "Set global_batch_size="),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_contradict_each_other_raise(name: str) -> None:
    settings, hint = SETTINGS[name]
    with pytest.raises(UsageError, match=hint):
        strategy(**settings)


class ByHand(Regression):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Gathering(Regression):  # type: ignore[misc, valid-type]
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(torch.zeros(1))
        return self.loss(batch)


class ClosureTwice(torch.optim.SGD):
    """Evaluates the model at two places before it makes its step, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Twice(Regression):  # type: ignore[misc, valid-type]
    def configure_optimizers(self) -> Any:
        return ClosureTwice(self.parameters(), 0.1)


TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], Any], type[Exception], str]] = {
    "by_hand": ({}, {}, ByHand, UnsupportedError, "automatic optimization"),
    "accumulation": (
        {},
        {"accumulate_grad_batches": 2},
        Regression,
        UnsupportedError,
        "Leave out accumulate_grad_batches",
    ),
    "closure_twice": ({}, {}, Twice, UnsupportedError, "an optimizer that calls its closure once"),
    "does_not_divide": ({"deterministic": True, "global_batch_size": 10}, {}, Regression, UsageError, "batch_size=4"),
    "gathering": ({}, {}, Gathering, UnsupportedError, "on_train_batch_end"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_that_leaves_no_room_for_a_global_batch_raises(name: str) -> None:
    settings, options, module, error, hint = TRAINERS[name]
    trainer = training.trainer(pl, strategy(**{"global_batch_size": 8, **settings}), **options)
    model = module()
    before = training.weights(model)
    with pytest.raises(error, match=hint):
        trainer.fit(model, training.loader())
    assert trainer.global_step == 0
    assert training.weights(model) == before
