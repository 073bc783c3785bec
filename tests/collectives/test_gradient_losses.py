"""Gradient reduction when members are lost, over the real session; members are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ef_common.collectives.gradients import buckets
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.core.view import View
from ef_common.session import Barrier, Session
from tests.collectives.cluster import Cluster, Died

pytestmark = pytest.mark.usefixtures("buffers")

WEIGHTS = {"m0": 1.0, "m1": 2.0, "m2": 3.0}


def weights(view: View) -> list[float]:
    total = sum(WEIGHTS[worker] for worker in view.ids)
    return [WEIGHTS[worker] / total for worker in view.ids]


def weighted_mean(values: list[float], ranks: tuple[int, ...] = (0, 1, 2)) -> float:
    members = [f"m{rank}" for rank in ranks]
    return sum(WEIGHTS[m] * values[r] for m, r in zip(members, ranks, strict=True)) / sum(WEIGHTS[m] for m in members)


def step(reducer: GradientReducer, loss: Callable[[], Tensor]) -> View | None:
    value = loss()
    reducer.before_backward()
    value.backward()
    return reducer.after_backward()


def net(*parameters: Any, **buffers: Tensor) -> nn.Module:
    module = nn.Module()
    for index, value in enumerate(parameters):
        module.register_parameter(f"p{index}", nn.Parameter(torch.as_tensor(value)))
    for name, buffer in buffers.items():
        module.register_buffer(name, buffer)
    return module


def attached(session: Session, module: nn.Module) -> GradientReducer:
    reducer = GradientReducer(session, module, weights=weights)
    reducer.attach()
    return reducer


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter of 16 floats is a bucket of its own."""
    monkeypatch.setattr(buckets, "ONE_BUCKET_BYTES", 64)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 64)


@pytest.mark.usefixtures("small_buckets")
@pytest.mark.parametrize("parameter", range(4))
def test_loss_in_backward_reduces_again_among_those_that_are_left(parameter: int) -> None:
    def member(session: Session, rank: int) -> tuple[Any, ...]:
        module = net(*(torch.ones(16) for _ in range(4)), buffer=torch.tensor(rank + 1.0))
        reducer = attached(session, module)
        if rank == 0:

            def die(gradient: Tensor) -> None:
                raise Died

            getattr(module, f"p{parameter}").register_hook(die)
        view = step(reducer, lambda: sum(p.sum() * (rank + 1) for p in module.parameters()))
        assert view is not None
        return view.ids, torch.cat([p.grad for p in module.parameters()]), module.buffer

    dead, *survivors = Cluster(3).run(member)
    assert dead is None
    for ids, gradient, buffer in survivors:
        assert ids == ("m1", "m2")
        torch.testing.assert_close(gradient, torch.full((64,), weighted_mean([1, 2, 3], ranks=(1, 2))))
        assert buffer.item() == 2.0  # of the new rank 0


@pytest.mark.usefixtures("small_buckets")
def test_result_stays_intact_until_all_have_it() -> None:
    """One lacks the result of a reduction while the others are in the middle of the next one."""

    def member(session: Session, rank: int) -> list[Any]:
        module = net(*(torch.ones(16) for _ in range(4)), buffer=torch.tensor(float(rank)))
        reducer = attached(session, module)
        found = []
        for number in range(4):
            for p in module.parameters():
                p.grad = None
            factor = 100 * number + rank + 1
            value = sum(p.sum() * factor for p in module.parameters())
            reducer.before_backward()
            value.backward()
            if number == 2 and rank == 1:
                session.group.loses_next = True  # type: ignore[attr-defined]
            view = reducer.after_backward()
            assert view is not None
            found.append((view.generation, module.p0.grad.clone(), module.p3.grad.clone()))
        session.run(Barrier())
        return found

    for found in Cluster(3).run(member):
        for number, (_, *gradients) in enumerate(found):
            expected = weighted_mean([100 * number + rank + 1 for rank in range(3)])
            for gradient in gradients:
                torch.testing.assert_close(gradient, torch.full((16,), expected))
        # The third reduction completed in the first view, also for the one that received its result.
        assert [generation for generation, *_ in found] == [1, 1, 1, 2]


@pytest.mark.usefixtures("small_buckets")
def test_loss_after_the_reduction_the_dead_has_contributed() -> None:
    def member(session: Session, rank: int) -> list[Any]:
        module = net(torch.ones(16), torch.ones(16))
        reducer = attached(session, module)
        found = []
        for number in range(3):
            for p in module.parameters():
                p.grad = None
            view = step(reducer, lambda: sum(p.sum() * (rank + 1) for p in module.parameters()))
            assert view is not None
            if number == 1 and rank == 2:
                session.group.wait_for_others()  # type: ignore[attr-defined]
                raise Died
            found.append((view.ids, module.p0.grad.clone()))
        return found

    *survivors, dead = Cluster(3).run(member)
    assert dead is None
    for found in survivors:
        assert [len(ids) for ids, _ in found] == [3, 3, 2]
        torch.testing.assert_close(found[1][1], torch.full((16,), weighted_mean([1, 2, 3])))
        torch.testing.assert_close(found[2][1], torch.full((16,), weighted_mean([1, 2], ranks=(0, 1))))


@pytest.mark.usefixtures("small_buckets")
def test_result_of_batches_of_different_sizes_that_one_lacks_is_divided_once_by_all() -> None:
    """Those who have it have divided it already when they hand it on; the reduction after it is as always."""
    fractions = (1.0, 0.25, 1.5)

    def member(session: Session, rank: int) -> list[Any]:
        module = net(*(torch.ones(16) for _ in range(4)), buffer=torch.tensor(float(rank)))
        reducer = attached(session, module)
        found = []
        for number in range(4):
            for p in module.parameters():
                p.grad = None
            if number == 2 and rank == 1:
                session.group.loses_next = True  # type: ignore[attr-defined]
            reducer.fraction = fractions[rank] if number == 2 else 1.0
            step(reducer, lambda: sum(p.sum() * (rank + 1) for p in module.parameters()))
            found.append(torch.cat([p.grad for p in module.parameters()]))
        session.run(Barrier())
        assert module.buffer.item() == 0.0
        return found

    sizes = [WEIGHTS[f"m{rank}"] * fractions[rank] for rank in range(3)]
    expected = [weighted_mean([1, 2, 3])] * 4
    expected[2] = sum(size * (rank + 1) for rank, size in enumerate(sizes)) / sum(sizes)
    for found in Cluster(3).run(member):
        for gradient, value in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, torch.full((64,), value))


def test_last_survivor_without_samples_has_gradients_of_zero() -> None:
    """Whoever had the samples of the step is gone: what padding has given may be anything, NaN too."""

    def member(session: Session, rank: int) -> Any:
        module = net(torch.ones(16), torch.ones(40_000))  # copied with its bucket, and by its hook
        reducer = GradientReducer(session, module, weights=lambda view: [float(name == "m0") for name in view.ids])
        reducer.attach()
        reducer.measures = lambda: True
        if rank == 0:
            module.p0.register_hook(lambda gradient: die_behind_others(session))
        view = step(reducer, lambda: sum(p.sum() * float("nan") for p in module.parameters()))
        assert view is not None
        return view.ids, [p.grad.tolist() for p in module.parameters()]

    dead, (ids, gradients) = Cluster(2).run(member)
    assert dead is None
    assert ids == ("m1",)
    assert gradients == [[0.0] * 16, [0.0] * 40_000]


def die_behind_others(session: Session) -> None:
    session.group.wait_for_others()  # type: ignore[attr-defined]
    raise Died


def test_last_survivor_makes_up_for_batches_in_which_it_had_no_share() -> None:
    """Of two accumulated batches it had one, so its gradient is half of a mean."""

    def member(session: Session, rank: int) -> Any:
        module = net(torch.ones(16))
        reducer = GradientReducer(session, module, weights=lambda view: [0.6, 0.8] if view.world_size > 1 else [2.0])
        reducer.attach()
        if rank == 0:
            module.p0.register_hook(lambda gradient: die_behind_others(session))
        step(reducer, lambda: module.p0.sum() * 3)
        return module.p0.grad.tolist()

    assert Cluster(2).run(member) == [None, [6.0] * 16]


def test_gradients_of_the_last_survivor_stay_sparse() -> None:
    def member(session: Session, rank: int) -> Any:
        module = nn.ModuleDict({"rows": nn.Embedding(8, 2, sparse=True), "rest": nn.Linear(2, 1)})
        reducer = attached(session, module)
        if rank == 0:
            module["rest"].weight.register_hook(lambda gradient: die_behind_others(session))
        step(reducer, lambda: module["rest"](module["rows"](torch.tensor([1, 3]))).sum())
        gradient = module["rows"].weight.grad
        torch.optim.SparseAdam(module["rows"].parameters()).step()
        return gradient.is_sparse, gradient.coalesce().indices().tolist()

    assert Cluster(2).run(member) == [None, (True, [[1, 3]])]
