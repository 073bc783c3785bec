"""Learning-rate schedules and `max_steps` that follow the samples, however many workers there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ef_common.core.schedule import ReferenceEpoch
from ef_common.core.sharding import EpochProgress
from ef_common.errors import UsageError
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.train_loader import ElasticLoader

SCHEDULES = ("samples", "updates")
_TOLERANCE = 1e-9  # thirds that should add up to one


def check_schedules(value: str) -> str:
    """The setting itself.

    Raises:
        UsageError: It is none.
    """
    if value not in SCHEDULES:
        raise UsageError(f"schedules follow one of {SCHEDULES}. Received: schedules={value!r}")
    return value


class Schedules:
    """Steps the schedulers of one Trainer as the samples say, where Lightning or the user would step them.

    Only schedulers that are stepped with updates are concerned; an epoch has the same samples in each world. The steps
    of the reference world are counted (see :mod:`ef_common.core.schedule`). If the user limits an epoch to a number of
    batches, an epoch has that many in each world, and these batches are counted.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        world_size: Of the reference world, in which the training began.
        loader: The training loader, once there is one.

    """

    def __init__(
        self, trainer: Any, session: Session, *, world_size: int, loader: Callable[[], ElasticLoader | None]
    ) -> None:
        self.world_size = world_size
        self._max_steps = self._shown_max_steps = int(trainer.max_steps)
        self._trainer = trainer
        self._session = session
        self._loader = loader
        self._epoch = -1
        self._whole: ReferenceEpoch | None = None  # the epoch at hand
        self._reference: ReferenceEpoch | None = None  # what `max_steps` leaves of it
        self._by_steps = False
        self._passed = 0  # updates of the reference world, in the epochs before this one
        self._made: list[int] = []  # steps of each scheduler in this epoch
        self._manual: list[_ManualSteps] = []
        self._loaded: dict[str, Any] | None = None

    # ------------------------------------------------------------ set-up

    def begin(self) -> None:
        """The training begins: step its schedulers, and limit it."""
        hooks.follow_schedules(self._trainer, self._due)
        if not self._trainer.lightning_module.automatic_optimization:
            hooks.wrap_schedulers(self._trainer.lightning_module, self._step_by_hand)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        hooks.unfollow_schedules(self._trainer)
        self.set_max_steps(self.max_steps, at_end=True)

    # ------------------------------------------------------------ the epoch

    def plan(self) -> None:
        """Somebody has come or gone, or an epoch begins: nothing of the next update has been dealt yet."""
        loader = self._loader()
        if loader is None:
            return
        if loader.progress.epoch != self._epoch or self._reference is None:
            self._begin_epoch(loader)
        self._limit(loader)
        if loader.dealer.num_updates:  # torch warns of schedulers that are stepped before their optimizer
            hooks.step_schedulers(self._trainer, self._due)

    def _begin_epoch(self, loader: ElasticLoader) -> None:
        progress, loaded, first = loader.progress, self._loaded or {}, self._reference is None
        if self._reference is not None:
            self._passed += self._reference.calls(self._reference.num_steps)
        self._epoch, self._loaded = progress.epoch, None
        self._whole, self._by_steps = reference, _ = self._reference_epoch(loader)
        self._reference = reference
        steps = reference.steps_at(self._position(progress))
        in_epoch = loaded.get("epoch") == progress.epoch
        if first:
            passed = loaded.get("passed")
            if passed is None:  # it is a start, or was no world that changes
                passed = self._trainer.global_step // (self._steps_per_update(loader) or 1)
            self._passed = passed - (reference.calls(steps) if in_epoch or progress.steps else 0)
        configs = self._trainer.lr_scheduler_configs
        self._made = list(loaded.get("made", ())) if in_epoch else []
        if len(self._made) != len(configs):
            self._made = [reference.calls(steps, config.frequency) for config in configs]
        if "manual" in loaded:
            self._manual = [_ManualSteps(*counts) for counts in loaded["manual"]]
        if len(self._manual) != len(configs):
            self._manual = [_ManualSteps(self._now(loader), loader.dealer.num_updates) for _ in configs]

    def _reference_epoch(self, loader: ElasticLoader) -> tuple[ReferenceEpoch, bool]:
        dealer, length = loader.dealer, loader.progress.length
        accumulate = int(self._trainer.accumulate_grad_batches)
        num_steps = dealer.num_steps(EpochProgress(0, length), self.world_size)
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int) and limit <= num_steps:
            return ReferenceEpoch(limit, 1, limit, accumulate), True
        return ReferenceEpoch(length, dealer.batch_size * self.world_size, num_steps, accumulate), False

    def _position(self, progress: EpochProgress) -> int:
        return progress.steps if self._by_steps else progress.length - progress.remaining

    def _update(self, loader: ElasticLoader) -> int:
        """Positions of an update in the world of now."""
        num = 1 if self._by_steps else loader.dealer.batch_size * self._session.completed_in.world_size
        return num * int(self._trainer.accumulate_grad_batches)

    # ------------------------------------------------------------ steps of the schedulers

    def _due(self, number: int) -> int:
        """How many steps a scheduler makes now: so that it is where it should be in the next update."""
        loader, reference = self._loader(), self._reference
        if loader is None or reference is None:
            return 1
        frequency = self._trainer.lr_scheduler_configs[number].frequency
        due = max(0, self._target(loader, frequency, reference) - self._made[number])
        self._made[number] += due
        return due

    def _target(self, loader: ElasticLoader, frequency: int, reference: ReferenceEpoch) -> int:
        position = self._position(loader.progress)
        if position >= reference.length:
            return reference.calls(reference.num_steps, frequency)
        return reference.calls_before(position, self._update(loader), frequency)

    def _step_by_hand(self, number: int) -> int:
        """The same, where the user's own code says that it is time: at its own pace, of which this is a step."""
        loader = self._loader()
        if loader is None or self._reference is None or not hooks.in_train_batch(self._trainer):
            return 1
        uncommitted = 1 if loader.progress.uncommitted else 0
        return self._manual[number].due(self._now(loader), loader.dealer.num_updates + uncommitted)

    def _now(self, loader: ElasticLoader) -> int:
        """Batches of the reference world until the next one."""
        reference = self._reference
        return self._passed + (0 if reference is None else self._target(loader, 1, reference))

    # ------------------------------------------------------------ max_steps

    @property
    def max_steps(self) -> int:
        """The user's limit, in updates of the reference world; -1 for none."""
        shown = int(self._trainer.max_steps)
        return self._max_steps if shown == self._shown_max_steps else shown

    def set_max_steps(self, max_steps: int, *, at_end: bool = False) -> None:
        """Set it, in the middle of a training as well, and show it as it is at its end."""
        self._max_steps, self._reference = max_steps, self._whole
        self._show_max_steps(max_steps)
        loader = self._loader()
        if loader is not None and not at_end:
            self._limit(loader)

    def _show_max_steps(self, max_steps: int) -> None:
        self._shown_max_steps = max_steps
        hooks.set_max_steps(self._trainer, max_steps)

    def _limit(self, loader: ElasticLoader) -> None:
        """Have `trainer.max_steps` say after which update the samples of the user's limit will have been used."""
        reference, steps = self._whole, self._steps_per_update(loader)
        if self._max_steps < 0 or reference is None or not steps:
            return
        left = self._max_steps // steps - self._passed
        self._reference = cut = reference.cut(left)
        update, position = self._update(loader), self._position(loader.progress)
        updates = -(-max(0, cut.length - position) // update)
        if cut is reference:
            later = max(0, left - reference.calls(reference.num_steps))
            updates += later if self._by_steps else -(-later * self.world_size // self._session.completed_in.world_size)
        self._show_max_steps(self._trainer.global_step + steps * updates)

    def _steps_per_update(self, loader: ElasticLoader) -> int:
        """Optimizer steps that Lightning counts for a reduction; 0 if that is not known."""
        if self._trainer.lightning_module.automatic_optimization:
            return 1
        steps, rest = divmod(self._trainer.global_step, max(1, loader.dealer.num_updates))
        return 0 if rest else int(steps)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """For newcomers and checkpoints: plain numbers."""
        loader, reference = self._loader(), self._reference
        if reference is None or loader is None:
            return self._loaded or {"world_size": self.world_size}
        done = reference.calls(reference.steps_at(self._position(loader.progress)))
        return {
            "world_size": self.world_size,
            "epoch": self._epoch,
            "passed": self._passed + done,
            "made": list(self._made),
            "manual": [counts.state() for counts in self._manual],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the others are, or where a checkpoint says."""
        self.world_size = int(state["world_size"])
        self._reference = self._whole = None
        self._loaded = state


class _ManualSteps:
    """Steps of a scheduler that the user's code steps, in manual optimization.

    Args:
        passed: Batches of the reference world until the newest step.
        batches: Batches of this world until then.
        owed: Part of a step that is still to be made.
    """

    def __init__(self, passed: int, batches: int, owed: float = 0.0) -> None:
        self._passed, self._batches, self._owed = passed, batches, owed

    def due(self, passed: int, batches: int) -> int:
        """How many steps one stands for: as many as the reference world makes in the time since the newest one."""
        if batches > self._batches:
            self._owed += (passed - self._passed) / (batches - self._batches)
            self._passed, self._batches = passed, batches
        steps = max(0, int(self._owed + _TOLERANCE))
        self._owed -= steps
        return steps

    def state(self) -> list[float]:
        """Its arguments."""
        return [self._passed, self._batches, self._owed]
