"""The quorum: which coordinator may issue a view, so that two of them can never do harm.

The members of a view train only if *all* of them take part in each collective, so two coordinators do harm only if
each of them issues a view, and nobody is a member of both. Each worker listens to one coordinator at a time, and tells
the next one all views that it has received since the one in which it has settled (its group was built, so that all its
members had received it). That one and those after it are the *chain*. For each view of the chain, with

* ``M``: its members, without those that are *gone*: who said goodbye; whose connection to the coordinator was ended by
  its process, and which took part in no view of another coordinator before; and who has asked to leave, since no view
  may rest on it from then on, whoever leads;
* ``S``: those of them that are members of the view to be issued,

a view may be issued if ``S = M``. Else it depends on whether the members have one *store* that all of them reach.

**With a store**, as one of S has told, it may if S has the *claim* of that view: a file there, which can be created but
once, says that S goes on. From then on nobody counts but those whom the claim names: if some of them are lost, too, the
others need the claim of what is left of it, and so on. For a claim to help,

* ``2 |S| ≥ |M|``; or
* all members of the view have told it (the view is *agreed*). Then S may be few. They let the others go first.

**Without a store**, as none of S has told of one, it may

* if ``2 |S| > |M|``; or
* if ``2 |S| = |M|``, all of S have told that there is none, and this coordinator has issued that view itself (all
  others need more than half), or whoever issued it has ended, which one of S has seen, and all of M without S are
  *dead*: nobody listens where these processes would.

Silence proves nothing. Nor may a successor leave the dead out of M: before they died they may have been half of
another coordinator's view whose other half lives.

Why it is safe: let coordinators 1 and 2 issue views with the members S1 and S2 of M, none in common, with G1 and G2
gone. Nobody of S1 is in G2, nor of S2 in G1: whoever has been in one of them tells the next coordinator of that view,
and who wants to leave is in neither. Who is in both G1 and G2 counts for neither; leave it out of M. Then the four have
nobody in common, and |S1| + |S2| + |G1| + |G2| ≤ |M|.

*Both without a store.* If one of them is more than half, 2 |S1| ≥ |M| - |G1| and 2 |S2| > |M| - |G2|, and so
|S1| + |S2| + (|G1| + |G2|) / 2 > |M|. If both are half, the sums may be equal, so there must be one way for both to be
the only half. They have it: one has issued the view, or all others are dead.

*Both with one.* It is the same one: the members have agreed on it in a collective, whose result is the same for all: it
is that none has one, or it is the digest of a random marker that each of them has read from it. Whoever has come later
tells a store only if it is that of the state that it received, and if it reads the same marker there. The claims that
begin with that of M are a list, each written once, and naming some of those whom the one before it names. Let S1 go on
with M itself or a claim W1, and S2 with W2, which is the same or comes later. W2 without G2 is in S2, and is somebody.
But all of W2 are in W1, so in S1 or in G1, and neither has anybody in common with S2. This holds also if S1 is all of M
without G1, whether it has told a store or not.

*One with a store, the other without.* Nobody of the other one has told, so the view is not agreed; so both are more
than half, or half, as above. Both are not half: one has told a store, and all of the other that there is none.

It does not matter whether coordinators come and go meanwhile, since claims name members. Later views rest on it as in
*dynamic voting* (Jajodia and Mutchler 1990; with views that may or may not have come about: Yeger Lotem, Keidar and
Dolev 1997): S2 has a member in each view that followed, so coordinator 2 knows that view and what it asks for as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ef_common.core.view import View


@dataclass(frozen=True, slots=True)
class Link:
    """A view of the chain.

    Args:
        view: The view.
        own: This coordinator has issued it.
        over: Whoever has issued it has ended, and a member that is here has heard all that it had to say till then.
        agreed: All its members have told that they have one store.
    """

    view: View
    own: bool = False
    over: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Bid:
    """Some members of a view go on without the others if they have a claim.

    Args:
        claim: Its name. There is one of each view, and one of what each claim has left of it.
        members: Ids of these members, sorted.
    """

    claim: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stores:
    """What is known of the members' stores.

    Args:
        told: Of each member that has told: "" for none, else the digest of the marker in it.
        claims: Of each claim that somebody has: whom it names.
    """

    told: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def have_one(self, members: Iterable[str]) -> bool:
        """Whether all these members have told, and have one store."""
        told = {self.told.get(member) for member in members}
        return len(told) == 1 and bool(told.pop())


NO_STORES = Stores()


@dataclass(frozen=True, slots=True)
class _Lack:
    """What is lacking: a reason, and perhaps a claim that would do."""

    why: str
    bid: Bid | None = None
    few: bool = False  # the others may be more, and should go first


def shortfall(
    members: Collection[str],
    chain: Iterable[Link],
    *,
    gone: Collection[str],
    dead: Collection[str],
    based: bool = True,
    stores: Stores = NO_STORES,
) -> str:
    """Why a view of these members must not be issued.

    Args:
        members: Ids of the members of the view to be issued.
        chain: The views that its members know of, since the newest in which one of them has settled.
        gone: Ids of those that are gone, as above.
        dead: Ids of those that are known to be dead.
        based: One of them has settled in the first view of the chain, or it is the first of all. Else nobody here knows
            what was before it, and all its members are needed.
        stores: Of the members.

    Returns:
        The reason in one line, or "" if the view may be issued.
    """
    here = frozenset(members)
    for link in chain:
        counted = _counted(link, gone)
        lack = _lack(link, here, counted, gone=gone, dead=dead, based=based, stores=stores)
        if lack is not None:
            present, absent = counted & here, counted - here
            return (
                f"only {len(present)} of {len(counted)} members of view {link.view.generation} are here (without "
                f"{', '.join(sorted(absent))}), and {lack.why}; on_minority=continue would go on"
            )
    return ""


def bids(
    members: Collection[str], chain: Iterable[Link], *, gone: Collection[str], dead: Collection[str], stores: Stores
) -> tuple[tuple[Bid, ...], bool]:
    """The claims with which alone these members could have a view; none if claims would not do.

    Returns:
        The claims, and whether the others may be more, and should go first.
    """
    here, found, few = frozenset(members), [], False
    for link in chain:
        lack = _lack(link, here, _counted(link, gone), gone=gone, dead=dead, based=True, stores=stores)
        if lack is None:
            continue
        if lack.bid is None:
            return (), False
        found.append(lack.bid)
        few = few or lack.few
    return tuple(found), few


def _counted(link: Link, gone: Collection[str]) -> frozenset[str]:
    if not any(member.standby for member in link.view.members):
        return frozenset()  # nobody can lead its members but this coordinator
    return frozenset(link.view.ids) - frozenset(gone)


def _lack(
    link: Link,
    here: frozenset[str],
    counted: frozenset[str],
    *,
    gone: Collection[str],
    dead: Collection[str],
    based: bool,
    stores: Stores,
) -> _Lack | None:
    present, absent = counted & here, counted - here
    if not absent:
        return None
    if not based:
        return _Lack("all are needed")
    is_most, is_half = 2 * len(present) > len(counted), 2 * len(present) == len(counted)
    told = {stores.told.get(member) for member in present}
    if not any(told):
        proved = link.own or (link.over and absent <= frozenset(dead))
        if is_most or (is_half and told == {""} and proved):
            return None
        tie = ", as they have no place for claims" if told == {""} else ""
        return _Lack(f"more than half are needed{tie}")
    if not (is_most or is_half or link.agreed):
        return _Lack("more than half are needed, as not all members were known to have one place for claims")
    bid = _next_bid(link.view, here, gone, stores)
    if bid is None:
        return None
    if not bid.members:
        return _Lack("the place for claims says that others go on")
    few = 2 * len(present) < len(counted) and not absent <= frozenset(dead)
    return _Lack("the place for claims is asked whether they go on", bid, few)


def _next_bid(view: View, here: frozenset[str], gone: Collection[str], stores: Stores) -> Bid | None:
    """The claim that is lacking; None if these members have the last one. Nobody in it: others have it."""
    claim, left = f"{view.generation:09d}-{_digest(view.ids)}", set(view.ids).difference(gone)
    while (named := stores.claims.get(claim)) is not None:
        claim, left = f"{view.generation:09d}-{_digest((claim, *named))}", set(named).difference(gone)
        if left and here.issuperset(left):
            return None
    return Bid(claim, tuple(sorted(here & left)))


def generation_of(claim: str) -> int:
    """Generation of the view that a claim is of."""
    return int(claim.partition("-")[0])


def _digest(names: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=16).hexdigest()


def merge(chains: Iterable[tuple[int, tuple[Link, ...]]]) -> tuple[int, tuple[Link, ...]]:
    """Put together what workers know.

    Args:
        chains: Of each the generation in which it has settled (0: none), and the views that it knows since then.

    Returns:
        The newest generation in which one of them has settled, and the chain since then, the newest view last. What was
        issued without knowledge of that view is left out: as that one has come about, it cannot any more, and its
        members may lag behind.
    """
    known = list(chains)
    settled = max((generation for generation, _ in known), default=0)
    # Of the views of that generation, one at most has come about: the one in which somebody has settled.
    named = (link.view for generation, chain in known if generation == settled for link in chain)
    first = next((view for view in named if view.generation == settled), None)
    links: dict[tuple[int, int, tuple[str, ...]], Link] = {}
    for _, chain in known:
        for link in chain:
            view = link.view
            is_first = first is not None and is_same(view, first)
            if is_first or first is None or follows(view, first, chain):
                key = (0 if is_first else max(view.base, settled), view.generation, view.ids)
                before = links.get(key, link)
                links[key] = Link(view, before.own or link.own, before.over or link.over, before.agreed or link.agreed)
    return settled, tuple(links[key] for key in sorted(links))


def is_same(one: View, other: View) -> bool:
    """Whether these are the same view: two coordinators may issue different ones of one generation."""
    return (one.generation, one.ids) == (other.generation, other.ids)


def follows(view: View, first: View, chain: Iterable[Link]) -> bool:
    """Whether a view was issued with knowledge of another one, which has come about.

    Args:
        view: The view.
        first: The other one.
        chain: Views that a worker has received, with `view` among them. Whoever sends a view to it has heard of those
            before; maybe not that `first` has come about.
    """
    knew = view.base >= first.generation or any(is_same(link.view, first) for link in chain)
    return view.generation > first.generation and knew
