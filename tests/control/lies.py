"""What a peer may say that knows the token, and lies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import strategies as st

from ef_common.core import membership
from ef_common.core.membership.phase import MEMBERS, NEWCOMERS
from ef_common.core.progress import KINDS, Progress
from ef_common.core.quorum import ChainLink
from ef_common.core.room import Demand
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.protocol import wire
from tests.protocol.returning import returning

ABSURD = 5 * 10**8
"""A generation that is higher than any other."""
Call = tuple[str, bool, Sequence[wire.FromWorker]]
"""Who a peer says it is, whether it comes back, and what it says then."""

generations = st.sampled_from((0, 1, 2, 3, 7, ABSURD))
numbers = st.sampled_from((0, 1, 5, 2**53))
amounts = st.sampled_from((0.0, 1e-9, 1.0, 1e9))
flags = st.booleans()
stores = st.sampled_from(("", "0f" * 16, "a9" * 16))
watermarks = st.builds(Watermark, numbers, numbers, st.lists(numbers, max_size=3).map(tuple))
demands = st.builds(Demand, generations, numbers, numbers)
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
def views(draw: st.DrawFn, names: st.SearchStrategy[str]) -> View:
    ids = draw(st.lists(names, unique=True, max_size=4))
    members = tuple(Member(name, f"node-{name}", "127.0.0.1", standby=draw(st.sampled_from((0, 1)))) for name in ids)
    generation = draw(generations)
    below = st.sampled_from(sorted({0, min(1, generation), generation}))
    gone = tuple(draw(st.lists(names, unique=True, max_size=2)))
    return View(generation, members, draw(below), draw(flags), draw(flags), "forged", gone, draw(below))


def _growing(found: list[ChainLink]) -> tuple[ChainLink, ...]:
    return tuple({link.view.generation: link for link in sorted(found, key=lambda one: one.view.generation)}.values())


def calls(of: Collection[str]) -> st.SearchStrategy[Call]:
    """Calls in these names, about them; of `Fail` and `Close` there is none, with which a worker ends the job."""
    names = st.sampled_from(sorted(of))
    links = st.lists(st.builds(ChainLink, views(names), over=flags), max_size=3).map(_growing)
    returns = st.builds(
        returning,
        links,
        st.sampled_from((*NEWCOMERS, *MEMBERS)),
        promised=generations,
        settled=generations,
        at_boundary=flags,
        suspects=flags,
        store=st.none() | stores,
        demand=st.just(Demand()) | demands,
    )
    ids = st.lists(names, min_size=1, unique=True).map(lambda ids: tuple(sorted(ids)))
    messages = st.one_of(
        st.builds(membership.AtBoundary, st.just(""), generations),
        st.builds(membership.Suspected, st.just(""), generations),
        st.builds(membership.Settled, st.just(""), generations),
        st.builds(membership.Wanted, st.just(""), demands),
        st.builds(wire.Heartbeat, st.none() | watermarks, st.none() | progresses),
        st.builds(wire.Relay, generations, st.sampled_from(("port/0", "peer/0", "k")), st.binary(max_size=9)),
        st.builds(membership.Stored, st.just(""), stores),
        st.builds(membership.Claimed, st.just(""), st.just("000000001-" + "0f" * 16), ids),
        st.builds(wire.Follow, st.just(1), flags),
        st.sampled_from((membership.Ready(""), membership.Leaving(""), wire.Moved(), wire.Bye())),
    )
    said = st.lists(returns | st.tuples(messages), max_size=4).map(_in_one)
    come_back = st.tuples(returns, st.tuples(messages), st.tuples(messages)).map(_in_one)
    # It may keep for itself which views it has named, for which others that name them then wait.
    keeps = returns.map(lambda report: report[:1])
    return st.one_of(
        st.tuples(names, flags, said),
        st.tuples(names, st.just(True), come_back),
        st.tuples(names, st.just(True), keeps),
    )


def _in_one(parts: Sequence[Sequence[wire.FromWorker]]) -> list[wire.FromWorker]:
    return [message for part in parts for message in part]
