"""ElasticFlow for Keras 3: `model.fit(x, y, callbacks=ef_keras.callbacks())`, or `ef_keras.fit(model, x, y)`."""

from ef_common.core.compensation import Compensation
from ef_common.core.retention import Retention
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.workers import WorkersChange
from ef_keras.callbacks import callbacks
from ef_keras.dataset import dataset
from ef_keras.program import model
from ef_keras.public import fit, is_rank_zero, rank, world_size

__all__ = [
    "callbacks",
    "fit",
    "model",
    "dataset",
    "rank",
    "world_size",
    "is_rank_zero",
    "Compensation",
    "Checkpointing",
    "Retention",
    "WorkersChange",
]
