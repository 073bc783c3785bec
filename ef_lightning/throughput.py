"""Lightning's `ThroughputMonitor`, which measures in rank 0 alone, from the start of a training on.

Any worker may become rank 0, and would then lack what the first one has noted. So each worker measures, and its loggers
write in rank 0 only, as everywhere. The monitor is told how many workers there are now.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.host import LightningHost, is_of_lightning

_HOOKS = (
    *(
        f"on_{stage}_{moment}"
        for stage in ("train", "validation", "test", "predict")
        for moment in ("start", "batch_end")
    ),
    "on_validation_end",
)


class ThroughputMonitors:
    """The monitors of one Trainer, from `attach` to `detach`.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        host: The class tree.
    """

    def __init__(self, trainer: Any, session: Session, host: LightningHost) -> None:
        self._session = session
        self._monitors: list[Any] = host.callbacks(trainer, "ThroughputMonitor")

    def attach(self) -> None:
        """Measure in this worker, whatever its rank is."""
        for monitor in self._monitors:
            for name in _HOOKS:
                measure = _measuring(type(monitor), name)
                if measure is not None:
                    hooks.replace(monitor, name, partial(_everywhere, partial(measure, monitor)))

    def follow_view(self) -> None:
        """There is a new view."""
        for monitor in self._monitors:
            hooks.set_workers_measured(monitor, max(1, self._session.world_size))

    def detach(self) -> None:
        """Leave the monitors as they were."""
        for monitor in self._monitors:
            for name in _HOOKS:
                hooks.put_back(monitor, name)


def _measuring(cls: type, name: str) -> Any:
    """What `rank_zero_only` has wrapped; None if a class of the user's has a hook of its own."""
    definer = next(base for base in cls.__mro__ if name in vars(base))
    return getattr(vars(definer)[name], "__wrapped__", None) if is_of_lightning(definer) else None


def _everywhere(measure: Any, original: Any) -> Any:
    return measure
