"""torchmetrics over an elastic session, and steps that leave no trace in any metric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric

from ef_common.collectives import operations
from ef_common.session import Session
from ef_lightning import hooks


class MetricSync:
    """Gathers the state of torchmetrics objects by our collectives, which survive a loss.

    All states of a metric travel together: they are then of the same members, whatever happens meanwhile, and a
    worker may hold more items in its lists than another.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connected: list[tuple[Metric, Any]] = []

    def connect(self, module: Module) -> None:
        """Connect every metric in the module that has no way of its own to synchronize."""
        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
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

    def available(self) -> bool:
        """Whether there are other members."""
        return self._session.completed_in.world_size > 1

    def gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """The tensor of every member, in rank order; shapes may differ."""
        parts, _ = operations.gather(self._session, value, what="a metric's state")
        return [part.to(value.device) for part in parts]

    def _synchronize(self, metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        own = {name: getattr(metric, name) for name in metric._reductions}
        parts, _ = operations.gather(self._session, own, what=f"state of {type(metric).__name__}")
        for name, reduction in metric._reductions.items():
            values = [part[name] for part in parts]
            if isinstance(own[name], list):
                joined: Any = [_to(item, metric.device) for value in values for item in value]
            else:
                joined = torch.stack([value.to(metric.device) for value in values])
            empty = isinstance(joined, list) and not joined
            setattr(metric, name, reduction(joined) if callable(reduction) and not empty else joined)


def _to(item: Any, device: torch.device) -> Any:
    return item.to(device) if isinstance(item, Tensor) else item


@contextmanager
def leaving_no_trace(trainer: Any) -> Iterator[None]:
    """Undo what a step on a batch that only keeps step adds to metrics and to what is logged over an epoch."""
    metrics = [m for m in trainer.lightning_module.modules() if isinstance(m, Metric)]
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
