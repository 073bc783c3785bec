"""The coordinator of an agent, at the end of the agent."""

from __future__ import annotations

from ef_common.control.coordinator import Coordinator
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.launch.hosting import Hosting
from ef_common.launch.rendezvous_options import GivenParameters, RendezvousOptions
from ef_common.protocol import wire
from ef_common.testing.ports import free_ports
from tests.control.conftest import Peer
from tests.protocol.returning import returning
from tests.waiting import poll_until

WHY = "worker w0 (node n) raised ValueError: x"


def test_agent_whose_standby_alone_has_heard_of_an_exception_ends_when_the_others_have_heard_it() -> None:
    options = RendezvousOptions.parse(GivenParameters(f"127.0.0.1:{free_ports(1)[0]}", 1, 2, {}))
    hosting = Hosting(options, run_id="none", node="n")
    own, other = (Coordinator(("127.0.0.1", 0), standby=True) for _ in range(2))
    own.start()
    other.start()
    hosting._keep(own)
    view = View(3, (Member("w0", "n", "127.0.0.1"), Member("w1", "m", "127.0.0.1", standby=other.address[1])), 3)
    peer = Peer(own.address)
    try:
        assert isinstance(peer.introduce("w0", returning=True), wire.Welcome)
        report, told = returning([ChainLink(view)], failed=WHY)
        peer.say(report, told)
        poll_until(lambda: own.failure == WHY)
        peer.close()
        hosting.end()
        poll_until(lambda: other.failure == WHY)
    finally:
        peer.close()
        hosting.leave()
        other.stop()
