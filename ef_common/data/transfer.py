"""The transfer of a training's state to a newcomer; see :class:`~ef_common.session.ports.State`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ef_common.collectives.codec import Codec
from ef_common.data.checkpointer import Checkpointer
from ef_common.data.claiming import Claiming
from ef_common.errors import ElasticFlowError, UnsupportedError, UsageError


class StateTransfer:
    """Transfers the state that the plugin has collected, and the run of its checkpoints and claims.

    Args:
        codec: Codec for the framework's arrays.
        claiming: The claims of this training.
        checkpoints: Checkpoints of this training, once there are any.

    Attributes:
        prepared: In a newcomer: memory for the state, if it fits.
    """

    def __init__(self, codec: Codec, claiming: Claiming, checkpoints: Callable[[], Checkpointer | None]) -> None:
        self._codec, self._claiming, self._checkpoints = codec, claiming, checkpoints
        self._leaves: list[Any] = []
        self.prepared: Sequence[Any] = ()

    def describe(self, collect: Callable[[], dict[str, Any]]) -> bytes:
        """Header of the state from `collect`. If it cannot be sent, the error is the newcomer's, not this worker's."""
        checkpoints = self._checkpoints()
        try:
            run = {"checkpoints": checkpoints and checkpoints.state(), "claims": self._claiming.state()}
            header, self._leaves = self._codec.encode({**collect(), **run}, what="state")
        except UnsupportedError as error:
            header, self._leaves = self._codec.encode({"error": str(error)})
        return header

    def leaves(self, header: bytes | None) -> list[Any]:
        """The arrays of the described state; with a header, room for the arrays in it."""
        if header is not None:
            self._leaves = self._codec.room(header, self.prepared)
            return self._leaves
        leaves, self._leaves = self._leaves, []
        return leaves

    def adopt(self, header: bytes, adopt: Callable[[dict[str, Any]], None]) -> None:
        """Continue from the received state.

        Args:
            header: Header of the state.
            adopt: Takes in what the others have collected.

        Raises:
            ElasticFlowError: The others cannot send it.
            UsageError: Either the others or this worker takes checkpoints, but not both.
        """
        state = self._codec.decode(header, self._leaves)
        self._leaves, self.prepared = [], ()
        if "error" in state:
            raise ElasticFlowError(f"the others cannot send their state: {state['error']}")
        checkpoints, run = self._checkpoints(), state["checkpoints"]
        if (checkpoints is None) != (run is None):
            problem = (
                "the others take checkpoints, and this worker has no place for them"
                if checkpoints is None
                else "this worker has a place for checkpoints, and the others take none"
            )
            raise UsageError(f"{problem}. Set checkpoint= or ELASTICFLOW_CHECKPOINT alike on all nodes")
        adopt(state)
        if checkpoints is not None:
            checkpoints.load_state(run)
        self._claiming.load_state(state["claims"])
