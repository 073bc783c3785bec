"""A step on a global batch: this worker's passes, and those that it computes in place of lost workers.

Lightning makes the first pass. The others follow after its backward pass, before the gradients are reduced: to
Lightning they all are one batch. No pass is larger than the loader's `batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives.gradients.deterministic import DeterministicReducer
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.core.view import View
from ef_common.data.torch_determinism import seed_everything
from ef_common.errors import UnsupportedError
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.train_loader import ElasticLoader


class GlobalStep:
    """The passes of each step, one after the other.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        loader: The training loader.
        reducer: Returns the reducer of gradients in each step; None in a process that is not a worker of a job.
        deterministic: Does it instead, if sums must not depend on the shares.

    Attributes:
        share: Part of the batch that the current pass is: the weight of its loss.
        loss: This worker's part of the loss of the batch; None if that is no single number.
        in_extra_pass: A pass runs that Lightning knows nothing of.
    """

    def __init__(
        self,
        trainer: Any,
        session: Session,
        loader: ElasticLoader,
        *,
        reducer: Callable[[], GradientReducer | None],
        deterministic: DeterministicReducer | None = None,
    ) -> None:
        self.share = 0.0
        self.loss: Tensor | None = torch.zeros(())
        self.in_extra_pass = False
        self._trainer = trainer
        self._session = session
        self._loader = loader
        self._find_reducer = reducer
        self._reducer: GradientReducer | None = None
        self._deterministic = deterministic
        self._pieces: Pieces | None = None
        self._passes: list[list[int]] = []
        self._pass: Sequence[int] = ()
        self._is_last = self._reducing = False
        self._arguments: Sequence[Any] = ()
        self._optimizer: Any = None

    # ------------------------------------------------------------ called by the strategy

    def begin(self, arguments: Sequence[Any]) -> None:
        """Lightning begins a step: before its forward pass. `arguments` are those of `training_step` but the batch.

        Raises:
            UnsupportedError: Lightning has begun this step before.
        """
        pieces = self._loader.dealer.pieces
        if pieces is self._pieces:
            raise UnsupportedError(
                "the optimizer evaluates the model more than once in a step, which cannot be done with a batch that "
                "workers share. Leave out global_batch_size, or use an optimizer that calls its closure once"
            )
        self._arguments, self.loss = arguments, torch.zeros(())
        self._pieces = pieces
        pieces.compute = self._make_up
        self._reducer = self._find_reducer()
        if self._deterministic is not None:
            self._deterministic.begin(pieces)
        elif self._reducer is not None:
            self._reducer.pieces = pieces
        self._passes = pieces.passes()
        self._begin_pass(self._passes.pop(0) if self._passes else (), is_last=not self._passes)

    def weigh(self, loss: Tensor, optimizer: Any) -> Tensor:
        """Scale the loss of the current pass to its part of the batch's, for this optimizer."""
        self._optimizer = optimizer
        return loss * self.share

    def before_backward(self) -> None:
        """Reduce the gradients of the last pass as they become ready."""
        if not self._pass:
            return
        if self._deterministic is not None:
            self._deterministic.before_backward()
        elif self._is_last and self._reducer is not None:
            self._reducer.before_backward()
            self._reducing = True

    def end_pass(self, loss: Tensor | None) -> None:
        """A backward pass has ended; its loss, if that is a single number."""
        if not self._pass:  # it only kept step; its loss and its gradient may be anything, NaN too
            for parameter in self._trainer.lightning_module.parameters():
                parameter.grad = None
            return
        self.loss = None if self.loss is None or loss is None else self.loss + loss
        if self._deterministic is not None:
            self._deterministic.after_pass(self._pass[0], self.share)

    def finish(self) -> View:
        """Make the remaining passes, and reduce.

        Returns:
            The view whose members contributed.
        """
        while self._passes:
            pieces = self._passes.pop(0)
            self._run(self._loader.next_pass(), pieces, is_last=not self._passes)
        if self._deterministic is not None:
            return self._deterministic.finish()
        if self._reducer is None:
            return self._session.completed_in
        if not self._reducing:
            self._reducer.before_backward()
        return self._reducer.after_backward() or self._session.completed_in

    # ------------------------------------------------------------ passes

    def _begin_pass(self, pieces: Sequence[int], *, is_last: bool) -> None:
        self._reducing = False
        self._pass, self._is_last = pieces, is_last
        self.share = self._pieces.share(pieces) if self._pieces is not None else 0.0
        if self._deterministic is not None and self._pieces is not None:
            self._deterministic.before_pass()
            loader, window = self._loader, self._pieces.window
            seed_everything([loader.seed, loader.progress.epoch, window.start, pieces[0] if pieces else 0])

    def _make_up(self, pieces: Sequence[int]) -> None:
        """Compute these pieces, whose worker is lost."""
        self._run(self._loader.fetch(pieces), pieces, is_last=False)

    def _run(self, batch: Any, pieces: Sequence[int], *, is_last: bool) -> None:
        """A forward and a backward pass."""
        trainer = self._trainer
        self._begin_pass(pieces, is_last=is_last)
        self.in_extra_pass = True
        try:
            output = hooks.training_step(trainer, batch, self._arguments)
            loss = output["loss"] if isinstance(output, Mapping) else output
            if loss is None:  # the user skips these samples
                loss = torch.zeros((), requires_grad=True)
            trainer.strategy.backward(loss, self._optimizer)
        finally:
            self.in_extra_pass = False
