"""What the loaders of all evaluations have in common: a pass that begins, and is over once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, NoReturn

from ef_lightning.data_workers import WrappedLoader
from ef_lightning.evaluation import Evaluation


class EvaluatedLoader(WrappedLoader):
    """Wraps one of the user's evaluation loaders, or several that are read together.

    Args:
        loader: The user's loader, or what stands for several.
        planned: Reads its batches.
        evaluation: What it is evaluated for.
        shown: What the user sees in its place; the loader itself if there is nothing else.

    Attributes:
        padding: The current batch only keeps step with the other workers, and counts nowhere.
    """

    def __init__(self, loader: Any, planned: Any, evaluation: Evaluation, *, shown: Any = None) -> None:
        super().__init__(loader, planned, shown=shown)
        self._evaluation = evaluation
        self._is_over = False
        self.padding = False

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass."""
        self._is_over = False
        self._begin()
        return self

    def __next__(self) -> Any:
        if self._is_over:  # a CombinedLoader may ask again in each step of the others
            raise StopIteration
        return self._batch()

    @abstractmethod
    def _begin(self) -> None:
        """Begin a pass."""

    @abstractmethod
    def _batch(self) -> Any:
        """The next batch, or `_end`."""

    def _end(self) -> NoReturn:
        """The pass is over."""
        self._is_over = True
        self._evaluation.end()
        raise StopIteration
