"""Checkpoints that a `fit` takes by itself, and starts from: Keras's own format, ElasticFlow's places."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ef_common import __version__
from ef_common.collectives.codec import ARRAYS
from ef_common.data.checkpointer import Checkpointer, Checkpointing, fingerprint
from ef_common.data.sharing import Plan
from ef_common.errors import UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.layout import Layout
from ef_common.storage.shares import SharedFile
from ef_common.storage.store import Writer
from ef_keras import hooks, metrics
from ef_keras.backends import memory_of, random_state, set_random_state
from ef_keras.model_file import MODEL, WEIGHTS, ModelParts, Texts, write_model
from ef_keras.weights import HostArrays, Weights, WeightsShare, num_bytes

STATE = "elasticflow.state"
"""What Keras's file lacks: the place in the epoch, what callbacks remember, random generators."""

_CHUNK_BYTES = 8 << 20


class FitCheckpoints:
    """Checkpoints of one `fit`.

    Args:
        settings: Where, and when.
        session: The worker's session.
        model: The model, built.
        log: Event log of the worker.
        collect: The place in the epoch and what callbacks remember: a plain tree.
        excluded: See :class:`~ef_common.storage.checkpoints.Checkpoints`.
    """

    def __init__(
        self,
        settings: Checkpointing,
        session: Session,
        model: Any,
        *,
        log: EventLog,
        collect: Callable[[], dict[str, Any]],
        excluded: Callable[[int], bool],
    ) -> None:
        self.job = Checkpointer(settings, session, log=log, excluded=excluded)
        self._session = session
        self._model = model
        self._collect = collect
        self._model_parts = ModelParts(model)
        self._arrays = HostArrays()
        self._found: dict[str, Any] | None = None
        self.memories: list[tuple[str, dict[str, Any]]] = []
        self.schedules: dict[str, Any] | None = None

    # ------------------------------------------------------------ start

    def find(self) -> dict[str, Any] | None:
        """At the start of all: load the newest one. Returns what was collected then; None if there is none."""
        return self._load(self.job.begin(self._fingerprint()) is not None)

    def find_again(self) -> dict[str, Any] | None:
        """The same, in one worker, when all who had a state are lost."""
        return self._load(self.job.begin_again(self._fingerprint()) is not None)

    def load_result(self) -> bool:
        """In a newcomer that skips this training: take in what has come of it. Returns whether that was saved."""
        collected = self._load(self.job.look(self._fingerprint()) is not None)
        if collected is not None:
            self.memories = collected["callbacks"]
            self.schedules = collected["progress"].get("schedules")
        return collected is not None

    def is_complete(self, epochs: int) -> bool:
        """What was found is a training that has ended, whatever has ended it, and is not to last any longer now."""
        return self.job.is_complete({"epochs": epochs})

    def _load(self, found: bool) -> dict[str, Any] | None:
        if not found:
            return None
        with self.job.open(STATE) as file:
            state: dict[str, Any] = ARRAYS.loads(file.read())
        with tempfile.TemporaryDirectory(prefix="elasticflow-") as directory:
            path = Path(directory) / (MODEL if state["file"] == MODEL else WEIGHTS)
            with self.job.open(state["file"]) as file, path.open("wb") as target:
                shutil.copyfileobj(file, target, _CHUNK_BYTES)
            try:
                self._model.load_weights(path)
            except ValueError as error:
                raise UsageError(f"the checkpoint does not fit this model or its optimizer: {error}") from error
        self._found = state
        collected: dict[str, Any] = state["collected"]
        return collected

    def resume(self) -> None:
        """The next step is the one before which all was saved: it draws what it would have drawn.

        What metrics had gathered in the epoch is rank 0's; what the other workers had is lost with them.
        """
        found, self._found = self._found, None
        if found is not None:
            _set_random_state(self._model, found["random"], rank=self._session.rank)
            if self._session.rank == 0:
                metrics.set_values(self._model, found["metrics"])

    def _fingerprint(self) -> str:
        variables = hooks.state_variables(self._model)
        return fingerprint((str(index), v.shape, str(v.dtype)) for index, v in enumerate(variables))

    # ------------------------------------------------------------ while it runs

    def boundary(self, step: int) -> None:
        """Between two steps of an epoch."""
        if self._session.newcomer:
            return
        match self.job.turn(step, self._num_bytes):
            case "alone":
                self.job.take(step, self._content)
            case "together":
                self._share(step)

    def finish(self, step: int, *, epochs: int) -> None:
        """The training is complete. All members call this.

        Args:
            step: Updates that were made.
            epochs: How many there could have been.

        Raises:
            StorageError: It could not be saved.
        """
        self.job.finish(step, self._content, complete={"epochs": epochs})

    def leave(self, step: int) -> None:
        """All members are told to go, and this worker is the one that saves the state.

        Raises:
            StorageError: It could not be saved.
        """
        self.job.save(step, self._content)

    def _content(self) -> tuple[Content, Callable[[], None]]:
        """A copy of all, for one file."""
        texts, weights = self._parts()
        copy = weights.map(lambda value: self._arrays.copy(memory_of(value)))
        name = MODEL if texts else WEIGHTS
        content = self._content_of(name, {name: lambda file: write_model(texts, copy, file)})
        return content, lambda: self._arrays.give_back(copy.values.values())

    def _parts(self) -> tuple[Texts, Weights]:
        with self._session.alone("get_config(), or save_own_variables()"):
            return self._model_parts.now()

    def _content_of(self, name: str, files: Mapping[str, WriteFile | SharedFile]) -> Content:
        """What is saved.

        Args:
            name: Of the file that has the weights.
            files: That, and what belongs to it.
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

    # ------------------------------------------------------------ shares

    def _num_bytes(self) -> int:
        """Of the state that all members hold."""
        return sum(map(num_bytes, hooks.shared_variables(self._model)))

    def _share(self, step: int) -> None:
        """Take a checkpoint together with the others: a folder, as Keras saves with `zipped=False`.

        A file of which parts are written elsewhere cannot be one in a zip archive, which has a checksum of it all.
        """
        parts: list[tuple[Texts, Weights]] = []

        def offer() -> Layout:
            texts, weights = self._parts()
            parts.append((texts, weights))
            if any("/" in name for name in texts):
                raise UnsupportedError("the model has assets (vocabularies), which are saved in one file with it")
            shared = {id(variable) for variable in hooks.shared_variables(self._model)}
            return weights.layout(lambda value: id(value) in shared)

        def make(plan: Plan) -> tuple[Content, Callable[[], None]]:
            texts, weights = parts[0] if parts else self._parts()
            try:
                share = WeightsShare(self._arrays, plan.layout, weights, plan.mine)
            except ValueError as error:
                return Content({WEIGHTS: plan.no_file(str(error))}), lambda: None
            file = plan.file(share.write)
            if not plan.leads:
                return Content({WEIGHTS: file}), share.release
            written = {name: partial(_write, text) for name, text in texts.items()}
            return self._content_of(WEIGHTS, {**written, WEIGHTS: file}), share.release

        with leaving_cleanly():
            self.job.share(step, offer, make, alone=self._content)


def _write(text: bytes, file: Writer) -> None:
    file.write(text)


def _newest_metrics(model: Any) -> dict[str, float]:
    """Results of the newest epoch that has ended."""
    history = getattr(getattr(model, "history", None), "history", {})
    return {name: float(values[-1]) for name, values in history.items() if values}


def _random_state(model: Any) -> dict[str, Any]:
    kind, keys, *others = np.random.get_state(legacy=True)
    return {
        "keras": [np.array(keras.ops.convert_to_numpy(state)) for state in hooks.seed_states(model)],
        "numpy": [str(kind), np.asarray(keys), *map(float, others)],
        "python": random.getstate(),
        "backend": random_state(),
    }


def _set_random_state(model: Any, saved: dict[str, Any], *, rank: int) -> None:
    """Keras's generators are equal in all workers; from the others, only rank 0 draws what it would have drawn."""
    for state, value in zip(hooks.seed_states(model), saved["keras"], strict=True):
        state.assign(value)
    if rank == 0:
        kind, keys, position, has_gauss, gauss = saved["numpy"]
        np.random.set_state((kind, keys, int(position), int(has_gauss), gauss))
        random.setstate(saved["python"])
        set_random_state(saved["backend"])
