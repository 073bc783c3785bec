"""What a reader does with what a block has made: trains with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import lightning.pytorch as pl

import ef_keras
import ef_lightning
from ef_common.launch.process import this_worker
from tests.pages.preambles import Classifier, arrays, keras_model, loader

_LOST_IN_STEP = 4


def use(made: Sequence[Any]) -> None:
    """Train with each strategy, and with each list of callbacks, that stands in a block as a line of its own."""
    for value in made:
        if isinstance(value, pl.strategies.Strategy):
            _fit(pl.Trainer(strategy=value, max_epochs=2))
        elif isinstance(value, list) and all(isinstance(one, keras.callbacks.Callback) for one in value):
            keras_model().fit(*arrays(), epochs=2, callbacks=value)


def _fit(trainer: Any, module: Any = None) -> None:
    trainer.fit(module or Classifier(), loader(), loader(30))
    if trainer.global_step == 0:
        raise AssertionError("no step was made")


# ---------------------------------------------------------------- what rows name


def train_with_trainer(names: dict[str, Any]) -> None:
    """A Trainer that is made without a length."""
    trainer = names["trainer"]
    trainer.fit_loop.max_epochs = 1
    _fit(trainer)


def continue_with_best(names: dict[str, Any]) -> None:
    """A new start from a checkpoint brings a new callback what the first one knew."""
    place, told = Path("best"), Path("best.json")

    def train(callback: Any, epochs: int) -> Any:
        keras_model().fit(*arrays(), epochs=epochs, callbacks=[callback, *ef_keras.callbacks(checkpoint=str(place))])
        return callback

    if (child := os.fork()) == 0:  # a process of its own, because a second training has another place
        try:
            told.write_text(json.dumps(train(names["Best"](), epochs=2).best))
        finally:
            os._exit(0)  # a failure has left no file
    os.waitpid(child, 0)
    found = train(names["Best"](), epochs=2).best  # there is nothing left to train
    if not json.loads(told.read_text()) == found > 0:
        raise AssertionError(f"the best was {told.read_text()}, and is {found} after the new start")


def lose_a_worker_in_keras(names: dict[str, Any]) -> None:
    class Lost(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            _end_rank_1(batch)

    callbacks = [names["Workers"](), Lost(), *ef_keras.callbacks()]
    keras_model().fit(*arrays(), batch_size=8, epochs=2, callbacks=callbacks)


def lose_a_worker_in_lightning(names: dict[str, Any]) -> None:
    """The block leaves open what its methods do, so only their signatures are tried: they are called."""

    class Lost(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            _end_rank_1(batch_idx)

    class Net(names["Net"], Classifier):  # type: ignore[misc, name-defined]
        pass

    trainer = pl.Trainer(
        strategy=ef_lightning.ElasticFlowStrategy(), max_epochs=2, callbacks=[names["Workers"](), Lost()]
    )
    _fit(trainer, Net())


def _end_rank_1(step: int) -> None:
    session = this_worker().session
    if step == _LOST_IN_STEP and (session.rank, session.world_size) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
