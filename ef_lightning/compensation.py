"""Compensated settings in torch's parameter groups, visible only during the update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ef_common.core import compensation
from ef_common.core.compensation import Affine, Compensation, Rule, adjustments
from ef_common.core.view import View
from ef_common.data.compensator import Compensator
from ef_common.events import EventLog
from ef_common.session import Session
from ef_lightning.train_loader import ElasticLoader

logger = logging.getLogger(__name__)

_NOTHING = object()

# What torch's optimizers call each kind of setting.
_KINDS = {"lr": "lr", "betas": "beta", "alpha": "beta_of_squares", "eps": "eps", "weight_decay": "weight_decay"}
_KNOWN: dict[type, str] = {
    cls: cls.__name__
    for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop, torch.optim.SGD)
}


def kind_of(cls: type[Optimizer]) -> str | None:
    """Which of the known optimizers a class of torch's is."""
    return compensation.kind_of(cls, _KNOWN, ["step"])


class TrainerCompensation:
    """Compensates the optimizers of one Trainer.

    The ratio moves on with the first reduction of each batch, so several optimizers, or several steps of one, that
    are made from a batch have the same.

    Args:
        settings: How to compensate.
        trainer: The Trainer, with its optimizers.
        session: The worker's session.
        log: Event log.
        global_batch_size: Samples of an update, if that is fixed.
        world_size: Workers with whom the training begins.
    """

    def __init__(
        self,
        settings: Compensation,
        trainer: Any,
        session: Session,
        *,
        log: EventLog,
        global_batch_size: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.compensator = Compensator(
            settings, session, log=log, global_batch_size=global_batch_size, world_size=world_size
        )
        self._trainer = trainer
        # As the user has set it. What a callback makes of it later is another batch by the user's own will, not by
        # a change of the world.
        self._accumulation = int(trainer.accumulate_grad_batches)
        self._scaled: dict[int, ScaledSettings] = {}
        self._settled: tuple[View, ElasticLoader, int | None] | None = None
        self._ratio = 1.0
        self._batch_size = 0
        for optimizer in trainer.optimizers:
            self._scaled_of(optimizer)
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Leave the optimizers as they were."""
        for handle in self._handles:
            handle.remove()

    def _scaled_of(self, optimizer: Optimizer) -> ScaledSettings:
        found = self._scaled.get(id(optimizer))
        if found is None:
            rule: Rule = "none"
            if optimizer.param_groups:  # Lightning's stand-in for no optimizer has none
                rule = self.compensator.rule_for(kind_of(type(optimizer)), name=type(optimizer).__name__)
            found = self._scaled[id(optimizer)] = ScaledSettings(optimizer, rule)
        return found

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer steps, perhaps without Lightning's wrapper (`self.optimizers(use_pl_optimizer=False)`)."""
        if not any(one is optimizer for one in self._trainer.optimizers):
            return
        scaled = self._scaled_of(optimizer)
        if scaled.applied:  # by `step`, or the step before has failed
            scaled.restore()
        if self._ratio != 1.0:
            scaled.apply(self._ratio)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        scaled = self._scaled.get(id(optimizer))
        if scaled is not None and scaled.applied:
            scaled.restore()

    # ------------------------------------------------------------ the step

    def commit(self, contributors: View, loader: ElasticLoader) -> None:
        """A reduction with these contributors has completed, and the loader has not been notified yet."""
        settled, dealer = self._settled, loader.dealer
        if (
            settled is not None
            and contributors is settled[0]
            and loader is settled[1]
            and dealer.chosen_batch == settled[2]
        ):
            return  # as in nearly all steps: a step of a small model takes a millisecond
        if loader.progress.uncommitted:
            num_workers = contributors.world_size
            self.compensator.commit(contributors, self._share(loader, num_workers), step=dealer.num_updates + 1)
            self._ratio = self.compensator.ratio or 1.0
            self._batch_size = num_workers * dealer.local_samples(num_workers)
            self._settled = (contributors, loader, dealer.chosen_batch) if self.compensator.settled else None

    def _share(self, loader: ElasticLoader, num_workers: int) -> int:
        """Samples of an update that come from one worker of so many."""
        return loader.dealer.local_samples(num_workers) * self._accumulation

    def step(
        self, update: Callable[..., Any], optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make an optimizer's step with compensated settings.

        The closure computes and reduces the gradients, so the ratio is known at its end. Before, and when the step
        is over, the settings are those of the user and the schedulers.

        Args:
            update: Lightning's `optimizer_step`.
            optimizer: Its first argument.
            closure: Its second one.
            args: The others.
            kwargs: The others.
        """
        scaled = self._scaled_of(optimizer)

        def compensated() -> Any:
            if scaled.applied:  # the step calls it again
                scaled.restore()
            result = closure()
            if self._ratio != 1.0:
                scaled.apply(self._ratio)
            return result

        try:
            return update(optimizer, compensated, *args, **kwargs)
        finally:
            if scaled.applied:
                scaled.restore()

    @contextmanager
    def shown(self, loader: ElasticLoader) -> Iterator[None]:
        """Show the settings of the next step in all parameter groups within the context."""
        num_workers = self.compensator.num_workers
        ratio = self.compensator.upcoming(self._share(loader, num_workers))
        all_scaled = [self._scaled_of(optimizer) for optimizer in self._trainer.optimizers]
        try:
            for scaled in all_scaled:
                scaled.apply(ratio)
            yield
        finally:
            for scaled in all_scaled:
                scaled.restore()

    @property
    def scalars(self) -> dict[str, float]:
        """The scale of the learning rate and the global batch of the newest update; empty before the first one."""
        if not self._batch_size:
            return {}
        rules = {type(optimizer).__name__: self._scaled_of(optimizer).rule for optimizer in self._trainer.optimizers}
        batch_size = self.compensator.global_batch_size or self._batch_size * self._trainer.accumulate_grad_batches
        return {**self.compensator.scales(rules), "global_batch_size": float(batch_size)}


class ScaledSettings:
    """The settings of an optimizer, which can be scaled and restored.

    A setting that is a tensor (the learning rate of a capturable optimizer, say) is changed in place: whoever holds
    it, a CUDA graph for instance, sees the change.

    Args:
        optimizer: The optimizer.
        rule: How its settings follow the ratio.

    Attributes:
        applied: Whether the settings are scaled.
    """

    def __init__(self, optimizer: Optimizer, rule: Rule) -> None:
        self.rule = rule
        self.applied = False
        self._optimizer = optimizer
        self._ratio = 1.0
        self._of_squares: Affine | None = None
        self._groups: list[dict[str, Any]] = []
        # Group, name, change, and the value with what has been made of it: mostly it is the same in the next step.
        self._numbers: list[list[Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []

    def apply(self, ratio: float) -> None:
        """Scale the settings."""
        groups = self._optimizer.param_groups
        if ratio != self._ratio or len(groups) != len(self._groups) or not all(map(is_, groups, self._groups)):
            self._plan(ratio)
        self.applied = True
        for number in self._numbers:
            group, name, change, old, new = number
            value = group[name]
            if value is not old or isinstance(value, list):
                new = self._changed(value, change)
                if new is value:
                    continue  # there is a tensor in it, which has been changed
                number[3:] = value, new
            group[name] = new

    def restore(self) -> None:
        """Restore the settings, except numbers that somebody else has set meanwhile."""
        self.applied = False
        for group, name, _, old, new in self._numbers:
            if group[name] is new:
                group[name] = old
        for tensor, value in self._tensors:
            tensor.copy_(value)
        self._tensors.clear()

    def _plan(self, ratio: float) -> None:
        changes = adjustments(self.rule, ratio)
        self._ratio, self._groups = ratio, list(self._optimizer.param_groups)
        self._of_squares = changes.get("beta_of_squares")
        self._numbers = [
            [group, name, changes[kind], _NOTHING, _NOTHING]
            for group in self._groups
            for name, kind in _KINDS.items()
            if name in group and kind in changes and (name != "weight_decay" or self._is_decoupled(group))
        ]

    def _is_decoupled(self, group: dict[str, Any]) -> bool:
        """Whether weights decay directly, and not through a part of the gradient."""
        return bool(group.get("decoupled_weight_decay", isinstance(self._optimizer, torch.optim.AdamW)))

    def _changed(self, value: Any, change: Affine) -> Any:
        """The new value of a setting; the same object if it is a tensor, or a type that we do not know."""
        if isinstance(value, (float, int)):
            return change(value)
        if isinstance(value, Tensor):
            self._change_in_place(value.detach(), change)
        elif isinstance(value, (tuple, list)) and change.shift and self._of_squares:  # betas, that of the squares last
            several = tuple(
                self._changed(item, self._of_squares if number == len(value) else change)
                for number, item in enumerate(value, start=1)
            )
            return value if all(map(is_, several, value)) else several
        return value

    def _change_in_place(self, tensor: Tensor, change: Affine) -> None:
        if not any(tensor.data_ptr() == known.data_ptr() for known, _ in self._tensors):  # groups may share it
            before = tensor.clone()
            self._tensors.append((tensor, before))
            tensor.mul_(change.scale).add_(change.shift)
            if change.shift:
                torch.maximum(tensor, before.clamp(max=change.least), out=tensor)
                torch.minimum(tensor, before.clamp(min=change.most), out=tensor)
                tensor.mul_(before != 0)
