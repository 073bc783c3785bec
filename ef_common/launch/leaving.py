"""How a worker ends when it has nothing more to do in the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ef_common.errors import JobFailed, JobFinished, Left
from ef_common.launch.failing import is_interruption

logger = logging.getLogger(__name__)


@contextmanager
def leaving_cleanly() -> Iterator[None]:
    """End a worker that has nothing more to do with status 0; interrupt it if another one was interrupted."""
    try:
        yield
    except JobFinished:
        exit_cleanly("the job has finished already; nothing to join")
    except Left as left:
        exit_cleanly(f"left the job: {left}")
    except JobFailed as failure:
        if is_interruption(failure):
            raise KeyboardInterrupt(str(failure)) from failure
        raise


def exit_cleanly(reason: str) -> None:
    """End this process with status 0."""
    logger.info("%s", reason)
    raise SystemExit(0)
