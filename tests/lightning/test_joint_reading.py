"""Several training loaders are dealt together: as one process reads them, and each position once."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler, WeightedRandomSampler

from ef_common.errors import UsageError
from ef_common.session import Session
from ef_lightning import strategy_for
from ef_lightning.joint_reading import LENGTHS, JointLoader, JointReading
from tests.lightning import joint, training
from tests.lightning.conftest import HOSTS, QUIET

pl = importlib.import_module(HOSTS[0])
combine = pl.utilities.CombinedLoader

pytestmark = QUIET


def loaders(**kwargs: Any) -> Any:
    return joint.nested(22, 9, 7, **kwargs)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "a list": lambda: [training.loader(13), training.loader(29)],
    "nested": loaders,
    "data workers": lambda: [training.loader(13, num_workers=1), training.loader(6)],
    "last batch dropped": lambda: loaders(drop_last=True),
    **{mode: lambda mode=mode: combine(loaders(), mode) for mode in LENGTHS},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "a number of batches": {"limit_train_batches": 3},
    "a fraction": {"limit_train_batches": 0.7},
    "accumulated": {"accumulate_grad_batches": 2},
    "overfitting": {"overfit_batches": 2},
    "steps": {"max_steps": 7, "max_epochs": -1},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
}
CASES = [(structure, "whole") for structure in STRUCTURES] + list(itertools.product(LENGTHS, OPTIONS))


def train(strategy: Any, given: Any, *, max_epochs: int = 2, path: Path | None = None, **options: Any) -> Any:
    """Train: what was in each batch, and what came out of it."""
    module = joint.module(pl)()
    trainer = training.trainer(pl, strategy, max_epochs=options.pop("epochs", max_epochs), **options)
    trainer.fit(module, given, ckpt_path=path)
    return module.seen, training.weights(module), trainer.global_step, trainer.num_training_batches


@pytest.mark.parametrize(("structure", "options"), CASES)
def test_one_process_trains_as_without_elasticflow(structure: str, options: str) -> None:
    chosen = dict(OPTIONS[options])
    chosen["epochs"] = chosen.pop("max_epochs", 2)
    ours, plain = (
        train(strategy, STRUCTURES[structure](), **chosen) for strategy in (strategy_for(HOSTS[0])(), "auto")
    )
    assert ours == plain


@pytest.mark.parametrize("mode", LENGTHS)
def test_each_pass_over_a_loader_reads_each_sample_once_and_in_another_order(mode: str) -> None:
    own = training.loader(6, 2, sampler=WeightedRandomSampler([1.0] * 6, 6, replacement=False))
    several = [training.loader(22, shuffle=True), training.loader(9, 2, shuffle=True), own]
    reading = JointReading(JointLoader(combine(several, mode), mode=mode, unflatten=list))
    assert not reading.is_computed
    assert reading.num_samples == 8
    session: Any = LoneSession()
    length = reading.length(1.0, 1)
    assert length == LENGTHS[mode]([6, 5, 3])
    order = reading.order(session, seed=1, epoch=0, length=length)
    read = [reading.at(order, [position], length=length) for position in range(length)]
    assert read == [reading.at(order, slice(p, p + 1), length=length) for p in range(length)]
    for index, (size, batches) in enumerate(((22, 6), (9, 5), (6, 3))):
        indices = [item[index] for item in read]
        if mode == "max_size":
            assert indices[batches:] == [None] * (length - batches)
        passes = [
            list(itertools.chain.from_iterable(filter(None, indices[at : at + batches])))
            for at in range(0, length, batches)
        ]
        whole = [one for one in passes if len(one) == size]
        assert len(whole) == (length // batches if mode != "max_size" else 1)
        assert all(sorted(one) == list(range(size)) for one in whole)
        assert len({tuple(one) for one in whole}) == len(whole)
    again = reading.order(session, seed=1, epoch=1, length=length)
    assert again[:22].tolist() != order[:22].tolist()


@pytest.mark.parametrize("mode", LENGTHS)
def test_fraction_that_leaves_no_batch_of_one_of_the_loaders_is_an_error(mode: str) -> None:
    several = [training.loader(22), training.loader(9, 2)]
    reading = JointReading(JointLoader(combine(several, mode), mode=mode, unflatten=list))
    assert reading.length(0.5, 1) == LENGTHS[mode]([3, 2])
    with pytest.raises(UsageError, match="less than one of the 5 batches of a loader"):
        reading.length(0.19, 1)


class Overdrawing(SequentialSampler):
    """Draws more than it says, as one that never ends."""

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))
        yield from itertools.repeat(0, 100)


def test_sampler_that_draws_more_than_it_says_leaves_the_other_loaders_their_samples() -> None:
    several = [training.loader(8, sampler=Overdrawing(training.data(8))), training.loader(8)]
    reading = JointReading(JointLoader(combine(several, "min_size"), mode="min_size", unflatten=list))
    session: Any = LoneSession()
    order = reading.order(session, seed=1, epoch=0, length=2)
    read = [reading.at(order, [position], length=2) for position in range(2)]
    assert read == [[[0, 1, 2, 3]] * 2, [[4, 5, 6, 7]] * 2]


class LoneSession(Session):
    """Of a world of one."""

    def __init__(self) -> None:
        from ef_common.core.view import Member

        super().__init__(Member("w", "n", "h"), channel=None, groups=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", LENGTHS)
def test_training_goes_on_in_the_middle_of_an_epoch(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"

    class Saving(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)

    def given() -> Any:
        torch.manual_seed(1)
        return combine(loaders(shuffle=True), mode)

    strategy = strategy_for(HOSTS[0])
    whole = train(strategy(), given(), callbacks=[Saving()])
    rest = train(strategy(), given(), path=path)
    assert rest[0] == whole[0][2:]
    assert rest[1:] == whole[1:]


def test_overfitting_shuffles_no_loader() -> None:
    given = loaders(shuffle=True)
    ours, plain = (train(strategy, given, overfit_batches=2) for strategy in (strategy_for(HOSTS[0])(), "auto"))
    assert ours == plain


def test_users_see_their_loaders_in_their_structure() -> None:
    given = loaders()
    seen: list[Any] = []

    class Looking(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            next(iter(trainer.train_dataloader["b"][1]))
            seen.append(trainer.train_dataloader)

    train(strategy_for(HOSTS[0])(), given, callbacks=[Looking()], max_epochs=1)
    assert seen[0]["a"] is given["a"]
    assert [found is own for found, own in zip(seen[0]["b"], given["b"], strict=True)] == [True, True]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_two_workers_train_as_one_process_that_accumulates(run: Callable[..., list[Any]]) -> None:
    first, second = run(2, joint.run, HOSTS[0])
    plain = joint.module(pl)()
    training.trainer(pl, "auto", accumulate_grad_batches=2).fit(plain, joint.loaders())
    assert first["weights"] == second["weights"] == pytest.approx(training.weights(plain), abs=1e-6)
    assert first["steps"] == 2 * 4
    for index in range(2):
        ours = sorted(batch[index] for worker in (first, second) for batch in worker["seen"])
        assert ours == sorted(batch[index] for batch in plain.seen)


@pytest.mark.processes
def test_workers_gather_from_batches_of_one_size_where_one_of_them_has_a_short_one(
    run: Callable[..., list[Any]],
) -> None:
    first, second = run(2, joint.gather, HOSTS[0])
    assert first == second
    assert first["sizes"] == [[4, 4]] * 4


@pytest.mark.parametrize("mode", LENGTHS)
def test_batch_is_filled_up_to_the_size_of_those_beside_it(mode: str) -> None:
    several = [training.loader(10), training.loader(7)]
    reading = JointReading(JointLoader(combine(several, mode), mode=mode, unflatten=list))
    session: Any = LoneSession()
    length = reading.length(1.0, 1)
    order = reading.order(session, seed=1, epoch=0, length=length)
    assert reading.at(order, [1], length=length)[1] == [4, 5, 6]
    assert reading.at(order, [1], length=length, beside=[0, 1])[1] == [4, 5, 6, 4]
    assert reading.at(order, [1], length=length, beside=[1])[1] == [4, 5, 6]
    if mode != "min_size":
        last = reading.at(order, [2], length=length, beside=[1, 2])
        assert last == [[8, 9, 8, 9], None if mode == "max_size" else [0, 1, 2, 3]]
