"""The checkpoints that a `fit` takes itself and starts from, in Keras's own format."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ef_common import __version__
from ef_common.collectives.codec import ARRAYS
from ef_common.data.checkpointer import Checkpointer, fingerprint
from ef_common.data.seeds import python_states, set_python_states
from ef_common.data.source import Source
from ef_common.errors import UsageError
from ef_common.session import Session
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.pool import Pool
from ef_common.storage.shares import SharedFile
from ef_keras import hooks, metrics
from ef_keras.backends import random_state, set_random_state
from ef_keras.model_file import MODEL, WEIGHTS, ModelParts, SavedModel, load_model
from ef_keras.weights import kind_of, num_bytes

logger = logging.getLogger(__name__)

STATE = "elasticflow.state"
"""What Keras's file lacks: the place in the epoch, what callbacks remember, random generators."""

_CHUNK_BYTES = 8 << 20


class FitCheckpoints:
    """Checkpoints of one `fit`, of which it is the :class:`~ef_common.data.source.Source`.

    Args:
        job: Makes the checkpointer of this source.
        session: The worker's session.
        model: The model, built.
        collect: The place in the epoch and what callbacks remember: a plain tree.
    """

    def __init__(
        self,
        job: Callable[[Source], Checkpointer],
        session: Session,
        model: Any,
        *,
        collect: Callable[[], dict[str, Any]],
    ) -> None:
        self.job = job(self)
        self._session = session
        self._model = model
        self._collect = collect
        self._model_parts = ModelParts(model)
        self._pool: Pool[np.ndarray] = Pool(_room, np.copyto, kind_of)
        self._found: dict[str, Any] | None = None
        self.memories: list[tuple[str, dict[str, Any]]] = []
        self.schedules: dict[str, Any] | None = None

    # ------------------------------------------------------------ start

    def find(self) -> dict[str, Any] | None:
        """At the start: load the newest checkpoint. Returns what was collected then; None if there is none."""
        return self._load(self.job.begin(self._fingerprint()) is not None)

    def find_again(self) -> dict[str, Any] | None:
        """Like `find`, in one worker, when all who had a state are lost."""
        return self._load(self.job.begin_again(self._fingerprint()) is not None)

    def load_result(self) -> bool:
        """In a newcomer that skips this training: load its result. Returns whether that was saved."""
        collected = self._load(self.job.look(self._fingerprint()) is not None)
        if collected is not None:
            self.memories = collected["callbacks"]
            self.schedules = collected["progress"].get("schedules")
        return collected is not None

    def _load(self, found: bool) -> dict[str, Any] | None:
        if not found:
            return None
        with self.job.open(STATE) as file:
            state: dict[str, Any] = ARRAYS.loads(file.read())
        with tempfile.TemporaryDirectory(prefix="elasticflow-") as directory:
            path = Path(directory) / (MODEL if state["file"] == MODEL else WEIGHTS)
            with self.job.open(state["file"]) as file, path.open("wb") as target:
                shutil.copyfileobj(file, target, _CHUNK_BYTES)
            self.job.let_go()
            try:
                load_model(self._model, path)
            except ValueError as error:
                raise UsageError(f"the checkpoint does not fit this model or its optimizer: {error}") from error
        self._found = state
        collected: dict[str, Any] = state["collected"]
        return collected

    def resume(self, in_epoch: bool) -> None:
        """The next step is the one before which the state was saved: it draws what it would have drawn.

        What metrics had gathered in an epoch that goes on is rank 0's; what the other workers had is lost with them. If
        the program has other metrics now, they begin with the rest of the epoch.

        Args:
            in_epoch: The state was saved in the middle of an epoch.
        """
        found, self._found = self._found, None
        if found is None:
            return
        _set_random_state(self._model, found["random"], rank=self._session.rank)
        if in_epoch and self._session.rank == 0:
            if metrics.fits(self._model, found["metrics"]):
                metrics.set_values(self._model, found["metrics"])
            else:
                logger.warning(
                    "the checkpoint was saved with other metrics than the model has now, so the results of this epoch "
                    "are those of its remaining steps"
                )

    def _fingerprint(self) -> str:
        variables = hooks.state_variables(self._model)
        return fingerprint((str(index), v.shape, str(v.dtype)) for index, v in enumerate(variables))

    # ------------------------------------------------------------ what is saved

    def num_bytes(self) -> int:
        """See the protocol."""
        return sum(map(num_bytes, hooks.shared_variables(self._model)))

    def state(self, *, whole: bool) -> SavedModel:
        """See the protocol."""
        with self._session.alone("get_config(), or save_own_variables()"):
            texts, weights = self._model_parts.now()
        return SavedModel(self._model, texts, weights, self._pool, self._content_of)

    def _content_of(self, name: str, files: Mapping[str, WriteFile | SharedFile]) -> Content:
        """The content of a checkpoint.

        Args:
            name: Name of the file with the weights.
            files: That file and the files that belong to it.
        """
        collected = self._collect()
        state = {
            "file": name,
            "collected": collected,
            "random": _random_state(self._model),
            "metrics": metrics.values_of(self._model),
        }
        header = ARRAYS.dumps(state, what="state of fit")
        progress = collected["progress"]
        return Content(
            files={**files, STATE: lambda file: file.write(header)},
            progress={name: progress[name] for name in ("epoch", "cursor", "seed")}
            | {"returned": np.asarray(progress["returned"]).tolist()},
            metrics=_newest_metrics(self._model),
            model=self._fingerprint(),
            versions={"elasticflow": __version__, "keras": str(keras.__version__)},
        )


def _room(array: np.ndarray) -> np.ndarray:
    return np.empty(array.shape, array.dtype)


def _newest_metrics(model: Any) -> dict[str, float]:
    """Results of the newest complete epoch."""
    return metrics.newest(getattr(getattr(model, "history", None), "history", {}))


def _random_state(model: Any) -> dict[str, Any]:
    return {
        "keras": [np.array(keras.ops.convert_to_numpy(state)) for state in hooks.seed_states(model)],
        "backend": random_state(),
        **python_states(),
    }


def _set_random_state(model: Any, saved: dict[str, Any], *, rank: int) -> None:
    """Restore Keras's generators, which are equal in all workers; rank 0 alone draws exactly what it would have."""
    for state, value in zip(hooks.seed_states(model), saved["keras"], strict=True):
        state.assign(value)
    if rank == 0:
        set_python_states(saved)
        set_random_state(saved["backend"])
