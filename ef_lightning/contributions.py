"""Each worker's contribution to an evaluation, known to all once a pass over a loader is complete.

So a worker that is lost after it takes nothing along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchmetrics import Metric

from ef_lightning import hooks
from ef_lightning.metrics import metrics_of, metrics_within, num_updates, state_of


class Contributions:
    """The contributions to one validation or test.

    Args:
        trainer: The Trainer.
        take: Called with the contributions of all workers, in an order that is the same in all of them, when a pass is
            complete.
    """

    def __init__(self, trainer: Any, take: Callable[[list[dict[str, Any]]], None]) -> None:
        self._trainer = trainer
        self._take = take
        self._counts = num_updates(trainer.lightning_module)
        self._of: dict[str, Any] = {}
        self.num_samples = 0

    @property
    def _metrics(self) -> dict[str, Metric]:
        return metrics_of(self._trainer.lightning_module)  # one may have been made meanwhile

    @property
    def num_workers(self) -> int:
        """Number of workers that have contributed."""
        return len(self._of)

    def own(self, num_samples: int) -> dict[str, Any]:
        """This worker's contribution so far.

        Args:
            num_samples: That it has evaluated since it was asked last.
        """
        self.num_samples += num_samples
        logged = hooks.epoch_results(self._trainer)
        counts = num_updates(self._trainer.lightning_module)
        names = {name for name, count in counts.items() if count != self._counts.get(name, 0)}
        for entry in logged.values():
            if not entry["is_tensor"]:
                names.update(metrics_within(self._trainer.lightning_module, entry["fields"]["metric_attribute"]))
        metrics = self._metrics
        return {"logged": logged, "metrics": {name: state_of(metrics[name]) for name in sorted(names)}}

    def complete(self, found: dict[str, Any]) -> None:
        """A pass is complete: all workers know what each of its workers (by id) has contributed."""
        self._of.update(found)
        self._take(list(self._of.values()))
        for contribution in self._of.values():
            for entry in contribution["logged"].values():
                entry["pending"] = False

    def states_of_the_lost(self, present: Sequence[str]) -> list[dict[str, Any]]:
        """Metric states of contributors that are no longer among these workers."""
        return [found["metrics"] for worker, found in self._of.items() if worker not in present]

    def of_the_lost(self, metric: Metric, present: Sequence[str]) -> list[dict[str, Any]]:
        """The state of one metric in each of them."""
        name = next((name for name, other in self._metrics.items() if other is metric), None)
        return [states[name] for states in self.states_of_the_lost(present) if name in states]
