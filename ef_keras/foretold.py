"""Batches that a DataLoader reads before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ef_common.data.torch_loader import PlannedLoader
from ef_keras.ordered import Coming


class ForetoldBatches:
    """Reads the batches that are asked for. A batch that was read ahead is dropped if another one is asked for.

    Args:
        planned: Reads them.
        items: Returns what to read for a batch of these positions.
    """

    def __init__(self, planned: PlannedLoader, items: Callable[[Sequence[int]], list[Any]]) -> None:
        self._planned = planned
        self._items = items
        self._foretold: Coming = _nothing
        self._coming: Iterator[list[int]] = iter(())

    def begin(self) -> None:
        """Begin an epoch."""
        self._planned.begin()
        self._coming = iter(())

    def expect(self, coming: Coming) -> None:
        """Expect requests for these batches next."""
        self._foretold = coming

    def batch(self, positions: Sequence[int]) -> Any:
        """The batch of these positions, as the loader makes it."""
        wanted = list(positions)
        if next(self._coming, None) != wanted:
            self._plan(wanted)
        return self._planned.next()

    def apart(self, items: list[Any]) -> Any:
        """A batch of these items, which nobody expects. It is read where the loader reads all others."""
        self._coming = iter(())
        self._planned.read(lambda start: islice(iter([items]), start, None))
        return self._planned.next()

    def close(self) -> None:
        """End the data workers. May be repeated."""
        self._planned.close()
        self._coming = iter(())

    def _plan(self, wanted: list[int]) -> None:
        foretold, self._foretold = self._foretold, _nothing
        # It is the second one if it is prepared while the worker waits for gradients.
        skip = next((number for number, one in enumerate(islice(foretold(), 2)) if one == wanted), None)
        if skip is None:
            foretold, skip = partial(iter, [wanted]), 0
        self._coming = islice(foretold(), skip + 1, None)
        self._planned.read(lambda start: map(self._items, islice(foretold(), skip + start, None)))


def _nothing() -> Iterator[list[int]]:
    return iter(())
