"""The rule by which a view may be issued, and that no two groups can both fulfil it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ef_common.core.quorum import Bid, ChainLink, Stores, bids, merge, shortfall, some_of
from ef_common.core.view import Member, View

MEMBERS = "abcdefg"


def view(generation: int, names: str, *, standbys: bool = True, base: int = 0, issuer: str = "") -> View:
    members = tuple(Member(name, name, "", standby=ord(name) if standbys else 0) for name in names)
    return View(generation, members, base=base, issuer=ord(issuer) if issuer else 0)


def lacking(
    names: str, *links: ChainLink, gone: str = "", dead: str = MEMBERS, based: bool = True, stores: Stores | None = None
) -> bool:
    """By default, connections to all that are not here are refused."""
    stores = told(names) if stores is None else stores
    return bool(shortfall(names, links, gone=gone, dead=dead, based=based, stores=stores))


def told(names: str, store: str = "", *claims: tuple[Bid, str]) -> Stores:
    return Stores(dict.fromkeys(names, store), {bid.claim: tuple(named) for bid, named in claims})


def asks(names: str, *links: ChainLink, gone: str = "", dead: str = "", stores: Stores | None = None) -> list[str]:
    stores = told(names, "d1") if stores is None else stores
    return ["".join(bid.members) for bid in bids(names, links, gone=gone, dead=dead, stores=stores)[0]]


@pytest.mark.parametrize(
    ("here", "gone", "enough"),
    [("abc", "", True), ("ab", "", True), ("a", "", False), ("a", "b", False), ("a", "bc", True), ("", "abc", True)],
)
def test_quorum_of_three_needs_more_than_half_of_those_that_are_not_gone(here, gone, enough):
    assert lacking(here, ChainLink(view(1, "abc")), gone=gone) is not enough


def test_quorum_of_half_is_enough_for_the_coordinator_that_issued_the_view():
    assert lacking("ab", ChainLink(view(1, "abcd")))
    assert not lacking("ab", ChainLink(view(1, "abcd"), own=True))
    assert lacking("a", ChainLink(view(1, "abcd"), own=True))


@pytest.mark.parametrize(
    ("issuer", "gone", "halves"),
    [
        ("", "", ["ab", "cd"]),
        ("a", "", ["bc", "ad"]),  # the first member that is not on the node of the issuer decides
        ("b", "", ["ab", "cd"]),
        ("a", "bd", ["c", "a"]),
        ("a", "bcd", ["a"]),  # nobody else is left
    ],
)
def test_quorum_of_half_is_enough_for_a_successor_if_the_issuer_is_over_and_its_member_decides(issuer, gone, halves):
    link = ChainLink(view(1, "abcd", issuer=issuer))
    over = ChainLink(link.view, over=True)
    for here, enough in zip(halves, (True, False), strict=False):
        assert lacking(here, over, gone=gone) is not enough
        assert lacking(here, over, gone=gone, dead="") is (len(halves) > 1)
        assert lacking(here, link, gone=gone) is (len(halves) > 1)
    assert lacking("a", over, gone="d")


@pytest.mark.parametrize("here", ["ab", "abc"])
def test_quorum_with_a_store_needs_the_claim_whoever_issued_the_view_and_however_many_are_here(here):
    link = ChainLink(view(1, "abcd"), own=True, over=True)
    ((bid,), few) = bids(here, [link], gone="", dead="", stores=told(here, "d1"))
    assert ("".join(bid.members), few) == (here, False)
    assert lacking(here, link, stores=told(here, "d1"))
    assert not lacking(here, link, stores=told(here, "d1", (bid, here)))
    assert lacking("cd", link, stores=told("cd", "d1", (bid, "ab")))
    assert lacking(here, ChainLink(view(2, "abcd"), own=True), stores=told(here, "d1", (bid, here)))
    assert not lacking("abcd", link, stores=told("abcd", "d1"))


def test_quorum_of_half_is_never_enough_as_long_as_a_store_is_not_known():
    link = ChainLink(view(1, "abcd"), own=True, over=True)
    for stores in (Stores(), told("a")):
        assert lacking("ab", link, stores=stores)
        assert asks("ab", link, stores=stores) == []
    assert not lacking("abc", link)
    assert asks("ab", link, stores=told("a", "d1")) == ["ab"]


def test_quorum_of_few_may_ask_for_the_claim_if_all_members_were_known_to_have_the_store():
    for dead, few in (("", True), ("b", True), ("bc", False)):
        found = bids("a", [ChainLink(view(1, "abc"), agreed=True)], gone="", dead=dead, stores=told("a", "d1"))
        assert ([bid.members for bid in found[0]], found[1]) == ([("a",)], few)
    assert asks("a", ChainLink(view(1, "abc"))) == []
    assert asks("a", ChainLink(view(1, "abc")), gone="b") == ["a"]


def test_quorum_of_those_whom_a_claim_names_and_of_what_is_left_of_them():
    link = ChainLink(view(1, "abcde"), agreed=True)
    (first,), _ = bids("abc", [link], gone="", dead="", stores=told("abc", "d"))
    assert lacking("ab", link, stores=told("ab", "d", (first, "abc")))
    assert not lacking("ab", link, gone="c", stores=told("ab", "d", (first, "abc")))
    (second,), few = bids("ab", [link], gone="", dead="", stores=told("ab", "d", (first, "abc")))
    assert (second.members, few) == (("a", "b"), True)
    assert second.claim != first.claim
    both = ((first, "abc"), (second, "ab"))
    assert not lacking("abd", link, stores=told("abd", "d", *both))
    assert lacking("cde", link, stores=told("cde", "d", *both))
    assert asks("cde", link, stores=told("cde", "d", *both)) == []


def test_quorum_is_not_those_that_are_left_when_all_whom_a_claim_names_are_gone():
    """They may have been left out by others, who do not know of the claim."""
    link = ChainLink(view(1, "abc"), agreed=True)
    (bid,), _ = bids("a", [link], gone="", dead="", stores=told("a", "d"))
    assert lacking("b", link, gone="a", stores=told("b", "d", (bid, "a")))
    assert not lacking("bc", link, gone="a", stores=told("bc", "d", (bid, "a")))


def test_bids_are_the_claims_that_alone_are_lacking():
    links = [ChainLink(view(1, "abcd")), ChainLink(view(2, "ab", base=1))]
    assert asks("ab", *links) == ["ab"]
    assert asks("a", *links, gone="bc") == ["a"]
    assert asks("a", *links) == []
    (bid,), _ = bids("ab", links, gone="", dead="", stores=told("ab", "d"))
    assert asks("ab", *links, stores=told("ab", "d", (bid, "cd"))) == []
    assert asks("ab", *links, stores=told("ab", "d", (bid, "ab"))) == []


def test_quorum_dead_members_are_not_left_out_by_a_successor():
    # c and d may have been half of {c, d, e} of another coordinator before they died, and e lives.
    assert lacking("ab", ChainLink(view(1, "abcde"), over=True))


def test_quorum_holds_for_each_view_of_the_chain():
    # a alone is half of {a, d}, which is half of {a, c, d}, and so on: but what counts is also where they began.
    chain = [
        ChainLink(view(1, "abcd"), own=True),
        ChainLink(view(2, "acd"), own=True),
        ChainLink(view(3, "ad"), own=True),
    ]
    assert not lacking("ad", *chain[:2])
    assert lacking("a", *chain)


def test_quorum_without_a_known_beginning_needs_all():
    assert lacking("abc", ChainLink(view(2, "abcd"), over=True), based=False)
    assert not lacking("abc", ChainLink(view(2, "abcd")), gone="d", based=False)
    assert not lacking("abcd", ChainLink(view(2, "abcd")), based=False)


def test_quorum_is_not_asked_for_if_nobody_else_can_lead():
    assert not lacking("a", ChainLink(view(1, "abcde", standbys=False)))


def test_quorum_reason_names_who_is_missing():
    reason = shortfall("a", [ChainLink(view(7, "abc"))], gone="", dead="")
    assert "only 1 of 3 members of view 7" in reason
    assert "b, c" in reason
    assert "on_minority" in reason


def test_merge_keeps_what_came_since_the_newest_view_that_was_settled():
    one, two, three = view(1, "abc"), view(2, "ab", base=1), view(3, "a", base=2)
    settled, chain = merge([(1, (ChainLink(one), ChainLink(two))), (2, (ChainLink(two, over=True), ChainLink(three)))])
    assert settled == 2
    assert chain == (ChainLink(two, over=True), ChainLink(three))


def test_merge_of_two_views_of_one_generation_begins_with_the_one_that_was_settled():
    one, two, other = view(1, "abcd"), view(2, "abc", base=1), view(2, "bcd", base=1)
    chains = [(2, (ChainLink(two),)), (1, (ChainLink(one), ChainLink(other)))]
    assert merge(chains) == merge(chains[::-1]) == (2, (ChainLink(two),))


def test_merge_leaves_out_what_was_issued_without_knowledge_of_a_view_that_came_about():
    one, two, other = view(1, "abcde"), view(2, "abc", base=1), view(3, "cde", base=1)
    assert merge([(1, (ChainLink(one), ChainLink(other))), (2, (ChainLink(two),))]) == (2, (ChainLink(two),))


def test_merge_keeps_what_was_issued_by_one_who_had_issued_the_view_that_came_about_but_not_heard_that_it_did():
    """Else the rest of the third view, {a, b}, and {c, d, e} could go on, each of them without the other."""
    one, two, three = view(4, "abcdef"), view(5, "abcde", base=4), view(6, "abc", base=4)
    settled, chain = merge([(5, (ChainLink(two), ChainLink(three))), (4, (ChainLink(one), ChainLink(two)))])
    assert (settled, chain) == (5, (ChainLink(two), ChainLink(three)))
    assert lacking("cde", *chain)


def test_merge_keeps_the_newest_view_last_whatever_its_issuer_had_heard():
    two, three, four = view(5, "abcde"), view(6, "abcd", base=5), view(7, "abc", base=4)
    assert merge([(5, (ChainLink(two), ChainLink(three))), (5, (ChainLink(two), ChainLink(four)))])[1][-1] == ChainLink(
        four
    )


FATES = st.sampled_from(["first", "gone from first", "second", "gone from second", "cut off", "dead"])


@settings(max_examples=2000, deadline=None)
@given(st.lists(FATES, min_size=1, max_size=7), st.sampled_from(["", *MEMBERS]))
def test_quorum_is_never_found_twice(fates, issuer):
    """Of the issuer of a view and two successors, whatever became of its members; each knows of its own gone only."""
    names = MEMBERS[: len(fates)]

    def those(*which: str) -> str:
        return "".join(name for name, fate in zip(names, fates, strict=True) if fate in which)

    first, second = those("first"), those("second")
    by = view(1, names, issuer=issuer)
    own = not lacking(first, ChainLink(by, own=True), gone=those("gone from first"))
    # Whoever is dead may have been the issuer's; then its own view has been issued before.
    had = not lacking(those("first", "dead"), ChainLink(by, own=True), gone=those("gone from first"))
    successor = ChainLink(by, over=not first and not had)
    other = not lacking(second, successor, gone=those("gone from second"))
    assert not (first and second and (own or had) and other)
    one = not lacking(first, ChainLink(by, over=True), gone=those("gone from first"))
    another = not lacking(second, ChainLink(by, over=True), gone=those("gone from second"))
    assert not (first and second and one and another)


ACTS = st.sampled_from(
    ["come", "come", "end", "leave", "lose", "issue", "issue", "issue without leavers", "stop", "stop"]
)
STEPS = st.lists(st.tuples(ACTS, st.integers(0, 5), st.integers(0, 2), st.booleans()), min_size=8, max_size=24)
STORES = st.sampled_from(["none", "not told", "told by some", "told by all", "agreed"])


@pytest.mark.parametrize("num_examples", [400, pytest.param(4000, marks=pytest.mark.thorough)])
def test_quorum_is_never_found_twice_whatever_comes_between(num_examples):
    search = given(STEPS, st.integers(2, 6), STORES, st.integers(1, 62))(find_a_second_quorum)
    settings(max_examples=num_examples, deadline=None, database=None)(search)()


def find_a_second_quorum(steps, size, stores, some):
    """Three coordinators, the first of which has issued the view, and may stop; members come to one and to another."""
    names = "abcdef"[:size]
    tellers = {"not told": "", "told by some": [name for i, name in enumerate(names) if some >> i & 1]}.get(
        stores, names
    )
    known = dict.fromkeys(tellers, "" if stores == "none" else "d1")
    world = World(names, known, agreed=stores == "agreed", issuer=names[some % size])
    for act, index, number, flag in steps:
        world.take(act, names[index % size], number, flag)


class World:
    """Who has come to whom. Whoever has received a view stays; a view is void if a member has not."""

    def __init__(self, names: str, told: dict[str, str], *, agreed: bool, issuer: str) -> None:
        self.told = told
        first = ChainLink(view(1, names, issuer=issuer), agreed=agreed)
        self.chains = [[replace(first, own=number == 0)] for number in range(3)]
        self.at = dict.fromkeys(names, 0)
        self.leaving: set[str] = set()
        self.gone: list[set[str]] = [set(), set(), set()]
        self.claims: dict[str, tuple[str, ...]] = {}
        self.alive: list[set[str]] = []
        self.settled: set[str] = set()

    def take(self, act: str, name: str, number: int, flag: bool) -> None:
        here = {one for one, where in self.at.items() if where == number}
        if act.startswith("issue"):
            self.issue(here - self.leaving if "without" in act else here, here, number, received=flag)
        elif act == "stop":
            self.stop()
        elif name in self.settled or name not in self.at:
            return
        elif act == "come":
            self.at[name] = number
        elif act == "lose":
            self.at[name] = -1
        elif act == "leave":
            self.leaving.add(name)
        else:
            where = self.at.pop(name)
            if where >= 0:
                self.gone[where].add(name)

    def stop(self) -> None:
        """The first coordinator ends, and has issued no other view: if it had, all would know."""
        if len(self.chains[0]) > 1:
            return
        for chain in self.chains[1:]:
            chain[0] = replace(chain[0], over=True)
        self.chains[0][0] = replace(self.chains[0][0], own=False)
        self.at = {name: where or -1 for name, where in self.at.items()}

    def issue(self, chosen: set[str], here: set[str], number: int, *, received: bool) -> None:
        chain, gone = self.chains[number], self.gone[number] | (self.leaving & here)
        if not chosen or chosen & self.settled:
            return
        stores = Stores({name: self.told[name] for name in here if name in self.told}, self.claims)
        for bid in bids(chosen, chain, gone=gone, dead="", stores=stores)[0]:
            self.claims.setdefault(bid.claim, bid.members)
        stores = Stores(stores.told, self.claims)
        if shortfall(chosen, chain, gone=gone, dead=MEMBERS, stores=stores):
            return
        chain.append(ChainLink(view(chain[-1].view.generation + 1, "".join(sorted(chosen))), own=True))
        if received:
            assert not self.alive, f"{self.alive} and {chosen}"
            self.alive.append(chosen)
            self.settled |= chosen


def test_reason_names_some_of_very_many_workers() -> None:
    ids = [f"w{index:04}" for index in range(1000)]
    assert some_of(ids[:3]) == "w0000, w0001, w0002"
    assert some_of(ids) == f"{', '.join(ids[:8])} and 992 more"


def test_stores_are_compared_until_one_is_missing_or_another_one() -> None:
    stores = Stores({"a": "x", "b": "y", "c": "", "d": "x"})
    assert stores.have_one("ad")
    assert not stores.have_one("")
    for names, left in [("abd", "d"), ("ead", "ad"), ("cad", "ad")]:
        members = iter(names)
        assert not stores.have_one(members)
        assert "".join(members) == left
