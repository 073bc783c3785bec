"""torchmetrics over an elastic session, and steps that leave no trace in any metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from ef_common.collectives import torch_operations as operations
from ef_common.collectives.engines import NoGroups
from ef_common.core.view import SOLO
from ef_common.session import Session
from ef_lightning import hooks


class Contributions:
    """What each worker has added to the metrics of an evaluation, known to all once a pass over a loader is complete.

    So a worker that is lost after it, but before the metrics are reduced, takes nothing along.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._counts = {name: metric._update_count for name, metric in self._metrics.items()}
        self._of: dict[str, Any] = {}

    @property
    def _metrics(self) -> dict[str, Metric]:
        return metrics_of(self._trainer.lightning_module)  # one may have been made meanwhile

    @property
    def num_workers(self) -> int:
        """Number of workers that have contributed."""
        return len(self._of)

    def own(self) -> dict[str, Any]:
        """This worker's, so far."""
        updated = {n: m for n, m in self._metrics.items() if m._update_count != self._counts.get(n, 0)}
        return {
            "logged": hooks.synced_totals(self._trainer),
            "metrics": {name: _state(metric) for name, metric in updated.items()},
        }

    def complete(self, found: dict[str, Any]) -> None:
        """A pass is complete, and everybody knows what each of its workers (by id) has contributed."""
        self._of.update(found)
        for key in hooks.synced_totals(self._trainer):
            totals = [c["logged"][key] for c in self._of.values() if key in c["logged"]]
            hooks.set_reduced(self._trainer, key, totals)

    def of_the_lost(self, metric: Metric, present: Sequence[str]) -> list[dict[str, Any]]:
        """State of a metric in each worker that has contributed, and is not there any more."""
        name = next((name for name, other in self._metrics.items() if other is metric), None)
        lost = [contribution["metrics"] for worker, contribution in self._of.items() if worker not in present]
        return [states[name] for states in lost if name in states]


def metrics_of(module: Module) -> dict[str, Metric]:
    """The torchmetrics objects in a module, by name."""
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def _state(metric: Metric) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in metric._reductions}


class MetricSync:
    """Gathers the state of torchmetrics objects by our collectives, which survive a loss.

    All states of a metric travel together: they are then of the same members, whatever happens meanwhile, and a
    worker may hold more items in its lists than another.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connected: list[tuple[Metric, Any]] = []
        self.evaluation: Contributions | None = None

    def connect(self, module: Module) -> None:
        """Connect every metric in the module that has no way of its own to synchronize."""
        for metric in metrics_of(module).values():
            if metric.dist_sync_fn is None:
                self._connected.append((metric, metric.distributed_available_fn))
                metric.dist_sync_fn = self.gather
                metric.distributed_available_fn = self.available
                if type(metric)._sync_dist is Metric._sync_dist:
                    metric._sync_dist = partial(self._synchronize, metric)  # type: ignore[method-assign]

    def disconnect(self) -> None:
        """Leave the metrics as they were, so that a model can be copied and pickled."""
        for metric, available in self._connected:
            metric.dist_sync_fn = None
            metric.distributed_available_fn = available
            metric.__dict__.pop("_sync_dist", None)
        self._connected = []

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricSync:
        """A copy of a metric has the same peers."""
        return self

    def __reduce__(self) -> tuple[Callable[[], MetricSync], tuple[()]]:
        """In a pickled metric, there are no peers."""
        return _without_peers, ()

    def available(self) -> bool:
        """Whether there are other members, or were when a pass of this evaluation was completed."""
        contributors = 0 if self.evaluation is None else self.evaluation.num_workers
        return max(self._session.completed_in.world_size, contributors) > 1

    def gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """The tensor of every member, in rank order; shapes may differ."""
        parts, _ = operations.gather(self._session, value, what="a metric's state")
        return [part.to(value.device) for part in parts]

    def _synchronize(self, metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        own = _state(metric)
        parts, view = operations.gather(self._session, own, what=f"state of {type(metric).__name__}")
        if self.evaluation is not None:
            parts += self.evaluation.of_the_lost(metric, view.ids)
        for name, reduction in metric._reductions.items():
            values = [part[name] for part in parts]
            if isinstance(own[name], list):
                joined: Any = [_to(item, metric.device) for value in values for item in value]
            else:
                joined = torch.stack([value.to(metric.device) for value in values])
            empty = isinstance(joined, list) and not joined
            setattr(metric, name, reduction(joined) if callable(reduction) and not empty else joined)


def _without_peers() -> MetricSync:
    return MetricSync(Session(SOLO.members[0], channel=None, groups=NoGroups()))


def _to(item: Any, device: torch.device) -> Any:
    return item.to(device) if isinstance(item, Tensor) else item


@contextmanager
def leaving_no_trace(trainer: Any) -> Iterator[None]:
    """Undo what a step on a batch that only keeps step adds to metrics and to what is logged over an epoch."""
    metrics = metrics_of(trainer.lightning_module).values()
    states = [{name: _copy(getattr(metric, name)) for name in metric._defaults} for metric in metrics]
    counts = [metric._update_count for metric in metrics]
    logged = hooks.logged_values(trainer)
    hooks.set_zero_batch_size(trainer)
    yield
    for metric, state, count in zip(metrics, states, counts, strict=True):
        for name, value in state.items():
            setattr(metric, name, value)
        metric._update_count = count
        metric._computed = None
    hooks.set_logged_values(trainer, logged)


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
