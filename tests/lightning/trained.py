"""Trainings by `elasticflow.train`, and the same with a Trainer; each process imports torch only, as a user does."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elasticflow
from ef_common.errors import UsageError
from ef_common.launch.process import this_worker

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


def model() -> dict[str, Any]:
    calls.append(0)
    torch.manual_seed(3)
    return {"net": nn.Linear(4, 1), "optimizer": partial(torch.optim.SGD, lr=0.05)}


calls: list[int] = []


def forward(x: Tensor, y: Tensor, params: Any) -> Any:
    error = params["net"](x) - y
    return {"loss": error.square().mean(), "error": error.abs().mean()}


def data(length: int = 30) -> tuple[Tensor, Tensor]:
    x = torch.randn(length, 4, generator=torch.Generator().manual_seed(7))
    return x, x.sum(1, keepdim=True)


def train_together() -> dict[str, Any]:
    """As a worker of a job: each has another start, and rank 0 kills itself in a step."""

    def fatal_forward(x: Tensor, y: Tensor, params: Any) -> Any:
        session = this_worker().session
        if (session.rank, session.world_size, len(calls)) == (0, 3, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        calls.append(0)
        return forward(x, y, params)

    torch.manual_seed(os.getpid())
    made = {"net": nn.Linear(4, 1), "optimizer": partial(torch.optim.SGD, lr=0.05)}
    x, y = data(240)
    result = elasticflow.train(made, fatal_forward, (x, y), validation=(x, y), epochs=2, batch_size=4, **QUIET)
    with torch.no_grad():
        error = (result.model.params.net(x) - y).abs().mean()
    weights = nn.utils.parameters_to_vector(result.model.params.net.parameters())
    return {"weights": weights.tolist(), "error": float(error), "metrics": result.metrics}


def train_in_all_ways(folder: str) -> dict[str, Any]:
    """What comes of arrays, of a dict, and of a loader by hand; of a second start; and of mistakes."""
    import warnings

    from torch.utils.data import DataLoader, TensorDataset

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", ".*LeafSpec")
    warnings.filterwarnings("ignore", ".*does not have many workers")
    warnings.filterwarnings("ignore", "The `srun` command is available")
    settings = {"epochs": 3, "batch_size": 8, **QUIET}
    x, y = data()
    results = {}
    loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
    for name, given in {"tuple": (x, y), "dict": {"y": y.numpy(), "x": x}, "loader": loader}.items():
        torch.manual_seed(5)
        made = model()
        torch.manual_seed(5)
        results[name] = elasticflow.train(made, forward, given, validation=(x, y), **settings)
    calls.clear()
    elasticflow.train(model, forward, (x, y), **settings)
    found: dict[str, Any] = {
        "weights": {name: result.model.params.net.weight.tolist() for name, result in results.items()},
        "metrics": results["tuple"].metrics,
        "class": type(results["tuple"].model).__mro__[2].__module__,
        "calls": len(calls),
        "files": sorted(path.name for path in Path().glob("*logs*")),
    }
    url = f"{folder}/checkpoints"
    for epochs in (2, 4):
        torch.manual_seed(5)
        again = elasticflow.train(model, forward, (x, y), **{**settings, "epochs": epochs}, checkpoint=url)
        found[f"epochs {epochs}"] = again.model.trainer.global_step
    found["global batch"] = elasticflow.train(
        model, forward, (x, y), **{**settings, "batch_size": 5}, global_batch_size=10, deterministic=True
    ).model.trainer.global_step
    for name, wrong in {"strategy": {"strategy": "ddp"}, "max_epochs": {"max_epochs": 2}}.items():
        try:
            elasticflow.train(model, forward, (x, y), **wrong)
        except UsageError as error:
            found[name] = str(error)
    return found
