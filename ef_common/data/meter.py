"""What loggers show about the workers of a training: their number, their speed, the cost of changes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ef_common.core.throughput import SpeedHistory
from ef_common.data.autoscaler import Autoscaler
from ef_common.session import Session

_OF_SIZE = ("wanted_nodes", "samples_per_s_spread", "change_s", "noise_scale")
COLUMNS = ("world_size", "samples_per_s", "pause_s", "lr_scale", "global_batch_size", *_OF_SIZE)
"""All columns that loggers get, the last four only if the job chooses its size; if optimizers have different rules,
each has an `lr_scale/NAME`."""


class _Reading(NamedTuple):
    time: float
    num_samples: float
    paused_s: float


class Meter:
    """Measures a training from one log row to the next.

    Args:
        session: The worker's session.
        autoscaler: Chooses the number of nodes, if anything does.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self,
        session: Session,
        autoscaler: Autoscaler | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._autoscaler, self._clock = session, autoscaler, clock
        self._before = self._read()

    def _read(self) -> _Reading:
        return _Reading(self._clock(), self._session.stats.num_samples_trained, self._session.stats.paused_s)

    def row(self) -> dict[str, float]:
        """The values to log now.

        Returns:
            `world_size`, the number of workers; and since the row before, or since the beginning: `samples_per_s`, the
            samples that all workers have trained on per second; and `pause_s`, the seconds for which training has
            paused because workers came or went. If the job chooses its number of nodes, `wanted_nodes`, too, and what
            it has learned, once it is known: `samples_per_s_spread`, the standard deviation of the throughput within
            the newest measure; `change_s`, the smoothed pause of a change of size; and, if its policy asks for it, the
            `noise_scale` of the gradients in samples.
        """
        before, now = self._before, self._read()
        self._before = now
        took_s = max(now.time - before.time, 1e-9)
        autoscaler = self._autoscaler
        wanted = None if autoscaler is None else autoscaler.wanted_nodes
        return {
            "world_size": float(self._session.completed_in.world_size),
            "samples_per_s": (now.num_samples - before.num_samples) / took_s,
            "pause_s": now.paused_s - before.paused_s,
            **({} if autoscaler is None or wanted is None else _learned(wanted, autoscaler.history)),
        }


def _learned(wanted: int, history: SpeedHistory) -> dict[str, float]:
    """What the job wants, and what it knows."""
    newest = history.newest
    values = (wanted, None if newest is None else newest.spread, history.change_s or None, history.noise_scale)
    return {name: float(value) for name, value in zip(_OF_SIZE, values, strict=True) if value is not None}
