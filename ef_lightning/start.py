"""What all workers agree on at the start of a run of the Trainer, besides the weights.

A worker that has joined in a later training of the program has skipped the earlier ones. Its Trainers have not trained
there, so their loops and callbacks lack what the others know, such as epoch counters and the best checkpoint. It takes
these from rank 0, which has been in the job for longest.
"""

from __future__ import annotations

import logging
from typing import Any

from ef_common.collectives import torch_operations as operations
from ef_common.collectives.torch_codec import TENSORS
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.host import LightningHost
from ef_lightning.own_files import do_without_lost_files
from ef_lightning.state import load_written, written_by

logger = logging.getLogger(__name__)


def agree_on_trainer(trainer: Any, host: LightningHost, session: Session) -> None:
    """Take over rank 0's loggers; where a worker has skipped a training, also its loops and callbacks.

    Costs one small exchange. If somebody has skipped a training, there is a second one, of what callbacks save.

    Args:
        trainer: The Trainer.
        host: Its class tree.
        session: The worker's session.
    """
    mine = {
        "versions": hooks.logger_versions(trainer),
        "skipped": session.trainings.has_skipped,
        "lacks": session.trainings.lacks_results,
    }
    everybody, _ = operations.gather(session, mine, what="a logger's version")
    hooks.set_logger_versions(trainer, everybody[0]["versions"])
    if not any(theirs["skipped"] for theirs in everybody):
        return
    if everybody[0]["lacks"] and session.rank == 0:
        logger.warning(
            "no worker is left that has made all trainings of this program, and there are no checkpoints of them: what "
            "only those have trained is as the program made it"
        )
    memories, _ = operations.gather(session, memory_of(trainer, host), what="state of a callback")
    if session.trainings.has_skipped:
        remember(trainer, host, memories[0])
        do_without_lost_files(trainer, host, session)


def memory_of(trainer: Any, host: LightningHost) -> dict[str, Any]:
    """What a Trainer knows about its earlier runs, as far as it can be sent."""
    return {
        "loops": hooks.loop_progress(trainer),
        "fields": hooks.loop_fields(trainer),
        "callbacks": {c.state_key: state for c in trainer.callbacks if TENSORS.knows(state := c.state_dict())},
        "files": written_by(trainer, host),
    }


def remember(trainer: Any, host: LightningHost, memory: dict[str, Any]) -> None:
    """Give a Trainer this knowledge."""
    load_written(trainer, host, memory["files"])
    for callback in trainer.callbacks:
        if state := memory["callbacks"].get(callback.state_key):
            callback.load_state_dict(state)
    hooks.know_best(trainer)
    hooks.load_loop_fields(trainer, memory["fields"])
    hooks.load_loop_progress(trainer, memory["loops"])
