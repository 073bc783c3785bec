"""The learning rate follows the global batch, and only the update sees it."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import optim

from ef_common.core.compensation import Compensation
from ef_common.data.compensator import Compensator
from ef_common.data.meter import COLUMNS
from ef_common.errors import UsageError
from ef_common.events import expand
from ef_common.testing.harness import Job, WorkerProcess
from ef_lightning import strategy_for
from ef_lightning.compensation import ScaledSettings, kind_of
from tests import closed_forms, warm
from tests.gpu import on_gpu
from tests.lightning import compensated, training
from tests.lightning.compensated import (
    TRACE,
    fit,
    module_of,
    noting,
    problem,
    rates,
    recorder,
    sgd,
    view_of,
    weights_of,
)
from tests.lightning.conftest import HOSTS
from tests.lightning.training import BATCH_SIZE

pl = importlib.import_module(HOSTS[0])

RATIOS = closed_forms.ramped(TRACE, 4)
BATCHES = [range(start, start + BATCH_SIZE) for start in range(0, compensated.LENGTH, BATCH_SIZE)] * 2

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def constant(rate: Any) -> list[Any]:
    return [rate] * len(TRACE)


# ---------------------------------------------------------------- the weights


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[..., Any], dict[str, Any]]] = {
    "sgd": (lambda m: optim.SGD(m.parameters(), 0.02), closed_forms.sgd, {}),
    "momentum": (
        lambda m: optim.SGD(m.parameters(), 0.02, momentum=0.9, weight_decay=0.1),
        closed_forms.sgd,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "nesterov": (
        lambda m: optim.SGD(m.parameters(), 0.02, momentum=0.8, nesterov=True),
        closed_forms.sgd,
        {"momentum": 0.8, "nesterov": True},
    ),
    "adamw": (
        lambda m: optim.AdamW(m.parameters(), 0.02, betas=(0.8, 0.99), eps=1e-3, weight_decay=0.5),
        closed_forms.adamw,
        {"betas": (0.8, 0.99), "eps": 1e-3, "weight_decay": 0.5},
    ),
    "adamw_whose_averages_are_as_short_as_may_be": (  # 4 · (1 − 0.7) is above 1
        lambda m: optim.AdamW(m.parameters(), 0.02, betas=(0.7, 0.95)),
        closed_forms.adamw,
        {"betas": (0.7, 0.95)},
    ),
    "adamw_fused": (
        lambda m: optim.AdamW(m.parameters(), 0.02, fused=True),
        closed_forms.adamw,
        {},
    ),
    "adamw_foreach": (
        lambda m: optim.AdamW(m.parameters(), 0.02, foreach=True),
        closed_forms.adamw,
        {},
    ),
    "adamw_with_tensors": (
        lambda m: optim.AdamW([{"params": [p]} for p in m.parameters()], torch.tensor(0.02, dtype=torch.float64)),
        closed_forms.adamw,
        {},
    ),
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_over_a_trace_are_those_of_the_closed_form(name: str, host: str) -> None:
    make, closed_form, options = OPTIMIZERS[name]
    tree = importlib.import_module(host)
    module = module_of(tree, make)
    trainer = fit(tree, module)
    expected = closed_form(problem(module.start), BATCHES, RATIOS, constant(0.02), **options)
    assert trainer.global_step == len(TRACE)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)


def on_device(rate: float, module: Any) -> Any:
    return torch.tensor(rate, device=module.device)  # in single precision, as the fused kernel wants it


ON_GPU: dict[str, tuple[Callable[[Any], Any], Callable[..., Any]]] = {
    "sgd_fused": (lambda m: optim.SGD(m.parameters(), 0.02, fused=True), closed_forms.sgd),
    "adamw_fused": (lambda m: optim.AdamW(m.parameters(), 0.02, fused=True), closed_forms.adamw),
    "adamw_fused_with_a_tensor": (
        lambda m: optim.AdamW(m.parameters(), on_device(0.02, m), fused=True),
        closed_forms.adamw,
    ),
    "adamw_capturable": (lambda m: optim.AdamW(m.parameters(), 0.02, capturable=True), closed_forms.adamw),
    "adamw_capturable_with_a_tensor": (
        lambda m: optim.AdamW(m.parameters(), on_device(0.02, m), capturable=True),
        closed_forms.adamw,
    ),
}


@on_gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_weights_on_a_gpu_are_those_of_the_closed_form(name: str) -> None:
    make, closed_form = ON_GPU[name]
    module = module_of(pl, make)
    fit(pl, module, accelerator="gpu")
    expected = closed_form(problem(module.start), BATCHES, RATIOS, constant(0.02))
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 8])
def test_ramp_has_the_length_that_is_asked_for(steps: int) -> None:
    module = module_of(pl, sgd)
    fit(pl, module, compensation={"ramp_steps": steps})
    ratios = closed_forms.ramped(TRACE, steps)
    expected = closed_forms.sgd(problem(module.start), BATCHES, ratios, constant(0.02), momentum=0.9)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)


def test_parameter_groups_keep_their_own_rates() -> None:
    def two_groups(module: Any) -> Any:
        groups = [{"params": [module.net.weight]}, {"params": [module.net.bias], "lr": 0.05}]
        return optim.SGD(groups, 0.02, momentum=0.9)

    module = module_of(pl, two_groups)
    trainer = fit(pl, module)
    by_weight = np.array([0.02, 0.02, 0.02, 0.02, 0.05])
    expected = closed_forms.sgd(problem(module.start), BATCHES, RATIOS, constant(by_weight), momentum=0.9)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)
    assert rates(trainer) == [0.02, 0.05]


def test_larger_reference_batch_gives_smaller_rates() -> None:
    module = module_of(pl, sgd)
    fit(pl, module, compensation={"reference_batch_size": 4 * BATCH_SIZE})
    halved = [ratio / 4 for ratio in RATIOS]
    expected = closed_forms.sgd(problem(module.start), BATCHES, halved, constant(0.02), momentum=0.9)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- who sees it


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "one_cycle": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=len(TRACE) + 1),
    "step": lambda o: optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
    "exponential": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "sequential": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.LinearLR(o), optim.lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "plateau": lambda o: optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_gives_the_rates_that_it_gives_alone(name: str, kind: Any) -> None:
    def scheduled(module: Any) -> Any:
        options = {"momentum": 0.9} if kind is optim.SGD else {}
        optimizer = kind(module.parameters(), 0.02, **options)
        config = {"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}
        if name == "plateau":
            config |= {"interval": "epoch", "monitor": "rising"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def settings(trainer: Any) -> Any:
        return [{k: v for k, v in g.items() if k != "params"} for o in trainer.optimizers for g in o.param_groups]

    def seen(compensation: str) -> tuple[list[Any], list[Any], np.ndarray]:
        module = module_of(pl, scheduled)
        module.on_train_epoch_end = lambda: module.log("rising", float(module.current_epoch))
        callback = noting(pl, "on_train_batch_end", settings)
        trainer = fit(pl, module, callbacks=[callback], compensation={"rule": compensation})
        states = [config.scheduler.state_dict() for config in trainer.strategy.lr_scheduler_configs]
        return callback.notes, [str(state) for state in states], weights_of(module)

    with_us, without_us = seen("auto"), seen("none")
    assert with_us[:2] == without_us[:2]
    assert not np.array_equal(with_us[2], without_us[2])


def test_schedule_and_compensation_together_give_the_closed_form() -> None:
    def scheduled(module: Any) -> Any:
        optimizer = sgd(module)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module = module_of(pl, scheduled)
    fit(pl, module)
    rates = [0.02 * 0.9**step for step in range(len(TRACE))]
    expected = closed_forms.sgd(problem(module.start), BATCHES, RATIOS, rates, momentum=0.9)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)


def test_tensor_of_a_rate_stays_the_same_object_with_its_value() -> None:
    rate = torch.tensor(0.02, dtype=torch.float64)
    module = module_of(pl, lambda m: optim.Adam(m.parameters(), rate))
    within = noting(
        pl, "on_before_optimizer_step", lambda t: [t.optimizers[0].param_groups[0]["lr"] is rate, float(rate)]
    )
    trainer = fit(pl, module, callbacks=[within])
    assert trainer.optimizers[0].param_groups[0]["lr"] is rate
    assert float(rate) == 0.02
    assert all(same for same, _ in within.notes)
    assert [value for _, value in within.notes] == pytest.approx([0.02 * math.sqrt(r) for r in RATIOS])


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_update_has_the_effective_rate_in_each_precision(precision: str) -> None:
    within, after = noting(pl, "on_before_optimizer_step", rates), noting(pl, "on_train_batch_end", rates)
    options: dict[str, Any] = {"precision": precision}
    if precision == "16-mixed":  # on a CPU, Lightning would take bfloat16
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        options = {"plugins": [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)]}
    fit(pl, training.regression(pl)(), callbacks=[within, after], **options)
    assert [rate for (rate,) in within.notes] == pytest.approx([0.05 * ratio for ratio in RATIOS])
    assert after.notes == [[0.05]] * len(TRACE)


def test_accumulated_batches_make_one_step_of_the_ramp() -> None:
    module = module_of(pl, sgd)
    within = noting(pl, "on_before_optimizer_step", rates)
    reference = {"reference_batch_size": 3 * BATCH_SIZE}
    trainer = fit(pl, module, callbacks=[within], accumulate_grad_batches=3, compensation=reference)
    assert trainer.global_step == len(TRACE) / 3
    assert [rate for (rate,) in within.notes] == pytest.approx([0.02 * ratio for ratio in RATIOS[: len(TRACE) // 3]])


def test_schedule_of_accumulation_is_no_change_of_the_world() -> None:
    schedule = pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    within, logger = noting(pl, "on_before_optimizer_step", rates), recorder(pl)
    fit(pl, module_of(pl, sgd), [2] * 24, callbacks=[schedule, within], logger=logger, log_every_n_steps=1)
    assert within.notes == [[0.04]] * 18
    assert list(logger.column("global_batch_size").values()) == [2 * BATCH_SIZE] * 12 + [4 * BATCH_SIZE] * 6


def adversarial() -> Any:
    """Two optimizers, by hand; both make a step from each batch."""
    base = type(module_of(pl, sgd))

    class Two(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return optim.SGD([self.net.weight], 0.02), optim.Adam([self.net.bias], 0.01)

    return Two()


@pytest.mark.parametrize("bare", [lambda m: m.optimizers(use_pl_optimizer=False), lambda m: m.optimizers().optimizer])
def test_step_without_lightnings_wrapper_is_compensated(bare: Callable[[Any], Any]) -> None:
    base = type(module_of(pl, sgd))

    class Bare(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = bare(self)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.rates = {*getattr(self, "rates", ()), optimizer.param_groups[0]["lr"]}

    module = Bare()
    fit(pl, module)
    expected = closed_forms.sgd(problem(module.start), BATCHES, RATIOS, constant(0.02), momentum=0.9)
    np.testing.assert_allclose(weights_of(module), expected, rtol=0, atol=1e-6)
    assert module.rates == {0.02}


def test_two_optimizers_in_a_batch_have_the_same_ratio() -> None:
    within, logger = noting(pl, "on_before_optimizer_step", rates), recorder(pl)
    # Each has a reduction of its own, so there are two updates in a batch.
    fit(pl, adversarial(), [w for w in TRACE for _ in range(2)], callbacks=[within], logger=logger, log_every_n_steps=1)
    expected = [pair for r in RATIOS for pair in ([0.02 * r, 0.01], [0.02, 0.01 * math.sqrt(r)])]
    assert np.asarray(within.notes) == pytest.approx(np.asarray(expected))
    linear, sqrt = logger.column("lr_scale/SGD"), logger.column("lr_scale/Adam")
    assert list(linear.values()) == pytest.approx(RATIOS)
    assert list(sqrt.values()) == pytest.approx([math.sqrt(r) for r in RATIOS])


def test_step_that_raises_leaves_the_settings_as_they_were() -> None:
    class Failing(optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            closure()
            assert self.param_groups[0]["betas"] != (0.9, 0.999)
            raise RuntimeError("a bad step")

    after = noting(pl, "on_exception", lambda trainer: dict(trainer.optimizers[0].param_groups[0]))
    module = module_of(pl, lambda m: Failing(m.parameters(), 0.02))
    with pytest.raises(RuntimeError, match="a bad step"):
        fit(pl, module, callbacks=[after], compensation={"rule": "sqrt"})
    (group,) = after.notes
    assert {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 0.02,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
    }


def test_rate_that_a_hook_sets_before_the_update_stays() -> None:
    class Setting(pl.Callback):  # type: ignore[misc, name-defined]
        def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.001

    module = module_of(pl, sgd)
    trainer = fit(pl, module, callbacks=[Setting()])
    assert rates(trainer) == [0.001]


def test_parameter_groups_that_come_later_are_scaled_too() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = optim.Adam([{"params": parameters[:1], "betas": [0.8, 0.9]}], 0.1)
    scaled = ScaledSettings(optimizer, "sqrt")

    def settings() -> list[Any]:
        return [(group["lr"], *group["betas"]) for group in optimizer.param_groups]

    def effective() -> list[Any]:
        before = settings()
        scaled.apply(4.0)
        found = settings()
        scaled.restore()
        assert settings() == before
        return found

    assert effective() == [pytest.approx((0.2, 0.5, 0.9))]
    optimizer.add_param_group({"params": parameters[1:], "lr": 0.3})
    optimizer.param_groups[0]["betas"][0] = 0.9
    assert effective() == [pytest.approx((0.2, 0.6, 0.9)), pytest.approx((0.6, 0.6, 0.996))]
    optimizer.load_state_dict(optimizer.state_dict())  # other dicts
    optimizer.param_groups[0]["lr"] = 0.5
    assert effective()[0] == pytest.approx((1.0, 0.6, 0.9))


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("host", HOSTS)
def test_monitor_shows_the_effective_rate_and_loggers_get_the_scale(host: str) -> None:
    tree = importlib.import_module(host)
    logger, monitor = recorder(tree), tree.callbacks.LearningRateMonitor("step", log_momentum=True)

    def make(module: Any) -> Any:
        return optim.Adam(module.parameters(), torch.tensor(0.02, dtype=torch.float64), betas=(0.8, 0.9))

    class Upcoming(tree.Callback):  # type: ignore[misc, name-defined]
        """The monitor asks before the reduction: the members at the boundary must be those of the trace."""

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            members = compensated.view_of(TRACE[trainer.global_step])
            trainer.strategy._fit.compensation.compensator._session = SimpleNamespace(completed_in=members)

    options = {"logger": logger, "log_every_n_steps": 1, "callbacks": [Upcoming(), monitor]}
    trainer = fit(tree, module_of(tree, make), **options)
    scales = [math.sqrt(ratio) for ratio in RATIOS]
    assert list(logger.column("lr_scale").values()) == pytest.approx(scales)
    assert list(logger.column("global_batch_size").values()) == [world * BATCH_SIZE for world in TRACE]
    assert list(logger.column("lr-Adam").values()) == pytest.approx([0.02 * scale for scale in scales])
    momenta = [max(0.5, 1 - ratio * (1 - 0.8)) for ratio in RATIOS]
    assert list(logger.column("lr-Adam-momentum").values()) == pytest.approx(momenta)
    assert float(trainer.callback_metrics["lr-Adam"]) == pytest.approx(0.02 * scales[-1])
    assert "_extract_stats" not in vars(monitor)  # it is given back


@pytest.mark.parametrize("log_workers", [True, False])
def test_columns_of_the_workers_can_be_left_out(log_workers: bool) -> None:
    logger = recorder(pl)
    fit(pl, module_of(pl, sgd), [4] * 5, logger=logger, max_steps=5, log_every_n_steps=1, log_workers=log_workers)
    for name in COLUMNS:
        is_there = log_workers and name in ("lr_scale", "global_batch_size")  # there are no workers here
        assert list(logger.column(name)) == (list(range(5)) if is_there else [])


def test_scale_is_logged_when_lightning_logs() -> None:
    logger = recorder(pl)
    fit(pl, module_of(pl, sgd), logger=logger, log_every_n_steps=5)
    assert list(logger.column("lr_scale")) == [4, 9, 14, 19]


# ---------------------------------------------------------------- which optimizers


class Wrapped(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Named(optim.AdamW):
    pass


KINDS = {
    optim.SGD: "SGD",
    optim.Adam: "Adam",
    optim.AdamW: "AdamW",
    optim.NAdam: "NAdam",
    optim.RMSprop: "RMSprop",
    Named: "AdamW",
    Wrapped: None,
    optim.Adagrad: None,
    optim.Adamax: None,
    optim.RAdam: None,
    optim.SparseAdam: None,
    optim.LBFGS: None,
}


@pytest.mark.parametrize("cls", KINDS)
def test_kinds_of_optimizers_are_told_apart(cls: Any) -> None:
    assert kind_of(cls) == KINDS[cls]
    cls([torch.nn.Parameter(torch.zeros(2))])  # torch wraps `step` of the class when the first one is made
    assert kind_of(cls) == KINDS[cls]


def effective(make: Callable[[Any], Any], rule: Any = "auto", ratio: int = 4) -> dict[str, Any]:
    """Settings of the first group at an update."""
    keep = noting(pl, "on_before_optimizer_step", lambda trainer: dict(trainer.optimizers[0].param_groups[0]))
    fit(pl, module_of(pl, make), [ratio], callbacks=[keep], max_steps=1, compensation={"rule": rule})
    return {name: value for name, value in keep.notes[0].items() if isinstance(value, (float, tuple))}


def test_settings_of_rmsprop_follow_the_square_root_rule() -> None:
    found = effective(lambda m: optim.RMSprop(m.parameters(), 0.01, alpha=0.98, momentum=0.5, weight_decay=0.1))
    assert found == pytest.approx({"lr": 0.02, "momentum": 0.5, "alpha": 0.92, "eps": 5e-9, "weight_decay": 0.1})


@pytest.mark.parametrize("make", [optim.Adam, optim.NAdam])
@pytest.mark.parametrize(("decoupled", "decay"), [(False, 0.1), (True, 0.2)])
def test_weight_decay_is_scaled_if_it_is_decoupled(make: Any, decoupled: bool, decay: float) -> None:
    found = effective(lambda m: make(m.parameters(), 0.01, weight_decay=0.1, decoupled_weight_decay=decoupled))
    assert found["weight_decay"] == pytest.approx(decay)


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_momentum_that_is_switched_off_stays_off_in_a_smaller_world(number: Any) -> None:
    betas = tuple(map(number, (0.0, 0.99)))
    capturable = {"capturable": number is torch.tensor, "foreach": False}
    optimizer = optim.Adam([torch.nn.Parameter(torch.zeros(2))], 0.01, betas=betas, **capturable)
    scaled = ScaledSettings(optimizer, "sqrt")
    scaled.apply(1 / 8)
    assert list(map(float, optimizer.param_groups[0]["betas"])) == pytest.approx([0.0, 1 - 0.01 / 8])
    scaled.restore()
    assert list(map(float, optimizer.param_groups[0]["betas"])) == pytest.approx([0.0, 0.99])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("linear", {"lr": 0.08, "eps": (1e-3, 1.0), "betas": (0.9, 0.95)}),
        ("sqrt", {"lr": 0.04, "eps": (1e-3, 1.0), "betas": (0.6, 0.9)}),
        (lambda ratio: 1 + math.log2(ratio), {"lr": 0.06, "eps": (1e-3, 1.0), "betas": (0.9, 0.95)}),
        ("none", {"lr": 0.02, "eps": (1e-3, 1.0), "betas": (0.9, 0.95)}),
    ],
)
def test_named_rule_scales_what_an_unknown_optimizer_has(rule: Any, expected: dict[str, Any]) -> None:
    class Unknown(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.02, "betas": (0.9, 0.95), "eps": (1e-3, 1.0)})

        def step(self, closure: Any = None) -> Any:
            return closure()

    found = effective(lambda m: Unknown(m.parameters()), rule)
    assert {name: pytest.approx(value) for name, value in found.items()} == expected


# ---------------------------------------------------------------- what costs nothing, and what is refused


def test_process_alone_has_nothing_to_compensate() -> None:
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), max_epochs=1)
    there = noting(pl, "on_train_start", lambda trainer: trainer.strategy._fit.compensation)
    trainer.callbacks.append(there)
    trainer.fit(module_of(pl, lambda m: optim.Adagrad(m.parameters())), training.loader())
    assert there.notes == [None]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("cubic", "unknown rule of compensation"),
        (None, "Received: rule=None"),
        (lambda ratio: -ratio, "a number above 0"),
    ],
)
def test_bad_rule_raises_when_the_strategy_is_made(bad: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        strategy_for(HOSTS[0])(compensation=bad)


def test_optimizer_without_a_rule_trains_unchanged_and_the_first_change_of_the_world_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def warned(trace: list[int]) -> list[str]:
        caplog.clear()
        within = noting(pl, "on_before_optimizer_step", rates)
        reference = {"reference_batch_size": 2 * BATCH_SIZE}
        module = module_of(pl, lambda m: optim.Adagrad(m.parameters(), 0.01))
        fit(pl, module, trace, callbacks=[within], max_steps=len(trace), compensation=reference)
        assert within.notes == [[0.01]] * len(trace)
        return [r.getMessage() for r in caplog.records if r.name == "ef_common.data.compensator"]

    with caplog.at_level(logging.WARNING, logger="ef_common"):
        assert warned([2, 2, 2]) == []
        (message,) = warned([2, 4, 4, 1])
    assert message.startswith("the global batch is 2 times the one that the training began with")
    assert "how the settings of Adagrad follow it: they stay as they are. Choose 'linear'" in message


@pytest.mark.processes
@pytest.mark.parametrize("name", compensated.WITHOUT_RULE)
def test_optimizer_without_a_rule_trains_unchanged_with_others_and_the_first_resize_is_told_once(
    job: Job, name: str
) -> None:
    options = {"length": 403, "max_epochs": 10_000, "stop": "enough", "optimizer": name}
    first, lost = job.start_world(2, compensated.run, options)
    job.wait_for_step(3)
    assert warnings_of(first, lost) == [0, 0]
    lost.kill()
    job.view(1, after=1)
    newest = max(event["step"] for event in job.events("step"))
    job.wait_for_step(newest + 3)
    alone = job.generation
    other = job.start(compensated.run, options)
    job.view(2, after=alone)
    newest = max(event["step"] for event in job.events("step"))
    job.wait_for_step(newest + 3)
    (job.directory / "enough").touch()
    results = [worker.result() for worker in (first, other)]
    job.audit()
    assert results[0]["weights"] == results[1]["weights"]
    for result in results:
        assert {rate for _, rate in result[f"lr-{name}"]} == {0.02}
    assert warnings_of(first, other) == [1, 0]


def warnings_of(*workers: WorkerProcess) -> list[int]:
    return [worker.output.read_text().count("compensation='auto' does not know") for worker in workers]


def test_newcomer_does_not_tell_again_what_has_been_told(caplog: pytest.LogCaptureFixture) -> None:
    def compensator() -> Compensator:
        session = SimpleNamespace(rank=0, completed_in=view_of(1))
        found = Compensator(Compensation(reference_batch_size=4), session, log=SimpleNamespace(enabled=False))
        assert found.rule_for(None, name="Lion") == "none"
        return found

    def told(one: Compensator, world_size: int) -> int:
        caplog.clear()
        one.commit(view_of(world_size), 4, step=1)
        return len(caplog.records)

    first, newcomer, resumed, other = (compensator() for _ in range(4))
    assert [told(first, 1), told(first, 2), told(first, 3)] == [0, 1, 0]
    newcomer.load_state(first.state())
    assert told(newcomer, 3) == 0
    resumed.resume(first.state())  # a start from a checkpoint has a log of its own
    assert told(resumed, 3) == 1
    other.load_state(compensator().state())
    assert told(other, 2) == 1


# ---------------------------------------------------------------- checkpoints


def test_ramp_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def save(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    whole = module_of(pl, sgd)
    fit(pl, whole, callbacks=[noting(pl, "on_train_batch_end", save)])
    for step in (3, 7, 12):  # in the middle of both ramps, and at the end of an epoch
        rest = module_of(pl, sgd)
        trainer = fit(pl, rest, ckpt_path=tmp_path / f"{step}.ckpt")
        assert trainer.global_step == len(TRACE)
        np.testing.assert_allclose(weights_of(rest), weights_of(whole), rtol=0, atol=1e-12)


def test_other_reference_batch_than_that_of_the_checkpoint_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "first.ckpt"
    fit(pl, module_of(pl, sgd), max_steps=3).save_checkpoint(path)
    within = noting(pl, "on_before_optimizer_step", rates)
    reference = {"reference_batch_size": 2 * BATCH_SIZE}
    fit(pl, module_of(pl, sgd), ckpt_path=path, callbacks=[within], max_steps=4, compensation=reference)
    assert within.notes == [[0.02 * 4 / 2]]


def test_process_alone_hands_the_reference_batch_on(tmp_path: Path) -> None:
    paths = [tmp_path / "first.ckpt", tmp_path / "second.ckpt"]
    fit(pl, module_of(pl, sgd), max_steps=3).save_checkpoint(paths[0])
    alone = training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=4)
    saving = noting(pl, "on_train_end", lambda trainer: trainer.save_checkpoint(paths[1]))
    alone.callbacks.append(saving)
    alone.fit(module_of(pl, sgd), training.loader(compensated.LENGTH), ckpt_path=paths[0])
    saved = [torch.load(path, weights_only=True)["elasticflow"]["compensation"] for path in paths]
    expected = {"reference_batch_size": BATCH_SIZE, "world_size": 1, "ramp": [2.0, 4.0, 1], "told": True}
    assert saved == [expected, expected]


# ---------------------------------------------------------------- real workers


def trace_of(events: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
    """World size and samples of each update."""
    steps = {event["step"]: event for event in events}
    return [steps[n]["world_size"] for n in sorted(steps)], [expand(steps[n]["committed"]) for n in sorted(steps)]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_workers_agree_on_the_scale_through_a_join_and_a_loss(job: Job) -> None:
    options = {"length": 403, "max_epochs": 10_000, "stop": "enough"}
    founders = job.start_world(2, compensated.run, options)
    job.wait_for_step(3)
    newcomer = job.start(compensated.run, options)
    first, second, third = job.view(3)
    admitted = job.wait_for("admitted")[0]["step"]
    job.wait_for_step(admitted + 5)  # in the middle of the ramp
    first.kill()
    lost = max(event["step"] for event in job.events("step", worker=first.id))
    job.wait_for_step(lost + 12)
    (job.directory / "enough").touch()
    results = [worker.result() for worker in (*founders, newcomer) if worker is not first]
    job.audit()

    worlds, samples = trace_of(job.events("step"))
    assert [worlds[n] for n in range(1, len(worlds)) if worlds[n] != worlds[n - 1]] == [3, 2]
    ratios = closed_forms.ramped([size / 2 for size in worlds], 8)
    by_step = [dict(result["lr_scale"]) for result in results]
    assert sorted(by_step[0]) == list(range(len(worlds)))
    assert [by_step[0][n] for n in sorted(by_step[1])] == [by_step[1][n] for n in sorted(by_step[1])]
    assert by_step[0] == pytest.approx({n: ratios[n] for n in by_step[0]})
    shown = dict(results[0]["lr-SGD"])  # asked for before the reduction, so it cannot know of a loss in it
    assert sum(shown[n] != pytest.approx(0.02 * scale) for n, scale in by_step[0].items()) <= 1
    batches = {n: size / BATCH_SIZE for n, size in results[0]["global_batch_size"]}
    assert batches == dict(enumerate(worlds))
    assert dict(results[0]["world_size"]) == dict(enumerate(worlds))
    pauses = dict(results[0]["pause_s"])
    assert {n for n in pauses if worlds[n] != worlds[max(n - 1, 0)]} <= {n for n, pause in pauses.items() if pause}
    assert min(speed for n, speed in results[0]["samples_per_s"]) > 0
    changes = {worker.id: job.events("compensation", worker=worker.id) for worker in (second, third)}
    assert [event["global_batch_size"] for event in changes[second.id]] == [size * BATCH_SIZE for size in (2, 3, 2)]
    assert {event["reference_batch_size"] for events in changes.values() for event in events} == {2 * BATCH_SIZE}
    start = next(result["start"] for result in results)
    expected = closed_forms.sgd(problem(start, 403), samples, ratios, [0.02] * len(samples), momentum=0.9)
    for result in results:
        np.testing.assert_allclose(result["weights"], expected, rtol=0, atol=1e-6)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_reference_batch_survives_a_restart_with_another_world_and_batch(
    run: Callable[..., list[Any]], tmp_path: Path
) -> None:
    saved = tmp_path / "checkpoints"
    options = {"max_steps": 5, "checkpoints": str(saved), "sleep_s": 0.0}
    (first, _) = run(2, compensated.run, options)
    assert dict(first["lr_scale"]) == dict.fromkeys(range(5), 1.0)
    assert dict(first["lr-SGD"]) == dict.fromkeys(range(5), 0.02)
    path = str(max(saved.glob("*.ckpt"), key=lambda path: int(path.stem.split("step=")[1])))
    with Job(tmp_path / "again", preload=warm.TORCH) as again:
        options = {"max_steps": 27, "ckpt_path": path, "batch_size": 2 * BATCH_SIZE, "sleep_s": 0.0, "max_epochs": 9}
        workers = again.start_world(3, compensated.run, options)
        results = [worker.result() for worker in workers]
        again.audit()
    expected = dict(enumerate([1 + 2 * part / 8 for part in range(1, 9)], start=5))  # the limit is one of samples
    for result in results:
        assert dict(result["lr_scale"]) == expected
        assert dict(result["global_batch_size"]) == dict.fromkeys(range(5, 13), 3 * 2 * BATCH_SIZE)


def test_compensation_is_there_under_its_public_name() -> None:
    from ef_lightning import Compensation as Public

    assert Public is Compensation
