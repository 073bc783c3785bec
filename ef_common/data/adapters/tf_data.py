"""Files that a pipeline of `tf.data` reads: as for `interleave`, a function makes a dataset from the name of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ef_common.data.adapters.files import expanded
from ef_common.errors import UsageError


class TFDataFiles:
    """A stream of the elements of `tf.data` datasets, one of each file; a file is a shard.

    It takes the function that you would pass to `interleave`. The elements are the samples, as NumPy arrays: leave out
    `batch`, `repeat` and `shuffle`, because ElasticFlow does that.

    Args:
        urls: Paths or URLs of the files, or patterns of them (`*`), which TensorFlow can open.
        dataset: Makes the dataset of a file from the file's name.

    Example:
        >>> from elasticflow.streams import TFDataFiles
        >>> files = TFDataFiles("data/*.tfrecord", lambda name: tf.data.TFRecordDataset(name).map(parse))
        ... # doctest: +SKIP
    """

    def __init__(self, urls: str | Iterable[str], dataset: Callable[[str], Any]) -> None:
        self._urls = expanded(urls)
        self._dataset = dataset

    def shards(self) -> Sequence[str]:
        """The files."""
        return self._urls

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        """Samples of a file from this one on. Those before it run through the pipeline, too.

        Raises:
            UsageError: The function has returned something else, or a dataset without an end or without an order.
        """
        return iter(self._opened(shard).skip(offset).as_numpy_iterator())

    def _opened(self, shard: str) -> Any:
        import tensorflow as tf  # takes seconds, and a program that makes such datasets has imported it

        made = self._dataset(shard)
        if not isinstance(made, tf.data.Dataset):
            raise UsageError(
                "expected a function that makes a tf.data.Dataset from the name of a file. "
                f"Received: {type(made).__name__} for {shard}"
            )
        if int(made.cardinality()) == tf.data.INFINITE_CARDINALITY:
            raise UsageError(f"the dataset of a file has no end: leave `repeat` out. Received: file {shard}")
        options = tf.data.Options()
        options.deterministic = True  # each worker must find the same samples at the same offsets
        made = made.with_options(options)
        if _has_no_order(made):
            raise UsageError(
                "the dataset of a file has a part with `deterministic=False`, so its samples come in another order "
                f"each time, and a sample could be used twice or never. Leave that out. Received: file {shard}"
            )
        return made


def _has_no_order(dataset: Any) -> bool:
    """Whether a part of it says so itself, which counts more than the options of the whole."""
    import tensorflow as tf

    variant, ignore_state = tf.data.experimental.to_variant(dataset), 1
    text = tf.raw_ops.DatasetToGraphV2(input_dataset=variant, external_state_policy=ignore_state).numpy()
    graph = tf.compat.v1.GraphDef.FromString(text)
    nodes = chain(graph.node, *(function.node_def for function in graph.library.function))
    return any(node.attr["deterministic"].s == b"false" for node in nodes if "deterministic" in node.attr)
