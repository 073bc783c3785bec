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
from torchmetrics.utilities import dim_zero_max, dim_zero_min

from ef_common.collectives import torch_operations as operations
from ef_common.core.view import SOLO
from ef_common.launch.engines import NoGroups
from ef_common.session import Session
from ef_lightning import hooks


def metrics_of(module: Module) -> dict[str, Metric]:
    """The torchmetrics objects in a module, by name."""
    return {name: metric for name, metric in module.named_modules() if isinstance(metric, Metric)}


def num_updates(module: Module) -> dict[str, int]:
    """How often each metric has been updated since it was reset."""
    return {name: metric.update_count for name, metric in metrics_of(module).items()}


def metrics_within(module: Module, attribute: str) -> list[str]:
    """Names of the torchmetrics objects inside one of a module's, including itself."""
    whole = dict(module.named_modules()).get(attribute)
    parts = [] if whole is None else list(whole.modules())
    return [name for name, metric in metrics_of(module).items() if any(metric is part for part in parts)]


def state_of(metric: Metric) -> dict[str, Any]:
    """The accumulated state of a metric."""
    return dict(metric.metric_state)


def extremes_of(module: Module) -> dict[str, dict[str, Any]]:
    """State and number of updates of metrics that keep only largest or smallest values, such as `MaxMetric`, by name.

    The best value of a whole training is kept in one. A worker that takes over such a state adds nothing to what all
    workers have together.
    """
    return {
        name: {"state": state_of(metric), "updates": metric.update_count}
        for name, metric in metrics_of(module).items()
        if metric._reductions and all(reduce in (dim_zero_max, dim_zero_min) for reduce in metric._reductions.values())
    }


def take_extremes(module: Module, extremes: dict[str, dict[str, Any]]) -> None:
    """Take over these states of another worker."""
    metrics = metrics_of(module)
    for name in extremes.keys() & metrics.keys():
        metric = metrics[name]
        for key, value in extremes[name]["state"].items():
            setattr(metric, key, value.to(metric.device, copy=True))
        metric._update_count, metric._computed = extremes[name]["updates"], None


class MetricSync:
    """Gathers the state of torchmetrics objects with our collectives, which survive a loss.

    All states of a metric travel together: they are then of the same members, whatever happens meanwhile, and a
    worker may hold more items in its lists than another.

    Attributes:
        of_the_lost: State of a metric in each worker that has contributed to the evaluation at hand, and is not among
            these any more.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connected: dict[int, tuple[Metric, Any, Any]] = {}  # by identity, with the two functions that it had
        self._known: dict[int, list[dict[str, Any]]] = {}
        self._alone = False
        self.of_the_lost: Callable[[Metric, Sequence[str]], list[dict[str, Any]]] = lambda metric, present: []

    def connect(self, module: Module) -> None:
        """Connect every metric in the module that has no way of its own to synchronize. May be repeated."""
        for metric in metrics_of(module).values():
            if id(metric) in self._connected:
                continue
            own, available = metric.dist_sync_fn, metric.distributed_available_fn
            self._connected[id(metric)] = metric, own, available
            if own is not None:  # it may use the default process group
                metric.distributed_available_fn = partial(self._unless_alone, available)
                continue
            metric.dist_sync_fn = self.gather
            metric.distributed_available_fn = partial(self.available, metric)
            if type(metric)._sync_dist is Metric._sync_dist:
                metric._sync_dist = partial(self._synchronize, metric)  # type: ignore[method-assign]

    def disconnect(self) -> None:
        """Leave the metrics as they were, so that a model can be copied and pickled."""
        for metric, own, available in self._connected.values():
            metric.dist_sync_fn, metric.distributed_available_fn = own, available
            if own is None:
                metric.__dict__.pop("_sync_dist", None)
        self._connected = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricSync:
        """A copy of a metric has the same peers."""
        return self

    def __reduce__(self) -> tuple[Callable[[], MetricSync], tuple[()]]:
        """In a pickled metric, there are no peers."""
        return _without_peers, ()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within this context, compute a metric from this worker's own state."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def knowing(self, states: dict[int, list[dict[str, Any]]]) -> Iterator[None]:
        """Within this context, compute metrics (by identity) from these states, without gathering."""
        self._known = states
        try:
            yield
        finally:
            self._known = {}

    def available(self, metric: Metric) -> bool:
        """Whether there are other members, or were when a pass of this evaluation was completed."""
        if self._alone:
            return False
        if id(metric) in self._known:
            return len(self._known[id(metric)]) > 0
        members = self._session.completed_in
        return members.world_size > 1 or bool(self.of_the_lost(metric, members.ids))

    def _unless_alone(self, available: Callable[[], bool]) -> bool:
        return not self._alone and available()

    def gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """The tensor of every member in rank order; shapes may differ."""
        parts, _ = operations.gather(self._session, value, what="a metric's state")
        return [part.to(value.device) for part in parts]

    def _synchronize(self, metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
        own = state_of(metric)
        parts = self._known.get(id(metric))
        if parts is None:
            parts, view = operations.gather(self._session, own, what=f"state of {type(metric).__name__}")
            parts += self.of_the_lost(metric, view.ids)
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


class Traces:
    """What a step adds to metrics and to the logged values of an epoch, so that it can be undone.

    Args:
        trainer: The Trainer, before the step.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        metrics = metrics_of(trainer.lightning_module).values()
        self._metrics = [(m, {k: _copy(v) for k, v in state_of(m).items()}, m.update_count) for m in metrics]
        self._logged, self._live = hooks.logged_values(trainer), hooks.live_keys(trainer)

    def undo(self) -> None:
        """Undo it. May be repeated."""
        for metric, state, count in self._metrics:
            for name, value in state.items():
                setattr(metric, name, _copy(value))
            metric._update_count = count
            metric._computed = None
        hooks.set_logged_values(self._trainer, self._logged)
        hooks.empty_others(self._trainer, self._live)


@contextmanager
def leaving_no_trace(trainer: Any) -> Iterator[None]:
    """Undo what a padding step adds to metrics and to the logged values of an epoch."""
    traces = Traces(trainer)
    hooks.set_zero_batch_size(trainer)
    yield
    traces.undo()


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)
