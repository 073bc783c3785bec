"""Learning rates that a callback, or a hook of the module, may set from what one worker sees.

`optimizer.param_groups` are each worker's own, so workers that decide by the loss of their own batches would make
different updates. The rates travel with the flags of each reduction, without a message of their own, and all workers
go on with the first one's when it ends. What is set between that and the update is each worker's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from math import isnan, nan
from numbers import Real
from typing import Any

from torch import Tensor

logger = logging.getLogger(__name__)

MAX_RATES = 8
"""Rates of more parameter groups are left to each worker. All reductions have room for as many, so that groups may be
added at any time, and newcomers agree with those who have begun before."""


class SharedRates:
    """The learning rates of a strategy's optimizers.

    Args:
        strategy: Has the optimizers, which may be others in each step.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._has_warned = False

    def own(self) -> list[float]:
        """Those of this worker's first groups, always as many; NaN where there is none that can be read at once."""
        rates = [_number(group) for group in self._groups()]
        return rates + [nan] * (MAX_RATES - len(rates))

    def take(self, rates: Sequence[float]) -> None:
        """Set those that the first worker has, see :meth:`own`. Whoever had others warns, once."""
        for group, rate in zip(self._groups(), rates, strict=False):
            own = _number(group)
            if own == rate or isnan(own) or isnan(rate):
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].detach().fill_(rate)
            else:
                group["lr"] = rate
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "this worker's learning rate was not that of the first worker, because code sets it from what one "
                    "worker sees, such as the loss of its own batch. It goes on with the first one's. To use what all "
                    "workers see, log the value with sync_dist=True, or call self.all_gather. "
                    "Received: %g, and %g in the first worker",
                    own,
                    rate,
                )

    def _groups(self) -> Iterator[dict[str, Any]]:
        groups = (group for optimizer in self._strategy.optimizers for group in optimizer.param_groups)
        return islice(groups, MAX_RATES)


def _number(group: dict[str, Any]) -> float:
    """The rate of a group; NaN if it is on a device, as all would wait for that, or if it is no number."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return float(rate.detach()) if rate.numel() == 1 and rate.device.type == "cpu" else nan
    return float(rate) if isinstance(rate, Real) else nan
