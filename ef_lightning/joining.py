"""How a newcomer joins a training: what it does before, during and after its admission.

It joins immediately before the hooks at the start of a training, so `on_train_start` and `on_train_epoch_start` see the
epoch, the step, and the state of optimizers and callbacks that the others have:

1. While the others train, it does everything that is slow.
2. It is admitted at a boundary, and receives the state. From here on the others wait for it, in their next reduction.
3. Lightning calls both hooks. They set up what belongs to this worker: attributes, the data set, callbacks without a
   state. Until the first batch is read the worker is *entering* (:class:`~ef_common.session.Session`).
4. The state is loaded once more, because what all workers share (weights, optimizers, callbacks' state, counters) comes
   from the others' hooks, and from steps that they have made since.

If nobody held a state, all begin together, with hooks that are called as at any start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ef_common.errors import ProtocolError
from ef_common.session import Session
from ef_lightning import hooks, parameter_groups
from ef_lightning.host import is_of_lightning
from ef_lightning.requests import Requests
from ef_lightning.state import TrainerState
from ef_lightning.train_loader import ElasticLoader


class Joining:
    """A newcomer's way to its first batch, which begins with `attach`.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        state: The state that it receives.
        loader: The training loader, which is there when the loops begin.
        prepare: Sets up what has to be there at a boundary.
        requests: Requests of the user's code to all workers.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        state: TrainerState,
        *,
        loader: Callable[[], ElasticLoader | None],
        prepare: Callable[[], None],
        requests: Requests | None,
    ) -> None:
        self._trainer = trainer
        self._session = session
        self._state = state
        self._loader = loader
        self._prepare = prepare
        self._requests = requests

    def attach(self) -> None:
        """Join when the training begins."""
        hooks.surround_entry(self._trainer, training=self._join, batches=self._begin)

    def detach(self) -> None:
        """Leave the Trainer as it was."""
        hooks.leave_entry(self._trainer)
        parameter_groups.add_again(self._trainer.optimizers)

    def end_start(self) -> None:
        """The start hooks have been called. Next, the loops check whether to continue."""
        if self._requests is not None and self._session.entering:
            self._requests.settle()

    def _join(self) -> None:
        self._prepare()
        trainer, reload_epoch = self._trainer, hooks.reload_epoch(self._trainer)
        self._state.has_hooks = has_entry_hooks(trainer)
        self._training_loader().join(starts_workers=reload_epoch is None and not self._state.has_hooks)
        if self._state.in_epoch:
            self._session.entering = True
            hooks.forget_restart(trainer)
            parameter_groups.add_nothing_twice(trainer.optimizers)
            if hooks.reload_epoch(trainer) != reload_epoch:  # the others have asked the user again
                hooks.reload_training(trainer)
            self._training_loader().show_plan()

    def _begin(self) -> None:
        self.detach()
        if self._session.entering:
            self._state.adopt_again()
            self._training_loader().show_plan()

    def _training_loader(self) -> ElasticLoader:
        loader = self._loader()
        if loader is None:
            raise ProtocolError("a newcomer cannot join a training before it has a loader")
        return loader


_ENTRY_HOOKS = ("on_train_start", "on_train_epoch_start", "on_load_checkpoint", "load_state_dict")


def has_entry_hooks(trainer: Any) -> bool:
    """Whether code between the admission and the first batch may change everything that was received.

    The user's may do anything to that, and to the data set. Of Lightning's callbacks, those count that have a hook at
    the start of an epoch and keep a state: `BackboneFinetuning` goes on from the rate that it keeps.
    """
    owners = [trainer.lightning_module, trainer.datamodule, *trainer.callbacks]
    return any(_may_change_much(owner, name) for owner in owners for name in _ENTRY_HOOKS)


def _may_change_much(owner: Any, name: str) -> bool:
    if name in getattr(owner, "__dict__", ()):
        return True
    cls = type(owner)
    definer = _definer(cls, name)
    if definer is object or definer.__module__.startswith("torch."):
        return False
    if is_of_lightning(definer):  # a callback of its own, or the base class, whose hooks do nothing
        if definer.__name__ in _BASES:
            return False
        keeps_state = _definer(cls, "state_dict").__name__ not in _BASES
        return not is_of_lightning(cls) or (name == "on_train_epoch_start" and keeps_state)
    return True


def _definer(cls: type, name: str) -> type:
    return next((base for base in cls.__mro__ if name in vars(base)), object)


_BASES = ("Callback", "ModelHooks", "CheckpointHooks", "DataHooks", "LightningDataModule")
