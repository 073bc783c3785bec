"""The progress bar, which only rank 0 shows; when rank 0 is lost, the next rank 0 shows one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning import host as hosts

logger = logging.getLogger(__name__)

_STAGES = ("sanity_check", "train", "train_epoch", "validation", "test", "predict")


class TrainerProgress:
    """The progress bar of one Trainer in this worker.

    Lightning disables it for good where a worker is not rank 0 when the callbacks are set up. It has no hook for a
    change of ranks. So what begins and ends meanwhile is noted down, and a bar that comes back is told again what has
    begun and has not ended. A bar that rank 0 has had from the start, as the only worker does, is left alone.

    Args:
        trainer: The Trainer, before its callbacks are set up.
        session: The worker's session.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._bar = trainer.progress_bar_callback
        self._begun: list[str] = []
        self._hidden = self._bar is not None and session.rank != 0
        self._wanted = bool(getattr(self._bar, "is_enabled", True))
        if self._hidden:
            for stage in _STAGES:
                hooks.replace(self._bar, f"on_{stage}_start", partial(self._noting, self._begun.append, stage))
                hooks.replace(self._bar, f"on_{stage}_end", partial(self._noting, self._forget, stage))

    def _noting(self, note: Callable[[str], None], stage: str, hook: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any, **kwargs: Any) -> None:
            note(stage)
            hook(*args, **kwargs)

        return noting

    def _forget(self, stage: str) -> None:
        if stage in self._begun:
            del self._begun[self._begun.index(stage) :]

    def follow_ranks(self) -> None:
        """There is a new view."""
        if not self._hidden or self._session.rank != 0:
            return
        shows = self._come_back()
        if shows:
            self._catch_up()
        elif self._wanted:
            logger.warning(
                "this worker is rank 0 now, and its progress bar stays disabled: %s has no method enable()",
                type(self._bar).__name__,
            )

    def _come_back(self) -> bool:
        """Enable the bar again, unless the user has disabled it; returns whether it now shows something."""
        self._hidden = False
        for stage in _STAGES:
            hooks.put_back(self._bar, f"on_{stage}_start")
            hooks.put_back(self._bar, f"on_{stage}_end")
        if not self._wanted or not _can_be_enabled(self._bar):
            return False
        self._bar.enable()
        return True

    def _catch_up(self) -> None:
        for stage in self._begun:
            getattr(self._bar, f"on_{stage}_start")(self._trainer, self._trainer.lightning_module)
        self._bar.reset_dataloader_idx_tracker()  # the next batch of an evaluation says how many there are

    def end(self) -> None:
        """Restore the bar for another fit."""
        if self._hidden:
            self._come_back()


def _can_be_enabled(bar: Any) -> bool:
    """Whether its class defines how: the base's method raises, and `enable` may be a flag of the user's."""
    host = hosts.of(bar)
    base = None if host is None else host.get("callbacks", "ProgressBar").enable
    method = getattr(type(bar), "enable", None)
    return callable(method) and method is not base and callable(bar.enable)
