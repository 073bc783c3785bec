"""ElasticFlow for Keras 3: `model.fit(x, y, callbacks=ef_keras.callbacks())`, or `ef_keras.fit(model, x, y)`."""

from ef_common import __version__ as __version__
from ef_common.imports import without_collections

try:
    with without_collections():
        from ef_common.core.autoscale import Autoscale
        from ef_common.core.compensation import Compensation
        from ef_common.core.retention import Retention
        from ef_common.data.checkpointer import Checkpointing
        from ef_common.data.workers import WorkersChange
        from ef_keras.callbacks import callbacks
        from ef_keras.dataset import dataset
        from ef_keras.program import model
        from ef_keras.public import fit, is_rank_zero, rank, world_size
except ModuleNotFoundError as error:
    missing = (error.name or "").partition(".")[0]
    if missing not in ("tensorflow", "torch", "jax"):
        raise
    raise ModuleNotFoundError(
        f"Keras's backend is {missing}, which is not installed. Install it (pip install {missing}), or choose "
        "another backend in the environment, before Keras is imported: KERAS_BACKEND=torch, tensorflow or jax",
        name=missing,
    ) from error

__all__ = [
    "callbacks",
    "fit",
    "model",
    "dataset",
    "rank",
    "world_size",
    "is_rank_zero",
    "Compensation",
    "Autoscale",
    "Checkpointing",
    "Retention",
    "WorkersChange",
]
