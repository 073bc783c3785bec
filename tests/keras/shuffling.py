"""Programs whose data sets shuffle themselves; each worker tells which samples its updates were made of."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from elasticflow import streams
from tests.keras import gated

NUM, SIZE = 240, 4


def started_again(backend: str, folder: str, kind: str) -> list[Any]:
    """What two trainings of this kind have trained on, of which the first one breaks off."""
    return gated.started_again(partial(program, backend, folder, kind), folder)


def program(
    backend: str,
    gates: str,
    kind: str,
    steps_per_epoch: int | None = None,
    shift: float = 0.0,
    *,
    checkpoint: Any = None,
    breaks_off: bool = False,
) -> Any:
    """Train for four epochs; wait in the second one.

    Args:
        backend: Of Keras.
        gates: Folder in which a file "go" ends the wait.
        kind: Of the data.
        steps_per_epoch: Of `fit`.
        shift: What is added to the samples.
        checkpoint: Where to save.
        breaks_off: In the second epoch, when all is saved.

    Returns:
        For each epoch, the numbers of the samples that this worker has trained on; or what was raised.
    """
    importlib.import_module(f"tests.keras.on_{backend}")
    keras = importlib.import_module("keras")
    ef_keras = importlib.import_module("ef_keras")
    found: dict[int, list[int]] = {}
    np.random.seed(os.getpid())  # as in processes that no server has forked
    random.seed(os.getpid())
    elastic = ef_keras.callbacks(checkpoint=checkpoint)

    class Numbered(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        """Shuffled as tutorials do it: before the first epoch already, and in place, or from a generator of its own."""

        def __init__(self) -> None:
            readers = {"in threads": {"workers": 3}, "in processes": {"workers": 2, "use_multiprocessing": True}}
            super().__init__(**readers.get(kind, {}))
            self.order, self.dice = np.arange(NUM), np.random.default_rng()
            self.on_epoch_end()

        def __len__(self) -> int:
            return NUM // SIZE

        def __getitem__(self, index: int) -> Any:
            y = self.order[index * SIZE : (index + 1) * SIZE].astype("float32")
            return y[:, None] * np.ones((1, 3), "float32") / NUM + shift, y

        def on_epoch_end(self) -> None:
            if kind.startswith("in "):
                np.random.shuffle(self.order)
            elif kind == "generator":
                self.order = self.dice.permutation(NUM)
            elif kind == "subset":  # of more samples, by nothing that workers share
                self.order = np.array(random.SystemRandom().sample(range(10 * NUM), NUM))

    def endless_generator() -> Any:
        while True:
            yield from one_pass()

    def one_pass() -> Any:
        for start in range(0, NUM, SIZE):
            y = np.arange(start, start + SIZE).astype("float32")
            yield y[:, None] * np.ones((1, 3), "float32") / NUM, y

    def of_unknown_length() -> Any:
        tf = importlib.import_module("tensorflow")
        spec = (tf.TensorSpec((SIZE, 3), tf.float32), tf.TensorSpec((SIZE,), tf.float32))
        return tf.data.Dataset.from_generator(one_pass, output_signature=spec)

    def of_files() -> Any:
        return ef_keras.dataset(SOURCES[kind](gates), batch_size=SIZE, map=_sample, shuffle_buffer=5)

    def note(epoch: int, numbers: list[int]) -> None:
        found.setdefault(epoch, []).extend(numbers)

    model = gated.model_that_notes(elastic, note)
    model.compile("sgd", "mse", run_eagerly=True)
    pauses = gated.gate(elastic, gates, breaks_off=breaks_off)()
    others = {"endless generator": endless_generator, "unknown length": of_unknown_length}
    made = of_files if kind in SOURCES else others.get(kind, Numbered)
    try:
        model.fit(made(), epochs=4, steps_per_epoch=steps_per_epoch, verbose=0, callbacks=[pauses, *elastic])
    except gated.BreaksOffError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    left = [thread.name for thread in threading.enumerate() if "reads-ahead" in thread.name]
    assert not left
    assert not multiprocessing.active_children()
    return {epoch: sorted(numbers) for epoch, numbers in found.items()}


# ---------------------------------------------------------------- files of numbers

FILES = [range(100), range(100, 103), range(103, NUM)]


def _sample(number: Any) -> Any:
    """The number comes as JSON, as a row, as a record or as an array."""
    y = np.float32(number["number"] if isinstance(number, dict) else np.asarray(number).item())
    return y * np.ones(3, "float32") / NUM, y


def _write_lines(folder: str) -> None:
    for index, numbers in enumerate(FILES):
        Path(folder, f"{index}.jsonl").write_text("".join(f'{{"number": {number}}}\n' for number in numbers))


def _write_records(folder: str) -> None:
    for index, numbers in enumerate(FILES):
        records = [np.int64(number).tobytes() for number in numbers]
        data = b"".join(len(one).to_bytes(8, "little") + bytes(4) + one + bytes(4) for one in records)
        Path(folder, f"{index}.tfrecord").write_bytes(data)


def _write_texts(folder: str) -> None:
    for index, numbers in enumerate(FILES):
        Path(folder, f"{index}.txt").write_text("".join(f"{number}\n" for number in numbers))


def _write_rows(folder: str) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    for index, numbers in enumerate(FILES):
        parquet.write_table(arrow.table({"number": list(numbers)}), Path(folder, f"{index}.parquet"), row_group_size=40)


def _lines(folder: str) -> Any:
    return streams.TextLines(f"{folder}/*.jsonl", json.loads)


def _rows(folder: str) -> Any:
    return streams.ParquetRows(f"{folder}/*.parquet")


def _records(folder: str) -> Any:
    return streams.TFRecords(f"{folder}/*.tfrecord", lambda data: np.frombuffer(data, np.int64))


def _tf_data(folder: str) -> Any:
    tf = importlib.import_module("tensorflow")

    def read(name: str) -> Any:
        return tf.data.TextLineDataset(name).map(tf.strings.to_number, num_parallel_calls=2)

    return streams.TFDataFiles(f"{folder}/*.txt", read)


def _hugging_face(folder: str) -> Any:
    datasets = importlib.import_module("datasets")
    files = [f"{folder}/{index}.jsonl" for index in range(len(FILES))]
    made = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=f"{folder}/cache")
    return made.shuffle(seed=1, buffer_size=7)


WRITERS = {
    "lines": _write_lines,
    "parquet": _write_rows,
    "records": _write_records,
    "tf.data": _write_texts,
    "datasets": _write_lines,
}
SOURCES = {
    "lines": _lines,
    "parquet": _rows,
    "records": _records,
    "tf.data": _tf_data,
    "datasets": _hugging_face,
}


def evaluation(backend: str, gates: str) -> dict[str, Any]:
    """Evaluate data of unknown length, by plain Keras and by all workers; wait in the second batch."""
    importlib.import_module(f"tests.keras.on_{backend}")
    keras = importlib.import_module("keras")
    ef_keras = importlib.import_module("ef_keras")
    features = importlib.import_module("tests.keras.features")

    class Gate(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                Path(gates, f"waits-{os.getpid()}").touch()
                while not Path(gates, "go").exists():
                    time.sleep(0.01)

    keras.utils.set_random_seed(1)
    model = features.compiled(features.net())
    results = [
        model.evaluate(features.of_unknown_length(8, 189), verbose=0, callbacks=callbacks, return_dict=True)
        for callbacks in ([], [Gate(), *ef_keras.callbacks()])
    ]
    return {name: [result[name] for result in results] for name in results[0]}
