"""One reduction of a module's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ef_common.collectives.gradients.bucket_run import CALL, BucketRun, RunState, Weights
from ef_common.collectives.gradients.buckets import NUM_FIXED_FLAGS, Bucket, BucketLayout, is_copied_early
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.sparse import check_dense, densify, sparsify
from ef_common.core.view import View
from ef_common.session import Session


class Reduction(BucketRun):
    """One gradient reduction, an operation of the session. The package says what it keeps and when."""

    def __init__(
        self,
        layout: BucketLayout,
        session: Session,
        weights: Weights,
        *,
        fraction: float = 1.0,
        pieces: Pieces | None = None,
    ) -> None:
        for bucket in layout.buckets:
            bucket.next_turn()
        super().__init__(
            [bucket.buffer for bucket in layout.buckets],
            session,
            weights=weights,
            fraction=fraction,
            pieces=pieces,
            call=CALL,
        )
        self.layout = layout
        self.skipped = False
        self.wants_stop = 0.0
        self.finds = False
        self.measures = False  # the squared norm of the local gradients is to be summed, too
        self.squared_norms = 0.0
        self.asks = self.asked = 0.0
        self.decides: Sequence[float] = ()
        self.decided: list[float] = []
        self.num_skipped = self.num_stops = self.num_wishes = self.num_finds = 0.0
        self._flags: list[float] = []
        self._missing = [len(bucket.sources) for bucket in layout.buckets]
        self._fired: set[int] = set()
        self._densified: list[Tensor] = []
        self._lacking_of_all = 0.0

    def gradient_ready(self, parameter: Tensor) -> None:
        """The gradient of a parameter is complete (a hook during the backward pass; it must never raise)."""
        if id(parameter) in self._fired:
            # Once more (reentrant checkpointing): its bucket may be under way with half of the gradient.
            self.stale = True
            return
        self._fired.add(id(parameter))
        index, place = self.layout.place_of[id(parameter)]
        gradient = parameter.grad
        is_dense = gradient is not None and not gradient.is_sparse
        if self._group is not None and self.weight and is_dense and is_copied_early(parameter):
            with torch.no_grad():  # in `backward(create_graph=True)` it is enabled
                torch.mul(gradient, self.weight, out=self.layout.buckets[index].views[place])  # type: ignore[arg-type]
            self.copied.add(id(parameter))
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self.ready(index)

    @torch.no_grad()
    def _fill(self, index: int) -> None:
        bucket = self.layout.buckets[index]
        if index in self.layout.value_buckets:
            bucket.fill_values(own=self.rank == 0)
            return
        self._densified += [parameter for parameter in self.layout.sparse if densify(parameter)]
        try:
            bucket.fill_gradients(self.weight, self.copied)
        except RuntimeError as error:
            check_dense(bucket.sources, error)
            raise
        if index == len(self.layout.buckets) - 1:
            bucket.flags.copy_(torch.tensor(self._own_flags(), dtype=torch.float32))

    def _own_flags(self) -> list[float]:
        session = self._session
        squared = squared_norm(self.layout) if self.measures and self.weight else 0.0  # of padding it may be NaN
        flags = [float(session.change_pending), float(self.stale), float(self.skipped), self.wants_stop]
        flags += [float(session.agreements.wish), self.lacking, squared, self.asks, float(self.finds)]
        words = as_words(self.decides)
        flags += words if self.rank == 0 else [0.0] * len(words)
        return flags + [float(p.grad is not None) for p in self.layout.parameters]

    def _is_stale(self) -> bool:
        return self.layout.buckets[-1].flags[1].item() > 0

    def _stay_alone(self, view: View) -> None:
        self._enter(view)
        self.layout.check_first_gradients()  # when others join, it is too late to refuse them
        self._flags = self._own_flags()

    # ------------------------------------------------------------ result

    def read_flags(self) -> float:
        """Read the members' flags. Returns how many know of a pending change."""
        if self.state is not RunState.ALONE:
            self._flags = self.layout.buckets[-1].flags.tolist()
        self.num_skipped, self.num_stops, self.num_wishes, self._lacking_of_all = self._flags[2:6]
        self.squared_norms, self.asked, self.num_finds = self._flags[6:NUM_FIXED_FLAGS]
        self.decided = from_words(self._flags[NUM_FIXED_FLAGS : self._num_before_parameters])
        return float(self._flags[0])

    @property
    def _num_before_parameters(self) -> int:
        """Flags before those that tell which parameters have a gradient."""
        return NUM_FIXED_FLAGS + num_words(len(self.decides))

    @torch.no_grad()
    def apply(self, *, spares_equal: bool = False) -> None:
        """Put the reduced gradients into `param.grad` and the buffers into the module; after `read_flags`.

        Args:
            spares_equal: Leave buffers alone that have rank 0's values already.
        """
        if self.state is RunState.ALONE:
            self._weigh_own()
            sparsify(self._densified)  # others stay as they are in one process
            return
        used = dict(zip(self.layout.ids, self._flags[self._num_before_parameters :], strict=True))
        for index, bucket in enumerate(self.layout.buckets):
            if index in self.layout.value_buckets:
                bucket.write_values(spares_equal=spares_equal)
            elif self.layout.double_buffered:
                _copy_gradients(bucket, used)
            else:
                self.layout.retired += [source.grad for source in bucket.sources]
                _lend_gradients(bucket, used)
        if self._lacking_of_all:  # `param.grad` is a copy, or everybody has the bucket: nobody gets what is divided
            gradients = [p.grad for p in self.layout.parameters if p.grad is not None]
            torch._foreach_div_(gradients, 1.0 - self._lacking_of_all)
        sparsify(self.layout.sparse)

    def _weigh_own(self) -> None:
        """The own gradients are the result. If whoever had the samples is gone, this update is of nothing."""
        weight = self.weights[self.rank]
        if weight == 1.0:
            return
        for gradient in (p.grad for p in self.layout.parameters if p.grad is not None):
            gradient.mul_(weight) if weight else gradient.zero_()  # which may be anything, NaN too


def num_words(num: int) -> int:
    """Flags that this many numbers take."""
    return 4 * num


def as_words(numbers: Sequence[float]) -> list[float]:
    """Numbers of double precision as flags, which have single precision: whole numbers of 16 bits each."""
    if not numbers:
        return []
    words: list[float] = np.array(numbers, np.float64).view(np.uint16).astype(float).tolist()
    return words


def from_words(words: Sequence[float]) -> list[float]:
    """The inverse of `as_words`."""
    if not words:
        return []
    numbers: list[float] = np.array(words, float).astype(np.uint16).view(np.float64).tolist()
    return numbers


@torch.no_grad()
def squared_norm(layout: BucketLayout) -> float:
    """Squared norm of the gradients that the parameters have; waits for the device."""
    gradients = [p.grad.to_dense() for p in layout.parameters if p.grad is not None]
    if not gradients:
        return 0.0
    norms = [norm.to(gradients[0].device, torch.float32) for norm in torch._foreach_norm(gradients)]
    return float(torch.stack(norms).square().sum())


def _copy_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    targets, values = [], []
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if parameter.grad is not None:
            targets.append(parameter.grad)
            values.append(view)
        elif used[id(parameter)] > 0:
            parameter.grad = view.clone()
    if targets:
        torch._foreach_copy_(targets, values)


def _lend_gradients(bucket: Bucket, used: dict[int, float]) -> None:
    for parameter, view in zip(bucket.sources, bucket.views, strict=True):
        if used[id(parameter)] > 0:
            parameter.grad = view
