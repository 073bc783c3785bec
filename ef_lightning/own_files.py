"""Restricts what a store may tell a ModelCheckpoint about files to the callback's own files that are still there.

It removes the files that its state names, and `Trainer.test(ckpt_path="best")` loads them, from any URL.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.host import LightningHost

logger = logging.getLogger(__name__)

_MOST_TOLD = 3
FILES = ("best_model_path", "kth_best_model_path", "last_model_path", "_last_checkpoint_saved")
SCORES = ("best_k_models", "best_model_score", "kth_value", "current_score", "_last_global_step_saved")

_NAMED = ("best_model_path", "last_model_path")  # by the user's code


def forget_foreign_files(trainer: Any, checkpoint: dict[str, Any]) -> None:
    """Remove, from a checkpoint of a store, files that are not the callbacks' own.

    A ModelCheckpoint forgets the scores of its files too if its folder has another name than it had. That of a logger
    has one at each start of the command, so the state gets the new name. Lightning removes no local file elsewhere.
    """
    states = checkpoint.get("callbacks", {})
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(state, dict):
            here = {"dirpath": callback.dirpath} if "dirpath" in state and hasattr(callback, "dirpath") else {}
            states[callback.state_key] = {**state, **_own_files(trainer, callback, state), **here}


def written_files(trainer: Any, callback: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The part of a ModelCheckpoint's state that a store may provide: what it has written, not where or how.

    Args:
        trainer: The Trainer.
        callback: The ModelCheckpoint.
        fields: The callback's fields in an earlier run.
    """
    known = {name: value for name, value in fields.items() if name in (*FILES, *SCORES)}
    return {**known, **_own_files(trainer, callback, known)}


def do_without_lost_files(trainer: Any, host: LightningHost, session: Session) -> None:
    """Until the next training, evaluate the current weights if a ModelCheckpoint's file is gone, with a warning.

    This process has not made the training that is over, and a later one may have removed its files: the best ones
    alone are kept. Each worker decides by itself. If some of them see the file, all take rank 0's weights.
    """
    filesystem_of = host.get_fabric("utilities.cloud_io", "get_filesystem")

    def is_lost(path: str) -> bool:
        known = [getattr(c, name, "") for name in _NAMED for c in trainer.checkpoint_callbacks]
        if path not in known or filesystem_of(path).exists(path):
            return False
        if session.newcomer or session.rank == 0:
            logger.warning(
                "%s does not exist any more, and the training that wrote it is over: evaluating the weights with which "
                "that training ended, not those of this file",
                path,
            )
        return True

    hooks.do_without_lost(trainer, is_lost)


def _own_files(trainer: Any, callback: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The fields that name files, without those outside the folders of this training."""
    folders = (getattr(callback, "dirpath", None), trainer.default_root_dir, *(log.save_dir for log in trainer.loggers))
    roots = [str(folder) for folder in folders if folder is not None]
    suffix = getattr(callback, "FILE_EXTENSION", "")

    def is_own(name: Any) -> bool:
        return name == "" or (str(name).endswith(suffix) and any(_is_below(str(name), root) for root in roots))

    models = state.get("best_k_models", {})
    models = models if isinstance(models, dict) else {}
    named = {name: state[name] for name in FILES if name in state}
    foreign = {str(name) for name in (*named.values(), *models) if not is_own(name)}
    kept: dict[str, Any] = {name: "" if str(value) in foreign else value for name, value in named.items()}
    if "best_k_models" in state:
        kept["best_k_models"] = {name: score for name, score in models.items() if str(name) not in foreign}
    if foreign:
        if "best_model_score" in state and kept.get("best_model_path") == "":
            kept["best_model_score"] = None
        logger.warning(
            "%s forgets files of an earlier run that are not below its dirpath, the loggers' folders or "
            "default_root_dir. Received: %s",
            type(callback).__name__,
            sorted(foreign)[:_MOST_TOLD],
        )
    return kept


def _is_below(name: str, root: str) -> bool:
    pairs = [(name, root.rstrip("/"))]
    if "://" not in name + root:
        pairs.append((os.path.join(os.getcwd(), os.path.expanduser(name)), os.path.abspath(os.path.expanduser(root))))
    return any(n.startswith(f"{r}/") and ".." not in n[len(r) :].split("/") for n, r in pairs if r)
