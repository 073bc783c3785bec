"""BatchNorm over the batches of all workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ef_common.errors import UnsupportedError
from ef_common.testing.harness import Job
from ef_lightning.batch_norm import SyncedBatchNorm
from tests.lightning import normalized
from tests.lightning.conftest import HOSTS

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one dimension": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "images": (lambda: nn.BatchNorm2d(4, eps=0.1), (6, 4, 3, 2)),
    "cumulative": (lambda: nn.BatchNorm1d(4, momentum=None, affine=False), (6, 4, 3)),
    "no statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (6, 4)),
}


class Activated(nn.BatchNorm1d):
    """Does more than to normalize."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).relu()


def test_layer_that_does_more_is_its_own_while_it_is_frozen_and_refused_in_training() -> None:
    model = nn.Sequential(Activated(3))
    model.eval()
    synced = SyncedBatchNorm(
        model, every=True, gather=lambda tensor: tensor.unsqueeze(0), in_step=lambda: True, counts=lambda: True
    )
    synced.attach()
    assert model(-torch.ones(2, 3)).eq(0.0).all()
    model.train()
    with pytest.raises(UnsupportedError, match=r"but 0 has one of its own.*Activated$"):
        model(torch.ones(2, 3))
    synced.detach()
    model(torch.ones(2, 3))


@pytest.mark.parametrize("name", LAYERS)
def test_worker_that_is_the_only_one_normalizes_as_torch_does(name: str) -> None:
    make, shape = LAYERS[name]
    ours, theirs = make().double(), make().double()
    synced = SyncedBatchNorm(
        ours, every=True, gather=lambda tensor: tensor.unsqueeze(0), in_step=lambda: True, counts=lambda: True
    )
    synced.attach()
    for _ in range(2):
        values, weights = torch.randn(shape).double(), torch.randn(shape).double()

        def gradient(layer: nn.Module, values: Tensor = values, weights: Tensor = weights) -> Tensor:
            given = values.clone().requires_grad_()
            (layer(given) * weights).sum().backward()  # type: ignore[no-untyped-call]
            assert given.grad is not None
            return given.grad

        torch.testing.assert_close(gradient(ours), gradient(theirs))
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])
    synced.detach()
    assert "forward" not in vars(ours)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("host", "options"), [(HOSTS[0], {"sync_batchnorm": True}), (HOSTS[1], {"converted": True})], ids=["flag", "layers"]
)
def test_two_workers_normalize_as_one_process_does(
    run: Callable[..., list[Any]], host: str, options: dict[str, Any]
) -> None:
    first, second = run(2, normalized.train, host, options)
    assert first == second
    assert first == pytest.approx(normalized.reference(), abs=1e-9)


@pytest.mark.processes
@pytest.mark.parametrize("place", [{"where": "after_forward"}, {"where": "reduction", "index": 1}])
def test_worker_is_lost_after_it_was_normalized_with_and_the_others_make_the_step_again(
    job: Job, place: dict[str, Any]
) -> None:
    fault = {"step": 1, "generation": 1, "rank": 1, **place}
    workers = job.start_world(3, normalized.train, HOSTS[0], {"sync_batchnorm": True}, fault)
    results = [worker.result() for worker in workers if worker.wait() == 0]
    assert len(results) == 2
    assert results[0] == results[1]
    assert len(job.events("repeated", step=2)) == 2
    job.audit()
