"""This process as a worker: its session, its event log, made once from the environment.

A process has one membership, however many Trainers or models it creates; that is why it is kept here, in the only
module-level variable of ElasticFlow.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from dataclasses import dataclass

from ef_common.control.client import CoordinatorClient
from ef_common.core.view import SOLO
from ef_common.events import EventLog
from ef_common.launch.c10d import host_or_find_coordinator, is_plain_torchrun
from ef_common.launch.environment import WorkerEnvironment, read_environment
from ef_common.session import Session

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """What a plugin needs of this process.

    Args:
        session: The worker's membership.
        log: Event log of this worker.
        elastic: There is a coordinator, so the world may change.
        audit: A hash of the weights is to be logged after each update.
    """

    session: Session
    log: EventLog
    elastic: bool
    audit: bool


_this: Worker | None = None


def this_worker() -> Worker:
    """The worker that this process is; the first call connects it to the job.

    Raises:
        JobFinished: The job is over.
        CoordinatorLost, AuthenticationError, UsageError: As their names say.
    """
    global _this
    if _this is None:
        _this = _start(read_environment())
    return _this


def _start(environment: WorkerEnvironment) -> Worker:
    from ef_common.collectives.torch_group import TorchGroups

    if is_plain_torchrun():
        job = host_or_find_coordinator(environment)
        environment = job.environment
        atexit.register(job.close)  # runs after the session's own end: exit handlers run last in, first out
    member = environment.member()
    if environment.coordinator is None:
        log = EventLog(environment.run_dir, member.id)
        session = Session(SOLO.members[0], channel=None, groups=TorchGroups())
        _write_start(log)
        return Worker(session, log, elastic=False, audit=environment.audit)
    channel = CoordinatorClient(environment.coordinator, member, environment.token)
    log = EventLog(environment.run_dir, member.id)
    session = Session(
        member,
        channel=channel,
        groups=TorchGroups(),
        on_event=log.write,
        clock=time.monotonic,
    )
    _write_start(log)
    newcomer = session.start()
    logger.info("%s: %s", member.id, "the job runs already, warming up" if newcomer else "started")
    atexit.register(session.stop)
    return Worker(session, log, elastic=True, audit=environment.audit)


def _write_start(log: EventLog) -> None:
    log.write("start", pid=os.getpid(), host=socket.gethostname())
