"""A model as Keras's own files hold it, in two steps: a copy in memory, and a file that is written from it later."""

from __future__ import annotations

import logging
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from ef_keras import hooks
from ef_keras.weights import Weights

logger = logging.getLogger(__name__)

MODEL = "model.keras"
WEIGHTS = "model.weights.h5"


Texts = dict[str, bytes]
"""What a file of a whole model holds besides the weights, by name; nothing if it cannot be serialized."""


class ModelParts:
    """What a model's file consists of. What does not change while it trains (its architecture) is found out once.

    Args:
        model: The model, built, with its optimizer.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._texts: Texts | None = None

    def now(self) -> tuple[Texts, Weights]:
        """They; the weights are the variables themselves."""
        if self._texts is None:
            self._texts = self._serialized()
        return self._texts, Weights.of(self._model)

    def _serialized(self) -> Texts:
        try:
            config, metadata = hooks.serialized(self._model)
        except Exception as error:
            logger.info("checkpoints hold weights only, as the model cannot be serialized: %s", error)
            return {}
        return {"metadata.json": metadata.encode(), "config.json": config.encode(), **self._assets()}

    def _assets(self) -> Texts:
        """Vocabularies, which layers write to a folder."""
        with tempfile.TemporaryDirectory(prefix="elasticflow-") as directory:
            folder = Path(directory) / "assets"
            hooks.save_state(self._model, hooks.store_that_makes(lambda path, metadata: {}), hooks.assets_in(folder))
            files = [path for path in folder.rglob("*") if path.is_file()]
            return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def write_model(texts: Texts, weights: Weights, file: Any) -> None:
    """Write a file as Keras does.

    Args:
        texts: See above.
        weights: A copy of the model's.
        file: To write to; it need not be seekable.
    """
    if not texts:
        weights.write(file)
        return
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
        with archive.open(WEIGHTS, "w", force_zip64=True) as target:
            weights.write(target)
