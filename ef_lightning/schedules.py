"""Learning-rate schedules and `max_steps` that follow the samples, however many workers there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ef_common.core import sharding
from ef_common.core.schedule import ReferenceEpoch
from ef_common.core.sharding import EpochProgress
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.train_loader import ElasticLoader

_TOLERANCE = 1e-9  # thirds that should add up to one


class Schedules:
    """Steps the schedulers of one Trainer as the samples say, where Lightning or the user would step them.

    Only schedulers that are stepped with updates are concerned; an epoch has the same samples in each world. The steps
    of the reference world are counted (see :mod:`ef_common.core.schedule`). If the user limits an epoch to a number of
    batches, and it is a limit in the reference world, an epoch has that many in each world, and these batches are
    counted. In manual optimization nobody but the user's code knows what an update is: there, batches are counted.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        world_size: Size of the reference world, in which the training began.
        loader: The training loader, once there is one.

    Attributes:
        world_size: The same size, or the one in a checkpoint.
        batch_size: Positions of one worker in a step of the reference world; None for those of now. A user who changes
            the loader's in a training changes this one as much, so it may be a fraction.
        accumulate: `accumulate_grad_batches` there, as the Trainer's argument.
    """

    def __init__(
        self, trainer: Any, session: Session, *, world_size: int, loader: Callable[[], ElasticLoader | None]
    ) -> None:
        self._argument = int(trainer.accumulate_grad_batches)
        self.world_size = world_size
        self.batch_size: Fraction | None = None
        self.accumulate = self._argument
        self._own_batch_size: int | None = None  # that of the loader, when `batch_size` was looked at last
        self._max_steps = self._shown_max_steps = int(trainer.max_steps)
        self._trainer = trainer
        self._session = session
        self._loader = loader
        self._epoch = -1
        self._whole: ReferenceEpoch | None = None  # the epoch at hand
        self._reference: ReferenceEpoch | None = None  # what `max_steps` leaves of it
        self._by_steps = False
        self._passed = 0  # updates of the reference world, in the epochs before this one
        self._reached: int | None = None  # positions of the epoch, at the newest boundary
        self._made: list[int] = []  # steps of each scheduler in this epoch
        self._manual: list[_ManualSteps] = []
        self._stepped = (0, 0)  # by hand: steps of optimizers until now, and batches until the newest of them
        self._loaded: dict[str, Any] | None = None

    # ------------------------------------------------------------ set-up

    def begin(self) -> None:
        """The training begins: step its schedulers, and limit it."""
        hooks.follow_schedules(self._trainer, self._due)
        if self._by_hand:
            hooks.wrap_schedulers(self._trainer.lightning_module, self._step_by_hand)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        hooks.unfollow_schedules(self._trainer)
        self.set_max_steps(self.max_steps, at_end=True)

    @property
    def _by_hand(self) -> bool:
        return not self._trainer.lightning_module.automatic_optimization

    def begin_again(self, world_size: int) -> None:
        """No state exists and none was saved: the training begins with this many workers."""
        self.load_state({"world_size": world_size})
        self._loaded = None

    # ------------------------------------------------------------ the reference world

    def planned_steps(self, loader: ElasticLoader, length: int) -> int:
        """Batches of an epoch of this length, from which Lightning computes the reference world's updates."""
        steps = self._num_steps(loader, length)
        limit = self._trainer.limit_train_batches
        if isinstance(limit, int):
            steps = min(steps, limit)
        if self.accumulate == self._argument:
            return steps
        return -(-steps // self.accumulate) * self._argument  # it divides by the Trainer's

    def is_limited(self, loader: ElasticLoader, length: int) -> bool:
        """Whether `limit_train_batches`, a number, limits such an epoch in the reference world."""
        return bool(self._trainer.limit_train_batches < self._num_steps(loader, length))

    def _num_steps(self, loader: ElasticLoader, length: int) -> int:
        """Steps of a whole epoch in the reference world."""
        return sharding.num_steps(
            EpochProgress(0, length),
            self.world_size,
            batch_size=self._batch_size(loader),
            min_share=loader.dealer.min_share,
        )

    def _batch_size(self, loader: ElasticLoader) -> int:
        """The reference world's batch size while the loader has this one."""
        dealer = loader.dealer
        now = sharding.local_batch(dealer.batch_size, self.world_size, dealer.max_batch)
        if self.batch_size is not None and self._own_batch_size is not None:
            self.batch_size *= Fraction(now, self._own_batch_size)
        self._own_batch_size = now
        return now if self.batch_size is None else max(1, round(self.batch_size))

    # ------------------------------------------------------------ the epoch

    def plan(self) -> None:
        """The members have changed, or an epoch begins: nothing of the next update has been dealt yet."""
        loader = self._loader()
        if loader is None:
            return
        if loader.progress.epoch != self._epoch or self._reference is None:
            self._begin_epoch(loader)
        elif self._whole is not None and not self._by_steps and loader.progress.length < self._whole.length:
            self._whole, self._by_steps = self._reference_epoch(loader)  # the end of a stream has been found
            self._reference = self._whole
        self._limit(loader)
        if self._trainer.global_step:  # torch warns of schedulers that are stepped before their optimizer
            hooks.step_schedulers(self._trainer, self._due)

    def _begin_epoch(self, loader: ElasticLoader) -> None:
        progress, loaded, first = loader.progress, self._loaded or {}, self._reference is None
        self._passed += self._passed_in_epoch(progress)
        self._epoch, self._loaded, self._reached = progress.epoch, None, None
        if self.batch_size is None:
            self.batch_size = Fraction(self._batch_size(loader))
        self._whole, self._by_steps = reference, _ = self._reference_epoch(loader)
        self._reference = reference
        steps = reference.steps_at(self._position(progress))
        in_epoch = loaded.get("epoch") == progress.epoch
        if first:
            passed = loaded.get("passed")
            if passed is None:  # it is a start, or was no world that changes
                passed = hooks.num_batches(self._trainer) if self._by_hand else self._trainer.global_step
                if self._by_hand:
                    self._note_steps()
            self._passed = passed - (reference.calls(steps) if in_epoch or progress.steps else 0)
        configs = self._trainer.lr_scheduler_configs
        self._made = list(loaded.get("made", ())) if in_epoch else []
        if len(self._made) != len(configs):
            self._made = [reference.calls(steps, config.frequency) for config in configs]
        if "manual" in loaded:
            self._manual = [_ManualSteps(*counts) for counts in loaded["manual"]]
        if len(self._manual) != len(configs):
            before = self._passed + reference.calls(steps)
            self._manual = [_ManualSteps(before, hooks.num_batches(self._trainer)) for _ in configs]

    def _reference_epoch(self, loader: ElasticLoader) -> tuple[ReferenceEpoch, bool]:
        length, limit = loader.progress.length, self._trainer.limit_train_batches
        accumulate = max(1, self.accumulate * int(self._trainer.accumulate_grad_batches) // self._argument)
        if isinstance(limit, int) and self.is_limited(loader, length):
            return ReferenceEpoch(limit, 1, limit, accumulate), True
        batch = self._batch_size(loader) * self.world_size
        return ReferenceEpoch(length, batch, self._num_steps(loader, length), accumulate), False

    def _passed_in_epoch(self, progress: EpochProgress) -> int:
        """Updates of the reference world in the epoch planned last; another one may have begun since."""
        whole = self._whole
        if whole is None:
            return 0
        if progress.epoch == self._epoch:
            return whole.calls(whole.steps_at(self._trained(progress)))
        return whole.calls(whole.num_steps if self._reached is None else whole.steps_at(self._reached))

    def _position(self, progress: EpochProgress) -> int:
        return progress.steps if self._by_steps else progress.length - progress.remaining

    def _trained(self, progress: EpochProgress) -> int:
        """The same, without samples that have only been dealt."""
        uncommitted = progress.uncommitted
        if self._by_steps:
            return progress.steps - len(uncommitted)
        return self._position(progress) - sum(window.stop - window.start for window in uncommitted)

    def _update(self, loader: ElasticLoader) -> int:
        """Positions of an update in the current world."""
        num_workers = self._session.completed_in.world_size
        num = 1 if self._by_steps else loader.dealer.local_batch(num_workers) * num_workers
        return num * int(self._trainer.accumulate_grad_batches)

    def between_batches(self) -> None:
        """Nothing of the next batch has been dealt."""
        loader = self._loader()
        if loader is None or self._reference is None:
            return
        self._note_reached(loader)
        if self._by_hand and self._note_steps() and loader.progress.remaining > 0:
            self._limit(loader)

    def end(self) -> None:
        """The training ends, maybe in the middle of an epoch, which the loader leaves next."""
        loader = self._loader()
        if loader is None or self._reference is None:
            return
        self._note_reached(loader)
        if self._by_hand:
            self._note_steps()

    def _note_reached(self, loader: ElasticLoader) -> None:
        progress = loader.progress
        self._reached = self._trained(progress) if progress.epoch == self._epoch else None  # another loader has begun

    def _note_steps(self) -> bool:
        """Check whether the user's code has made optimizer steps in the previous batch."""
        step = int(self._trainer.global_step)
        if step == self._stepped[0]:
            return False
        self._stepped = (step, hooks.num_batches(self._trainer))
        return True

    # ------------------------------------------------------------ steps of the schedulers

    def _due(self, number: int) -> int:
        """How many steps a scheduler makes now to have the right value in the next update."""
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
        """The same for a step of the user's own code, at its own pace."""
        loader = self._loader()
        if loader is None or self._reference is None or not hooks.in_train_batch(self._trainer):
            return 1
        return self._manual[number].due(self._now(loader), hooks.num_batches(self._trainer))

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
        """Set the limit, even during a training, and show it as it is at the end."""
        self._max_steps, self._reference = max_steps, self._whole
        self._show_max_steps(max_steps)
        loader = self._loader()
        if loader is not None and not at_end:
            self._limit(loader)

    def resume(self) -> None:
        """Lightning continues from a checkpoint; until the first plan, say only whether anything is left to do."""
        state, pace = self._loaded, self._pace()[1]
        if self._max_steps < 0 or state is None or "passed" not in state:
            return
        is_left = not pace or state["passed"] * pace < self._max_steps
        self._show_max_steps(max(self._max_steps, state["step"] + 1) if is_left else state["step"])

    def _show_max_steps(self, max_steps: int) -> None:
        self._shown_max_steps = max_steps
        hooks.set_max_steps(self._trainer, max_steps)

    def _limit(self, loader: ElasticLoader) -> None:
        """Set `trainer.max_steps` to the step that will have used the samples of the user's limit."""
        reference = self._whole
        step, steps_per_update, since = self._pace()
        if self._max_steps < 0 or reference is None or not steps_per_update:
            return
        left = self._max_steps / steps_per_update - self._passed
        self._reference = reference.cut(math.ceil(left))
        updates = since + self._updates_until(left, reference, loader)
        self._show_max_steps(step + math.ceil(steps_per_update * updates))

    def _updates_until(self, left: Fraction, reference: ReferenceEpoch, loader: ElasticLoader) -> Fraction:
        """Updates of the current world until the reference world has made this many in the epoch."""
        update, num_updates = self._update(loader), reference.calls(reference.num_steps)
        if left < num_updates:
            end = left * reference.accumulate * reference.batch
            return max(Fraction(0), end - self._position(loader.progress)) / update
        num_steps = reference.num_steps if self._by_steps else loader.dealer.num_steps()
        in_epoch = -(-(num_steps - loader.progress.steps) // int(self._trainer.accumulate_grad_batches))
        same = Fraction(1) if self._by_steps else Fraction(reference.accumulate * reference.batch, update)
        return in_epoch + (left - num_updates) * same

    def _pace(self) -> tuple[int, Fraction, int]:
        """Optimizer steps as Lightning counts them, steps per update (0: unknown), and updates since.

        By hand an update is a batch. There may be several steps in one, or one in several.
        """
        if not self._by_hand:
            return int(self._trainer.global_step), Fraction(1), 0
        step, batches = self._stepped
        pace = Fraction(step, batches) if batches else Fraction(0)
        return step, pace, hooks.num_batches(self._trainer) - batches

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state for newcomers and checkpoints, as plain numbers."""
        loader, reference, step = self._loader(), self._reference, int(self._trainer.global_step)
        if reference is None or loader is None:
            loaded = self._loaded or {}
            return loaded if loaded.get("step") == step else self._world(loader)
        return {
            **self._world(loader),
            "step": step,
            "epoch": self._epoch,
            "passed": self._passed + self._passed_in_epoch(loader.progress),
            "made": list(self._made),
            "manual": [counts.state() for counts in self._manual],
            "stepped": list(self._stepped),
        }

    def _world(self, loader: ElasticLoader | None) -> dict[str, Any]:
        now = None if loader is None else self._batch_size(loader)
        batch_size = self.batch_size or now
        ratio = None if batch_size is None else list(batch_size.as_integer_ratio())
        return {"world_size": self.world_size, "batch_size": ratio, "accumulate": self.accumulate}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the others' state or from a checkpoint."""
        self.world_size = int(state["world_size"])
        batch_size = state.get("batch_size")
        self.batch_size = None if batch_size is None else Fraction(*batch_size)
        self.accumulate = int(state.get("accumulate", self._argument))
        self._own_batch_size = None
        self._reference = self._whole = None
        step, batches = state.get("stepped", (0, 0))
        self._stepped = (step, batches)
        self._loaded = state


class _ManualSteps:
    """The steps of a scheduler that the user's code steps in manual optimization.

    Args:
        passed: Batches of the reference world until the newest step.
        batches: Batches of this world until then.
        owed: Part of a step that is still to be made.
        pace: Batches of the reference world in the time of one of this world, lately.
    """

    def __init__(self, passed: int, batches: int, owed: float = 0.0, pace: float = 1.0) -> None:
        self._passed, self._batches, self._owed, self._pace = passed, batches, owed, pace

    def due(self, passed: int, batches: int) -> int:
        """How many steps one stands for: as many as the reference world makes in the time since the last one.

        If there are several in a batch, each stands for as many.
        """
        if batches > self._batches:
            self._pace = (passed - self._passed) / (batches - self._batches)
            self._passed, self._batches = passed, batches
        self._owed += self._pace
        steps = max(0, int(self._owed + _TOLERANCE))
        self._owed -= steps
        return steps

    def state(self) -> list[float]:
        """The state for newcomers and checkpoints."""
        return [self._passed, self._batches, self._owed, self._pace]
