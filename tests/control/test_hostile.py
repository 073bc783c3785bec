"""A peer that knows the token, and lies: it can leave, and have the job end, but it can do nothing in others' names."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ef_common.control import wire
from ef_common.control.auth import Token, new_nonce
from ef_common.core.place import Place
from ef_common.core.progress import KINDS, Progress
from ef_common.core.quorum import Half, Link
from ef_common.core.view import Member, View

GUARD_S = 5.0

TOKEN = Token("hunter2")
HONEST = ("w0", "w1")
NAMES = (*HONEST, "liar", "ghost")
ABSURD = 2**52


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---------------------------------------------------------------- what it may say

names = st.sampled_from(NAMES)
generations = st.sampled_from((0, 1, 2, 3, 7, ABSURD))
numbers = st.sampled_from((0, 1, 5, 2**53))
amounts = st.sampled_from((0.0, 1e-9, 1.0, 1e9))
flags = st.booleans()
stores = st.sampled_from(("", "0f" * 16, "a9" * 16))
places = st.builds(Place, numbers, numbers, st.lists(numbers, max_size=3).map(tuple))
progresses = st.builds(
    Progress,
    generations,
    st.sampled_from((-1, 0, 3, 2**53)),
    flags,
    st.sampled_from(KINDS),
    *[amounts] * 4,
    numbers,
    amounts,
    amounts,
    flags,
)


@st.composite
def views(draw: st.DrawFn) -> View:
    ids = draw(st.lists(names, unique=True, max_size=4))
    members = tuple(Member(name, f"node-{name}", "127.0.0.1", standby=draw(st.sampled_from((0, 1)))) for name in ids)
    generation = draw(generations)
    below = st.sampled_from(sorted({0, min(1, generation), generation}))
    gone = tuple(draw(st.lists(names, unique=True, max_size=2)))
    return View(generation, members, draw(below), draw(flags), draw(flags), "forged", gone, draw(below))


def _growing(found: list[Link]) -> tuple[Link, ...]:
    return tuple({link.view.generation: link for link in sorted(found, key=lambda one: one.view.generation)}.values())


links = st.lists(st.builds(Link, views(), over=flags), max_size=3).map(_growing)
returns = st.builds(
    wire.Return,
    st.sampled_from(("warming", "ready", "member", "leaving")),
    generations,
    generations,
    links,
    at_boundary=flags,
    suspects=flags,
    closed=st.just(False),
    failed=st.just(""),
    store=st.none() | stores,
)
halves = st.builds(
    Half, st.just("000000001-" + "0f" * 16), st.lists(names, unique=True).map(lambda ids: tuple(sorted(ids)))
)
# What ends the job is its right: `Fail`, `Close`. See `test_liar_that_ends_the_job_ends_it_for_all`.
messages = st.one_of(
    returns,
    st.builds(wire.AtBoundary, generations),
    st.builds(wire.Suspect, generations),
    st.builds(wire.Settled, generations),
    st.builds(wire.Heartbeat, st.none() | places, st.none() | progresses),
    st.builds(wire.Relay, generations, st.sampled_from(("port/0", "link/0", "k")), st.binary(max_size=9)),
    st.builds(wire.Store, stores),
    st.builds(wire.Claimed, halves, flags),
    st.builds(wire.Follow, st.just(1), flags),
    st.sampled_from((wire.Ready(), wire.Leave(), wire.Moved(), wire.Bye())),
)
# (who it says it is, whether it comes back, what it says then); it leaves all these connections open.
calls = st.tuples(names, flags, st.lists(messages, max_size=4))


class Faults(logging.Handler):
    """Faults of the coordinator's own code."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


@pytest.fixture
def faults() -> Iterator[list[str]]:
    handler, logger = Faults(), logging.getLogger("ef_common")
    logger.addHandler(handler)
    yield handler.found
    logger.removeHandler(handler)


@pytest.mark.timeout(300)
@settings(
    max_examples=150,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(founder=flags, script=st.lists(calls, min_size=1, max_size=5))
def test_others_go_on_whatever_a_peer_with_the_token_says(serve, join, dial, faults, founder, script):
    """The liar is a member from the start, or comes then; the honest ones keep their lines, and get on without it."""
    coordinator = serve(3 if founder else 2, token=TOKEN)
    board = coordinator._switchboard
    key, peers = new_nonce(), []
    if founder:
        peers.append(dial(coordinator))
        assert isinstance(peers[0].introduce("liar", TOKEN, key=key), wire.Welcome)
    workers = [join(coordinator, name, TOKEN) for name in HONEST]
    for worker in workers:
        assert worker.started().warm_up is False
    for name, returning, said in script:
        peer = dial(coordinator)
        peers.append(peer)
        peer.introduce(name, TOKEN, key=key if name == "liar" else "", returning=returning)
        with contextlib.suppress(OSError):
            for message in said:
                peer.say(message)
    for peer in peers:
        peer.close()
    wait_until(lambda: set(board._workers) <= set(HONEST))
    assert set(board._workers) == set(HONEST)  # nobody has taken their lines
    assert board.state.generation < ABSURD // 2
    wait_until(lambda: set(workers[0].client.next_view(0).ids) == set(HONEST))
    before = workers[0].client.next_view(0).generation
    for worker in workers:
        wait_until(lambda worker=worker: worker.client.next_view(0).generation == before)
        worker.client.send("suspect", before)
    for worker in workers:
        wait_until(lambda worker=worker: worker.client.next_view(0).generation > before)
        assert set(worker.client.next_view(0).ids) == set(HONEST)
    for worker in workers:
        worker.stop()
    coordinator.stop()
    assert faults == []
