"""torchmetrics over an elastic session: their state is gathered by our collectives, which survive a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Module

from ef_common.collectives import operations
from ef_common.session import Session


class MetricSync:
    """What torchmetrics calls to gather a state tensor, and to ask whether there is anybody to gather from."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def gather(self, value: Tensor, group: Any = None) -> list[Tensor]:
        """The tensor of every member, in rank order; shapes may differ."""
        parts, _ = operations.gather(self._session, value, what="a metric's state")
        return [part.to(value.device) for part in parts]

    def available(self) -> bool:
        """Whether there are other members."""
        return self._session.view.world_size > 1

    def connect(self, module: Module) -> None:
        """Connect every metric in the module that has no way of its own to synchronize."""
        from torchmetrics import Metric

        for metric in module.modules():
            if isinstance(metric, Metric) and metric.dist_sync_fn is None:
                metric.dist_sync_fn = self.gather
                metric.distributed_available_fn = self.available
