"""For which claims a worker asks its store, and when."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ef_common.core.quorum import Bid
from ef_common.protocol.claim_requests import AGAIN_S, ClaimRequests
from tests.diagrams import rows

BID, OTHER = Bid("3", ("a", "b")), Bid("4", ("a",))


def state(requests: ClaimRequests) -> str:
    if BID not in requests._due:
        return "none"
    return "asked" if requests._due[BID] is None else "put_off"


def wanted(*acts: Callable[[ClaimRequests], object]) -> ClaimRequests:
    requests = ClaimRequests()
    for act in (lambda requests: requests.want(BID), *acts):
        act(requests)
    return requests


def put_off(requests: ClaimRequests) -> None:
    requests.put_off(BID, 5.0)


WITNESSES: dict[str, tuple[ClaimRequests, Callable[[ClaimRequests], object], object]] = {
    "none → asked": (ClaimRequests(), lambda requests: requests.want(BID), (BID,)),
    "asked → put_off": (wanted(), put_off, None),
    "put_off → asked": (wanted(put_off), lambda requests: requests.again(5.0 + AGAIN_S), (BID,)),
    "asked → none": (wanted(), lambda requests: requests.settle(BID), True),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(ClaimRequests) == list(WITNESSES)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str) -> None:
    requests, act, expected = WITNESSES[row]
    before = state(requests)
    assert act(requests) == expected
    assert row == f"{before} → {state(requests)}"


def test_one_request_for_a_claim_is_under_way_however_often_it_is_wanted() -> None:
    requests = wanted()
    assert requests.want(BID) == ()
    assert requests.want(OTHER) == (OTHER,)
    assert requests.due is None
    put_off(requests)
    assert requests.want(BID) == ()  # not before it is time
    assert requests.due == 5.0 + AGAIN_S
    assert requests.again(5.0 + AGAIN_S - 0.1) == ()


def test_answer_that_nobody_waits_for_is_none() -> None:
    requests = wanted(lambda requests: requests.settle(BID))
    assert not requests.settle(BID)
    requests.put_off(BID, 5.0)
    assert requests.due is None
    assert requests.want(BID) == (BID,)  # whoever leads now may want it anew
