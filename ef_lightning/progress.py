"""The progress bar: rank 0 shows one. When rank 0 is lost, the worker that is rank 0 then does."""

from __future__ import annotations

from typing import Any

from ef_common.session import Session


class Progress:
    """The progress bar of one Trainer in this worker.

    Lightning disables it for good where a worker is not rank 0 when the callbacks are set up. It has no hook for a
    change of ranks, so the bar is told again what it has missed.

    Args:
        trainer: The Trainer, before its callbacks are set up.
        session: The worker's session.
    """

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self._session = trainer, session
        self._bar = trainer.progress_bar_callback
        self._wanted = self._bar is not None and bool(getattr(self._bar, "is_enabled", True))
        self._shown = session.rank == 0
        self._begun = False

    def begin(self) -> None:
        """The bar has been told that the Trainer's loops begin: from now on it has something to miss."""
        self._begun = True

    def follow_ranks(self) -> None:
        """There is a new view."""
        if self._shown or self._session.rank != 0:
            return
        self._shown = True
        if self._wanted:
            self._bar.enable()
            if self._begun:
                self._catch_up()

    def _catch_up(self) -> None:
        trainer, bar = self._trainer, self._bar
        told = (trainer, trainer.lightning_module)
        if trainer.state.fn == "fit":
            bar.on_train_start(*told)
            bar.on_train_epoch_start(*told)
        if trainer.validating:
            bar.on_validation_start(*told)
        elif trainer.testing:
            bar.on_test_start(*told)
        elif trainer.predicting:
            bar.on_predict_start(*told)
        bar.reset_dataloader_idx_tracker()  # the next batch of an evaluation says how many there are

    def end(self) -> None:
        """Leave it as it was, for another fit."""
        if self._wanted:
            self._bar.enable()
