"""The same in Keras: a `fit` in which one worker's layer, or one of its callbacks, raises."""

from __future__ import annotations

import os
import sys
import time

os.environ.update(KERAS_BACKEND=sys.argv[1], TF_CPP_MIN_LOG_LEVEL="3")

import keras
import numpy as np

import ef_keras
from ef_common.launch.process import this_worker


class Bug(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        time.sleep(0.05)
        if batch == 3 and this_worker().session.rank == 1:
            if "exit" in sys.argv:
                sys.exit(3)
            raise ValueError("this is a bug")


model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((400, 4), np.float32)
try:
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[Bug(), *ef_keras.callbacks(backend="gloo")])
except ValueError:
    if "catch" not in sys.argv:
        raise
    sys.stdout.write("it has something else to do\n")
    sys.stdout.flush()
    time.sleep(600)
