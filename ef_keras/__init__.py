"""ElasticFlow for Keras 3: `model.fit(x, y, callbacks=ef_keras.callbacks())`."""

from ef_common.core.compensation import Compensation
from ef_common.core.retention import Retention
from ef_common.data.checkpointer import Checkpointing
from ef_keras.callbacks import callbacks
from ef_keras.dataset import dataset
from ef_keras.program import model

__all__ = ["callbacks", "model", "Compensation", "Checkpointing", "Retention", "dataset"]
