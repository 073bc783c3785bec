"""The sum of what workers hold of a global batch, over the real session; members are threads, and may be lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.shared import SharedReduction, SumMemory
from ef_common.core.sharding import Window
from ef_common.session import Session
from tests.collectives.cluster import Cluster, Died

SIZE = 1001


class Worker:
    """Reduces global batches of single pieces; the gradient of piece n is n + 1 everywhere."""

    def __init__(self, session: Session, rank: int) -> None:
        self.session = session
        self.rank = rank
        self.room = SumMemory(SIZE, num_flags=2)
        self.num_passes: list[int] = []

    def reduce(self, num_pieces: int, *, dies: bool = False) -> Any:
        members = self.session.completed_in.ids
        pieces = Pieces(Window(0, num_pieces, members, piece=1), self.session.worker.id, batch_size=2)
        reduction = SharedReduction(self.room, self.session, pieces, lambda: [float(not reduction.rank), self.rank])

        def compute(some: Sequence[int]) -> None:
            array = self.room.take()
            array[:] = sum(some) + len(some)
            reduction.insert(some[0], array)
            self.num_passes.append(len(some))

        pieces.compute = compute
        for some in pieces.passes():
            compute(some)
        if dies:
            raise Died
        view = self.session.run(reduction)
        found = set(reduction.total.tolist()), reduction.flags.tolist(), view.ids, list(pieces.mine)
        reduction.finish()
        return found


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("num_pieces", [1, 2, 7, 8])
def test_sum_is_of_all_pieces_however_they_are_shared(num_workers: int, num_pieces: int) -> None:
    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        return worker.reduce(num_pieces), worker.reduce(num_pieces), worker.num_passes

    for first, second, passes in Cluster(num_workers).run(member):
        assert first == second
        assert first[0] == {num_pieces * (num_pieces + 1) / 2}
        assert first[1] == [1, sum(range(num_workers))]
        assert all(size <= 2 for size in passes)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("victim", ["first", "last"])
def test_survivors_make_up_for_the_pieces_of_the_dead(num_workers: int, victim: str) -> None:
    dead = 0 if victim == "first" else num_workers - 1

    def member(session: Session, rank: int) -> Any:
        worker = Worker(session, rank)
        worker.reduce(8)
        return worker.reduce(8, dies=rank == dead), worker.reduce(7), worker.num_passes

    results = Cluster(num_workers).run(member)

    assert results.pop(dead) is None
    for first, second, passes in results:
        assert (first[0], second[0]) == ({36.0}, {28.0})
        assert (first[1][0], second[1][0]) == (1, 1)  # whoever is the first one now
        assert all(size <= 2 for size in passes)
    assert sorted(piece for first, _, _ in results for piece in first[3]) == list(range(8))
