"""The quorum: which coordinator may issue a view, so that two of them can never do harm.

The members of a view train only if *all* of them take part in each collective, so two coordinators do harm only if
each of them issues a view, and nobody is a member of both. Each worker listens to one coordinator at a time, and tells
the next one all views that it has received since the one in which it has settled (its group was built, so that all its
members had received it). That one and those after it are the *chain*. For each view of the chain, with

* ``M``: its members, without those that are *gone*. Gone is who said goodbye, was told to leave and did, or whose
  connection to the coordinator was ended by its process. It took part in no view of another coordinator before;
* ``S``: those of them that are members of the view to be issued,

a view may be issued if ``2 |S| > |M|``, or if ``2 |S| = |M|`` and nobody else can do the same. If the members have one
*store* that all of them reach, that is because

* S has the *claim* of that view: a file there, which can be created but once, says that S goes on.

If they have said that they have no store, it is because

* this coordinator has issued that view itself: all others need more than half; or
* whoever issued it has ended, which one of S has seen, and all of M without S are *dead*: nobody listens where
  these processes would.

As long as one of S has not told its store, or if their stores differ, half is not enough.

Silence proves nothing. Nor may a successor leave the dead out of M: before they died they may have been half of
another coordinator's view whose other half lives.

Why it is safe: let coordinators 1 and 2 issue views with the members S1 and S2 of M, none in common, with G1 and G2
gone. None of the four sets has a member in common with another (whoever has been in S1 tells coordinator 2 of that
view when it comes to it). So |S1| + |S2| + |G1| + |G2| ≤ |M|. But 2 |S1| ≥ |M| - |G1|, 2 |S2| > |M| - |G2|, and so
|S1| + |S2| + (|G1| + |G2|) / 2 > |M|. If both are half, 2 |S1| = |M| - |G1| and 2 |S2| = |M| - |G2|, the sums may be
equal, so there must be one way for both to be the only half. They have it. The members have agreed on their store in a
collective, whose result is the same for all: it is that none has one, or it is the digest of a random marker that each
of them has read from it. Whoever has come later tells a store only if it is that of the state that it received, and if
it reads the same marker there. So S1 and S2 both have the same store, or both have none. With a store both would need
the claim of M, which names S1 or S2 but not both; whether coordinators come and go meanwhile does not matter, since it
names members. A majority elsewhere needs no claim, and would not find one of it in its way. Later views rest on it as
in *dynamic voting* (Jajodia and Mutchler 1990; with views that may or may not have come about: Yeger Lotem, Keidar and
Dolev 1997): S2 has a member in each view that followed, so coordinator 2 knows that view and needs its majority as
well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ef_common.core.view import View


@dataclass(frozen=True, slots=True)
class Link:
    """A view of the chain.

    Args:
        view: The view.
        own: This coordinator has issued it.
        over: Whoever has issued it has ended, and a member that is here has heard all that it had to say till then.
    """

    view: View
    own: bool = False
    over: bool = False


@dataclass(frozen=True, slots=True)
class Half:
    """Exactly half of a view's members: they may go on if they have its claim.

    Args:
        claim: Name of the claim, of this view alone.
        winner: Ids of these members, sorted.
    """

    claim: str
    winner: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stores:
    """What is known of the members' stores.

    Args:
        told: Of each member that has told: "" for none, else the digest of the marker in it.
        won: Claims that are known to be won.
        lost: Claims that others have.
    """

    told: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    won: frozenset[Half] = frozenset()
    lost: frozenset[Half] = frozenset()

    def of(self, members: Iterable[str]) -> str | None:
        """The one of these members; None if that is not known, or if they differ."""
        told = {self.told.get(member) for member in members}
        return told.pop() if len(told) == 1 else None


NO_STORES = Stores()


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
        missing, present = counted - here, counted & here
        if not missing or (based and 2 * len(present) > len(counted)):
            continue
        is_half = based and 2 * len(present) == len(counted)
        if is_half and _half_is_enough(link, present, missing, dead=dead, stores=stores):
            continue
        needed = "all are needed" if not based else "more than half are needed"
        tie = f", or the claim of it: {_state_of_claim(link, present, stores)}" if is_half else ""
        return (
            f"only {len(present)} of {len(counted)} members of view {link.view.generation} are here, {needed}{tie} "
            f"(without {', '.join(sorted(missing))}); on_minority=continue would go on"
        )
    return ""


def ties(members: Collection[str], chain: Iterable[Link], *, gone: Collection[str], stores: Stores) -> tuple[Half, ...]:
    """The claims with which alone these members could have a view; none if claims would not do, or are lost."""
    here = frozenset(members)
    found = []
    for link in chain:
        counted = _counted(link, gone)
        present = counted & here
        if 2 * len(present) > len(counted) or present == counted:
            continue
        half = _half(link, present)
        if 2 * len(present) < len(counted) or not stores.of(present) or half in stores.lost:
            return ()
        if half not in stores.won:
            found.append(half)
    return tuple(found)


def _counted(link: Link, gone: Collection[str]) -> frozenset[str]:
    if not any(member.standby for member in link.view.members):
        return frozenset()  # nobody can lead its members but this coordinator
    return frozenset(link.view.ids) - frozenset(gone)


def _half_is_enough(
    link: Link, present: frozenset[str], missing: frozenset[str], *, dead: Collection[str], stores: Stores
) -> bool:
    store = stores.of(present)
    if store is None:
        return False
    if store:
        return _half(link, present) in stores.won
    return link.own or (link.over and missing <= frozenset(dead))


def _half(link: Link, present: Iterable[str]) -> Half:
    view = link.view
    digest = hashlib.blake2b("\n".join(sorted(view.ids)).encode(), digest_size=16).hexdigest()
    return Half(f"{view.generation:09d}-{digest}", tuple(sorted(present)))


def _state_of_claim(link: Link, present: frozenset[str], stores: Stores) -> str:
    store = stores.of(present)
    if store is None:
        return "it is not known that they have one store for checkpoints"
    if not store:
        return "there is no store for checkpoints"
    return "the others have it" if _half(link, present) in stores.lost else "the store is asked"


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
                links[key] = replace(before, own=before.own or link.own, over=before.over or link.over)
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
