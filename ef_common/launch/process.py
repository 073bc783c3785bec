"""This process as a worker: its session and its event log, created once from the environment.

A process has one membership, however many Trainers or models it creates; that is why it is kept here, in the only
module-level variable of ElasticFlow.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

from ef_common.control.client import CoordinatorClient
from ef_common.core.autoscale import Autoscale
from ef_common.core.view import SOLO
from ef_common.data.autoscaler import Autoscaler
from ef_common.data.checkpointer import Checkpointer
from ef_common.data.claiming import Claiming
from ef_common.data.provisioners import Provisioner
from ef_common.data.settings import ElasticSettings
from ef_common.data.source import Source
from ef_common.errors import Left, UsageError
from ef_common.events import EventLog
from ef_common.launch.c10d import C10dJob, host_or_find_coordinator, is_plain_torchrun
from ef_common.launch.certificates import Trust, trust_of
from ef_common.launch.engines import NoGroups, check_engine, groups_of
from ef_common.launch.environment import WorkerEnvironment, read_environment
from ef_common.launch.failing import Failing
from ef_common.launch.horovodrun import HorovodJob, is_horovodrun, join_horovodrun
from ef_common.launch.hung import end_if_hung
from ef_common.launch.notice_sources import AgentEnd, this_agent
from ef_common.launch.notices import DepartureNotices
from ef_common.launch.provisioning import provisioner_for
from ef_common.launch.software import software_here
from ef_common.launch.worker_metrics import metrics_page
from ef_common.session import Session
from ef_common.session.crash_record import CrashRecord
from ef_common.session.ports import ControlChannel
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.settling_report import Surroundings
from ef_common.story import Story
from ef_common.terminal import log_as_json, outlive_reader
from ef_common.tls import Tls

logger = logging.getLogger(__name__)


def _tell_nobody() -> int:
    """The launcher needs to know nothing of a worker that leaves, which ends with status 0."""
    return 0


@dataclass(frozen=True)
class Worker:
    """What a plugin needs from this process.

    Args:
        session: The worker's membership.
        log: Event log of this worker.
        notices: Handles notices that this worker must leave, until the training is complete.
        failing: Tells the others of the exception that ends it.
        elastic: There is a coordinator, so the world may change.
        audit: A hash of the weights is to be logged after each update.
        engine: Its data plane.
        checkpoint: URL for checkpoints that the environment names.
        claims: URL for claims that the environment names.
        autoscale: How the environment says that the job chooses its size.
        provisioner: Gives what starts and ends nodes, the same each time; None where nothing does.
        leave: Tells the launcher that this worker leaves. Returns the exit status of the process.
        trainings: Numbers the trainings of this process that have checkpoints.
        fits: Numbers all of them.
    """

    session: Session
    log: EventLog
    notices: DepartureNotices
    failing: Failing
    elastic: bool
    audit: bool
    engine: str
    checkpoint: str | None = None
    claims: str | None = field(default=None, repr=False)
    autoscale: Autoscale | None = None
    provisioner: Callable[[], Provisioner | None] = lambda: None
    leave: Callable[[], int] = _tell_nobody
    trainings: Iterator[int] = field(default_factory=itertools.count)
    fits: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def begin_training(self) -> bool:
        """The program comes to its next training. Returns whether to skip it, as the others have ended it."""
        number = next(self.fits)
        self.failing.forget()
        self.log.write("training", number=number)
        self.session.trainings.begin(number)
        return self.session.trainings.is_behind

    def places(self, settings: ElasticSettings) -> tuple[Claiming, Callable[[Source], Checkpointer] | None]:
        """The claims of the program's next training, and the factory of its checkpoints, if any. Asked once each."""
        place = settings.checkpointing(self.checkpoint)
        place = None if place is None else place.of_training(next(self.trainings))
        claiming = Claiming(settings.place(self.claims, checkpoints=place, elastic=self.elastic), self.session)
        if place is None:
            return claiming, None
        return claiming, partial(Checkpointer, place, self.session, log=self.log, excluded=claiming.excluded)

    def autoscaler(self, settings: ElasticSettings) -> Autoscaler | None:
        """What chooses the number of nodes of a training, or has stragglers replaced; None if nothing is to."""
        chosen = settings.autoscaling(self.autoscale)
        if not self.elastic or (chosen is None and not settings.evict_stragglers):
            return None
        self.session.job.evict_stragglers()
        return Autoscaler(chosen, self.session, log=self.log, provisioner=self.provisioner)

    def end(self) -> None:
        """The program ends: newcomers need not wait for another training, unless it has failed."""
        if not self.failing.has_failed:
            self.session.close()


_this: Worker | None = None


def this_worker(engine: str | None = None) -> Worker:
    """The worker in this process; the first call connects it to the job.

    Args:
        engine: Its data plane, one of :data:`~ef_common.launch.engines.ENGINES`. A process has one; None for that
            one, at first Gloo.

    Raises:
        JobFailed, JobFinished: The job is over.
        Left: It was asked to leave before it was admitted.
        UsageError: The engine is unknown, not installed, or another one than before; or the environment is wrong.
        CoordinatorLost, AuthenticationError: As their names say.
    """
    global _this
    if _this is None:
        _this = _start(read_environment(), engine or "gloo")
    if engine not in (None, _this.engine):
        raise UsageError(
            f"this process is a worker with another data plane already. Expected: engine={_this.engine!r}. "
            f"Received: engine={engine!r}"
        )
    return _this


def worker_if_any() -> Worker | None:
    """The worker in this process, if it has become one."""
    return _this


def is_alone(environment: WorkerEnvironment | None = None) -> bool:
    """Whether the environment says that this process is not a worker of a job."""
    environment = environment or read_environment()
    return environment.coordinator is None and not is_plain_torchrun() and not is_horovodrun()


def _start(environment: WorkerEnvironment, engine: str) -> Worker:
    check_engine(engine)
    plain, horovodrun = is_plain_torchrun(), is_horovodrun()
    alone = is_alone(environment)
    if alone:
        from ef_common.launch.surroundings import check_alone  # 15 ms, which the workers of a job save

        check_alone(os.environ)
    trust = Trust(environment.token, worker=environment.credentials)
    if plain:
        environment = replace(environment, agent=AgentEnd(this_agent(os.getppid())))
    if plain or horovodrun:  # no agent of ours has given this worker its certificate
        trust = trust_of(environment.token, environment.tls)
    tls = None if trust.worker is None else Tls(trust.worker)
    # Before anybody is told of this worker: the engine may not be installed. Who is alone needs none.
    groups = NoGroups() if alone else groups_of(engine, tls=tls)
    job: C10dJob | HorovodJob | None = None
    if plain:
        job = host_or_find_coordinator(replace(environment, token=trust.token), credentials=trust.coordinator)
    elif horovodrun:
        job = join_horovodrun(replace(environment, token=trust.token), credentials=trust.coordinator)
    if job is not None:
        environment = job.environment
        atexit.register(job.close)  # runs after the session's own end: exit handlers run last in, first out
    member = environment.member()
    if environment.coordinator is None:
        log = EventLog(environment.run_dir, member.id)
        session = Session(SOLO.members[0], channel=None, groups=groups)
        notices = _notices(session, environment, log, elastic=False)
        _write_start(log)
        return Worker(
            session,
            log,
            notices,
            Failing(session),
            elastic=False,
            audit=environment.audit,
            engine=engine,
            checkpoint=environment.checkpoint,
        )
    tracker = ProgressTracker(time.monotonic)
    record = _open_crash_record(environment, member.id)
    log = EventLog(environment.run_dir, member.id, listener=Story())
    outlive_reader()
    log_as_json()

    def on_straggling(slow: bool, ratio: float, waiting: float) -> None:
        log.write("straggler", slow=slow, ratio=ratio, waiting=waiting)

    channel: ControlChannel = CoordinatorClient(
        environment.coordinator,
        member,
        environment.token,
        tracker=tracker,
        crash_record=record,
        on_hung=end_if_hung,
        on_straggling=on_straggling,
        tls=tls,
    )
    leave: Callable[[], int] = _tell_nobody
    if isinstance(job, HorovodJob):
        channel, leave = job.watch(channel, member.id), job.leave
    session = Session(
        member,
        channel=channel,
        groups=groups,
        on_event=log.write,
        clock=time.monotonic,
        tracker=tracker,
        surroundings=Surroundings(software_here(), time.time),
        crash_record=record,
    )
    notices = _notices(session, environment, log, elastic=True)
    _write_start(log)
    failing = Failing(session, is_told=lambda: bool(notices.heard))
    failing.install()
    page = metrics_page(session, environment)
    try:
        newcomer = session.start()
    except BaseException as error:
        if isinstance(error, Left):
            record.leave()
            error.status = leave()
        notices.close()
        page.stop()
        raise
    logger.info("%s: %s", member.id, "the job runs already, warming up" if newcomer else "started")
    worker = Worker(
        session,
        log,
        notices,
        failing,
        elastic=True,
        audit=environment.audit,
        engine=engine,
        checkpoint=environment.checkpoint,
        claims=environment.claims,
        autoscale=environment.autoscale,
        provisioner=cache(partial(provisioner_for, environment)),
        leave=leave,
    )
    ends = (
        page.stop,
        session.stop,
        worker.end,
        notices.close,
        failing.tell_postponed,
    )  # they run in the opposite order
    for last in (failing.end_soon_if_interrupted, *ends):
        atexit.register(last)
    return worker


def _notices(session: Session, environment: WorkerEnvironment, log: EventLog, *, elastic: bool) -> DepartureNotices:
    sources = [source for source in (environment.notice, environment.agent) if source is not None]
    notices = DepartureNotices(session, elastic=elastic, sources=sources, grace_s=environment.grace_s, log=log)
    notices.start()
    return notices


def _open_crash_record(environment: WorkerEnvironment, worker: str) -> CrashRecord:
    try:
        record = CrashRecord(environment.crash_records, environment.local_rank)
        record.introduce(worker)
        return record
    except OSError as error:  # a full disk is no reason not to train
        logger.warning("nothing is recorded for the launcher: %s", error)
        return CrashRecord()


def _write_start(log: EventLog) -> None:
    log.write("start", pid=os.getpid(), host=socket.gethostname())
