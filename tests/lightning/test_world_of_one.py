"""One process without a coordinator: the same as Lightning's own strategy for one device, bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from ef_common.audit import audit
from ef_lightning import strategy_for
from tests.lightning import battery, training
from tests.lightning.conftest import HOSTS

LENGTH = 13

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", battery.CASES)
def test_training_gives_the_same_weights(host: str, name: str) -> None:
    pl = importlib.import_module(host)
    make = battery.CASES[name]
    assert battery.train(make(pl), pl, strategy_for(host)()) == battery.train(make(pl), pl, "auto")


@pytest.mark.parametrize("host", HOSTS)
def test_lbfgs_and_stochastic_weight_averaging_give_the_same_weights(host: str) -> None:
    pl = importlib.import_module(host)
    torch = training.torch

    class Second(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    def averaging() -> battery.Case:
        callback = pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1)
        return battery.Case(training.regression(pl), {"callbacks": [callback], "max_epochs": 4})

    for make in (lambda: battery.Case(Second), averaging):
        assert battery.train(make(), pl, strategy_for(host)()) == battery.train(make(), pl, "auto")


@pytest.mark.parametrize("host", HOSTS)
def test_evaluation_gives_the_same_batches_and_numbers(host: str) -> None:
    pl = importlib.import_module(host)

    class Evaluated(training.regression(pl)):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("index", batch[0].double().mean(), on_step=True, on_epoch=True, sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.all_gather(batch[0])

    def everything(strategy: Any) -> Any:
        trainer, module = training.trainer(pl, strategy), Evaluated()
        trainer.fit(module, training.loader(LENGTH), training.loader(LENGTH))
        logged = [float(trainer.callback_metrics["index"])]
        logged += [r["index_epoch"] for r in trainer.validate(module, training.loader(LENGTH), verbose=False)]
        logged += [r["index_epoch"] for r in trainer.test(module, training.loader(LENGTH), verbose=False)]
        return logged, [batch.tolist() for batch in trainer.predict(module, training.loader(LENGTH))]

    assert everything(strategy_for(host)()) == everything("auto")


def tuned(pl: Any) -> Any:
    class Tuned(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lr, self.batch_size = 0.1, 2

        def train_dataloader(self) -> Any:
            return training.loader(100, self.batch_size)

        def val_dataloader(self) -> Any:
            return training.loader(8)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return training.torch.optim.SGD(self.parameters(), self.lr)

    return Tuned()


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
def test_tuner_finds_the_same_learning_rate_and_batch_size(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pl = importlib.import_module(HOSTS[0])
    tuning = importlib.import_module(f"{HOSTS[0]}.tuner")

    def found(strategy: Any) -> Any:
        module = tuned(pl)
        trainer = training.trainer(pl, strategy, default_root_dir=tmp_path)
        tuner = tuning.Tuner(trainer)
        results = tuner.lr_find(module, num_training=20, early_stop_threshold=None).results
        size = tuner.scale_batch_size(module, max_trials=3, steps_per_trial=2)
        trainer.fit(module)
        return results, module.lr, size, trainer.global_step, training.weights(module)

    theirs = found("auto")
    run_dir = request.getfixturevalue("world_of_one") if where == "in_a_job" else None
    assert found(strategy_for(HOSTS[0])()) == theirs
    if run_dir is not None:
        assert audit(run_dir).ok


@pytest.mark.parametrize("where", ["alone", "in_a_job"])
@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder", "StochasticWeightAveraging", "ModelPruning"])
def test_callback_that_wants_to_stay_alone_does_the_same(
    name: str, where: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(HOSTS[0])
    options = {
        "LearningRateFinder": {"num_training_steps": 20, "early_stop_threshold": None},
        "BatchSizeFinder": {"max_trials": 2, "steps_per_trial": 2},
        "StochasticWeightAveraging": {"swa_lrs": 0.01, "swa_epoch_start": 1, "annealing_epochs": 1},
        "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.25},
    }[name]

    def found(strategy: Any) -> Any:
        module = tuned(pl)
        callback = getattr(pl.callbacks, name)(**options)
        trainer = training.trainer(pl, strategy, callbacks=[callback], default_root_dir=tmp_path, max_epochs=3)
        trainer.fit(module)
        values = [float(value) for value in trainer.callback_metrics.values()]
        return module.lr, module.batch_size, trainer.global_step, values, training.weights(module)

    theirs = found("auto")
    run_dir = request.getfixturevalue("world_of_one") if where == "in_a_job" else None
    assert found(strategy_for(HOSTS[0])()) == theirs
    if run_dir is not None:
        assert f"no worker can join this one while {name} is used" in caplog.text
        assert audit(run_dir).ok


class Diary:
    """What the training loader knows after each batch, and what was in the batch."""

    def __init__(self, pl: Any, save_at: int = 0, path: Path | None = None) -> None:
        self.states: list[Any] = []
        self.batches: list[list[int]] = []
        diary = self

        class Notes(pl.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                loader = trainer.strategy._fit.train_loader
                diary.states.append({k: v for k, v in loader.state_dict().items() if k not in ("order", "returned")})
                diary.batches.append(batch[0].tolist())
                if len(diary.batches) == save_at:
                    trainer.save_checkpoint(path)

        self.callback = Notes()


@pytest.mark.parametrize("save_at", [2, 3])
def test_lone_worker_goes_on_in_the_middle_of_an_epoch(save_at: int, tmp_path: Path) -> None:
    pl = importlib.import_module(HOSTS[0])
    whole, rest = Diary(pl, save_at, tmp_path / "middle.ckpt"), Diary(pl)
    training.trainer(pl, callbacks=[whole.callback]).fit(training.regression(pl)(), training.loader(LENGTH))
    resumed = training.trainer(pl, callbacks=[rest.callback])
    resumed.fit(training.regression(pl)(), training.loader(LENGTH), ckpt_path=tmp_path / "middle.ckpt")
    assert rest.batches == whole.batches[save_at:]


@pytest.mark.parametrize(
    ("options", "num_samples"),
    [
        ({"max_epochs": 2}, 2 * LENGTH - 4),
        ({"max_steps": 5}, 4 * 4),
        ({"max_epochs": 2, "limit_train_batches": 3}, 5 * 4),
    ],
)
def test_training_loader_knows_what_is_left(options: dict[str, Any], num_samples: int) -> None:
    pl, found = importlib.import_module(HOSTS[0]), []

    class Asks(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            found.append(trainer.strategy._fit.train_loader.dealer.rest().samples)

    strategy = strategy_for(HOSTS[0])()
    trainer = training.trainer(pl, strategy, callbacks=[Asks()], **options)
    trainer.fit(training.regression(pl)(), training.loader(LENGTH))
    assert found[0] == num_samples


@pytest.mark.parametrize("options", [{}, {"limit_val_batches": 3}, {"limit_val_batches": 0.5}])
def test_length_of_a_validation_is_not_that_of_the_sanity_check(options: dict[str, Any]) -> None:
    pl = importlib.import_module(HOSTS[0])

    class Evaluated(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lengths: list[Any] = []

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            trainer = self.trainer
            lengths = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            self.lengths.append((batch_idx, list(lengths)))

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            self.lengths.append((batch_idx, list(self.trainer.num_predict_batches)))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.lengths.append((batch_idx, list(self.trainer.num_val_batches)))

    def lengths(strategy: Any) -> Any:
        module, trainer = Evaluated(), training.trainer(pl, strategy, **options)
        trainer.fit(module, training.loader(LENGTH), [training.loader(33), training.loader(17)])
        trainer.predict(module, training.loader(33))
        return module.lengths

    assert lengths(strategy_for(HOSTS[0])()) == lengths("auto")


@pytest.mark.parametrize(("every", "reload"), [(1, 0), (2, 1), (3, 2), (2, 3)])
@pytest.mark.parametrize("sanity", [0, 2])
def test_loaders_are_made_when_lightning_makes_them(sanity: int, every: int, reload: int) -> None:
    pl = importlib.import_module(HOSTS[0])

    class Noting(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.notes: list[tuple[str, int]] = []

        def note(self, what: str) -> None:
            self.notes.append((what, self.trainer.current_epoch))

        def train_dataloader(self) -> Any:
            self.note("train_dataloader")
            return training.loader(LENGTH)

        def val_dataloader(self) -> Any:
            self.note("val_dataloader")
            return training.loader(LENGTH)

        def on_train_start(self) -> None:
            self.note("on_train_start")

        def on_train_epoch_start(self) -> None:
            self.note("on_train_epoch_start")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.note("validation_step")

    options = {
        "max_epochs": 7,
        "num_sanity_val_steps": sanity,
        "check_val_every_n_epoch": every,
        "reload_dataloaders_every_n_epochs": reload,
    }

    def notes(strategy: Any) -> Any:
        module = Noting()
        training.trainer(pl, strategy, **options).fit(module)
        return module.notes

    assert notes(strategy_for(HOSTS[0])()) == notes("auto")


def test_an_empty_list_is_no_loader() -> None:
    pl = importlib.import_module(HOSTS[0])

    def steps(strategy: Any, *loaders: Any) -> Any:
        module, trainer = training.regression(pl)(), training.trainer(pl, strategy)
        module.validation_step = lambda batch, batch_idx: pytest.fail("there is nothing to validate")
        trainer.fit(module, *loaders)
        return trainer.global_step

    for loaders in ((training.loader(LENGTH), []), ([], [])):
        assert steps(strategy_for(HOSTS[0])(), *loaders) == steps("auto", *loaders)


@pytest.mark.parametrize("host", HOSTS)
def test_checkpoint_in_the_middle_of_an_accumulation_goes_on_with_its_first_batch(
    host: str, world_of_one: Path, tmp_path: Path
) -> None:
    pl = importlib.import_module(host)
    path = tmp_path / "middle.ckpt"

    def train(**options: Any) -> tuple[list[list[int]], list[float]]:
        class Recording(training.regression(pl)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                seen.append(batch[0].tolist())
                return super().training_step(batch, batch_idx)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                if not options and batch_idx == 5:  # an update, and two batches of the next one
                    self.trainer.save_checkpoint(path)

        seen: list[list[int]] = []
        module = Recording()
        strategy = strategy_for(host)(compensation="none")
        trainer = training.trainer(pl, strategy, accumulate_grad_batches=4, max_epochs=1)
        trainer.fit(module, training.loader(64), **options)
        return seen, training.weights(module)

    whole, weights = train()
    rest, weights_of_rest = train(ckpt_path=path)
    assert rest == whole[4:]
    assert weights_of_rest == pytest.approx(weights)


@pytest.mark.parametrize("host", HOSTS)
def test_checkpoint_after_an_exception_goes_on_with_the_batch_that_raised_it(
    host: str, world_of_one: Path, tmp_path: Path
) -> None:
    pl = importlib.import_module(host)
    seen: list[tuple[int, list[int]]] = []

    class Breaking(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3 and not any(index == 3 for index, _ in seen):
                seen.append((3, []))
                raise ArithmeticError("in the middle")
            seen.append((batch_idx, batch[0].tolist()))
            return super().training_step(batch, batch_idx)

    for accumulate in (1, 2):
        seen.clear()
        trainer = training.trainer(pl, strategy_for(host)(), max_epochs=1, accumulate_grad_batches=accumulate)
        with pytest.raises(ArithmeticError):
            trainer.fit(Breaking(), training.loader(32))
        trainer.save_checkpoint(tmp_path / "broken.ckpt")
        again = training.trainer(pl, strategy_for(host)(), max_epochs=1, accumulate_grad_batches=accumulate)
        again.fit(Breaking(), training.loader(32), ckpt_path=tmp_path / "broken.ckpt")
        first = 4 - accumulate  # the batch before it has begun the accumulation
        rest = [(index, list(range(4 * index, 4 * index + 4))) for index in range(first, 8)]
        assert seen[4:] == rest


@pytest.mark.parametrize("host", HOSTS)
def test_step_that_all_skip_is_skipped_with_scaled_gradients(host: str, world_of_one: Path) -> None:
    pl = importlib.import_module(host)
    torch = training.torch

    class Skipping(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (0, 2) else super().training_step(batch, batch_idx)

    def train(strategy: Any) -> tuple[list[float], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
        plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler)  # by name, a CPU would get bfloat16
        module = Skipping()
        training.trainer(pl, strategy, plugins=[plugin]).fit(module, training.loader(4 * training.BATCH_SIZE))
        return training.weights(module), scaler.get_scale()

    assert train(strategy_for(host)(compensation="none")) == train("auto")


@pytest.mark.parametrize("host", HOSTS)
def test_gradient_of_padding_is_dropped_within_an_accumulation(host: str, world_of_one: Path) -> None:
    pl = importlib.import_module(host)
    torch = training.torch

    def train(padding: float) -> list[float]:
        class Padded(training.regression(pl)):  # type: ignore[misc]
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                loader = self.trainer.strategy._fit.train_loader
                loader.padding = loader.padding or batch_idx == 1
                return super().training_step(batch, batch_idx) * (padding if batch_idx == 1 else 1.0)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.05)

        module, strategy = Padded(), strategy_for(host)(compensation="none")
        training.trainer(pl, strategy, accumulate_grad_batches=2, max_epochs=1).fit(module, training.loader(8))
        assert not any(parameter._backward_hooks for parameter in module.parameters())
        return training.weights(module)

    assert train(float("nan")) == train(0.0)
