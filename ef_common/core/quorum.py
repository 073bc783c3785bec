"""The quorum: which coordinator may issue a view, so that two coordinators never do harm.

The members of a view train only if *all* of them take part in each collective. Two coordinators therefore do harm only
if each of them issues a view, and nobody is a member of both. Each worker listens to one coordinator at a time, and
reports to the next one all views that it has received since the one in which it has settled (its group was built, so
all members of that view had received it). That view and those after it are the *chain*. For each view of the chain,
with

* ``M``: its members, without those that are *gone*: a member is gone if it said goodbye; if its process ended its
  connection to the coordinator, and it took part in no view of another coordinator before; if it has not received that
  view, nor any other, and comes as a newcomer, since it never takes part in what rests on it; or if it has asked to
  leave, since no view may rest on it from then on, whoever leads;
* ``S``: those of them that are members of the view to be issued,

a view may be issued if ``S = M``. Otherwise it depends on whether the members have one *store* that all of them reach.

**With a store**, which some member of S has reported, it may be issued if S has the *claim* of that view: a file in the
store, which can be created only once, says that S continues. From then on only the members that the claim names count.
If some of them are lost, too, the others need the claim of what is left, and so on. A claim can help only if

* ``2 |S| ≥ |M|``; or
* all members of the view have reported the store (the view is *agreed*). Then S may be few. They let the others go
  first.

**Without a store**, because no member of S has reported one, it may be issued

* if ``2 |S| > |M|``; or
* if ``2 |S| = |M|``, all of S have reported that there is no store, and either this coordinator has issued that view
  itself, or its issuer has ended, which a member of S has seen, all of M without S seem to be *dead*, as connections
  to their processes are refused, and S has the member of M that *decides*. It is the first one, in rank order, that is
  not on the node of the issuer, which may have been lost with it; or else the first.

Silence proves nothing, and nor does a refused connection alone: a firewall may refuse it, or another machine that has
the address now. A successor must not leave the dead out of M, either: before they died they may have been half of
another coordinator's view whose other half lives.

Why it is safe: let coordinators 1 and 2 issue views with the members S1 and S2 of M, which have no member in common,
with G1 and G2 gone. No member of S1 is in G2, and none of S2 in G1: a worker that has been in one of these views
reports it to the next coordinator, and a worker that wants to leave is in neither. A member of both G1 and G2 counts
for neither coordinator; leave it out of M. Then the four sets are disjoint, and |S1| + |S2| + |G1| + |G2| ≤ |M|.

*Both without a store.* If one of them is more than half, 2 |S1| ≥ |M| - |G1| and 2 |S2| > |M| - |G2|, and so
|S1| + |S2| + (|G1| + |G2|) / 2 > |M|. If both are half, the sums are equal, so nobody is gone for one alone, and
both see the same M. Then the same member of it decides for both, and is in one of S1 and S2 only (as in *dynamic-linear
voting*). If coordinator 1 is the issuer, it has ended before coordinator 2 issues its view, and has told those
in S2 that S1 goes on without them.

*Both with a store.* It is the same one. The members have agreed on it in a collective, whose result is the same for
all: either that none has one, or the digest of a random marker that each of them has read from it. A later arrival
reports a store only if it is that of the state that it received, and if it reads the same marker there. The claims that
begin with that of M form a list; each is written once and names some of the members that the previous one names. Let S1
continue with M itself or a claim W1, and S2 with W2, which is the same or a later one. W2 without G2 is in S2, and is
not empty. But all of W2 are in W1, so in S1 or in G1, and neither has a member in common with S2. This also holds if S1
is all of M without G1, whether it has reported a store or not.

*One with a store, the other without.* No member of the second has reported a store, so the view is not agreed. Both are
therefore more than half, or half, as above. They are not both half: a member of one has reported a store, and all of
the other that there is none.

It does not matter whether coordinators come and go meanwhile, because claims name members. Later views rest on it as in
*dynamic voting* (Jajodia and Mutchler 1990; with views that may or may not have come about: Yeger Lotem, Keidar and
Dolev 1997): S2 has a member in each view that followed, so coordinator 2 knows that view and its requirements as well.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ef_common.core.view import View

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class ChainLink:
    """A view of the chain.

    Args:
        view: The view.
        own: Whether this coordinator has issued it.
        over: Whether its issuer has ended, and a member that is here has heard everything the issuer said until then.
        agreed: Whether all its members have reported the same store.
    """

    view: View
    own: bool = False
    over: bool = False
    agreed: bool = False


@dataclass(frozen=True, slots=True)
class Bid:
    """The claim that some members of a view need to continue without the others.

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
        told: Store of each member that has reported it: the digest of its marker, or "" for none.
        claims: Members that each acquired claim names.
    """

    told: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    claims: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def have_one(self, members: Iterable[str]) -> bool:
        """Whether all these workers have reported a store, and it is the same one."""
        told = map(self.told.get, members)  # one after the other: each report asks for all of them anew
        first = next(told, None)
        return bool(first) and all(store == first for store in told)


NO_STORES = Stores()


@dataclass(frozen=True, slots=True)
class _Lack:
    """What is missing: a reason, and perhaps a claim that would be enough."""

    why: str
    bid: Bid | None = None
    few: bool = False  # the others may be more, and should go first


def shortfall(
    members: Collection[str],
    chain: Iterable[ChainLink],
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
        dead: Ids of those that seem to be dead.
        based: One of them has settled in the first view of the chain, or it is the first of all. Else nobody here knows
            what was before it, and all its members are needed.
        stores: Stores of the members.

    Returns:
        The reason in one line, or "" if the view may be issued.
    """
    here = frozenset(members)
    here_or_gone = here.union(gone)
    for link in chain:
        if here_or_gone.issuperset(link.view.ids):
            continue
        counted = _counted(link, gone)
        lack = _lack(link, here, counted, gone=gone, dead=dead, based=based, stores=stores)
        if lack is not None:
            present, absent = counted & here, counted - here
            return (
                f"only {len(present)} of {len(counted)} members of view {link.view.generation} are here (without "
                f"{some_of(absent)}), and {lack.why}; on_minority=continue would go on"
            )
    return ""


def some_of(workers: Collection[str]) -> str:
    """Names some workers, for people; a reason is found anew with each event, also where a thousand are lost."""
    few = heapq.nsmallest(_MAX_NAMED, workers)
    more = len(workers) - len(few)
    return ", ".join(few) + (f" and {more} more" if more else "")


def bids(
    members: Collection[str],
    chain: Iterable[ChainLink],
    *,
    gone: Collection[str],
    dead: Collection[str],
    stores: Stores,
) -> tuple[tuple[Bid, ...], bool]:
    """The claims with which these members could have a view; empty if claims alone are not enough.

    Args:
        members: As for :func:`shortfall`, and the rest likewise.
        chain: Likewise.
        gone: Likewise.
        dead: Likewise.
        stores: Likewise.

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


def _counted(link: ChainLink, gone: Collection[str]) -> frozenset[str]:
    if not any(member.standby for member in link.view.members):
        return frozenset()  # nobody can lead its members but this coordinator
    return frozenset(link.view.ids) - frozenset(gone)


def _lack(
    link: ChainLink,
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
        decides = link.over and absent <= frozenset(dead) and _deciding(link.view, counted) in present
        if is_most or (is_half and told == {""} and (link.own or decides)):
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


def _deciding(view: View, counted: frozenset[str]) -> str:
    """The member of a view that decides which half of it goes on."""
    able = [member for member in view.members if member.id in counted]
    return next((member for member in able if member.standby != view.issuer), able[0]).id


def _next_bid(view: View, here: frozenset[str], gone: Collection[str], stores: Stores) -> Bid | None:
    """The missing claim; None if these members have the last one; one without members if others have it."""
    claim, left = f"{view.generation:09d}-{digest_of_ids(view.ids)}", set(view.ids).difference(gone)
    while (named := stores.claims.get(claim)) is not None:
        claim, left = f"{view.generation:09d}-{digest_of_ids((claim, *named))}", set(named).difference(gone)
        if left and here.issuperset(left):
            return None
    return Bid(claim, tuple(sorted(here & left)))


def is_in(worker: str, chain: Iterable[ChainLink]) -> bool:
    """Whether a worker is a member of a view of the chain."""
    return any(link.view.rank_of(worker) is not None for link in chain)


def is_founder(worker: str, chain: Iterable[ChainLink]) -> bool:
    """Whether a worker is in the first view of all, to which it has come as one that knew of none; likewise."""
    return any(link.view.generation == 1 and link.view.rank_of(worker) is not None for link in chain)


def members_in(chain: Collection[ChainLink], workers: Iterable[str]) -> frozenset[str]:
    """Those of these workers that are members of a view of the chain."""
    return frozenset(worker for worker in workers if is_in(worker, chain))


def generation_of(claim: str) -> int:
    """Generation of the view that a claim is of."""
    return int(claim.partition("-")[0])


def digest_of_ids(names: Iterable[str]) -> str:
    """A digest of some ids, in any order."""
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=16).hexdigest()


def merge(chains: Iterable[tuple[int, tuple[ChainLink, ...]]]) -> tuple[int, tuple[ChainLink, ...]]:
    """Combine what workers know.

    Args:
        chains: For each worker, the generation in which it has settled (0: none), and its views since then.

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
    links: dict[tuple[int, int, tuple[str, ...]], ChainLink] = {}
    for _, chain in known:
        for link in chain:
            view = link.view
            is_first = first is not None and is_same(view, first)
            if is_first or first is None or follows(view, first, chain):
                key = (0 if is_first else max(view.base, settled), view.generation, view.ids)
                before = links.get(key, link)
                links[key] = ChainLink(
                    view, before.own or link.own, before.over or link.over, before.agreed or link.agreed
                )
    return settled, tuple(links[key] for key in sorted(links))


def is_same(one: View, other: View) -> bool:
    """Whether these are the same view: two coordinators may issue different ones of one generation."""
    return (one.generation, one.ids) == (other.generation, other.ids)


def follows(view: View, first: View, chain: Iterable[ChainLink]) -> bool:
    """Whether a view was issued with knowledge of another view, which has come about.

    Args:
        view: The view.
        first: The other one.
        chain: Views that a worker has received, with `view` among them. Whoever sends a view to it has heard of those
            before; maybe not that `first` has come about.
    """
    knew = view.base >= first.generation or any(is_same(link.view, first) for link in chain)
    return view.generation > first.generation and knew
