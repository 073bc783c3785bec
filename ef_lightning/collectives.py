"""The functions with which Lightning and its users talk to other workers, as collectives of the session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives import torch_operations as operations
from ef_common.core.view import View
from ef_common.errors import SharesUneven, UnsupportedError, UsageError
from ef_common.launch.leaving import leaving_cleanly
from ef_common.launch.process import Worker
from ef_common.session import Barrier, Session
from ef_lightning import hooks
from ef_lightning.gathering import GatherPeers, GatherWithGradients
from ef_lightning.host import LightningHost
from ef_lightning.repetition import Repetition

# The calls, as whoever has made them in one worker only knows them.
_REDUCE = "strategy.reduce or self.log(sync_dist=True)"
_ALL_GATHER = "self.all_gather"
_STATISTICS = "synchronized BatchNorm"
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}


class CollectivesMixin:
    """The collectives of a strategy.

    Before the first run of a Trainer there are no others, and all of these answer as in a world of one. A worker that
    fails in its own code says what it still has to say (a last checkpoint, say) without the others: they are somewhere
    else, and go on without it.
    """

    host: LightningHost
    _trainer: Any = None
    _worker: Worker | None = None
    _makes_checkpoint = False
    is_last = False
    """All others have left, and so will this worker."""

    @property
    def session(self) -> Session:
        """The worker's session."""
        raise NotImplementedError

    @property
    def _alone(self) -> bool:
        return self._worker is None or self.is_last or (self._trainer is not None and self._trainer.interrupted)

    @contextmanager
    def making_checkpoint(self) -> Iterator[None]:
        """Within this context, the user's hooks make a checkpoint in this worker alone, and collectives raise.

        Not so at the start of a job, where rank 0 hands out its state before there is anybody else: it answers its
        collectives itself.
        """
        if self.session.newcomer:
            yield
            return
        self._makes_checkpoint = True
        try:
            with self.session.alone("on_save_checkpoint, or a state_dict()"):
                yield
        finally:
            self._makes_checkpoint = False

    @property
    def _repetition(self) -> Repetition | None:
        """The object that repeats steps; None where none can be repeated."""
        return None

    @property
    def _in_part(self) -> bool:
        """Whether this is a further pass of a global batch, in which other workers may not take part."""
        return False

    def gather(self, value: Any, call: str) -> list[Any]:
        """Every worker's value, in rank order. The text says what it is for."""
        self._refuse_in_part()
        return [value] if self._alone else self.gather_in_view(value, call)[0]

    def gather_in_view(self, value: Any, call: str) -> tuple[list[Any], View]:
        """The same values, and the members that they belong to."""
        self._refuse_in_part()
        with leaving_cleanly():
            return operations.gather(self.session, value, call=call)

    def _refuse_in_part(self) -> None:
        if self._in_part:
            raise UnsupportedError(
                "with global_batch_size, training_step is called for parts of a batch, as often as each worker has "
                "some, so it cannot exchange values with the other workers. Do it in on_train_batch_end, or leave out "
                "global_batch_size"
            )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the workers: mean, sum, max or min; other values are returned as they are."""
        if not isinstance(tensor, Tensor) or self._alone or self._in_part:
            return tensor
        name = _REDUCTIONS.get(str(reduce_op or "mean").lower().rsplit(".", 1)[-1])
        if name is None:
            raise UnsupportedError(f"unknown reduction. Expected one of {tuple(_REDUCTIONS)}. Received: {reduce_op!r}")
        with leaving_cleanly():
            return operations.reduce(self.session, tensor, name, call=_REDUCE)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the workers say yes."""
        decisions = self.gather(bool(decision), "strategy.reduce_boolean_decision")
        return bool(min(decisions)) if all else bool(max(decisions))

    def barrier(self, name: str | None = None) -> None:
        """Wait for all workers."""
        if not self._alone and not self._in_part:
            with leaving_cleanly():
                self.session.run(Barrier(f"barrier {name!r}" if name else "strategy.barrier"))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s value in all workers. Plain values and tensors only: nothing is unpickled.

        Everybody sends a value, so that there is one, the first worker's, if that rank is lost. `trainer.log_dir` is
        broadcast whenever it is asked for, and hooks of checkpoints ask for it. It is equal in all workers already.
        """
        if self._alone or self.session.completed_in.world_size == 1:
            return obj
        is_path = obj is None or isinstance(obj, (str, os.PathLike))
        if self._makes_checkpoint and is_path and obj == hooks.log_dir(self._trainer, self.host):
            return obj
        ids = self.session.completed_in.ids
        values, view = self.gather_in_view(obj, "strategy.broadcast")
        rank = view.rank_of(ids[src]) if src < len(ids) else None
        return values[rank or 0]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all workers, stacked: shape (world size, *tensor.shape).

        As in Lightning's distributed strategies, a member of a job that is the only one gets shape (1, *tensor.shape),
        so that a step goes on as it was written when the others are lost. A process that is no member of a job gets the
        tensor itself, as with Lightning's strategies for one device.

        Args:
            tensor: A tensor of the same shape in all workers.
            group: There is one group only.
            sync_grads: A gradient of the result is one of everybody's tensor.

        Raises:
            UnsupportedError: With gradients, where a step cannot be made again.
            UsageError: The shapes differ.
        """
        self._refuse_in_part()
        if self._worker is None or not self._worker.elastic:
            return tensor
        if not (sync_grads and tensor.requires_grad and torch.is_grad_enabled()):
            return torch.stack(self._gather_tensor(tensor, _ALL_GATHER)[0])
        self._check_gradients()
        return self._gather_with_gradients(tensor, self._gather_tensor, _ALL_GATHER)

    def gather_statistics(self, tensor: Tensor) -> Tensor:
        """Like `all_gather`, with gradients, for a tensor whose shape does not depend on the batch."""
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return torch.stack(self._gather_tensor(tensor, _STATISTICS, follows_batch=False)[0])
        return self._gather_with_gradients(tensor, partial(self._gather_tensor, follows_batch=False), _STATISTICS)

    def _gather_with_gradients(self, tensor: Tensor, gather: Callable[..., Any], call: str) -> Tensor:
        peers = GatherPeers(
            partial(gather, call=call, in_backward=True),
            add=partial(self.add, call=f"backward pass of {call}"),
            rank=self._rank_in,
            weights=self.weights_in,
        )
        gathered: Tensor = GatherWithGradients.apply(tensor, peers)  # type: ignore[no-untyped-call]
        return gathered

    def _check_gradients(self) -> None:
        trainer = self._trainer
        if trainer is None or not trainer.training or self._repetition is not None:
            return
        raise UnsupportedError(
            "all_gather(sync_grads=True) needs steps that can be repeated if a worker is lost in them, which is not "
            "possible with manual optimization (an update may have been made already) or with global_batch_size "
            "(workers make different numbers of passes). Use automatic optimization without "
            "global_batch_size, or compute the loss from the local batch: gradients are averaged over the workers"
        )

    def _gather_tensor(
        self, tensor: Tensor, call: str, *, in_backward: bool = False, follows_batch: bool = True
    ) -> tuple[list[Tensor], View | None]:
        """Tensors of one shape from all workers, and these workers; a lone worker's own."""
        if self._alone:
            return [tensor.detach()], None
        values, view = self._exchanged(tensor, call, in_backward=in_backward)
        if follows_batch:
            self._note_rows(values)
        if _differ(values):
            raise UsageError(
                "all_gather needs tensors of the same shape in all workers. Gather a sum or a mean, or pad the tensor. "
                "Batches have the same size in all workers in a step that gathers, except with manual optimization. "
                f"Received: shapes={[tuple(value.shape) for value in values]}"
            )
        return [value.to(tensor.device) for value in values], view

    def _exchanged(self, value: Any, call: str, *, in_backward: bool) -> tuple[list[Any], View]:
        if self._repetition is not None:
            self._repetition.begin_collective(in_backward=in_backward)
        values, view = self.gather_in_view(value, call)
        if self._repetition is not None:
            self._repetition.check(view)
        return values, view

    def exchange(self, value: Any, call: str) -> tuple[list[Any], View | None]:
        """Every worker's value, for the default process group, and these workers; a lone worker's own.

        In a step, this is a collective of the step.
        """
        if self._alone:
            return [value], None
        values, view = self._exchanged(value, call, in_backward=True)
        self._note_rows(values)
        return values, view

    def _note_rows(self, values: Sequence[Any]) -> None:
        """Note that a training step has gathered these shapes, equal in all workers; a row is usually a sample.

        Raises:
            SharesUneven: Batches are of several sizes, and need not be.
        """
        in_pass = self._repetition is not None and self._repetition.in_pass
        if in_pass and any(isinstance(value, Tensor) and value.dim() and len(value) > 1 for value in values):
            is_even = self._want_even_shares()
            if not is_even and _differ(values):
                raise SharesUneven

    def add(self, tensor: Tensor, call: str) -> Tensor:
        """The sum of a tensor over the workers, as a new one. In a step, this is a collective of the step."""
        if self._alone:
            return tensor.clone()
        self._refuse_in_part()
        if self._repetition is not None:
            self._repetition.begin_collective(in_backward=True)
        operation = operations.SumTensor(tensor, call)
        with leaving_cleanly():
            view = self.session.run(operation)
        if self._repetition is not None:
            self._repetition.check(view)
        return operation.total

    def _rank_in(self, view: View) -> int:
        return view.rank_of(self.session.worker.id) or 0

    def weights_in(self, view: View) -> Sequence[float]:
        """Weight of each member's gradient."""
        return [1.0 / view.world_size] * view.world_size

    def _want_even_shares(self) -> bool:
        """Ask for batches of one size in all workers. Returns whether the current ones are."""
        return True


def _differ(values: Sequence[Any]) -> bool:
    """Whether there are tensors of several shapes among these."""
    return len({value.shape for value in values if isinstance(value, Tensor)}) > 1
