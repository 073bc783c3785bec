"""What a reader of the documentation has already: a model, data, the imports of the program around a block.

Each function without an underscore returns names, in which a block is run (`tests.pages.rows` says which). What a block
defines and leaves to the reader to use is used by the functions of `tests.pages.uses`.
"""

from __future__ import annotations

import csv
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ef_keras
import ef_lightning

NUM_CLASSES = 3
_FEATURES = 4
_BATCH = 8


class Classifier(pl.LightningModule):
    """As a user writes it. `STEP_SECONDS` makes it slow, so that there is time to interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)

    def _loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(_FEATURES, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))


def arrays(length: int = 0) -> tuple[Any, Any]:
    """Points, and which of their first coordinates is the largest. `SAMPLES` says of how many a training is made."""
    length = length or int(os.environ.get("SAMPLES", "120"))
    x = np.random.default_rng(3).normal(size=(length, _FEATURES)).astype("float32")
    return x, x[:, :NUM_CLASSES].argmax(1)


def tensors(length: int = 0) -> tuple[Tensor, Tensor]:
    x, y = arrays(length)
    return torch.from_numpy(x), torch.from_numpy(y)


def loader(length: int = 0) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors(length)), _BATCH, shuffle=not length)


def keras_model() -> Any:
    model = keras.Sequential([keras.Input((_FEATURES,)), keras.layers.Dense(NUM_CLASSES, activation="softmax")])
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


# ---------------------------------------------------------------- what rows name


def nothing() -> dict[str, Any]:
    """For a block that says all itself, or goes on with what stands above it in its page."""
    return {}


def lightning() -> dict[str, Any]:
    return {"model": Classifier(), "train_loader": loader(), "val_loader": loader(30), "test_loader": loader(30)}


def of_keras() -> dict[str, Any]:
    x, y = arrays()
    early = partial(keras.callbacks.EarlyStopping, monitor="loss")
    return {"keras": keras, "model": keras_model(), "x": x, "y": y, "EarlyStopping": early}


def forward() -> dict[str, Any]:
    (x, y), (x_val, y_val) = tensors(), tensors(30)
    return {"Net": net, "partial": partial, "torch": torch, "F": F, "x": x, "y": y, "x_val": x_val, "y_val": y_val}


def by_hand() -> dict[str, Any]:
    """Of a program of one `forward` with a Trainer of its own; its net is for other data."""
    data = TensorDataset(tensors()[0], tensors()[1] % 2)
    loader_of_two = DataLoader(data, _BATCH, shuffle=True)
    return {"nn": nn, "Trainer": pl.Trainer, "ef_lightning": ef_lightning, "loader": loader_of_two, **forward()}


def regression() -> dict[str, Any]:
    x, _ = arrays()
    return {"keras": keras, "ef_keras": ef_keras, "x": x, "y": x[:, :2]}


def files() -> dict[str, Any]:
    """The file of each sample, and what reads it."""
    x, y = arrays()
    for number, values in enumerate(x):
        np.save(f"{number}.npy", values)

    def load(path: Any, label: Any) -> Any:
        return np.load(f"{path}.npy"), label

    return {**of_keras(), "ef_keras": ef_keras, "np": np, "paths": range(len(x)), "labels": y, "load": load}


def files_of_arrays() -> dict[str, Any]:
    """Files with several samples each."""
    x, y = arrays()
    Path("data").mkdir(exist_ok=True)
    for number in range(4):
        np.savez(f"data/{number}.npz", x=x[number::4], y=y[number::4])
    return of_keras()


def files_of_records() -> dict[str, Any]:
    """Files of TFRecords, and what makes a sample of one."""
    import tensorflow as tf

    x, y = arrays()
    Path("data").mkdir(exist_ok=True)
    for number, rows in enumerate(np.array_split(np.column_stack([x, y]).astype("float32"), 3)):
        with tf.io.TFRecordWriter(f"data/{number}.tfrecord") as writer:
            for row in rows:
                writer.write(tf.io.serialize_tensor(row).numpy())

    def parse(record: Any) -> Any:
        row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), (x.shape[1] + 1,))
        return row[:-1], row[-1]

    return {**of_keras(), "parse": parse}


def rows_of_csv() -> dict[str, Any]:
    """A file of numbers, and a model of them."""
    x, y = arrays()
    np.savetxt("train.csv", np.column_stack([x, y]), delimiter=",")
    return {**_on_streams(), "csv": csv, "torch": torch, "IterableDataset": IterableDataset, "Trainer": pl.Trainer}


def files_of_samples() -> dict[str, Any]:
    """Samples in files of lines and in a table."""
    import pyarrow
    from pyarrow import parquet

    x, y = arrays()
    Path("data").mkdir(exist_ok=True)
    for number, rows in enumerate(np.array_split(np.column_stack([x, y]), 3)):
        lines = [json.dumps({"x": [float(value) for value in row[:-1]], "y": [float(row[-1])]}) for row in rows]
        Path(f"data/{number}.jsonl").write_text("\n".join(lines))
        parquet.write_table(pyarrow.table({"text": rows[:, 0], "label": rows[:, -1]}), f"data/{number}.parquet")
    return {**_on_streams(), "trainer": pl.Trainer(strategy=ef_lightning.ElasticFlowStrategy(), max_epochs=1)}


def _on_streams() -> dict[str, Any]:
    return {"DataLoader": DataLoader, "model": Regressor()}


class Regressor(pl.LightningModule):
    """Takes what the streams of the guides yield."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(_FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch.values() if isinstance(batch, dict) else batch
        x, y = (torch.stack(tuple(part), -1) if isinstance(part, (list, tuple)) else part for part in (x, y))
        return F.mse_loss(self.net(x.float()), y.float())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def notebook() -> dict[str, Any]:
    return {"Trainer": pl.Trainer, "Model": Classifier, "loader": loader}


def launched() -> dict[str, Any]:
    import elasticflow

    return {"ef": elasticflow, "train": train}


def train(epochs: int) -> dict[str, Any]:
    """The function that is launched from a notebook."""
    trainer = pl.Trainer(strategy=ef_lightning.ElasticFlowStrategy(), max_epochs=epochs)
    trainer.fit(Classifier(), loader())
    return trainer.callback_metrics


def both() -> dict[str, Any]:
    """Of a page that tells of both frameworks."""
    modules = {"pl": pl, "ef_keras": ef_keras, "ef_lightning": ef_lightning}
    strategies = {"ElasticFlowStrategy": ef_lightning.ElasticFlowStrategy, "Trainer": pl.Trainer}
    return {**of_keras(), **strategies, **modules}
