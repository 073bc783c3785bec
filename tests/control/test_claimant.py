"""Claims are tried until the store has said who has them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ef_common.control.client import CoordinatorClient
from ef_common.core import membership
from ef_common.core.quorum import Bid
from ef_common.errors import StorageFailed
from ef_common.protocol import wire
from tests.control.conftest import Worker
from tests.waiting import poll_until

CLAIM = membership.Claim("", Bid("000000003-" + "0f" * 16, ("a",)))
GUARD_S = 60.0


class Store:
    """Answers when it is let, and fails as often as it is told."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.num_asked = 0
        self.open = threading.Event()

    def claim(self, name: str, members: tuple[str, ...]) -> tuple[str, ...]:
        self.num_asked += 1
        self.open.wait(GUARD_S)
        if self.failures:
            raise self.failures.pop()
        return members


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ef_common.protocol.claim_requests.AGAIN_S", 0.01)


@pytest.fixture
def start(
    form: Callable[..., tuple[object, list[Worker]]], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Store], tuple[CoordinatorClient, list[wire.FromWorker]]]:
    """A client with this store, and what it says from then on; it says nothing to its coordinator."""

    def make(store: Store) -> tuple[CoordinatorClient, list[wire.FromWorker]]:
        _, (worker,) = form(1)
        client, said = worker.client, list[wire.FromWorker]()
        client.use_store("0f" * 16, store.claim)
        monkeypatch.setattr(client._protocol, "_say", said.append)
        return client, said

    return make


def ask(client: CoordinatorClient) -> None:
    client._do(lambda: client._protocol._hear(CLAIM))


def test_client_takes_no_error_of_the_store_for_an_answer(start) -> None:
    store = Store()
    store.failures = [StorageFailed("it is out of reach")] * 3
    store.open.set()
    client, said = start(store)
    ask(client)
    poll_until(lambda: said)
    assert said == [membership.Claimed(client.member.id, CLAIM.bid.claim, CLAIM.bid.members)]
    assert store.num_asked == 4


def test_client_that_is_asked_again_meanwhile_asks_once(start) -> None:
    store = Store()
    client, said = start(store)
    ask(client)
    ask(client)
    store.open.set()
    poll_until(lambda: said)
    assert store.num_asked == 1


def test_client_that_is_asked_again_afterwards_asks_again(start) -> None:
    store = Store()
    store.open.set()
    client, said = start(store)
    ask(client)
    poll_until(lambda: said)
    ask(client)
    poll_until(lambda: len(said) == 2)
    assert store.num_asked == 2


def test_client_that_is_stopped_gives_up(start) -> None:
    store = Store()
    store.failures = [StorageFailed("it is out of reach")]
    client, said = start(store)
    ask(client)
    poll_until(lambda: store.num_asked)
    client.stop()
    store.open.set()
    poll_until(lambda: not any(thread.name == "elasticflow-claim" for thread in threading.enumerate()))
    assert said == []
    assert store.num_asked == 1


@pytest.mark.parametrize("error", [RuntimeError("out of order"), SystemExit("out of order")], ids=repr)
def test_client_takes_no_unexpected_error_for_an_answer_either(
    start, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    store.failures = [error] * 3
    store.open.set()
    client, said = start(store)
    ask(client)
    poll_until(lambda: said)
    assert said == [membership.Claimed(client.member.id, CLAIM.bid.claim, CLAIM.bid.members)]
    (warning,) = [record for record in caplog.records if "out of order" in record.getMessage()]
    assert warning.exc_info  # it is a defect, so it is logged with its place
