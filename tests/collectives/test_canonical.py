"""Sums with the same bits for every number of workers, over the real session; members are threads, and may be lost."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ef_common.collectives.gradients.canonical import CanonicalReduction, _Exchange
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.shared import SumMemory
from ef_common.core.sharding import Window
from ef_common.errors import GroupBroken
from ef_common.session import Session
from tests.collectives.cluster import Cluster, Died

SIZE = 1001


def gradient_of(piece: int, step: int) -> np.ndarray:
    return np.random.default_rng([piece, step]).normal(size=SIZE).astype(np.float32)


class Worker:
    """Reduces some steps of a global batch of single pieces."""

    def __init__(self, session: Session, rank: int) -> None:
        self.session = session
        self.rank = rank
        self.room = SumMemory(SIZE, num_flags=2)
        self.computed: list[int] = []

    def reduce(self, num_pieces: int, *, step: int = 0, dies_after: int = -1) -> Any:
        members = self.session.completed_in.ids
        window = Window(0, num_pieces, members, piece=1)
        pieces = Pieces(window, self.session.worker.id, batch_size=1)
        reduction = CanonicalReduction(self.room, self.session, pieces, lambda: [1.0, self.rank])
        pieces.compute = functools.partial(self.compute, reduction, step)
        for number, some in enumerate(pieces.passes()):
            if number == dies_after:
                raise Died
            pieces.compute(some)
        if dies_after >= 0:
            raise Died
        view = self.session.run(reduction)
        found = reduction.total.copy(), reduction.flags.tolist(), view.ids, list(pieces.mine)
        reduction.finish()
        return found

    def compute(self, reduction: CanonicalReduction, step: int, pieces: Sequence[int]) -> None:
        for piece in pieces:
            array = self.room.take()
            array[:] = gradient_of(piece, step)
            reduction.insert(piece, array)
            self.computed.append(piece)


def sum_alone(num_pieces: int, step: int = 0) -> bytes:
    ((total, _, _, _),) = Cluster(1).run(lambda session, rank: Worker(session, rank).reduce(num_pieces, step=step))
    expected = sum(gradient_of(piece, step).astype(np.float64) for piece in range(num_pieces))
    np.testing.assert_allclose(total, expected, atol=1e-5)
    return total.tobytes()


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_pieces", [1, 2, 3, 7, 8])
def test_the_bits_do_not_depend_on_the_number_of_workers(num_workers: int, num_pieces: int) -> None:
    results = Cluster(num_workers).run(lambda session, rank: Worker(session, rank).reduce(num_pieces))

    assert {total.tobytes() for total, *_ in results} == {sum_alone(num_pieces)}
    for _, flags, ids, _ in results:
        assert flags == [num_workers, sum(range(num_workers))]
        assert len(ids) == num_workers


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("dies_after", [0, 1, 2])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_survivors_make_up_for_the_pieces_of_the_dead_and_get_the_same_bits(
    num_workers: int, dies_after: int, victim: str
) -> None:
    dead = 0 if victim == "first" else num_workers - 1

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        worker.reduce(8)
        found = worker.reduce(8, step=1, dies_after=dies_after if rank == dead else -1)
        worker.computed.clear()
        return found, worker.reduce(7, step=2)

    results = Cluster(num_workers).run(member)

    assert results.pop(dead) is None
    assert {first[0].tobytes() for first, _ in results} == {sum_alone(8, step=1)}
    assert {second[0].tobytes() for _, second in results} == {sum_alone(7, step=2)}
    done = sorted(piece for first, _ in results for piece in first[3])
    assert done == list(range(8))  # each by one of those that are left


def test_a_second_loss_while_pieces_are_made_up_for() -> None:
    """Rank 1 dies after it has made up for what rank 0 had: that is made up for once more."""

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        if rank == 1:
            compute = worker.compute

            def die_in_the_second_part(reduction: Any, step: int, pieces: Sequence[int]) -> None:
                if 0 in pieces or 1 in pieces:
                    raise Died
                compute(reduction, step, pieces)

            worker.compute = die_in_the_second_part  # type: ignore[method-assign]
        return worker.reduce(8, dies_after=0 if rank == 0 else -1)

    first, second, *results = Cluster(4).run(member)

    assert first is None
    assert second is None
    assert {total.tobytes() for total, *_ in results} == {sum_alone(8)}
    assert sorted(piece for found in results for piece in found[3]) == list(range(8))


def test_a_result_that_one_lacks_is_handed_on() -> None:
    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        worker.reduce(8)
        if rank == 2:
            session.group.loses_next = True  # type: ignore[attr-defined]
        return worker.reduce(8, step=1), worker.reduce(8, step=2)

    results = Cluster(3).run(member)

    assert {first[0].tobytes() for first, _ in results} == {sum_alone(8, step=1)}
    assert {second[0].tobytes() for _, second in results} == {sum_alone(8, step=2)}
    assert {tuple(first[1]) for first, _ in results} == {(3.0, 3.0)}


def test_memory_is_used_again() -> None:
    def member(session: Session, rank: int) -> int:
        worker = Worker(session, rank)
        for step in range(5):
            worker.reduce(8, step=step)
        return len(worker.room._free)

    assert max(Cluster(2).run(member)) <= 4


def test_forward_passes_hold_no_more_than_a_batch() -> None:
    pieces = Pieces(Window(0, 256, ("a", "b", "c"), piece=1), "a", batch_size=32)
    sizes = [len(some) for some in pieces.passes()]

    assert sizes == [29, 29, 28]
    assert sum(pieces.share(some) for some in pieces.passes()) == pytest.approx(86 / 256)
    micro = Pieces(Window(512, 768, ("a", "b", "c"), piece=32), "b", batch_size=32)
    assert [micro.slots(some)[:1] for some in micro.passes()] == [[608], [640], [672]]


def test_member_whose_receiving_fails_does_not_wait_for_its_sending() -> None:
    aborted = threading.Event()

    class Group:
        def send(self, arrays: Sequence[Any], target: int) -> None:
            assert aborted.wait(60)
            raise GroupBroken("aborted")

        def receive(self, arrays: Sequence[Any], source: int, target: int | None = None) -> None:
            raise ValueError("cannot be received")

        def abort(self) -> None:
            aborted.set()

    exchange = _Exchange(SumMemory(SIZE, num_flags=2), Group(), 0, 2)
    raised: list[BaseException] = []

    def swap() -> None:
        try:
            exchange._swap({1: []}, {1: []})
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(raised) == 1


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_member_whose_sending_fails_does_not_wait_for_what_it_receives(error: type[BaseException]) -> None:
    aborted = threading.Event()

    class Group:
        def send(self, arrays: Sequence[Any], target: int) -> None:
            raise error("cannot be sent")

        def receive(self, arrays: Sequence[Any], source: int, target: int | None = None) -> None:
            assert aborted.wait(60)

        def abort(self) -> None:
            aborted.set()

    with pytest.raises(error, match="cannot be sent"):
        _Exchange(SumMemory(SIZE, num_flags=2), Group(), 0, 2)._swap({1: []}, {1: []})
