"""Claims are tried until the store has said who has them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ef_common.control import claimant
from ef_common.control.claimant import Claimant
from ef_common.core.quorum import Bid
from ef_common.errors import StorageFailed

BID = Bid("000000003-" + "0f" * 16, ("a",))
GUARD_S = 60.0


class Store:
    """Answers when it is let, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.num_asked = 0
        self.open = threading.Event()
        self.told: list[tuple[str, tuple[str, ...]]] = []
        self.answered = threading.Event()

    def claim(self, name: str, members: tuple[str, ...]) -> tuple[str, ...]:
        self.num_asked += 1
        self.open.wait(GUARD_S)
        if self.num_asked <= self.failures:
            raise StorageFailed("it is out of reach")
        return members

    def tell(self, claim: str, named: tuple[str, ...]) -> None:
        self.told.append((claim, named))
        self.answered.set()


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimant, "_AGAIN_S", 0.01)


def start(store: Store) -> tuple[Callable[[Bid], None], threading.Event]:
    stopped = threading.Event()
    return Claimant(store.claim, store.tell, stopped=stopped).get, stopped


def test_claimant_takes_no_error_for_an_answer() -> None:
    store = Store(failures=3)
    store.open.set()
    start(store)[0](BID)
    assert store.answered.wait(GUARD_S)
    assert (store.told, store.num_asked) == ([(BID.claim, BID.members)], 4)


def test_claimant_that_is_asked_again_meanwhile_asks_once() -> None:
    store = Store()
    get, _ = start(store)
    get(BID)
    get(BID)
    store.open.set()
    assert store.answered.wait(GUARD_S)
    assert store.num_asked == 1


def test_claimant_that_is_stopped_gives_up() -> None:
    store = Store(failures=1)
    get, stopped = start(store)
    get(BID)
    stopped.set()
    store.open.set()
    assert not store.answered.wait(0.2)
    assert store.told == []


def test_claimant_takes_no_unexpected_error_for_an_answer_either(caplog: pytest.LogCaptureFixture) -> None:
    store = Store()
    store.open.set()
    failures = [RuntimeError("out of order")] * 3

    def claim(name: str, members: tuple[str, ...]) -> tuple[str, ...]:
        if failures:
            raise failures.pop()
        return store.claim(name, members)

    Claimant(claim, store.tell, stopped=threading.Event()).get(BID)
    assert store.answered.wait(GUARD_S)
    assert store.told == [(BID.claim, BID.members)]
    (warning,) = [record for record in caplog.records if "out of order" in record.getMessage()]
    assert warning.exc_info  # it is a defect, so it is logged with its place
