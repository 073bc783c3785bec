"""What a coordinator holds in memory depends on who is there and not on who has been."""

from __future__ import annotations

from ef_common.control.coordinator import Coordinator
from ef_common.core.quorum import ChainLink
from ef_common.core.view import Member, View
from ef_common.protocol import known_standbys, wire
from tests.control.conftest import in_loop
from tests.protocol.returning import returning
from tests.waiting import poll_until


def sizes_of(coordinator: Coordinator) -> dict[str, int]:
    sizes = collections_in(coordinator._server)
    state = coordinator._server.state
    sizes |= {"state": len(state.workers) + len(state.dismissed) + len(state.dead) + len(state.stores.told)}
    return sizes


def collections_in(machine: object, name: str = "") -> dict[str, int]:
    """Sizes of the collections that a state machine holds, and those of which it consists."""
    sizes = {}
    for field, value in vars(machine).items():
        if isinstance(value, (dict, set)):
            sizes[name + field] = len(value)
        elif type(value).__module__.startswith("ef_common.protocol"):
            sizes |= collections_in(value, f"{name}{field}.")
    return sizes


def test_coordinator_forgets_newcomers_that_have_come_and_gone(form, dial, monkeypatch):
    monkeypatch.setattr(known_standbys, "NUM_FORMER", 4)
    coordinator, _ = form(2)
    server = coordinator._server
    other = View(1, (Member("x", "node-x", "127.0.0.1", standby=9),))  # of a job that has long gone on without it

    def churn(first: int, number: int) -> None:
        for index in range(first, first + number):
            newcomer = dial(coordinator)
            assert isinstance(newcomer.introduce(f"n{index}", standby=1 + index), wire.Welcome)
            newcomer.say(wire.Heartbeat(None))
            newcomer.close()
            late = dial(coordinator)
            assert isinstance(late.introduce(f"l{index}", returning=True, standby=1), wire.Welcome)
            late.say(*returning([ChainLink(other)], store="0f" * 16))
            assert any(isinstance(message, wire.Eviction) for message in iter(late.hear, None))
            late.close()
        poll_until(lambda: len(server.workers) == 2 and not server._sessions._out)
        in_loop(coordinator, lambda now: server._sweep())
        poll_until(lambda: set(server._admission.known) == set(server.workers))
        poll_until(lambda: len(coordinator._serving._open) == 2)

    churn(0, 12)
    before = sizes_of(coordinator)
    churn(12, 60)
    after = sizes_of(coordinator)
    assert after.pop("standbys._addresses") <= 2 * 4 + 1
    before.pop("standbys._addresses")
    assert after == before
