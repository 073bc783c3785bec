"""The rule by which a view may be issued, and that no two groups can both fulfil it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ef_common.core.quorum import Half, Link, Stores, merge, shortfall, ties
from ef_common.core.view import Member, View


def view(generation: int, names: str, *, standby: int = 1, base: int = 0) -> View:
    return View(generation, tuple(Member(name, name, "", standby=standby) for name in names), base=base)


def lacking(
    names: str, *links: Link, gone: str = "", dead: str = "", based: bool = True, stores: Stores | None = None
) -> bool:
    stores = told(names) if stores is None else stores
    return bool(shortfall(names, links, gone=gone, dead=dead, based=based, stores=stores))


def told(names: str, store: str = "", *, won: tuple[Half, ...] = (), lost: tuple[Half, ...] = ()) -> Stores:
    return Stores(dict.fromkeys(names, store), frozenset(won), frozenset(lost))


@pytest.mark.parametrize(
    ("here", "gone", "enough"),
    [("abc", "", True), ("ab", "", True), ("a", "", False), ("a", "b", False), ("a", "bc", True), ("", "abc", True)],
)
def test_quorum_of_three_needs_more_than_half_of_those_that_are_not_gone(here, gone, enough):
    assert lacking(here, Link(view(1, "abc")), gone=gone) is not enough


def test_quorum_of_half_is_enough_for_the_coordinator_that_issued_the_view():
    assert lacking("ab", Link(view(1, "abcd")))
    assert not lacking("ab", Link(view(1, "abcd"), own=True))
    assert lacking("a", Link(view(1, "abcd"), own=True))


def test_quorum_of_half_is_enough_for_a_successor_if_the_others_are_dead_and_the_issuer_is_over():
    assert not lacking("ab", Link(view(1, "abcd"), over=True), dead="cd")
    assert lacking("ab", Link(view(1, "abcd"), over=True), dead="c")
    assert lacking("ab", Link(view(1, "abcd")), dead="cd")
    assert lacking("a", Link(view(1, "abcd"), over=True), dead="bcd")


def test_quorum_of_half_with_a_store_needs_the_claim_whoever_issued_the_view():
    link = Link(view(1, "abcd"), own=True, over=True)
    (half,) = ties("ab", [link], gone="", stores=told("ab", "d1"))
    assert half.winner == ("a", "b")
    assert lacking("ab", link, dead="cd", stores=told("ab", "d1"))
    assert not lacking("ab", link, stores=told("ab", "d1", won=(half,)))
    assert lacking("cd", link, stores=told("cd", "d1", won=(half,)))
    assert lacking("ab", Link(view(2, "abcd"), own=True), stores=told("ab", "d1", won=(half,)))


def test_quorum_of_half_is_never_enough_as_long_as_a_store_is_not_known_or_differs():
    link = Link(view(1, "abcd"), own=True, over=True)
    for stores in (Stores(), told("a"), Stores({"a": "", "b": "d1"}), Stores({"a": "d1", "b": "d2"})):
        assert lacking("ab", link, dead="cd", stores=stores)
        assert ties("ab", [link], gone="", stores=stores) == ()
    assert not lacking("abc", link)


def test_ties_are_the_claims_that_alone_are_lacking():
    links = [Link(view(1, "abcd")), Link(view(2, "ab", base=1))]
    assert [half.winner for half in ties("ab", links, gone="", stores=told("ab", "d"))] == [("a", "b")]
    assert [half.winner for half in ties("a", links, gone="bc", stores=told("a", "d"))] == [("a",)]
    assert ties("a", links, gone="", stores=told("a", "d")) == ()
    (half,) = ties("ab", links, gone="", stores=told("ab", "d"))
    assert ties("ab", links, gone="", stores=told("ab", "d", lost=(half,))) == ()
    assert ties("ab", links, gone="", stores=told("ab", "d", won=(half,))) == ()


def test_quorum_dead_members_are_not_left_out_by_a_successor():
    # c and d may have been half of {c, d, e} of another coordinator before they died, and e lives.
    assert lacking("ab", Link(view(1, "abcde"), over=True), dead="cd")


def test_quorum_holds_for_each_view_of_the_chain():
    # a alone is half of {a, d}, which is half of {a, c, d}, and so on: but what counts is also where they began.
    chain = [Link(view(1, "abcd"), own=True), Link(view(2, "acd"), own=True), Link(view(3, "ad"), own=True)]
    assert not lacking("ad", *chain[:2])
    assert lacking("a", *chain)


def test_quorum_without_a_known_beginning_needs_all():
    assert lacking("abc", Link(view(2, "abcd"), over=True), dead="d", based=False)
    assert not lacking("abc", Link(view(2, "abcd")), gone="d", based=False)
    assert not lacking("abcd", Link(view(2, "abcd")), based=False)


def test_quorum_is_not_asked_for_if_nobody_else_can_lead():
    assert not lacking("a", Link(view(1, "abcde", standby=0)))


def test_quorum_reason_names_who_is_missing():
    reason = shortfall("a", [Link(view(7, "abc"))], gone="", dead="")
    assert "only 1 of 3 members of view 7" in reason
    assert "b, c" in reason
    assert "on_minority" in reason


def test_merge_keeps_what_came_since_the_newest_view_that_was_settled():
    one, two, three = view(1, "abc"), view(2, "ab", base=1), view(3, "a", base=2)
    settled, chain = merge([(1, (Link(one), Link(two))), (2, (Link(two, over=True), Link(three)))])
    assert settled == 2
    assert chain == (Link(two, over=True), Link(three))


def test_merge_of_two_views_of_one_generation_begins_with_the_one_that_was_settled():
    one, two, other = view(1, "abcd"), view(2, "abc", base=1), view(2, "bcd", base=1)
    chains = [(2, (Link(two),)), (1, (Link(one), Link(other)))]
    assert merge(chains) == merge(chains[::-1]) == (2, (Link(two),))


def test_merge_leaves_out_what_was_issued_without_knowledge_of_a_view_that_came_about():
    one, two, other = view(1, "abcde"), view(2, "abc", base=1), view(3, "cde", base=1)
    assert merge([(1, (Link(one), Link(other))), (2, (Link(two),))]) == (2, (Link(two),))


def test_merge_keeps_what_was_issued_by_one_who_had_issued_the_view_that_came_about_but_not_heard_that_it_did():
    """Else the rest of the third view, {a, b}, and {c, d, e} could go on, each of them without the other."""
    one, two, three = view(4, "abcdef"), view(5, "abcde", base=4), view(6, "abc", base=4)
    settled, chain = merge([(5, (Link(two), Link(three))), (4, (Link(one), Link(two)))])
    assert (settled, chain) == (5, (Link(two), Link(three)))
    assert lacking("cde", *chain)


def test_merge_keeps_the_newest_view_last_whatever_its_issuer_had_heard():
    two, three, four = view(5, "abcde"), view(6, "abcd", base=5), view(7, "abc", base=4)
    assert merge([(5, (Link(two), Link(three))), (5, (Link(two), Link(four)))])[1][-1] == Link(four)


MEMBERS = "abcdefg"
FATES = st.sampled_from(["first", "gone from first", "second", "gone from second", "cut off", "dead"])


@settings(max_examples=2000, deadline=None)
@given(st.lists(FATES, min_size=1, max_size=7))
def test_quorum_is_never_found_twice(fates):
    """The issuer of a view, and a successor, whatever has become of its members; each knows of its own gone only."""
    names = MEMBERS[: len(fates)]

    def those(*which: str) -> str:
        return "".join(name for name, fate in zip(names, fates, strict=True) if fate in which)

    first, second = those("first"), those("second")
    own = not lacking(first, Link(view(1, names), own=True), gone=those("gone from first"))
    # Whoever is dead may have been the issuer's; then its own view has been issued before.
    had = not lacking(those("first", "dead"), Link(view(1, names), own=True), gone=those("gone from first"))
    successor = Link(view(1, names), over=not first and not had)
    other = not lacking(second, successor, gone=those("gone from second"), dead=those("dead", "gone from first"))
    assert not (first and second and (own or had) and other)


@settings(max_examples=1000, deadline=None)
@given(st.lists(FATES, min_size=1, max_size=7), st.booleans())
def test_quorum_with_claims_is_never_found_twice(fates, first_is_faster):
    """The same, if all have one store: each side has the claims that it asks for, unless the other one has them."""
    names = MEMBERS[: len(fates)]

    def those(*which: str) -> str:
        return "".join(name for name, fate in zip(names, fates, strict=True) if fate in which)

    link, winners = Link(view(1, names), own=True, over=True), {}

    def goes_on(side: str) -> bool:
        stores = told(those(side), "d1")
        halves = ties(those(side), [link], gone=those(f"gone from {side}"), stores=stores)
        won = tuple(half for half in halves if winners.setdefault(half.claim, half.winner) == half.winner)
        stores = told(those(side), "d1", won=won)
        return not lacking(those(side), link, gone=those(f"gone from {side}"), dead=those("dead"), stores=stores)

    sides = ("first", "second") if first_is_faster else ("second", "first")
    assert sum(bool(those(side)) and goes_on(side) for side in sides) <= 1
