"""What TLS costs: a connection to the coordinator, and a peer connection between workers of two nodes.

In one process over loopback: both ends of a connection share the interpreter, so the figures are upper bounds.
"""

from __future__ import annotations

import sys
import threading
import time

from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.peer_connections import PeerConnections
from ef_common.control.coordinator import Coordinator
from ef_common.control.leader_request import Conversation
from ef_common.core.view import Member, View
from ef_common.launch.certificates import Trust, trust_of
from ef_common.protocol.addresses import LOOPBACK
from ef_common.protocol.auth import Token
from ef_common.tls import Tls
from tests.benchmarks.figure import emit, is_quick, of_samples

PLAIN, SAFE = (trust_of(Token("benchmark"), tls) for tls in ("0", "1"))
STATE_BYTES = 256 * 1024 * 1024


class Greetings:
    """A coordinator, and somebody who greets it."""

    def __init__(self, trust: Trust) -> None:
        self._token = trust.token
        self._tls = None if trust.worker is None else Tls(trust.worker)
        self._coordinator = Coordinator((LOOPBACK, 0), token=trust.token, credentials=trust.coordinator)
        self._coordinator.start()
        self._number = 0

    def sample(self) -> float:
        """Milliseconds from nothing to the coordinator's answer to the greeting."""
        self._number += 1
        member = Member(f"worker-{self._number}", "node", "")
        begin = time.perf_counter()
        conversation = Conversation(self._coordinator.address, member, self._token, tls=self._tls)
        took = 1000 * (time.perf_counter() - begin)
        conversation.close()
        return took

    def stop(self) -> None:
        """End the coordinator."""
        self._coordinator.stop()


class Transfer:
    """A peer connection between workers of two nodes."""

    def __init__(self, trust: Trust) -> None:
        members = tuple(Member(f"w{rank}", f"node-{rank}", LOOPBACK) for rank in range(2))
        tls, values = None if trust.worker is None else Tls(trust.worker), SharedValues()
        self._ends = [PeerConnections(View(1, members), rank, values, tls=tls) for rank in range(2)]
        self._state, self._room = bytes(STATE_BYTES), bytearray(STATE_BYTES)

    def sample(self) -> float:
        """Milliseconds for the state."""
        begin = time.perf_counter()
        sender = threading.Thread(target=self._ends[0].send, args=([memoryview(self._state)], 1))
        sender.start()
        self._ends[1].receive([memoryview(self._room)], 0)
        sender.join()
        return 1000 * (time.perf_counter() - begin)

    def stop(self) -> None:
        """End both sides."""
        for end in self._ends:
            end.close()


def main() -> int:
    """Measure, in turns; the last line of output is JSON."""
    quick = is_quick(__doc__)
    figures = {}
    for name, kind, number, target in (
        ("tls_greeting", Greetings, 20 if quick else 200, 6.0),
        ("tls_state_256_mib", Transfer, 3 if quick else 15, 3.0),
    ):
        sides = [kind(SAFE), kind(PLAIN)]
        samples: list[list[float]] = [[], []]
        for side in sides:
            side.sample()  # the first one connects
        for _ in range(number):
            for side, found in zip(sides, samples, strict=True):
                found.append(side.sample())
        for side in sides:
            side.stop()
        figures[name] = of_samples(*samples, target=target, unit="ms")
    emit(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
