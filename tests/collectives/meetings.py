"""Scripts of members that meet in different calls; see `seats`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from ef_common.collectives import linked_group
from ef_common.errors import CallMismatch
from ef_common.session.ports import Group
from tests.collectives.seats import RealSeat

LARGE = 1 << 19  # numbers: nothing that is sent directly
Act = Callable[[RealSeat, Group], Any]


def gather(payload: int, call: str) -> Act:
    return lambda seat, group: group.all_gather(b"x" * payload, call)


def add(num: int, call: str = "sum", dtype: Any = np.float32) -> Act:
    return lambda seat, group: group.all_reduce(seat.of(np.ones(num, dtype)), call).wait()


def add_several(sizes: Sequence[int], call: str) -> Act:
    """As a reduction of gradients does: all begin before any is waited for, and a barrier follows."""

    def act(seat: RealSeat, group: Group) -> None:
        tensors = [seat.of(np.ones(num, np.float32)) for num in sizes]
        meeting = group.meet(call, tensors)
        for pending in [group.all_reduce(tensor, call, meeting) for tensor in tensors]:
            pending.wait()
        group.all_reduce(seat.of(np.zeros(1, np.float32)), "barrier after it").wait()

    return act


def reduce_gradients(width: int) -> Act:
    """Of a module with so many parameters, three times; the backward pass overlaps the sums."""

    def act(seat: RealSeat, group: Group) -> None:
        import torch

        from ef_common.collectives.gradients.reducer import GradientReducer
        from tests.collectives.world import OneView

        module = torch.nn.Sequential(
            torch.nn.Linear(width, 100), torch.nn.Linear(100, width), torch.nn.Linear(width, 1)
        )
        session: Any = OneView(seat.rank, group, seat.world_size)
        reducer = GradientReducer(session, module, weights=lambda view: [1 / view.world_size] * view.world_size)
        reducer.attach()
        reducer.before_backward()
        module(torch.ones(2, width)).sum().backward()
        reducer.after_backward()

    return act


GATHERS = {
    "a gather": gather(100, "a gather"),
    "a gather of nothing": gather(0, "a gather of nothing"),
    "a large gather": gather(1 << 20, "a large gather"),
    "another large gather": gather(1 << 20, "another large gather"),
}
SUMS = {
    "a sum": add(3),
    "a longer sum": add(57),
    "a sum of equal size": add(3, "another sum"),
    "a sum of equal bytes": add(3, dtype=np.int32),
    "a large sum": add(LARGE),
    "a larger sum": add(LARGE + 1),
    "a large sum of equal size": add(LARGE, "another sum"),
    "several sums": add_several([LARGE, LARGE, 10], "gradients"),
    "other sums": add_several([LARGE, LARGE, 11], "gradients"),
}
GRADIENTS = {
    "the gradients of a small module": reduce_gradients(10),
    "the gradients of a large module": reduce_gradients(5000),
}
ALL = GATHERS | SUMS | GRADIENTS


def meet(seat: RealSeat, names: Sequence[str]) -> list[list[Any]]:
    """In each pair of these, rank 0 does one, and the others do the other. What each one finds."""
    linked_group._LINGER_S = 0.1
    pairs = [pair[:: 1 - number % 2 * 2] for number, pair in enumerate(combinations(names, 2))]
    return [[*pair, _meet(seat, pair)] for pair in pairs]


def _meet(seat: RealSeat, pair: tuple[str, ...]) -> str:
    group = seat.build()
    seat.client.send("settled", seat.view.generation)  # as a session does: this group has come about
    group.all_gather(b"", "the same")  # what went well before changes nothing
    try:
        ALL[pair[seat.rank > 0]](seat, group)
    except CallMismatch as error:
        return str(error)
    finally:
        group.abort()
        seat.client.send("suspect", seat.view.generation)
        seat.next_view()
    return ""


def agree_in_all(seat: RealSeat, names: Sequence[str]) -> int:
    """All do the same, twice in one group. How many calls were made."""
    group = seat.build()
    for name in [*names, *names]:
        ALL[name](seat, group)
    return 2 * len(names)
