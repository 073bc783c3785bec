"""The file that `fit(ckpt_path=…)` begins from, which may be gone when a newcomer starts the same program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ef_common.session import Session
from ef_lightning import hooks

logger = logging.getLogger(__name__)


class StartFile:
    """Lets a newcomer start without this file, because it takes over the others' state.

    Args:
        trainer: The Trainer.
        session: The worker's session.
        choose: Given the file that the user named, and `weights_only`; returns the one to begin from.
    """

    def __init__(self, trainer: Any, session: Session, choose: Callable[[Any, bool | None], Any]) -> None:
        self._session = session
        self._gone: FileNotFoundError | None = None
        hooks.before_restoring(trainer, choose, do_without=self._do_without)

    def _do_without(self, error: FileNotFoundError) -> bool:
        if not self._session.newcomer:
            return False
        logger.info("the file of ckpt_path is gone, so this newcomer starts without it: %s", error)
        self._gone = error
        return True

    def require(self) -> None:
        """All workers who had a state are lost, and this one's start becomes that of all.

        Raises:
            FileNotFoundError: It has started without the file.
        """
        if self._gone is not None:
            raise self._gone
