"""Small messages between all members: what becomes of one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ef_common.collectives.torch_exchange import Exchange, Exchanges
from ef_common.core.calls import HEADER_BYTES, header
from ef_common.errors import CallMismatch, GroupBroken
from tests.diagrams import cases, rows


class Flight:
    """An operation of which a test decides how it ends."""

    def __init__(self) -> None:
        self.has_ended = False
        self.error: Exception | None = None

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.has_ended = True

    def is_over(self) -> bool:
        return self.has_ended or self.error is not None


class Two:
    """An exchange of the first of two members, and the group that carries it."""

    def __init__(self) -> None:
        self.flight = Flight()
        self.exchanges = Exchanges(2, 0)
        self.taken: list[tuple[int, bytes]] = []
        self.exchange = self.exchanges.begin(
            self,
            "sum",
            np.frombuffer(b"own!", np.uint8),
            take=lambda room: self.taken.extend(room.messages()),
        )

    def start(self, act: Callable[..., object], *tensors: torch.Tensor) -> Flight:
        self.room = tensors[0].numpy()
        return self.flight

    def mismatch(self, calls: Sequence[str]) -> CallMismatch:
        return CallMismatch(" and ".join(calls))

    def hears(self, call: str) -> None:
        """The other member's message is there."""
        self.flight.has_ended = True
        self.room[: HEADER_BYTES + 4] = np.frombuffer(header(call, 4) + b"more", np.uint8)

    @property
    def state(self) -> str:
        exchange = self.exchange
        if exchange._error is not None:
            return "mismatched"
        return "flying" if exchange._flying is not None else "complete"


def waits(two: Two) -> None:
    two.hears("sum")
    two.exchange.wait()
    assert two.taken == [(4, b"more")]


def looks(two: Two) -> None:
    two.hears("sum")
    assert two.exchange.is_open()
    assert two.taken == [(4, b"more")]


def waits_for_another_call(two: Two) -> None:
    two.hears("barrier")
    with pytest.raises(CallMismatch, match="sum and barrier"):
        two.exchange.wait()
    assert two.taken == []


def looks_at_another_call(two: Two) -> None:
    two.hears("barrier")
    assert not two.exchange.is_open()
    waits_for_another_call(two)


def loses_the_other(act: Callable[[Exchange], Any]) -> Callable[[Two], None]:
    def lose(two: Two) -> None:
        two.flight.error = GroupBroken("lost")
        with pytest.raises(GroupBroken, match="lost"):
            act(two.exchange)

    return lose


WITNESSES: dict[str, tuple[tuple[Callable[[Two], None], ...], ...]] = {
    "flying → complete": ((waits,), (looks,)),
    "flying → mismatched": ((waits_for_another_call,), (looks_at_another_call,)),
    "flying → GroupBroken": ((loses_the_other(Exchange.wait),), (loses_the_other(Exchange.is_open),)),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(Exchange) == list(WITNESSES)


@pytest.mark.parametrize(("row", "case"), cases(WITNESSES))
def test_each_row_of_the_diagram_is_true(row: str, case: int) -> None:
    two = Two()
    assert not two.exchange.is_open()
    *first, last = WITNESSES[row][case]
    for act in first:
        act(two)
    before = two.state
    last(two)
    broken = row.endswith("GroupBroken")  # which `last` has seen
    assert row == f"{before} → {'GroupBroken' if broken else two.state}"
    if broken:
        assert two.state == before


def test_memory_of_a_complete_exchange_carries_the_next_one() -> None:
    two = Two()
    waits(two)
    room = two.room
    two.exchange = two.exchanges.begin(two, "barrier")
    assert np.shares_memory(two.room, room)
    assert two.exchanges._rooms == []
