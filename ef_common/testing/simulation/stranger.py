"""Strangers: who connects to a coordinator, and does not belong to its job."""

from __future__ import annotations

from collections.abc import Mapping

from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, CoordinatorLost, ProtocolError
from ef_common.protocol.auth import Token
from ef_common.testing.simulation.channel import Channel
from ef_common.testing.simulation.claim_store import ClaimStore
from ef_common.testing.simulation.coordinator import STRANGER, THIEF, Coordinator
from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.scheduler import Process
from ef_common.testing.simulation.streams import MESSAGE_S, Stream


class Stranger:
    """One of :data:`~ef_common.testing.simulation.schedule.STRANGERS`.

    Those that introduce themselves are real clients, with another token, or with the name of a worker that is
    connected. The others leave their connections open.

    Args:
        kind: What it does.
        coordinator: To whom it connects.
        coordinators: All of them.
        store: The store of claims, which it never gets to.
    """

    def __init__(
        self, kind: str, coordinator: Coordinator, coordinators: Mapping[int, Coordinator], *, store: ClaimStore
    ) -> None:
        scheduler = coordinator.scheduler
        self._kind = kind
        self._words = coordinator.greeting if kind == "replay" else b""
        self.process = Process(scheduler, STRANGER, self._introduce)
        if kind in ("silent", "replay"):
            stream = Stream(scheduler, coordinator.cuts, self, coordinator, (STRANGER, coordinator.name))
            scheduler.idle_after(scheduler.delay(MESSAGE_S), coordinator.accept, stream, STRANGER)
            return
        is_thief = kind == "thief"
        names = [*coordinator.workers, STRANGER]
        place = THIEF if is_thief else STRANGER
        wrong = None if coordinator.token is not None and scheduler.chance(0.5) else Token("wrong")
        self._channel = Channel(
            coordinators,
            coordinator.number,
            self.process,
            Member(names[0] if is_thief else scheduler.random.choice(names), place, place),
            mark=lambda place: None,
            replaced=lambda generation: None,
            progress=lambda: None,
            store=store,
            token=coordinator.token if is_thief else wrong,
        )
        self.process.start()

    def _introduce(self) -> None:
        refusal = AuthenticationError if self._kind == "wrong" else ProtocolError
        try:
            self._channel.start(lambda generation: None)
        except (refusal, CoordinatorLost):
            return
        raise Violation(f"a stranger that is {self._kind} has begun as a worker")

    # ------------------------------------------------------------ the end of a connection without a client

    def hear(self, stream: Stream, data: bytes) -> None:
        """Bytes have come."""
        stream.take(data)
        if self._words:
            stream.up(self._words)
            self._words = b""

    def lose(self, stream: Stream, *, in_order: bool) -> None:
        """The connection has ended."""
