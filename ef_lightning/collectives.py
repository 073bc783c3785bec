"""What Lightning and its users call to talk to the other workers, as collectives of the session."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ef_common.collectives import torch_operations as operations
from ef_common.core.view import View
from ef_common.errors import UnsupportedError, UsageError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker
from ef_common.session import Barrier, Session

_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class CollectivesMixin:
    """The collectives of a strategy.

    Before the first run of a Trainer there are no others, and all of these answer as in a world of one. A worker that
    fails in its own code says what it still has to say (a last checkpoint, say) without the others: they are somewhere
    else, and go on without it.
    """

    _trainer: Any = None
    _worker: Worker | None = None
    _is_last = False
    """All others have left, and so will this worker."""

    @property
    def session(self) -> Session:
        """The worker's session."""
        raise NotImplementedError

    @property
    def _alone(self) -> bool:
        return self._worker is None or self._is_last or (self._trainer is not None and self._trainer.interrupted)

    @property
    def _in_part(self) -> bool:
        """In a further pass of a global batch. The others may have fewer of them, so nobody would answer."""
        return False

    def _check_whole(self) -> None:
        if self._in_part:
            raise UnsupportedError(
                "with global_batch_size, training_step is called for parts of a batch, as often as each worker has "
                "some, so it cannot exchange values with the other workers. Do it in on_train_batch_end, or leave out "
                "global_batch_size"
            )

    def _gather(self, value: Any) -> list[Any]:
        self._check_whole()
        return [value] if self._alone else self._gather_in_view(value)[0]

    def _gather_in_view(self, value: Any) -> tuple[list[Any], View]:
        with leaving_cleanly():
            return operations.gather(self.session, value)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the workers: mean, sum, max or min; anything but a tensor comes back as it is."""
        if not isinstance(tensor, Tensor) or self._alone or self._in_part:
            return tensor
        name = _REDUCTIONS.get(str(reduce_op or "mean").lower().rsplit(".", 1)[-1])
        if name is None:
            raise UnsupportedError(f"unknown reduction. Expected one of {tuple(_REDUCTIONS)}. Received: {reduce_op!r}")
        with leaving_cleanly():
            return operations.reduce(self.session, tensor, name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the workers say yes."""
        decisions = self._gather(bool(decision))
        return bool(min(decisions)) if all else bool(max(decisions))

    def barrier(self, name: str | None = None) -> None:
        """Wait for everybody."""
        if not self._alone and not self._in_part:
            with leaving_cleanly():
                self.session.run(Barrier())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s value, for everybody. Plain values and tensors only: nothing is unpickled.

        Everybody sends a value, so that there is one if the rank is lost meanwhile.
        """
        if self._alone or self.session.completed_in.world_size == 1:
            return obj
        values = self._gather(obj)
        return values[min(src, len(values) - 1)]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Everybody's tensor, stacked: shape (world size, *tensor.shape); the tensor itself in a world of one."""
        self._check_whole()
        if self._worker is None or not self._worker.elastic:
            return tensor
        if sync_grads:
            raise UnsupportedError(
                "all_gather(sync_grads=True) cannot be run again after a loss. Compute the loss from the local "
                "batch; gradients are averaged over the workers"
            )
        values = self._gather(tensor)
        if len({value.shape for value in values}) > 1:
            raise UsageError(
                "all_gather needs tensors of the same shape in all workers, and the last batches of an epoch may "
                "differ in size. Gather a sum or a mean, or pad the tensor. "
                f"Received: shapes={[tuple(value.shape) for value in values]}"
            )
        values = [value.to(tensor.device) for value in values]
        return values[0] if len(values) == 1 else torch.stack(values)
