"""Lets the optimizers of a `fit` follow its global batch; see `ef_common.core.compensation`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras

from ef_common.core import compensation
from ef_common.core.compensation import Compensation
from ef_common.core.view import View
from ef_common.data.compensator import Compensator
from ef_common.events import EventLog
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.backends import scaled_for
from ef_keras.scaled_optimizer import ScaledOptimizer

_KNOWN = {
    keras.optimizers.AdamW: "AdamW",
    keras.optimizers.Adam: "Adam",
    keras.optimizers.Nadam: "NAdam",
    keras.optimizers.RMSprop: "RMSprop",
    keras.optimizers.SGD: "SGD",
}
_STEPS = ("apply", "update_step", "_backend_update_step", "_backend_apply_gradients")


def kind_of(cls: type) -> str | None:
    """Which of the known optimizers a Keras class is; a backend may have its own class for one."""
    public = next(part for part in cls.__mro__ if not part.__module__.startswith("keras.src.backend."))
    return compensation.kind_of(public, _KNOWN, _STEPS)


class FitCompensation:
    """Compensates the optimizers of one `fit`.

    The ratio moves on with the first reduction of each batch, so several optimizers have the same; if Keras
    accumulates gradients, with that of the batch in which the update is made.

    Args:
        settings: How to compensate; the rule is not "none".
        model: The model, built, with its optimizers.
        session: The worker's session.
        log: Event log.
        batch_size: Tells the samples of one worker in a step of so many workers.
    """

    def __init__(
        self, settings: Compensation, model: Any, session: Session, *, log: EventLog, batch_size: Callable[[int], int]
    ) -> None:
        self.compensator = Compensator(settings, session, log=log)
        self._batch_size = batch_size
        everybody = hooks.updating_optimizers(model)
        self._scaled = [self._scaled_of(optimizer) for optimizer in everybody]
        self._main = max(everybody, key=lambda optimizer: optimizer.built, default=None)  # the first that has variables
        self._accumulation = hooks.accumulation(self._main)
        self._num_applied = 0
        self._settled: tuple[View, int] | None = None
        self._global_batch_size = 0

    def _scaled_of(self, optimizer: Any) -> ScaledOptimizer:
        cls = type(optimizer)
        return scaled_for(optimizer, self.compensator.rule_for(kind_of(cls), name=cls.__name__))

    # ------------------------------------------------------------ the step

    def before_step(self) -> None:
        """No step is running."""
        if self._accumulation > 1:
            self._num_applied = hooks.num_applied(self._main)

    def commit(self, contributors: View, *, step: int) -> None:
        """The first reduction of a batch has completed, with these contributors.

        Args:
            contributors: Contributors to the reduction, which all of them know.
            step: Number of the update.
        """
        self._num_applied += 1
        if self._num_applied % self._accumulation:
            return
        local, settled = self._batch_size(contributors.world_size), self._settled
        if settled is not None and contributors is settled[0] and local == settled[1]:
            return  # as in nearly all steps
        share = local * self._accumulation
        self.compensator.commit(contributors, share, step=step)
        self._global_batch_size = contributors.world_size * share
        self._settled = (contributors, local) if self.compensator.settled else None
        self._set_ratio()
        for scaled in self._scaled:
            scaled.rescale_momentum(self._ratio)

    def _set_ratio(self) -> None:
        for scaled in self._scaled:
            scaled.set_ratio(self._ratio)

    @contextmanager
    def applied(self, optimizer: Any, gradients: Sequence[Any]) -> Iterator[None]:
        """Let an optimizer make an update with these reduced gradients."""
        with ExitStack() as stack:
            for scaled in self._scaled:
                if any(part is scaled.optimizer for part in hooks.parts_of(optimizer)):
                    stack.enter_context(scaled.applied(gradients))
            yield

    def settle(self) -> None:
        """The epoch is over: restore plain Keras's momentum for code that saves it or trains on without us."""
        self._settled = None
        for scaled in self._scaled:
            scaled.rescale_momentum(1.0)

    @property
    def _ratio(self) -> float:
        return self.compensator.ratio or 1.0

    # ------------------------------------------------------------ what is shown, and handed on

    def show(self, logs: dict[str, Any]) -> None:
        """Add the scale of the learning rate and the global batch of the newest update."""
        rules = {scaled.optimizer.name: scaled.rule for scaled in self._scaled}
        logs.update(self.compensator.scales(rules))
        logs["global_batch_size"] = float(self._global_batch_size)

    def state(self) -> dict[str, Any]:
        """The state for newcomers, as plain numbers."""
        return {
            **self.compensator.state(),
            "global_batch_size": self._global_batch_size,
            "held": [scaled.held for scaled in self._scaled],
        }

    def load_state(self, state: dict[str, Any], *, saved: bool) -> None:
        """Continue from the others' state, or from that of a checkpoint, whose momentum has its ratio in it anyway."""
        if saved:
            self.compensator.resume(state)
        else:
            self.compensator.load_state(state)
        self._global_batch_size = state["global_batch_size"]
        self._set_ratio()
        for scaled in self._scaled:  # all have the same, and there may be more or fewer of them now
            scaled.held = state["held"][0] if state["held"] else 1.0
