"""The ratio of a run from update to update: agreed by all workers and passed to newcomers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ef_common.core.compensation import AUTO, Compensation, Ramp, Rule, lr_scale
from ef_common.core.view import View
from ef_common.events import EventLog
from ef_common.session import Session

logger = logging.getLogger(__name__)


class Compensator:
    """Follows the global batch of the updates.

    Args:
        settings: How to compensate.
        session: The worker's session.
        log: Event log of the worker.
        global_batch_size: Samples of an update, if that is fixed.
        world_size: Workers with whom the training begins; by default those of its first update.

    Attributes:
        reference_batch_size: Samples of an update that the optimizer's settings are meant for; by default those of
            an update of all workers at the start of the run.
    """

    def __init__(
        self,
        settings: Compensation,
        session: Session,
        *,
        log: EventLog,
        global_batch_size: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._without_rule: list[str] = []
        self._rules: list[Rule] = []
        self._told = False
        self._world_size = world_size
        self.settings = settings
        self.global_batch_size = global_batch_size
        self.reference_batch_size = settings.reference_batch_size
        self._session = session
        self._log = log
        self._ramp: Ramp | None = None

    def rule_for(self, kind: str | None, *, name: str) -> Rule:
        """The rule of an optimizer. One that `auto` does not know keeps its settings; the first change is logged.

        Args:
            kind: Which of those in `AUTO` it is; None for any other.
            name: For people.
        """
        if self.settings.rule == "auto" and kind is None:
            self._without_rule.append(name)
        rule = self.settings.rule_for(kind)
        self._rules.append(rule)
        return rule

    @property
    def ratio(self) -> float | None:
        """Ratio of the newest update; None before the first one."""
        return None if self._ramp is None else self.settings.ratio(self._ramp)

    @property
    def settled(self) -> bool:
        """Whether nothing changes while the same members contribute as much."""
        return self._ramp is not None and self.settings.is_over(self._ramp)

    @property
    def num_workers(self) -> int:
        """Workers that contribute to the next update, if none is lost."""
        return self._session.completed_in.world_size

    def upcoming(self, batch_size: int) -> float:
        """Ratio of the next update, if all members contribute to it."""
        return self.settings.ratio(self._advanced(self._session.completed_in, batch_size))

    def commit(self, contributors: View, batch_size: int, *, step: int) -> None:
        """An update will be made from the samples of these contributors, who all call this.

        Args:
            contributors: Contributors to the gradient reduction.
            batch_size: Samples of one worker.
            step: Number of the update.
        """
        before, self._ramp = self._ramp, self._advanced(contributors, batch_size)
        if self._ramp.goal != 1.0:
            self._warn_of_unknown(self._ramp.goal)
        if self._log.enabled and (before is None or before.goal != self._ramp.goal):
            record = {
                "step": step,
                "rule": self.settings.rule_name,
                "reference_batch_size": self.reference_batch_size,
                "global_batch_size": self._size(contributors, batch_size),
                "ramp_steps": self.settings.ramp_steps,
            }
            scales = {lr_scale(rule, self._ramp.goal) for rule in self._rules}
            if len(scales) == 1:
                record["lr_scale"] = scales.pop()
            self._session.when_confirmed(lambda: self._log.write("compensation", **record))

    def _advanced(self, contributors: View, batch_size: int) -> Ramp:
        if self.reference_batch_size is None:
            self._world_size = self._world_size or contributors.world_size
            self.reference_batch_size = self.global_batch_size or self._world_size * batch_size
        goal = self._size(contributors, batch_size) / self.reference_batch_size
        return self.settings.advance(self._ramp, goal)

    def _size(self, contributors: View, batch_size: int) -> int:
        return self.global_batch_size or contributors.world_size * batch_size

    # ------------------------------------------------------------ what is shown

    def scales(self, rules: Mapping[str, Rule]) -> dict[str, float]:
        """Factors of the learning rate in the newest update: one, or one per optimizer if their rules differ.

        Args:
            rules: Rules of the optimizers, by their names.
        """
        ratio = self.ratio or 1.0
        alike = self.settings.rule != "auto" or len(set(rules.values())) == 1
        return {"lr_scale" if alike else f"lr_scale/{name}": lr_scale(rule, ratio) for name, rule in rules.items()}

    def _warn_of_unknown(self, ratio: float) -> None:
        names = [] if self._told else self._without_rule
        self._told = True
        if names and self._session.rank == 0:
            logger.warning(
                "the global batch is %g times the one that the training began with, and compensation='auto' does not "
                "know how the settings of %s follow it: they stay as they are. Choose 'linear' (the learning rate "
                "grows with the batch), 'sqrt' (with the square root, and betas and eps with it), 'none', or a "
                "function of the ratio that gives the factor of the learning rate. Known: %s",
                ratio,
                ", ".join(names),
                ", ".join(AUTO),
            )

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """The state for newcomers and checkpoints, as plain numbers."""
        ramp = None if self._ramp is None else list(self._ramp)
        return {
            "reference_batch_size": self.reference_batch_size,
            "world_size": self._world_size,
            "ramp": ramp,
            "told": self._told,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from the others' state."""
        self.reference_batch_size = state["reference_batch_size"]
        self._world_size = state.get("world_size")
        self._ramp = None if state["ramp"] is None else Ramp(*state["ramp"])
        self._told = bool(state.get("told", False))

    def begin_again(self, world_size: int) -> None:
        """No state exists and none was saved: the training begins with this many workers."""
        self.reference_batch_size, self._world_size, self._ramp = self.settings.reference_batch_size, world_size, None

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, unless the user has chosen another reference batch meanwhile."""
        if self.settings.reference_batch_size in (None, state["reference_batch_size"]):
            self.load_state({**state, "told": False})  # the log is a new one
