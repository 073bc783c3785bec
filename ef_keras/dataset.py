"""`ef_keras.dataset(…)`: data of which each worker reads only the samples that it trains on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ef_common.core import sharding
from ef_common.data.adapters.recognition import shards_of
from ef_common.data.global_batches import check_size
from ef_common.data.ordered_stream import OnBadShard
from ef_common.errors import UsageError
from ef_keras.collating import mapped, stacked
from ef_keras.stream_data import streamed


def dataset(
    samples: Any,
    *,
    batch_size: int = 32,
    map: Callable[..., Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    global_batch_size: int | None = None,
    shuffle_buffer: int = 0,
    on_bad_shard: OnBadShard = "raise",
) -> Any:
    """Data for `fit` and `evaluate` whose samples are read one by one, by the worker that needs them.

    Example::

        paths, labels = np.array(paths), np.array(labels)
        model.fit(ef_keras.dataset((paths, labels), map=load, batch_size=64), callbacks=ef_keras.callbacks())

    Args:
        samples: An array, a tuple of arrays of the same length (x, y and sample weights), or any object with `__len__`
            and `__getitem__(index)` that returns one sample. Or a stream of shards, which has `shards()` and
            `open(shard, offset)` (see :class:`ef_common.data.shards.ShardStream`), or is one of those that the guide to
            the sources of streams names.
        batch_size: Samples of one worker in a step.
        map: Turns one sample into what the model sees. It is called with the parts of the sample, and returns the same
            structure for all samples.
        shuffle: Whether each epoch has an order of its own. In an elastic `fit`, the order depends on the seed of the
            job. The shards of a stream are shuffled, and the samples in a shard with `shuffle_buffer`.
        seed: Seed of the order when there is no job.
        global_batch_size: Samples of an update, which the workers share; see :func:`ef_keras.callbacks`. A worker then
            reads at most `batch_size` of them at a time. A stream must know the lengths of all its shards then.
        shuffle_buffer: Samples of a shard of a stream are shuffled in a buffer of this size, also without `shuffle`.
        on_bad_shard: Whether a shard that cannot be read ends the training ("raise"), or the rest of it is left out
            with a warning and an event ("skip").

    Raises:
        UnsupportedError: A data set of another library cannot be dealt with its settings.
        UsageError: Samples cannot be read one by one, their numbers differ, a stream has none, or a setting is invalid.
    """
    check_size(global_batch_size)
    recognized = shards_of(samples)
    if recognized is not None:
        settings = {"shuffle": shuffle, "shuffle_buffer": shuffle_buffer, "seed": seed, "on_bad_shard": on_bad_shard}
        return streamed(recognized[0], batch_size=batch_size, map=map, global_batch_size=global_batch_size, **settings)
    if shuffle_buffer or on_bad_shard != "raise":
        raise UsageError(
            "shuffle_buffer and on_bad_shard are settings of a stream of shards, an object with `shards()` and "
            f"`open(shard, offset)`. Received: samples={type(samples).__name__}"
        )
    data = SampleDataset(samples, batch_size=batch_size, map=map, shuffle=shuffle, seed=seed)
    data.global_batch_size = global_batch_size
    return data


class SampleDataset(keras.utils.PyDataset):
    """The result of :func:`dataset`. To Keras it is a `PyDataset`; an elastic `fit` asks it for samples."""

    def __init__(
        self, samples: Any, *, batch_size: int, map: Callable[..., Any] | None, shuffle: bool, seed: int
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise UsageError(f"a batch has at least one sample. Received: batch_size={batch_size}")
        self._columns = tuple(samples) if isinstance(samples, tuple) else None
        if self._columns is None and not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
            raise UsageError(
                "samples must be arrays, or have __len__ and __getitem__, so that a worker can read those that it "
                f"needs. Pass a tf.data.Dataset or a PyDataset to fit() itself. Received: {type(samples).__name__}"
            )
        self._samples = samples
        lengths = {len(part) for part in self.parts}
        if len(lengths) != 1:
            raise UsageError(f"all parts must have as many samples. Received: lengths={sorted(lengths)}")
        self._map = map
        self._seed, self._epoch = seed, 0
        self.sample_batch_size = int(batch_size)
        self.shuffle = shuffle
        self.global_batch_size: int | None = None
        (self.num_samples,) = lengths
        self._order = self._make_order()

    @property
    def parts(self) -> tuple[Any, ...]:
        """What the samples are in: an array of each of their parts, or the user's data set."""
        return self._columns or (self._samples,)

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-self.num_samples // self.sample_batch_size)

    def __getitem__(self, index: int) -> Any:
        """A batch for a process without a job."""
        first = index * self.sample_batch_size
        return self.batch(self._order[first : first + self.sample_batch_size].tolist())

    def on_epoch_end(self) -> None:
        """The next epoch has another order."""
        self._epoch += 1
        self._order = self._make_order()

    def batch(self, indices: Sequence[int], before: Callable[[int], None] = lambda number: None) -> Any:
        """The stacked parts of these samples. `before` is called with the number of each sample."""
        samples = []
        for number, index in enumerate(indices):
            before(number)
            samples.append(self._sample(index))
        return stacked(samples)

    def _sample(self, index: int) -> Any:
        parts = self._samples[index] if self._columns is None else tuple(column[index] for column in self._columns)
        return mapped(parts, self._map)

    def _make_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return sharding.shuffled(self.num_samples, seed=self._seed, epoch=self._epoch)
