"""Repeats a training step in which a worker was lost that had exchanged values with the others.

A loss in a collective is repaired within that collective: the survivors have one result, of the same members. But a
step that computes with tensors of several workers is consistent only if all its collectives have the same members, from
the first one to the reduction of its gradients. If a worker is lost in between, its features are in the loss of the
others, while its samples go back to the epoch and nobody has their gradient. The others therefore repeat the step, with
the same samples and from the random state of its start, after everything that the step has changed is undone.

**All decide alike.** They compare the members in which a collective of the step has completed with those at its start,
which all know alike (:attr:`~ef_common.session.Session.completed_in`). The same collective raises
:class:`~ef_common.errors.MembersChanged` in all of them. A result that is handed on to a worker that lacked it brings
its members along.

**Uneven shares.** A step is also repeated if it is the first to gather and its batches differ in size: in the last
steps of an epoch, shares differ by a sample. All workers see the same shapes, so
:class:`~ef_common.errors.SharesUneven` is raised in all of them; the current batch is then read again, as large as the
largest one.

**A step is an update** with all passes of its accumulation. Earlier passes are repeated, too, but leave what they have
logged as it was.

**What is undone**: random generators, the module's buffers, and what `self.log` and torchmetrics objects have
accumulated. The first pass sets gradients to zero. Attributes that a training step sets are not undone.

Saving this state costs about 50 microseconds and a copy of the buffers, so it happens in the first update of a
training, and in all others once a step has gathered. The first step of a module that begins to gather later is repeated
with the state at its first collective.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from ef_common.core.view import View
from ef_common.errors import MembersChanged, SharesUneven
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.metrics import Traces, leaving_no_trace
from ef_lightning.random_state import Generators

Act = Callable[..., Any]


class Repetition:
    """Makes the steps of one training, and repeats them when needed.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        on_repeat: Called with the reason before a step is made again.
        begins: Whether the current batch is the first one since an update.
        fill: Reads the current batch again, as large as the largest one of its step.
        select: Tells which batch of the update is used next, counted from the newest one, -1.

    Attributes:
        in_pass: The forward or the backward pass of a batch is running.
        in_backward: The backward passes of this step have collectives of their own.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        *,
        on_repeat: Callable[[str], None],
        begins: Callable[[], bool],
        fill: Callable[[], Any],
        select: Callable[[int], None],
    ) -> None:
        self.in_pass = self.in_backward = False
        self._trainer = trainer
        self._session = session
        self._on_repeat = on_repeat
        self._begins = begins
        self._fill = fill
        self._select = select
        self._records = True
        self._used = self._used_before = False
        self._began_in: View | None = None
        self._act: Act | None = None
        self._is_first = True
        self._passes: list[Pass] = []
        self._state: ModuleState | None = None

    def attach(self) -> None:
        """Make the steps from now on."""
        hooks.surround_passes(self._trainer, lambda *given: partial(self._run, *given), begins=self._begins)

    def detach(self) -> None:
        """Leave the steps to Lightning."""
        hooks.leave_passes(self._trainer)
        self._forget()

    # ------------------------------------------------------------ collectives

    def begin_collective(self, *, in_backward: bool = False) -> None:
        """A collective begins whose result is valid only for the members of the whole step."""
        if self.in_pass:
            self._used = self._records = True  # from here on, also the passes that follow in this update
            self.in_backward = self.in_backward or in_backward
            if self._state is None:
                self._record()

    def check(self, members: View) -> None:
        """A collective of the step, or the reduction of its gradients, has completed with these members.

        Raises:
            MembersChanged: In all of them, if they have changed.
        """
        began_in = self._began_in
        if self._used and self.in_pass and began_in is not None and members.ids != began_in.ids:
            raise MembersChanged(f"the step began with {began_in.ids}, and goes on with {members.ids}")

    def end_update(self) -> None:
        """The gradients are the same in all workers, so there is nothing to repeat."""
        self._records = self._used_before = self._used_before or self._used
        self.in_pass = False
        self._forget()

    # ------------------------------------------------------------ passes

    def _run(self, act: Act, is_first: bool, arguments: dict[str, Any], *args: Any) -> Any:
        """Make a pass (forward and backward). The arguments are those of the training step."""
        if is_first or self._began_in is None:
            self._forget()
            self._began_in = self._session.completed_in
        self._act, self._is_first = act, is_first
        if self._records:
            self._record()
        self.in_pass = True
        try:
            return self._repeat(act, arguments, args)
        finally:
            self.in_pass, self._act = False, None

    def _repeat(self, act: Act, arguments: dict[str, Any], args: Any) -> Any:
        why, is_uneven = "", False
        while True:
            try:
                if why:
                    filled = [self._fill()] if is_uneven else []  # to read may draw random numbers
                    self._go_back(why)
                    self._take(filled, arguments)
                return act(*args)
            except MembersChanged:
                why, is_uneven = "a worker was lost in a step that had its values", False
            except SharesUneven:
                why, is_uneven = "a step has gathered for the first time, from batches of several sizes", True

    def _take(self, filled: list[Any], arguments: dict[str, Any]) -> None:
        """Continue with this batch, if there is one, even if the pass is repeated once more."""
        for batch in filled:
            hooks.set_batch(self._trainer, arguments, batch)
            self._passes[-1] = self._passes[-1]._replace(fields=hooks.step_fields(self._trainer))

    def _record(self) -> None:
        if self._act is None:
            return
        module = self._trainer.lightning_module
        if self._state is None:
            self._state = ModuleState(module, gradients=not self._is_first)
        fields = hooks.step_fields(self._trainer)
        self._passes.append(Pass(self._act, Generators(), Traces(self._trainer), fields))

    def _go_back(self, why: str) -> None:
        """Go back to the start of the newest pass, with the earlier ones repeated."""
        self._on_repeat(why)
        self._began_in = self._session.completed_in
        self._used = self.in_backward = False
        if self._state is not None:
            self._state.restore()
        for index, earlier in enumerate(self._passes[:-1], start=-len(self._passes)):
            earlier.generators.restore()
            self._select(index)
            with leaving_no_trace(self._trainer), self._trainer.strategy.block_backward_sync():
                earlier.act()
        newest = self._passes[-1]
        newest.generators.restore()
        self._select(-1)
        newest.traces.undo()
        hooks.set_step_fields(self._trainer, newest.fields)

    def _forget(self) -> None:
        self._used = self.in_backward = False
        self._began_in, self._state = None, None
        self._passes.clear()


class Pass(NamedTuple):
    """The start of a pass."""

    act: Act
    generators: Generators
    traces: Traces
    fields: tuple[Any, ...]


class ModuleState:
    """The things that the passes of an update change in a module.

    Args:
        module: The module.
        gradients: Keep gradients as well: no pass will set them to zero.
    """

    def __init__(self, module: Module, *, gradients: bool) -> None:
        self._buffers = [
            (owner, name, tensor, tensor.detach().clone())
            for owner in module.modules()
            for name, tensor in owner.named_buffers(recurse=False)
        ]
        kept = module.parameters() if gradients else ()
        self._gradients = [(p, None if p.grad is None else p.grad.clone()) for p in kept]

    def restore(self) -> None:
        """Restore this state. May be repeated."""
        with torch.no_grad():
            for owner, name, tensor, kept in self._buffers:
                tensor.copy_(kept)
                setattr(owner, name, tensor)  # it may be another one by now
        for parameter, gradient in self._gradients:
            parameter.grad = None if gradient is None else gradient.clone()
