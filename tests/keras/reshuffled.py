"""A program of two fits over the same `tf.data`, which TensorFlow shuffles anew for each pass, as its tutorials do."""

from __future__ import annotations

import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

NUM, NUM_VAL, SIZE = 96, 50, 4


def program(gates: str, loses: bool = False, is_augmented: bool = False, split: str = "") -> dict[str, Any]:
    """Pre-train and fine-tune. Newcomers are waited for in the second epoch of the second fit.

    Args:
        gates: Folder in which a file "go" ends the wait.
        loses: The last worker is killed in the last validation.
        is_augmented: The inputs of the training are changed by random numbers that differ in each worker.
        split: How training and validation are parts of the same data. "fixed": these are shuffled once, and the
            training again for each pass; "shuffled": they are shuffled for each pass.

    Returns:
        The numbers of the samples trained on in each epoch of the second fit, and the results of its validations.
    """
    importlib.import_module("tests.keras.on_tensorflow")
    np = importlib.import_module("numpy")
    keras = importlib.import_module("keras")
    tf = importlib.import_module("tensorflow")
    ef_keras = importlib.import_module("ef_keras")
    gated = importlib.import_module("tests.keras.gated")
    elastic = ef_keras.callbacks()
    trained: dict[str, list[int]] = {}

    def shuffled(num: int, *, anew: bool = True) -> Any:
        numbers = np.arange(num, dtype="float32")
        samples = tf.data.Dataset.from_tensor_slices((np.stack([numbers / num] * 3, 1), numbers))
        return samples.shuffle(50, seed=3, reshuffle_each_iteration=anew)

    class Gate(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            while self.epoch == 3 and batch == 2 and not Path(gates, "go").exists():
                time.sleep(0.01)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            session = elastic[0]._worker.session
            if loses and self.epoch == 4 and batch and session.completed_in.world_size == 3 and session.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    class Mean(keras.metrics.Mean):  # type: ignore[misc, name-defined]
        """Of the numbers of the samples."""

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            super().update_state(y_true)

    def note(epoch: int, numbers: list[int]) -> None:
        trained.setdefault(str(epoch), []).extend(numbers)

    keras.utils.set_random_seed(1)
    model = gated.model_that_notes(elastic, note)
    model.compile("sgd", "mse", metrics=[Mean(name="mean")], run_eagerly=True)
    if split:
        everything = shuffled(NUM_VAL + NUM, anew=split == "shuffled")
        validation, train = everything.take(NUM_VAL).batch(SIZE), everything.skip(NUM_VAL)
        train = (train.shuffle(50, seed=4) if split == "fixed" else train).batch(SIZE)
    else:
        validation, train = shuffled(NUM_VAL).batch(SIZE), shuffled(NUM).batch(SIZE)
    given = {"validation_data": validation, "verbose": 0}
    if is_augmented:
        train = train.map(lambda x, y: (x + tf.random.uniform(tf.shape(x), seed=os.getpid()), y), tf.data.AUTOTUNE)
    model.fit(train, epochs=2, callbacks=[Gate(), *elastic], **given)
    trained.clear()
    history = model.fit(train, epochs=5, initial_epoch=2, callbacks=[Gate(), *elastic], **given).history
    return {"trained": trained, "means": history["val_mean"]}
