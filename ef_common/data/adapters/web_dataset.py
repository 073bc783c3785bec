"""WebDataset pipelines over tar files."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

from ef_common.data.adapters.classes import is_a
from ef_common.data.seeds import numbers_of
from ef_common.data.shards import skipped
from ef_common.errors import UnsupportedError


def is_web_dataset(dataset: Any) -> bool:
    """Whether this is a `webdataset.DataPipeline`, such as a `WebDataset`."""
    return is_a(dataset, "webdataset.pipeline.DataPipeline")


class TarShards:
    """The tar files of a WebDataset pipeline, which is run on each of them.

    Stages before the one that opens tar files (they divide the files among nodes and data workers, or shuffle them) are
    left out: ElasticFlow deals the files. A `shuffle` of samples draws from a generator whose seed follows from the
    epoch and the file.

    Args:
        dataset: The pipeline.

    Raises:
        UnsupportedError: It draws its tar files at random, repeats them, or does not begin with a list of them.
    """

    def __init__(self, dataset: Any) -> None:
        source, *stages = dataset.pipeline
        opener = next((place for place, stage in enumerate(stages) if _opens(stage)), None)
        urls = getattr(source, "urls", None)
        if opener is None or type(source).__name__ != "SimpleShardList" or not urls:
            raise UnsupportedError(
                "a WebDataset can be dealt if it begins with a list of tar files, as in "
                'webdataset.WebDataset("data-{000..099}.tar", shardshuffle=False), and draws none of them at random. '
                f"Received: a pipeline that begins with {type(source).__name__}"
            )
        if dataset.repetitions != 1 or dataset.nsamples > 0:
            raise UnsupportedError(
                "a WebDataset with .repeat() or .with_epoch() has no end that all workers could share. Leave them out, "
                "and give the Trainer max_epochs, or limit_train_batches"
            )
        self._dataset = dataset
        self._urls = list(urls)
        self._stages = [stage for stage in stages[opener:] if _name(stage) != "check_empty"]
        self.is_shuffled = source.seed is not None or any(map(_shuffles, stages[:opener]))
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Samples are shuffled anew in each epoch."""
        self._epoch = epoch

    def shards(self) -> Sequence[str]:
        """The tar files."""
        return self._urls

    def open(self, shard: str, offset: int) -> Iterator[Any]:
        """Samples of a tar file from this one on; those before run through the pipeline, too."""
        pipeline = copy.copy(self._dataset)
        stages = [self._repeatable(stage, shard, number) for number, stage in enumerate(self._stages)]
        pipeline.pipeline = [[{"url": shard}], *stages]
        return skipped(pipeline, offset, what=shard)

    def _repeatable(self, stage: Any, shard: str, number: int) -> Any:
        """A stage that shuffles in the same way whenever this shard is read in this epoch."""
        if not _shuffles(stage):
            return stage
        stage = copy.copy(stage)
        if hasattr(stage, "epoch"):  # `detshuffle`, which counts its runs
            stage.epoch = self._epoch - 1
            return stage
        seed = numbers_of([self._epoch, number, *shard.encode()], 1)[0]
        stage.kw = {**stage.kw, "rng": random.Random(seed)}
        return stage


def _name(stage: Any) -> str:
    """Name of the function that a stage calls, or of its class."""
    function = getattr(stage, "f", stage)
    return getattr(function, "__name__", type(stage).__name__)


def _opens(stage: Any) -> bool:
    return _name(stage) in {"StreamingOpen", "FileCache", "url_opener", "tarfile_samples"}


def _shuffles(stage: Any) -> bool:
    size = getattr(stage, "bufsize", None) or next(iter(getattr(stage, "args", ())), 1)
    return _name(stage) in {"_shuffle", "detshuffle"} and bool(size)
