"""How a worker ends when it has nothing more to do in the job."""

from __future__ import annotations

import atexit
import contextlib
import logging
from collections.abc import Iterator

from ef_common.errors import JobFailed, JobFinished, Left
from ef_common.launch.ending import InOrder, end_soon
from ef_common.launch.failing import is_interruption
from ef_common.launch.process import worker_if_any

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def leaving_cleanly() -> Iterator[None]:
    """End a worker that has nothing more to do; interrupt it if another one was interrupted."""
    try:
        yield
    except JobFinished:
        if (worker := worker_if_any()) is not None:
            worker.session.crash_record.finish()
        exit_cleanly("the job has finished already; nothing to join")
    except Left as left:
        worker, status = worker_if_any(), left.status
        if worker is not None:
            worker.session.crash_record.leave()
            status = worker.leave()
        exit_cleanly(f"left the job: {left}", status)
    except JobFailed as failure:
        if is_interruption(failure):
            raise KeyboardInterrupt(str(failure)) from failure
        raise


def exit_cleanly(reason: str, status: int = 0) -> None:
    """End this process with that status."""
    logger.info("%s", reason)
    atexit.register(end_soon)
    raise InOrder(status)
