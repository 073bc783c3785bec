"""Evaluations that take a batch of several loaders in each step: as one process does, and each position once."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from ef_common.errors import UnsupportedError
from ef_lightning import hooks, strategy_for
from ef_lightning.joint_reading import LENGTHS
from tests.lightning import joint, training
from tests.lightning.conftest import HOSTS, QUIET
from tests.lightning.test_adapted import needs

pl = importlib.import_module(HOSTS[0])
combine = pl.utilities.CombinedLoader

pytestmark = QUIET


class Rows(IterableDataset[Any]):
    """The samples of `training.loader` as a stream, whose length is known."""

    def __init__(self, length: int) -> None:
        self._data = training.data(length)

    def __len__(self) -> int:
        return len(self._data)

    def __iter__(self) -> Iterator[Any]:
        return (self._data[index] for index in range(len(self._data)))


class Batches(Rows):
    """The same in batches of one."""

    def __iter__(self) -> Iterator[Any]:
        return ([part[None] for part in row] for row in super().__iter__())


STRUCTURES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [training.loader(23), training.loader(7)],
    "nested": lambda: joint.nested(7, 9, 22),
    "data workers": lambda: [training.loader(13, num_workers=1), training.loader(6)],
    "last batch dropped": lambda: joint.nested(7, 9, 22, drop_last=True),
    "a stream": lambda: [DataLoader(Rows(23), 4), training.loader(7)],
    "a stream of batches": lambda: [training.loader(23), DataLoader(Batches(7), batch_size=None)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "a number of batches": {"limit_val_batches": 3, "limit_test_batches": 1},
    "a fraction": {"limit_val_batches": 0.5, "limit_test_batches": 0.7},
    "a whole sanity check": {"num_sanity_val_steps": -1},
    "overfitting": {"overfit_batches": 2},
}
CASES = [
    *itertools.product(STRUCTURES, ["whole"], LENGTHS),
    *itertools.product(["a list", "a stream"], OPTIONS, LENGTHS),
]


def evaluate(strategy: Any, make: Callable[[], Any], mode: str, **options: Any) -> Any:
    """Validate in a fit, then validate and test: what was in each batch, and what was logged."""
    module, trainer = joint.evaluated(pl)(), training.trainer(pl, strategy, max_epochs=1, **options)
    module.training_step = lambda batch, batch_idx: module.loss(batch)
    trainer.fit(module, training.loader(9), combine(make(), mode))
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    results = [run(module, combine(make(), mode), verbose=False) for run in (trainer.validate, trainer.test)]
    return module.seen, fitted, results


@pytest.mark.parametrize(("structure", "options", "mode"), CASES)
def test_one_process_evaluates_as_without_elasticflow(structure: str, options: str, mode: str) -> None:
    ours, plain = (
        evaluate(strategy, STRUCTURES[structure], mode, **OPTIONS[options])
        for strategy in (strategy_for(HOSTS[0])(), "auto")
    )
    assert ours == plain
    assert ours[0]


def test_shuffled_loaders_are_not_shuffled_in_overfitting() -> None:
    ours, plain = (
        evaluate(
            strategy, lambda: joint.nested(7, 9, 22, shuffle=True), "max_size", overfit_batches=2, limit_test_batches=0
        )
        for strategy in (strategy_for(HOSTS[0])(), "auto")
    )
    fitting = [[batch for batch in seen if batch[0] == "sanity_check"] for seen, *_ in (ours, plain)]
    assert fitting[0] == fitting[1] != []


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_workers_evaluate_what_one_process_does(run: Callable[..., list[Any]]) -> None:
    results = run(3, joint.evaluate, HOSTS[0])
    plain = joint.evaluate(HOSTS[0], "auto")
    for mode in LENGTHS:
        values, batches = plain[mode]
        assert all(result[mode][0] == pytest.approx(values) for result in results)
        found = Counter(str(batch[-1]) for result in results for batch in result[mode][1])
        assert found == Counter(str(batch[-1]) for batch in batches)


@pytest.mark.parametrize("structure", ["nested", "a stream"])
def test_users_see_their_loaders_in_their_structure(structure: str) -> None:
    given, seen = STRUCTURES[structure](), []

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_validation_start(self, trainer: Any, *args: Any) -> None:
            seen.append(trainer.val_dataloaders)

    module = joint.evaluated(pl)()
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=[Looking()])
    trainer.validate(module, combine(given, "max_size"), verbose=False)
    own = combine(given).flattened
    assert all(shown is one for shown, one in zip(combine(seen[0]).flattened, own, strict=True))
    assert type(seen[0]) is type(given)


class Alternating(combine):  # type: ignore[misc, valid-type]
    def __next__(self) -> Any:
        return super().__next__()


def test_own_combination_is_refused_where_a_step_takes_a_batch_of_each() -> None:
    module, trainer = joint.evaluated(pl)(), training.trainer(pl, strategy_for(HOSTS[0])())
    with pytest.raises(UnsupportedError, match="Use one of its modes"):
        trainer.validate(module, Alternating(STRUCTURES["a list"](), "max_size"), verbose=False)
    trainer.validate(module, Alternating(STRUCTURES["a list"](), "sequential"), verbose=False)
    assert [batch[2] for batch in module.seen] == [0] * 6 + [1] * 2


def test_prediction_takes_one_loader_after_the_other_only() -> None:
    module, trainer = joint.evaluated(pl)(), training.trainer(pl, strategy_for(HOSTS[0])())
    module.predict_step = lambda batch, batch_idx: batch
    with pytest.raises(ValueError, match="only supports"):
        trainer.predict(module, combine(STRUCTURES["a list"](), "max_size"))


class Numbers:
    """A stream of shards."""

    def shards(self) -> list[str]:
        return ["3", "2"]

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        return (training.data(3)[index] for index in range(offset, int(shard)))


@pytest.mark.parametrize("kind", ["samples", "a stream", "a stream of shards"])
def test_loader_that_is_asked_again_after_its_end_exchanges_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ef_common.data.torch_stream import StreamDataset

    ended: list[Any] = []
    mark_done = hooks.mark_evaluation_done
    monkeypatch.setattr(hooks, "mark_evaluation_done", lambda loop: (ended.append(loop), mark_done(loop)))

    class Asking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            (loader,) = trainer.validate_loop._combined_loader.flattened
            for _ in range(2):
                with pytest.raises(StopIteration):
                    next(loader)

    data = {"samples": training.data(5), "a stream": Rows(5), "a stream of shards": StreamDataset(Numbers())}[kind]
    module = joint.evaluated(pl)()
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=[Asking()])
    for number in (1, 2):
        trainer.validate(module, combine([DataLoader(data, 4)], "max_size"), verbose=False)
        assert len(ended) == number
        assert len(module.seen) == 2 * number


def test_search_in_one_process_that_is_a_job_reads_several_loaders(world_of_one: Path) -> None:
    def search(strategy: Any) -> Any:
        module = joint.evaluated(pl)()
        module.lr = 0.1
        finder = pl.callbacks.LearningRateFinder(num_training_steps=5, early_stop_threshold=None)
        trainer = training.trainer(pl, strategy, callbacks=[finder], default_root_dir=world_of_one.parent)
        train = {"a": training.loader(23), "b": training.loader(7)}
        trainer.fit(module, train, combine(STRUCTURES["a list"](), "max_size"))
        return module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}

    assert search("auto") == search(strategy_for(HOSTS[0])())


def test_stateful_loaders_are_trained_on_and_evaluated_together() -> None:
    needs("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def fit(strategy: Any) -> Any:
        def given() -> Any:
            return combine([training.loader(23), StatefulDataLoader(training.data(7), 4)], "max_size")

        module, trainer = joint.evaluated(pl)(), training.trainer(pl, strategy)
        trainer.fit(module, given(), given())
        return module.seen

    assert fit("auto") == fit(strategy_for(HOSTS[0])())
