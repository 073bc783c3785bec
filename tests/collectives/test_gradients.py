"""Gradients and buffers are equal over the members, for every kind of model; and a result stays until all have it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ef_common.collectives.gradients import buckets
from ef_common.collectives.gradients.bucket_run import Confirmation
from ef_common.collectives.gradients.buckets import BucketLayout
from ef_common.collectives.gradients.left import left_gradients, take_gradients
from ef_common.collectives.gradients.module_buffers import ModuleBuffers
from ef_common.collectives.gradients.reducer import GradientReducer
from ef_common.collectives.gradients.reduction import Reduction
from ef_common.core.view import View
from ef_common.errors import UnsupportedError
from ef_common.session import LoneGroup
from ef_common.session.ports import Group, Operation
from tests.collectives.world import OneView, in_world, view_of

pytestmark = pytest.mark.usefixtures("buffers")

WEIGHTS = (0.25, 0.75)


def weights(view: View) -> tuple[float, ...]:
    return WEIGHTS


_seeding = threading.Lock()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with _seeding:  # the generator is the process's, and the ranks are threads
        torch.manual_seed(0)
        return make()


def reduced(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    *,
    prepare: Callable[[nn.Module, int], None] = lambda module, rank: None,
    steps: int = 1,
) -> list[dict[str, Any]]:
    """Gradients and buffers of each rank after `steps` reductions without zeroing between them."""

    def act(rank: int, group: Group) -> dict[str, Any]:
        module = seeded(make)
        session: Any = OneView(rank, group, 2)
        reducer = GradientReducer(session, module, weights=weights)
        reducer.attach()
        prepare(module, rank)
        for _ in range(steps):
            value = loss(module, rank)
            reducer.before_backward()
            value.backward()
            reducer.after_backward()
        group.all_gather(b"")
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        return {**gradients, **{n: b.clone() for n, b in module.named_buffers()}}

    return in_world(2, act)


def alone(make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor], rank: int) -> nn.Module:
    module = seeded(make)
    loss(module, rank).backward()
    return module


def batch(rank: int, size: int = 4) -> Tensor:
    return torch.rand(3, size, generator=torch.Generator().manual_seed(100 + rank))


def assert_weighted_mean(results: list[dict[str, Any]], make: Any, loss: Any) -> None:
    modules = [alone(make, loss, rank) for rank in range(2)]
    for name, _ in modules[0].named_parameters():
        gradients = [dict(module.named_parameters())[name].grad for module in modules]
        if all(gradient is None for gradient in gradients):
            assert results[0][name] is None
            continue
        expected = sum(
            weight * gradient for weight, gradient in zip(WEIGHTS, gradients, strict=True) if gradient is not None
        )
        torch.testing.assert_close(results[0][name], expected)
        assert torch.equal(results[0][name], results[1][name])


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def large() -> nn.Module:
    """More than one bucket."""
    return nn.Sequential(nn.Linear(4, 3000), nn.Tanh(), nn.Linear(3000, 2400), nn.Tanh(), nn.Linear(2400, 2))


def only_large() -> nn.Module:
    """One bucket, with gradients that their hooks copy."""
    return nn.Linear(4, 20_000)


def shared() -> nn.Module:
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Tanh(), first)


def two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Cast(torch.float64), nn.Linear(4, 4).double())


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)


def mean_loss(module: nn.Module, rank: int) -> Tensor:
    return module(batch(rank)).square().mean()


@pytest.mark.parametrize("make", [small, large, shared, two_types])
def test_reduction_gives_the_weighted_mean(make: Callable[[], nn.Module]) -> None:
    assert_weighted_mean(reduced(make, mean_loss), make, mean_loss)


def test_parameter_used_on_one_rank_only_counts_as_zero_on_the_other() -> None:
    def loss(module: nn.Module, rank: int) -> Tensor:
        first, _, last = module
        return (last(first(batch(rank))) if rank == 0 else first(batch(rank))).square().mean()

    results = reduced(small, loss)
    assert_weighted_mean(results, small, loss)
    assert results[1]["2.weight"] is not None


@pytest.mark.parametrize("num_rows", [8, 300_000])  # with two buffers, and lent
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["both", "one"])
def test_sparse_gradients_are_summed_and_stay_sparse(ranks: tuple[int, ...], num_rows: int) -> None:
    def make() -> nn.Module:
        return nn.ModuleDict({"rows": nn.Embedding(num_rows, 2, sparse=True), "rest": nn.Linear(2, 1)})

    def loss(module: nn.Module, rank: int) -> Tensor:
        found = module["rows"](torch.tensor([rank, 3, 3])) if rank in ranks else torch.ones(3, 2)  # type: ignore[index]
        return module["rest"](found).square().mean()  # type: ignore[index, no-any-return]

    for steps in (1, 2):
        results = reduced(make, loss, steps=steps)
        modules = [alone(make, loss, rank) for rank in range(2)]
        gradients = {rank: modules[rank]["rows"].weight.grad.to_dense() for rank in ranks}  # type: ignore[index]
        first = sum(WEIGHTS[rank] * gradient for rank, gradient in gradients.items())
        # The second one is added to what the first one has left, as without others.
        expected = first if steps == 1 else first + first
        for result in results:
            found = result["rows.weight"]
            assert found.is_sparse
            assert found.coalesce().indices().tolist() == [sorted({*ranks, 3})]
            torch.testing.assert_close(found.to_dense(), expected)


def test_sparse_gradient_where_none_is_expected_is_refused() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:  # type: ignore[override]
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return torch.ones(8, 4).to_sparse(1)

    def loss(module: nn.Module, rank: int) -> Tensor:
        return Own.apply(module[0].weight)  # type: ignore[index, no-any-return, no-untyped-call]

    with pytest.raises(UnsupportedError, match=r"the sparse gradient of another parameter, of shape=\(8, 4\)"):
        reduced(small, loss)


def test_parameter_used_nowhere_keeps_no_gradient() -> None:
    def loss(module: nn.Module, rank: int) -> Tensor:
        return module[0](batch(rank)).square().mean()

    results = reduced(small, loss)
    assert results[0]["2.weight"] is results[1]["2.weight"] is None


def test_reduction_without_zeroing_adds_up_as_it_does_alone() -> None:
    once, twice = (reduced(small, mean_loss, steps=steps) for steps in (1, 2))
    for name in ("0.weight", "2.bias"):
        torch.testing.assert_close(twice[0][name], 2 * once[0][name])


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("make", [small, large, only_large])
def test_gradients_with_a_graph_are_reduced(make: Callable[[], nn.Module]) -> None:
    """As for second-order optimizers, which differentiate the gradients once more."""

    def act(rank: int, group: Group) -> dict[str, Any]:
        module = seeded(make)
        session: Any = OneView(rank, group, 2)
        reducer = GradientReducer(session, module, weights=weights)
        reducer.attach()
        for _ in range(2):
            module.zero_grad()
            value = mean_loss(module, rank)
            reducer.before_backward()
            value.backward(create_graph=True)
            reducer.after_backward()
        found = {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}
        group.all_gather(b"")
        module.zero_grad()  # a parameter and the graph of its gradient keep each other
        return found

    assert_weighted_mean(in_world(2, act), make, mean_loss)


def test_gradients_accumulated_before_are_part_of_the_reduction() -> None:
    once = reduced(small, mean_loss)
    twice = reduced(small, mean_loss, prepare=lambda module, rank: mean_loss(module, rank).backward())
    torch.testing.assert_close(twice[0]["0.weight"], 2 * once[0]["0.weight"])


def test_parameter_that_requires_a_gradient_later_is_taken_in() -> None:
    def make() -> nn.Module:
        module = small()
        module[0].requires_grad_(False)
        return module

    def prepare(module: nn.Module, rank: int) -> None:
        module.requires_grad_(True)

    assert_weighted_mean(reduced(make, mean_loss, prepare=prepare), small, mean_loss)


def test_reentrant_checkpointing_that_accumulates_twice_is_reduced_whole() -> None:
    def loss(module: nn.Module, rank: int) -> Tensor:
        x = batch(rank).requires_grad_()
        for _ in range(2):  # each backward of a checkpoint accumulates into the same parameters
            x = checkpoint(module[0], x, use_reentrant=True, preserve_rng_state=False)
        return x.square().mean()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4))

    assert_weighted_mean(reduced(make, loss), make, loss)


def test_buffers_of_every_type_become_those_of_rank_0() -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module.register_buffer("flag", torch.tensor([True, False]))
        module.register_buffer("scale", torch.zeros(3, dtype=torch.float16))
        return module

    def prepare(module: nn.Module, rank: int) -> None:
        module.scale += rank + 1
        module[1].num_batches_tracked += 2**40 + rank
        if rank == 1:
            module.flag.logical_not_()

    results = reduced(make, mean_loss, prepare=prepare)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "flag", "scale"):
        assert torch.equal(results[0][name], results[1][name]), name
    assert int(results[1]["1.num_batches_tracked"]) == 2**40 + 1
    assert results[1]["flag"].tolist() == [True, False]
    assert results[1]["scale"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("width", [4, 600])  # one bucket of gradients, or several
def test_buffers_that_the_backward_pass_changes_become_those_of_rank_0(width: int) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, width))
        module.register_buffer("count", torch.zeros((), dtype=torch.int64))
        module.register_buffer("norm", torch.zeros(2))
        return module

    def loss(module: nn.Module, rank: int) -> Tensor:
        def note(gradient: Tensor) -> None:
            module.count += rank + 1
            module.norm.add_(0.5 * (rank + 1))

        value = mean_loss(module, rank)
        value.register_hook(note)
        return value

    for found in reduced(make, loss, steps=3):
        assert int(found["count"]) == 3
        assert found["norm"].tolist() == [1.5, 1.5]


class Replacing(nn.Module):
    """Puts other tensors in the place of its buffers, as a running mean often does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Linear(4, 4)
        self.register_buffer("center", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("wide", torch.ones(1).expand(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "attached":
            self.center = 0.5 * self.center.detach() + self.net(x).mean(0)
        elif self.kind == "expanded":
            self.center = x.detach().mean().expand(4)
        else:
            with torch.inference_mode(self.kind == "inference"):
                self.center = 0.5 * self.center + x.mean(0)
        self.count = self.count + len(x)
        self.table = torch.arange(float(len(self.table) + len(x)))
        found: Tensor = self.net(x)
        return found


@pytest.mark.parametrize("kind", ["plain", "attached", "expanded", "inference"])
def test_tensors_in_the_place_of_buffers_become_those_of_rank_0(kind: str) -> None:
    def loss(module: nn.Module, rank: int) -> Tensor:
        found: Tensor = module(batch(rank)[: 3 - rank]).square().mean()
        return found

    def make() -> nn.Module:
        return Replacing(kind)

    results = reduced(make, loss, steps=3)
    assert torch.equal(results[0]["center"], results[1]["center"])
    assert [int(result["count"]) for result in results] == [9, 9]
    assert [len(result["table"]) for result in results] == [12, 9]  # of which each has one of its own


def test_buffers_that_members_have_enlarged_differently_are_left_out_when_the_buckets_are_made_anew() -> None:
    def act(rank: int, group: Group) -> tuple[list[Any], list[str]]:
        module = seeded(lambda: Replacing("plain"))
        module.net.bias.requires_grad_(False)
        reducer: Any = GradientReducer(OneView(rank, group, 2), module, weights=weights)  # type: ignore[arg-type]
        reducer.attach()
        for step in range(2):
            module.net.bias.requires_grad_(step > 0)
            value = module(batch(rank)[: 3 - rank]).square().mean()
            reducer.before_backward()
            value.backward()
            reducer.after_backward()
        again = GradientReducer(OneView(rank, group, 2), module, weights=weights)  # type: ignore[arg-type]
        again.attach()
        group.all_gather(b"")
        assert reducer.kinds() == again.kinds()
        found = [module.center.tolist(), int(module.count), module.net.bias.grad.tolist()]
        return [*found, len(module.table)], [name for name, *_ in again.kinds() or ()]

    (first, names), (second, _) = in_world(2, act)
    assert first[:-1] == second[:-1]
    assert (first[-1], second[-1]) == (9, 7)
    assert names == ["center", "count", "wide"]


def test_newcomer_has_the_buffers_of_the_others() -> None:
    module, longer = Replacing("plain"), Replacing("plain")
    longer(batch(0))
    longer.register_buffer("late", torch.ones(2))
    others, own = ModuleBuffers(longer), ModuleBuffers(module)
    own.take_kinds(others.kinds())
    assert own.kinds() == others.kinds()
    assert own.tensors[0] is module.center
    module.register_buffer("late", torch.full((2,), 5.0))
    own.follow()
    assert [tensor.tolist() for tensor in own.tensors[2:]] == [[0.0] * 6, [1.0] * 4, [5.0] * 2]
    assert len(module.table) == 3


def test_buffers_that_nobody_can_write_into_are_replaced_by_copies() -> None:
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("evaluated", torch.ones(2))
    module.register_buffer("wide", torch.ones(1).expand(2))
    for buffer in ModuleBuffers(module).tensors:
        buffer[0] = 0.0
    assert [buffer.tolist() for buffer in module.buffers()] == [[0.0, 1.0], [0.0, 1.0]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_modules_of_jit_are_reduced() -> None:
    def make() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), nn.Linear(4, 2))

    results = reduced(make, mean_loss, steps=2)
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("spares_equal", [True, False])
def test_equal_buffers_are_spared_for_another_backward_pass_of_the_same_graph(spares_equal: bool) -> None:
    def act(rank: int, group: Group) -> list[Tensor]:
        module = seeded(small)
        module.register_buffer("scale", torch.tensor([-0.0, 1.0]))
        module.register_buffer("mask", torch.tensor([True, False]))
        module.register_buffer("own", torch.tensor([0.0, -0.0]) if rank else torch.tensor([-0.0, 0.0]))
        session: Any = OneView(rank, group, 2)
        reducer = GradientReducer(session, module, weights=weights)
        reducer.spares_equal = spares_equal
        reducer.attach()
        found = (module(batch(rank)) * module.scale).masked_fill(module.mask, 1.0)
        for value in (found.sum(), found.square().sum()):
            reducer.before_backward()
            value.backward(retain_graph=True)
            reducer.after_backward()
        group.all_gather(b"")
        return [module.own, module.scale]

    if not spares_equal:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            in_world(2, act)
        return
    for own, scale in in_world(2, act):
        assert own.signbit().tolist() == [True, False]
        assert scale.signbit().tolist() == [True, False]


def test_gradient_of_weight_zero_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.WEIGHTS", (1.0, 0.0))

    def loss(module: nn.Module, rank: int) -> Tensor:
        return mean_loss(module, rank) * (1.0 if rank == 0 else float("nan"))

    results = reduced(small, loss)
    expected = alone(small, mean_loss, 0)
    torch.testing.assert_close(results[1]["0.weight"], expected[0].weight.grad)


@pytest.mark.parametrize(
    ("flag", "heard", "later", "sums"),
    [("change_pending", "agreed", True, [0.0, 1.0, 2.0]), ("wish", "wishes", False, [0.0, 1.0, 0.0])],
)
def test_flags_tell_all_how_many_have_raised_them(flag: str, heard: str, later: bool, sums: list[float]) -> None:
    def act(rank: int, group: Group) -> list[float]:
        module, session = small(), OneView(rank, group, 2)
        reducer = GradientReducer(session, module, weights=weights)  # type: ignore[arg-type]
        reducer.attach()
        for raised in (False, rank == 1, later):
            setattr(session if hasattr(session, flag) else session.agreements, flag, raised)
            reducer.before_backward()
            mean_loss(module, rank).backward()
            reducer.after_backward()
        group.all_gather(b"")
        found: list[float] = getattr(session, heard)
        return found

    assert in_world(2, act) == [sums] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_take_the_numbers_that_rank_zero_decides_with_all_their_bits(dtype: torch.dtype) -> None:
    """Also where new tensors have few bits, and all parameters."""
    decides = [[0.1, -1e300, float("inf")], [0.2, 3.0, float("nan")]]

    def act(rank: int, group: Group) -> Any:
        module, session, found = large().to(dtype), OneView(rank, group, 2), []
        reducer = GradientReducer(session, module, weights=weights)  # type: ignore[arg-type]
        reducer.decides = lambda: decides[rank]
        reducer.attach()
        for _ in range(2):
            reducer.before_backward()
            mean_loss(module, rank).backward()
            reducer.after_backward()
            found.append(reducer.decided)
        group.all_gather(b"")
        return found

    torch.set_default_dtype(dtype)
    try:
        assert in_world(2, act) == [[decides[0]] * 2] * 2
    finally:
        torch.set_default_dtype(torch.float32)


def test_squared_norms_are_told_where_they_are_measured() -> None:
    def act(rank: int, group: Group) -> Any:
        module, session, found = small(), OneView(rank, group, 2), []
        reducer = GradientReducer(session, module, weights=weights)  # type: ignore[arg-type]
        reducer.asks = lambda: 24.0 if rank == 0 else 0.0
        reducer.on_measured = lambda *all: found.append(all)
        reducer.attach()
        own = 0.0
        for measured in (False, True):
            reducer.measures = lambda measured=measured: measured
            module.zero_grad()
            reducer.before_backward()
            mean_loss(module, rank).backward()
            own = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
            reducer.after_backward()
        reduced = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
        group.all_gather(b"")
        return own, reduced, found

    results = in_world(2, act)
    local = (results[0][0] + results[1][0]) / 2
    for _, reduced, found in results:
        assert found == [(pytest.approx(local), pytest.approx(reduced), 24.0)]


def test_squared_norm_of_padding_is_not_measured() -> None:
    def act(rank: int, group: Group) -> Any:
        module, session, found = small(), OneView(rank, group, 2), []
        reducer = GradientReducer(session, module, weights=lambda view: [1.0, 0.0])  # type: ignore[arg-type]
        reducer.measures, reducer.on_measured = lambda: True, lambda *all: found.append(all)
        reducer.attach()
        reducer.before_backward()
        (mean_loss(module, rank) * (1.0 if rank == 0 else float("nan"))).backward()
        own = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
        reducer.after_backward()
        group.all_gather(b"")
        return own, found

    (own, found), (_, others) = in_world(2, act)
    assert found == others == [(pytest.approx(own / 2), pytest.approx(own), 0.0)]


def test_module_without_parameters_reduces_nothing() -> None:
    session: Any = OneView(0, None, 2)  # type: ignore[arg-type]
    reducer = GradientReducer(session, nn.Tanh(), weights=weights)
    reducer.attach()
    reducer.before_backward()
    assert reducer.after_backward() is None


# ---------------------------------------------------------------- a result stays until everybody has it


class Recorder:
    """A group whose collectives complete at once, without any other member."""

    def __init__(self) -> None:
        self.reduced: list[Tensor] = []

    def meet(self, call: str, tensors: Any = None) -> Any:
        return self

    def all_reduce(self, tensor: Tensor, call: str = "", meeting: Any = None) -> Any:
        self.reduced.append(tensor)
        return self

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        return [payload, payload]

    def wait(self) -> None:
        pass


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize("make", [small, with_batch_norm])
def test_result_of_a_small_module_is_intact_throughout_the_next_reduction(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    module, session = make(), OneView(0, Recorder(), 2)  # type: ignore[arg-type]
    reducer = GradientReducer(session, module, weights=weights)  # type: ignore[arg-type]
    reducer.attach()
    kept: list[tuple[Tensor, Tensor]] = []
    for _ in range(5):
        module.zero_grad()
        loss = module(batch(0)).sum()
        reducer.before_backward()
        loss.backward()
        reducer.after_backward()
        assert all(torch.equal(tensor, copied) for tensor, copied in kept)
        kept = [(tensor, tensor.clone()) for tensor in session.newest.result(None)]
        for parameter in module.parameters():
            parameter.grad.zero_()  # clipping, say


def test_gradients_of_a_large_module_are_lent_when_all_have_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "DOUBLE_BUFFER_BYTES", 0)

    def act(rank: int, group: Group) -> list[tuple[type, bool]]:
        module, session = small(), OneView(rank, group, 2)
        storages: set[int] = set()
        reducer = GradientReducer(session, module, weights=weights)  # type: ignore[arg-type]
        reducer.attach()
        seen = []

        def note(operation: Operation) -> None:
            storages.update(tensor.untyped_storage().data_ptr() for tensor in operation.result(None))
            seen.append((type(operation), _lies_in(storages, module)))

        session.after = note
        for _ in range(2):  # without zeroing
            reducer.before_backward()
            mean_loss(module, rank).backward()
            reducer.after_backward()
            assert _lies_in(storages, module)
        return seen

    assert in_world(2, act) == [[(Reduction, False), (Confirmation, False)] * 2] * 2


def _lies_in(storages: set[int], module: nn.Module) -> bool:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return any(gradient.untyped_storage().data_ptr() in storages for gradient in gradients)


@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_that_are_accumulated_by_hand_are_whole_after_a_newcomer_has_come(sparse: bool) -> None:
    left: list[dict[str, Tensor]] = []

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(3, 4, sparse=sparse), nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False))

    def loss(module: nn.Module, row: int) -> Tensor:
        found: Tensor = module(torch.tensor([row])).square().mean()
        return found

    def step(reducer: GradientReducer, module: nn.Module, row: int) -> None:
        value = loss(module, row)
        reducer.before_backward()
        value.backward()
        reducer.after_backward()

    def act(rank: int, group: Group) -> dict[str, Tensor]:
        module = seeded(make)
        session: Any = OneView(rank, group, 2)
        reducer = GradientReducer(session, module, weights=weights)
        reducer.attach()
        if rank == 0:
            for row in (0, 1):
                loss(module, row).backward()
            left.append(left_gradients(module, reducer.names()))
        else:
            loss(module, 2).backward()  # to warm up
        group.all_gather(b"")
        if rank == 1:
            take_gradients(module, left[0])
        group.all_gather(b"")
        for row in (1, 2):
            step(reducer, module, row)
        group.all_gather(b"")
        gradients = left_gradients(module, reducer.names())
        assert module[0].weight.grad is not None
        assert module[0].weight.grad.is_sparse == sparse
        return {name: gradient.clone() for name, gradient in gradients.items()}

    expected = seeded(make)
    for row in (0, 1, 1, 2):
        loss(expected, row).backward()
    for found in in_world(2, act):
        for name, parameter in expected.named_parameters():
            if parameter.grad is None:
                assert name not in found
            else:
                torch.testing.assert_close(found[name], parameter.grad.to_dense())


def test_reduction_that_is_run_again_starts_from_the_local_gradients() -> None:
    module, lost = small(), Recorder()
    session: Any = OneView(0, lost, 2)  # type: ignore[arg-type]
    layout = BucketLayout(list(module.parameters()), [])
    mean_loss(module, 0).backward()
    local = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    reduction = Reduction(layout, session, weights)
    reduction.run(lost, session.view)
    for tensor in lost.reduced:
        tensor.fill_(7)  # what a collective that broke leaves behind
    again = Recorder()
    reduction.run(again, view_of(1, generation=2))  # type: ignore[arg-type]
    expected = [WEIGHTS[0] * gradient.flatten() for gradient in reversed(local)]
    torch.testing.assert_close(again.reduced[-1][: sum(map(Tensor.numel, expected))], torch.cat(expected))


def test_parameter_that_is_frozen_again_keeps_its_place() -> None:
    module = nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 1))  # the first is large enough for a hook
    session: Any = OneView(0, LoneGroup(), 1)
    first = GradientReducer(session, module, weights=lambda view: [1.0])
    first.attach()
    module[0].requires_grad_(False)
    names, second = first.names(), GradientReducer(session, module, weights=lambda view: [1.0])
    second.attach(names)  # as a newcomer does
    assert second.names() == names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert not module[0].weight.requires_grad
