"""The state that a newcomer receives: all variables, the place in the epoch, and what callbacks remember."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ef_common.collectives.codec import ARRAYS
from ef_common.data.checkpointer import Checkpointer
from ef_common.data.claiming import Claiming
from ef_common.data.transfer import StateTransfer
from ef_common.errors import ElasticFlowError
from ef_keras import hooks
from ef_keras.checkpoints import FitCheckpoints
from ef_keras.memories import memory_of, restore
from ef_keras.rank_zero import OnRankZero, unwrapped

logger = logging.getLogger(__name__)

Memory = tuple[str, dict[str, Any]]
"""What a callback remembers: its key (see `_by_kind`), and its fields."""


class FitState:
    """The state of one `fit`, in the form of the session's port `State`.

    Args:
        model: The model, built, with its optimizers.
        callbacks: Callbacks of the `fit`.
        progress: Collects how far the epoch is.
        load_progress: Takes it in; the flag says that it comes from a checkpoint, not from a member.
        claiming: Its claims.

    Attributes:
        checkpoints: Checkpoints of the `fit`, if any are taken.
    """

    def __init__(
        self,
        model: Any,
        callbacks: Callable[[], Sequence[Any]],
        *,
        progress: Callable[[], dict[str, Any]],
        load_progress: Callable[[dict[str, Any], bool], None],
        claiming: Claiming,
    ) -> None:
        self._model = model
        self._callbacks = callbacks
        self._progress = progress
        self._load_progress = load_progress
        self._claiming = claiming
        self.checkpoints: FitCheckpoints | None = None
        self._transfer = StateTransfer(ARRAYS, claiming, self._job)
        self._memories: list[Memory] = []

    # ------------------------------------------------------------ port

    def prepare(self) -> None:
        """Prepare memory that has been touched already, because the others wait while the state travels."""
        self._transfer.prepared = [np.zeros(v.shape, str(v.dtype)) for v in hooks.shared_variables(self._model)]

    def describe(self) -> bytes:
        """Header of this worker's state."""
        return self._transfer.describe(self._collect)

    def tensors(self, header: bytes | None) -> Sequence[np.ndarray]:
        """The arrays of the state."""
        return [array for array in self._transfer.leaves(header) if array.size]

    def adopt(self, header: bytes) -> None:
        """Continue from the received state."""
        self._transfer.adopt(header, self._adopt)

    def _adopt(self, state: dict[str, Any]) -> None:
        variables = hooks.shared_variables(self._model)
        shapes = [list(variable.shape) for variable in variables]
        received = [list(value.shape) for value in state["variables"]]
        if shapes != received:
            raise ElasticFlowError(
                "the others train another model, or with another optimizer: the shapes of its variables differ. "
                f"Expected: {received[:5]}… ({len(received)}). Received: {shapes[:5]}… ({len(shapes)})"
            )
        for variable, value in zip(variables, state["variables"], strict=True):
            variable.assign(value)
        self._memories = state["callbacks"]
        self._load_progress(state["progress"], False)

    def restore(self) -> bool:
        """All who held a state are lost: load the newest saved one, if there is one."""
        self._claiming.begin_again()
        return self.checkpoints is not None and self.go_back(self.checkpoints.find_again())

    def go_back(self, collected: dict[str, Any] | None) -> bool:
        """Continue from what a checkpoint holds besides the variables. Returns whether there was one."""
        if collected is None:
            return False
        self._memories = collected["callbacks"]
        self._load_progress(collected["progress"], True)
        return True

    def collect(self) -> dict[str, Any]:
        """The state without the variables."""
        return {"progress": self._progress(), "callbacks": self.memories()}

    # ------------------------------------------------------------ callbacks

    def memories(self, *, of_rank_zero: bool = False) -> list[Memory]:
        """What the callbacks remember: all of them, or those that run only in rank 0."""
        return [
            (key, memory)
            for key, callback in _by_kind(self._callbacks()).items()
            if isinstance(callback, OnRankZero) or not of_rank_zero
            if (memory := _memory_of(callback)) is not None
        ]

    def remember(self, memories: Sequence[Memory]) -> None:
        """Give this worker's callbacks the memories of another worker's."""
        mine = _by_kind(self._callbacks())
        for key, memory in memories:
            callback = mine.get(key)
            if callback is None:
                logger.warning("the others have a callback that this worker has not: %s", key)
            elif isinstance(callback, OnRankZero):
                callback.memory = memory
            else:
                restore(callback, memory)

    def writers(self) -> dict[str, bool]:
        """Callbacks that write, by their keys: whether the newest hook, one that writes, was called in this worker."""
        mine = _by_kind(self._callbacks()).items()
        return {key: one.ran for key, one in mine if isinstance(one, OnRankZero) and one.ran is not None}

    def write_again(self, everybody: Sequence[dict[str, bool]]) -> bool:
        """Call hooks again in which rank 0 was lost. Returns whether there were any, which all members see alike.

        Args:
            everybody: `writers` of each member, in rank order.
        """
        lost = [key for key in everybody[0] if not any(theirs.get(key) for theirs in everybody)]
        mine = _by_kind(self._callbacks())
        for key in lost:
            if key in mine:
                mine[key].call_again()
        return bool(lost)

    def recall(self, *, forget: bool = True) -> None:
        """Give this worker's callbacks the memories that came with a state; call this when all of them have begun.

        Args:
            forget: They are not needed again.
        """
        memories = self._memories
        if forget:
            self._memories = []
        self.remember(memories)

    def _job(self) -> Checkpointer | None:
        return None if self.checkpoints is None else self.checkpoints.job

    def _collect(self) -> dict[str, Any]:
        return {
            **self.collect(),
            "variables": [
                np.asarray(keras.ops.convert_to_numpy(variable)) for variable in hooks.shared_variables(self._model)
            ],
        }


def _memory_of(callback: Any) -> dict[str, Any] | None:
    return callback.memory if isinstance(callback, OnRankZero) else memory_of(callback)


def _by_kind(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Callbacks by class and number within the class, which are the same in all workers."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        name = type(unwrapped(callback)).__qualname__
        number = sum(key.startswith(f"{name}#") for key in found)
        found[f"{name}#{number}"] = callback
    return found
