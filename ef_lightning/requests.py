"""Requests of one worker's code that concern all: to stop the training, or to change its length.

Lightning's loops end by `trainer.should_stop` and by the Trainer's limits, and read them where no message could be
exchanged. All workers must therefore find the same values there, although user code may have set them in only one.

Changes that a worker's code makes during a batch are reverted at the end of that batch, and kept as requests. The flags
of the next reduction announce that a worker has requests; all workers hear that alike, and exchange their requests at
the end of that batch. They also do so where they wait for each other in any case: before the sanity check and before
the training, at the beginning and the end of an epoch, and at the end of a validation. If several workers request
different values, the lowest rank among them decides.

Whether to skip the rest of an epoch (`on_train_batch_start` returns -1) must be known before the batch is trained.
Where a module has this hook, all workers exchange its return values before each batch.

A worker that is alone asks nobody: everything is as without ElasticFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.host import LightningHost


class Requests:
    """The requests that the user's code makes to one Trainer, from `attach` to `detach`.

    Args:
        trainer: The Trainer, before any hook of the user's is called.
        host: Its class tree.
        session: The worker's session.
        gather: Everybody's value, in rank order.
        max_steps: The user's limit, which is not what the Trainer shows if schedules follow the samples.
        set_max_steps: Sets it.
        on_skip: Called when the rest of an epoch is left out, from the batch on that was dealt last.
    """

    def __init__(
        self,
        trainer: Any,
        host: LightningHost,
        session: Session,
        *,
        gather: Callable[[Any], list[Any]],
        max_steps: Callable[[], int],
        set_max_steps: Callable[[int], None],
        on_skip: Callable[[], None],
    ) -> None:
        self._trainer, self._host = trainer, host
        self._session = session
        self._gather = gather
        self._max_steps = max_steps
        self._set_max_steps = set_max_steps
        self._on_skip = on_skip
        self._agreed = self._shown()
        self._kept: dict[str, Any] = {}
        self._heard = False
        self._late: dict[str, Any] = {}  # agreed on, and not shown yet

    def attach(self) -> None:
        """Begin to keep and exchange requests. All workers are here, and have run their setup hooks."""
        hooks.surround_decisions(
            self._trainer, self._host, batch=self._end_batch, epoch=self.settle, skip=self._agree_to_skip
        )
        self.settle()

    def detach(self) -> None:
        """Leave the Trainer as it is."""
        hooks.leave_decisions(self._trainer)

    # ------------------------------------------------------------ telling

    @property
    def pending(self) -> bool:
        """Whether this worker has a request."""
        return bool(self._kept) or self._shown() != self._agreed

    def hear(self, num_pending: float) -> None:
        """A reduction has completed in which this many workers had a request."""
        self._heard = self._heard or num_pending >= 1

    def settle(self) -> None:
        """All workers are here: do what any of them requests.

        A newcomer is not one of them yet. It will have their limits; if its code wants to stop, they hear of it later.
        """
        if self._session.newcomer:
            self._keep("should_stop")
            return
        late, self._late = self._late, {}
        self._show(late)
        self._keep()
        if self._session.entering:
            return  # they have been here before it came: it tells them at the end of a batch
        self._heard = False
        wanted = [self._kept] if self._is_alone else self._gather(self._kept)
        self._kept = {}
        for of_worker in reversed(wanted):
            self._agreed.update(of_worker)
        self._show(self._agreed)

    def _end_batch(self) -> None:
        if self._heard:
            self.settle()
        elif self.pending:
            self.settle() if self._is_alone else self._keep()

    def _agree_to_skip(self, response: Any) -> Any:
        """Before a batch: combine what the hooks of all workers returned; this worker's returned this."""
        skips = bool(response == -1)
        if not self._is_alone:
            skips = any(self._gather(skips))
        if skips:
            self._on_skip()
        return -1 if skips else response

    @property
    def _is_alone(self) -> bool:
        return self._session.completed_in.world_size == 1

    # ------------------------------------------------------------ the Trainer

    def _keep(self, *names: str) -> None:
        """Revert and keep changes since the last time: all of them, or these."""
        shown = self._shown()
        changed = [name for name in names or shown if shown[name] != self._agreed[name]]
        self._kept |= {name: shown[name] for name in changed}
        self._show({name: self._agreed[name] for name in changed})

    def _shown(self) -> dict[str, Any]:
        return {**hooks.run_time_limits(self._trainer), "max_steps": self._max_steps()}

    def _show(self, values: dict[str, Any]) -> None:
        shown = self._shown()
        for name, value in values.items():
            if value == shown[name]:
                continue
            if name == "max_steps":
                self._set_max_steps(value)
            else:
                hooks.set_run_time_limit(self._trainer, self._host, name, value)

    # ------------------------------------------------------------ newcomers

    def state(self) -> dict[str, Any]:
        """The agreed values, as plain values."""
        return dict(self._agreed)

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what the others have agreed on, before the hooks at the start of the training.

        A `GradientAccumulationScheduler` raises there if anything but itself has set the accumulation.
        """
        self._agreed = {name: state[name] for name in self._agreed}
        shown, name = self._shown(), "accumulate_grad_batches"
        is_late = self._agreed[name] != shown[name] and self._host.callbacks(
            self._trainer, "GradientAccumulationScheduler"
        )
        self._late = {name: self._agreed[name]} if is_late else {}
        self._show({**self._agreed, **{late: shown[late] for late in self._late}})
