"""The quorum: which coordinator may issue a view, so that two of them can never do harm.

The members of a view train only if *all* of them take part in each collective, so two coordinators do harm only if
each of them issues a view, and nobody is a member of both. Each worker listens to one coordinator at a time, and tells
the next one all views that it has received since the one in which it has settled (its group was built, so that all its
members had received it). That one and those after it are the *chain*. For each view of the chain, with

* ``M``: its members, without those that are *gone*. Gone is who said goodbye, was told to leave and did, or whose
  connection to the coordinator was ended by its process. It took part in no view of another coordinator before;
* ``S``: those of them that are members of the view to be issued,

a view may be issued if ``2 |S| > |M|``, or if ``2 |S| = |M|`` and nobody else can do the same, because

* this coordinator has issued that view itself: all others need more than half; or
* whoever issued it has ended, which one of S has seen, and all of M without S are *dead*: nobody listens where
  these processes would.

Silence proves nothing. Nor may a successor leave the dead out of M: before they died they may have been half of
another coordinator's view whose other half lives.

Why it is safe: let coordinators 1 and 2 issue views with the members S1 and S2 of M, none in common, with G1 and G2
gone. None of the four sets has a member in common with another (whoever has been in S1 tells coordinator 2 of that
view when it comes to it). So |S1| + |S2| + |G1| + |G2| ≤ |M|. But 2 |S1| ≥ |M| - |G1|, 2 |S2| > |M| - |G2|, and so
|S1| + |S2| + (|G1| + |G2|) / 2 > |M|. Later views rest on it as in *dynamic voting* (Jajodia and Mutchler 1990; with
views that may or may not have come about: Yeger Lotem, Keidar and Dolev 1997): S2 has a member in each view that
followed, so coordinator 2 knows that view and needs its majority as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

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


def shortfall(
    members: Collection[str], chain: Iterable[Link], *, gone: Collection[str], dead: Collection[str], based: bool = True
) -> str:
    """Why a view of these members must not be issued.

    Args:
        members: Ids of the members of the view to be issued.
        chain: The views that its members know of, since the newest in which one of them has settled.
        gone: Ids of those that are gone, as above.
        dead: Ids of those that are known to be dead.
        based: One of them has settled in the first view of the chain, or it is the first of all. Else nobody here knows
            what was before it, and all its members are needed.

    Returns:
        The reason in one line, or "" if the view may be issued.
    """
    here = frozenset(members)
    for link in chain:
        if not any(member.standby for member in link.view.members):
            continue  # nobody can lead its members but this coordinator
        counted = frozenset(link.view.ids) - frozenset(gone)
        missing = counted - here
        num_here = len(counted & here)
        unknown = missing - frozenset(dead)
        buried = link.over and not unknown
        if not missing:
            continue
        if based and (2 * num_here > len(counted) or (2 * num_here == len(counted) and (link.own or buried))):
            continue
        needed = "all are needed" if not based else "more than half are needed"
        return (
            f"only {num_here} of {len(counted)} members of view {link.view.generation} are here, {needed} "
            f"(without {', '.join(sorted(missing))}); on_minority=continue would go on"
        )
    return ""


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
    links: dict[tuple[int, int, tuple[str, ...]], Link] = {}
    for _, chain in known:
        for link in chain:
            view = link.view
            if view.generation == settled or (view.generation > settled and view.base >= settled):
                key = (0 if view.generation == settled else view.base, view.generation, view.ids)
                before = links.get(key, link)
                links[key] = replace(before, own=before.own or link.own, over=before.over or link.over)
    return settled, tuple(links[key] for key in sorted(links))
