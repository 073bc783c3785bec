"""What a strategy answers before its Trainer runs, and after: the same as Lightning's for one device."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

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
