"""Trainings that choose their size, and tell of which sizes they know the throughput when they begin."""

from __future__ import annotations

import importlib
import time
from typing import Any

SETTINGS = {"min": 2, "max": 2, "every_steps": 10}
_STEP_S = 0.02


def lightning(folder: str, epochs: int, path: str | None = None) -> dict[str, Any]:
    """Train with Lightning; go on from the file `path`, if it is given."""
    from tests.lightning import training

    pl = training.use("lightning.pytorch")
    strategy = importlib.import_module("ef_lightning").ElasticFlowStrategy(autoscale=SETTINGS)

    class Knowing(training.regression(pl)):  # type: ignore[misc]
        known: list[int] | None = None

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            time.sleep(_STEP_S)
            if self.known is None:
                self.known = _sizes(self.trainer.strategy._fit.autoscaler)

    module = Knowing()
    checkpoint = pl.callbacks.ModelCheckpoint(folder)
    trainer = training.trainer(pl, strategy, max_epochs=epochs, callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(module, training.loader(61), ckpt_path=path)
    return {"known": module.known, "path": checkpoint.best_model_path}


def keras_torch(folder: str, epochs: int) -> dict[str, Any]:
    """Train with Keras; go on from what is in the folder."""
    importlib.import_module("tests.keras.on_torch")
    features = importlib.import_module("tests.keras.features")
    keras = importlib.import_module("keras")
    checkpoint = importlib.import_module("ef_common.data.checkpointer").Checkpointing(folder, every_steps=20)
    elastic = importlib.import_module("ef_keras").callbacks(autoscale=SETTINGS, checkpoint=checkpoint)

    class Knowing(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        known: list[int] | None = None

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(_STEP_S)
            if self.known is None:
                self.known = _sizes(elastic[0]._fit._autoscaler)

    knowing = Knowing()
    model = features.compiled(features.net())
    model.fit(*features.data(244), batch_size=16, epochs=epochs, verbose=0, callbacks=[knowing, *elastic])
    return {"known": knowing.known}


def _sizes(autoscaler: Any) -> list[int]:
    return [measure.size for measure in autoscaler.history.measures]
