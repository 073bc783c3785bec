"""The strategies that are compared."""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from ef_lightning import ElasticFlowStrategy
from tests.benchmarks.models import BATCH_SIZE
from tests.benchmarks.pair import WORLD_SIZE

GLOBAL_BATCH_SIZE = 4 * BATCH_SIZE


def arguments(name: str) -> dict[str, Any]:
    """The Trainer's arguments for "ours", also with "horovod", or a peer: "ddp" or "single".

    "global" and "deterministic" are ours with a fixed global batch.
    """
    if name == "ours":
        return {"strategy": ElasticFlowStrategy()}
    if name == "horovod":
        return {"strategy": ElasticFlowStrategy(backend="horovod")}
    if name in ("global", "deterministic"):
        kwargs = {"global_batch_size": GLOBAL_BATCH_SIZE, "deterministic": name == "deterministic"}
        return {"strategy": ElasticFlowStrategy(**kwargs)}
    if name == "single":
        return {"strategy": SingleDeviceStrategy("cpu")}
    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    return {"strategy": strategy, "num_nodes": WORLD_SIZE}
