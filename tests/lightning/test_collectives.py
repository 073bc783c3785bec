"""What a strategy answers before its Trainer runs, and after: the same as Lightning's for one device."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ef_common.core.view import Member, View
from ef_lightning import strategy_for
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def answers(trainer: Any, path: Path) -> dict[str, Any]:
    """Of everything that a user may ask for between two runs."""
    strategy, ones = trainer.strategy, torch.ones(2, requires_grad=True)
    trainer.save_checkpoint(path)
    return {
        "log_dir": trainer.log_dir,
        "barrier": strategy.barrier("here"),
        "broadcast": strategy.broadcast({"any": object}),
        "reduce": strategy.reduce(ones).tolist(),
        "decision": (strategy.reduce_boolean_decision(True), strategy.reduce_boolean_decision(False, all=False)),
        "gather": strategy.all_gather(ones, sync_grads=True) is ones,
        "ranks": (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.is_global_zero),
        "saved": sorted(torch.load(path, weights_only=False)["state_dict"]),
    }


@pytest.mark.parametrize("host", HOSTS)
def test_strategy_answers_as_lightnings_own_before_a_fit_and_after_it(host: str, tmp_path: Path) -> None:
    pl = importlib.import_module(host)

    def before_and_after(strategy: Any) -> Any:
        module = training.regression(pl)()
        trainer = training.trainer(pl, strategy, default_root_dir=tmp_path, max_epochs=1)
        trainer.strategy.connect(module)
        before = answers(trainer, tmp_path / "before.ckpt")
        trainer.fit(module, training.loader(8))
        return before, answers(trainer, tmp_path / "after.ckpt")

    assert before_and_after(strategy_for(host)()) == before_and_after("auto")


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        (["a 1", "a 0", "b 0", "b 1"], [0, 0, 1, 1]),  # local ranks come in any order
        (["a 1", "b 1", "b 0"], [1, 0, 0]),  # one of the first node is lost
        (["a 1", "b 1"], [0, 1]),
    ],
)
def test_one_worker_prepares_data_for_all_nodes(places: list[str], expected: list[int]) -> None:
    named = [(f"w{rank}", *place.split()) for rank, place in enumerate(places)]
    members = tuple(Member(name, node, "127.0.0.1", int(local), 2) for name, node, local in named)
    found = []
    for member in members:
        strategy = strategy_for(HOSTS[0])()
        strategy._worker = cast(Any, SimpleNamespace(session=SimpleNamespace(newcomer=False, rank=0)))
        vars(strategy._worker.session).update(worker=member, view=View(1, members))
        found.append(strategy.node_rank)
        strategy._worker.session.newcomer, strategy._worker.session.rank = True, len(members)
        assert strategy.node_rank == len(members)
    assert found == expected
    preparing = [rank == member.local_rank == 0 for rank, member in zip(found, members, strict=True)]
    assert sum(preparing) == any(member.local_rank == 0 for member in members)


def test_gathers_are_weighed_as_the_reduction_weighs_and_not_without_a_share_of_the_batch() -> None:
    strategy = strategy_for(HOSTS[0])()
    weights = {False: [0.5, 0.3, 0.2], True: [0.6, 0.4, 0.0]}  # of an accumulation, and of its current batch
    strategy._fit = cast(Any, SimpleNamespace(weights=lambda view, of_batch=False: weights[of_batch]))
    assert strategy.weights_in(View(1, ())) == [0.5, 0.3, 0.0]
