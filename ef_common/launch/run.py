"""`elasticflow run`: torchrun, completed with what an elastic job needs.

With ``--rdzv-endpoint`` it is one node of a job: torchrun's agent with our rendezvous. Without it, it is a whole
elastic job on this machine. Each worker then has its own agent, because an agent restarts all of its workers when one
crashes; and the coordinator is a process of its own, so no worker is special.

A worker that a signal has ended (SIGKILL, a lack of memory, a crash) is restarted: the first time at once, then after
growing pauses. If a signal has ended its agent, the worker leaves by itself, and another one is started with a new
agent. A worker that has raised an exception would raise it again, so the job ends. So it does when a worker dies at the
same step repeatedly (:mod:`ef_common.launch.restarts`).

This process imports torch once and has one thread; agents are forked from it, even later, when the job is scaled.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

import psutil
import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ef_common.errors import AuthenticationError, CoordinatorLost, UsageError
from ef_common.launch import command, environment, joining, kubeflow, run_directory
from ef_common.launch.certificates import trust_of
from ef_common.launch.child import end_with_parent
from ef_common.launch.command import LEFT, REFUSED
from ef_common.launch.coordinator_process import RESTART_S, start_coordinator
from ef_common.launch.departure import SIGNAL
from ef_common.launch.ending import end_soon, has_ended
from ef_common.launch.hosts import options as hosts_options
from ef_common.launch.launcher_file import LauncherFile
from ef_common.launch.nnodes import DEFAULT_NNODES
from ef_common.launch.rendezvous_options import BACKEND, config_of, joined_conf, names_token, options_of_a_local_job
from ef_common.launch.restarts import Restarts
from ef_common.launch.run_directory import Launcher
from ef_common.launch.signals import GENTLE, Signals, listening, to_end
from ef_common.launch.surroundings import local_number_in, meeting_in
from ef_common.protocol.addresses import LOOPBACK, format_address
from ef_common.protocol.auth import Token
from ef_common.session.crash_record import ask_to_leave, ended_early, has_left, pids, read_failure
from ef_common.storage.store import absolute
from ef_common.terminal import say

LAST_CALL_S = 10.0
"""How long the start waits for a worker that was started with the others and does not arrive."""
KILLED = 128
"""And the number of the signal: exit status of an agent whose worker a signal has ended."""
EXCUSED = os.EX_UNAVAILABLE
"""Exit status of an agent whose worker has ended by the fault of something else: the others have lost it, say, or its
machine lacks something."""
INTERRUPTED = KILLED + signal.SIGINT
_OF_THE_MACHINE = frozenset(
    (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO, errno.ESTALE)
)
"""Errors of the system that another machine need not have."""
_NONE = "\0"  # stands for a script that is not named
_LOOK_S = 0.1
_START_AGAIN_S = 5.0
_LATE_S = 5.0
"""A worker without an agent that has not ended so long after its grace time stands still: it finds out within a second
that it is alone."""


@dataclass(frozen=True)
class Options:
    """The options on the command line.

    Args:
        torchrun: Its own arguments, with our defaults.
        num_workers: Workers to start on this machine.
        min_nodes: Nodes, without which the job waits.
        max_nodes: Nodes, of which the job has no more.
        local: The whole job runs here.
        checkpoint: URL, or None.
        run_dir: Directory of the run, or None for a new one.
        left_status: Exit status if the launcher is told to go before the training is over.
        variables: What further options say, as variables of the workers.
    """

    torchrun: argparse.Namespace
    num_workers: int
    min_nodes: int
    max_nodes: int
    local: bool
    checkpoint: str | None
    run_dir: Path | None
    left_status: int = LEFT
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, argv: list[str]) -> Options:
        """Read a command line as torchrun does, with our own settings.

        Raises:
            SystemExit: It is wrong, or help was asked for.
            JobFinished: The job that it is to join has finished.
            UsageError: Values that do not go together.
        """
        made = parser()
        args = _parse(made, argv)
        if args.join:
            _take_from_job(args, made)
        meeting = None
        is_alone = args.standalone
        if is_alone:
            _be_alone(args)
        elif not args.rdzv_endpoint:
            meeting = meeting_in(os.environ, has_token=names_token(config_of(args.rdzv_conf)))
        if meeting is not None:
            args.rdzv_endpoint = meeting.endpoint
            is_host = "" if meeting.is_host is None else f"is_host={int(meeting.is_host)}"
            args.rdzv_conf = joined_conf(args.rdzv_conf, is_host)
            if meeting.num_nodes and args.nnodes == DEFAULT_NNODES:
                args.nnodes = f"1:{meeting.num_nodes}"
        local = not args.rdzv_endpoint
        if local and args.rdzv_backend != BACKEND:
            raise UsageError(
                f"this rendezvous needs --rdzv-endpoint. Received: --rdzv-backend={args.rdzv_backend} alone"
            )
        try:
            min_nodes, max_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
            num_workers = torchrun.determine_local_world_size(args.nproc_per_node)
        except (RuntimeError, ValueError) as error:
            raise UsageError(str(error)) from None
        if num_workers < 1:
            raise UsageError(f"at least one worker is needed. Received: --nproc-per-node={args.nproc_per_node}")
        if local and min_nodes > num_workers and not is_alone:
            raise UsageError(
                f"a job of at least {min_nodes} nodes needs a place where they meet: add --rdzv-endpoint=HOST:PORT, or "
                f"start it with --nnodes=1:{max_nodes} or --nproc-per-node={min_nodes} on this machine. Received: "
                f"--nnodes={args.nnodes} --nproc-per-node={args.nproc_per_node}"
            )
        if local:
            min_nodes, max_nodes = min(min_nodes, num_workers), max(max_nodes, num_workers)
        if not 0 <= args.left_status <= 255:
            raise UsageError(f"an exit status is 0 to 255. Received: --left-status={args.left_status}")
        return cls(
            *(args, num_workers, min_nodes, max_nodes, local, args.checkpoint, args.run_dir, args.left_status),
            variables=_autoscaling(args),
        )


def _be_alone(args: argparse.Namespace) -> None:
    """A job on this machine, whoever else was started beside it, and whatever endpoint a variable names."""
    if args.rdzv_endpoint == os.environ.get(kubeflow.RDZV_ENDPOINT):
        args.rdzv_endpoint = ""
    if args.rdzv_endpoint:
        raise UsageError(
            "--standalone is a job on this machine, and --rdzv-endpoint one node of a job: pass one of them. "
            f"Received: --rdzv-endpoint={args.rdzv_endpoint}"
        )
    args.standalone = False  # else torchrun chooses a rendezvous of its own


def _autoscaling(args: argparse.Namespace) -> dict[str, str]:
    """The variables that say how the job chooses its size. A mistake in them is found before a worker is started."""
    given = {environment.AUTOSCALE: args.autoscale, environment.SCALE_COMMAND: args.scale_command}
    variables = {name: value for name, value in given.items() if value is not None}
    environment.check_autoscale({**os.environ, **variables})
    return variables


def parser() -> argparse.ArgumentParser:
    """Torchrun's parser, with our options and defaults."""
    made = torchrun.get_args_parser()
    made.prog = "elasticflow run"
    made.description = (
        "Run a training script elastically: on this machine, or as one node of a job with --rdzv-endpoint. "
        "All options of torchrun are accepted."
    )
    command.add_options(made)
    return made


def _parse(made: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the command line; with ``--join`` it may name no script, which is "" then."""
    may_lack_script = any(
        argument.partition("=")[0] == "--join" for argument in argv
    )  # or it is an option of the script
    words = [*argv, _NONE] if may_lack_script else argv
    number = _up_to_script(made, words)
    args = made.parse_args(words[:number])  # behind the script, it would look for options that are abbreviated
    args.training_script_args += words[number:]
    if args.training_script == _NONE:
        args.training_script = ""
    elif args.training_script_args[-1:] == [_NONE]:
        args.training_script_args.pop()
    return args


def _up_to_script(made: argparse.ArgumentParser, words: list[str]) -> int:
    """The number of words up to the script, with it and a `--` right behind it; of all words if one is before it."""
    takes_value = {name: action.nargs != 0 for action in made._actions for name in action.option_strings}
    rest = iter(enumerate(words, start=1))
    for number, word in rest:
        if word == "--":
            break
        if not word.startswith("-") or word == "-":  # the script
            return number + (words[number : number + 1] == ["--"])
        meant = [word] if word in takes_value else [name for name in takes_value if name.startswith(word)]
        if any(takes_value[name] for name in meant):  # the next word is its value
            next(rest, None)
    return len(words)


def _take_from_job(args: argparse.Namespace, made: argparse.ArgumentParser) -> None:
    """Complete the arguments by what the job has that it is to join."""
    args.rdzv_conf = joined_conf(args.rdzv_conf, "join=1")
    if "://" in args.join:
        if not args.training_script:
            raise UsageError(f"name the script, too. Received: --join={args.join} alone")
        args.rdzv_endpoint = args.join
        return
    place = Path(args.join)
    job = joining.read(place)
    for name, value in job.options.items():
        if name == "rdzv_conf":
            args.rdzv_conf = joined_conf(value, args.rdzv_conf)
        elif getattr(args, name) == made.get_default(name):
            setattr(args, name, value)
    for name, value in job.variables.items():
        os.environ.setdefault(name, value)
    args.run_dir = args.run_dir or place.absolute()
    if not args.training_script:
        args.training_script, *args.training_script_args = job.command
        vars(args).update(job.start)
        os.chdir(job.directory)


def main(argv: list[str]) -> int:
    """Run a job, or one node of it, to its end.

    Returns:
        Exit status.

    Raises:
        CoordinatorLost: The job that it is to join cannot be found.
        JobFinished: It has finished.
        UsageError: Values that do not go together.
    """
    args = _parse(parser(), argv)
    command.prepare(args)
    if hosts_options.is_asked_for(args):
        from ef_common.launch.hosts import job as hosts_job

        return hosts_job.main(args, argv)
    options = Options.parse(argv)
    script = [options.torchrun.training_script, *options.torchrun.training_script_args]
    if options.checkpoint:
        os.environ[environment.CHECKPOINT] = options.checkpoint
    for name in (environment.CHECKPOINT, environment.CLAIMS):
        if url := os.environ.get(name, "").strip():
            os.environ[name] = absolute(url)  # the script may change its working directory
    os.environ.update(options.variables)
    launcher = run_directory.this_launcher(script, max_workers=options.max_nodes, local=options.local)
    with (
        run_directory.taken(
            script[0], options.run_dir, launcher=launcher, joins=bool(options.torchrun.join)
        ) as run_dir,
        listening() as signals,
        _Agents(options) as agents,
    ):
        os.environ[environment.RUN_DIR] = str(run_dir)
        if not options.torchrun.join:
            joining.write(run_dir, options.torchrun, script, local=options.local, token=agents.token_to_join)
        return _Supervisor(options, run_dir, agents, launcher, signals).run()


@dataclass(slots=True)
class _Agent:
    """One agent.

    Args:
        process: It.
        device: Index of the GPU that its worker has, or None.
        lives: How many there have been in its place, with this one.
        records: Directory of its crash record, and of those before it.
        due: When it is replaced, if it is lost.
        asked: It was asked to leave.
        told: Its workers that have been.
        was_told: It was told itself, as it had no workers.
    """

    process: multiprocessing.process.BaseProcess
    device: int | None
    lives: int
    records: Path
    due: float | None = None
    asked: bool = False
    told: set[psutil.Process] = field(default_factory=set)
    was_told: bool = False


class _Agents:
    """Torchrun agents, which are children of this process. Leaving the context ends whatever is left of them.

    Args:
        options: The command line's.

    Attributes:
        token_to_join: The token of a local job that nobody knows but its launcher and its workers; "" for none.
    """

    def __init__(self, options: Options) -> None:
        self.token_to_join = ""
        self._options = options
        self._args = options.torchrun
        self._agents: dict[int, _Agent] = {}  # without those that are replaced, or have left as asked
        self._num_started = 0
        self._failure = ""  # what one of these has known
        self._some_left = False  # of these, without being asked by this launcher
        self._start_again_at = 0.0  # not before
        self._start_failed = False  # and that was said
        self._grace_s = environment.grace_s_in(os.environ)
        self._directory = Path(tempfile.mkdtemp(prefix="elasticflow-"))
        self._max_restarts = 0
        self._orphans: dict[psutil.Process, float] = {}  # when they are late
        self._coordinator: psutil.Process | None = None

    def __enter__(self) -> _Agents:
        try:
            if self._options.local:
                self._prepare_local_job()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._coordinator is not None:  # by itself it would wait for other workers
            with contextlib.suppress(psutil.NoSuchProcess):
                self._coordinator.terminate()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _prepare_local_job(self) -> None:
        options = self._options
        given = options_of_a_local_job(
            self._args.rdzv_conf, min_nodes=options.min_nodes, max_nodes=options.max_nodes, last_call_s=LAST_CALL_S
        )
        token = given.token or Token(secrets.token_hex(16), source=environment.TOKEN)
        os.environ[environment.TOKEN] = token.text
        trust = trust_of(token, given.tls)
        if given.token is None and trust.coordinator is None:
            self.token_to_join = token.text
        if options.num_workers > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for several workers of a node
        address, pid = start_coordinator(
            LOOPBACK,
            trust.token or token,
            replace(given.settings, start_nodes=options.num_workers),
            heartbeat_timeout_s=given.heartbeat_timeout_s,
            hang_timeout_s=given.hang_timeout_s,
            credentials=trust.coordinator,
            linger_s=RESTART_S,  # who is started again may import for long
            launcher=os.getpid(),
        )
        with contextlib.suppress(psutil.NoSuchProcess):
            self._coordinator = psutil.Process(pid)
        self._args.rdzv_endpoint = format_address(address)
        self._args.rdzv_conf = joined_conf(self._args.rdzv_conf, "is_host=0", "stands_in=1")
        self._args.nnodes = f"{options.min_nodes}:{options.max_nodes}"  # for the standbys, which the agents host
        self._args.nproc_per_node = "1"
        self._max_restarts, self._args.max_restarts = self._args.max_restarts, 0

    # ------------------------------------------------------------ life and death

    def start(self, *, lives: int = 1, records: Path | None = None) -> None:
        """Start one more agent.

        Args:
            lives: How many there have been in its place, with this one.
            records: Directory for its crash record.

        Raises:
            OSError: This machine has no process, memory, file or space for it now.
        """
        device = self._free_device() if self._options.local else self._device_of_rank()
        if records is None or not records.is_dir():
            if not self._directory.is_dir():  # some systems clean /tmp of what is old
                self._directory = Path(tempfile.mkdtemp(prefix="elasticflow-"))
            records = self._directory / str(self._num_started)
            records.mkdir(exist_ok=True)  # an attempt may have left it
        process = multiprocessing.get_context("fork").Process(
            target=_run_agent, args=(self._args, device, records, self._options.local, os.getpid())
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])  # the agent is told nothing until it heeds it
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._agents[self._num_started] = _Agent(process, device, lives, records)
        self._num_started += 1

    def try_to_start(self, *, lives: int = 1, records: Path | None = None) -> bool:
        """Start one more agent beside others, which train on if that fails. It is then not tried again for 5 s.

        Args:
            lives: See `start`.
            records: See `start`.

        Returns:
            Whether it was started.
        """
        if time.monotonic() < self._start_again_at:
            return False
        try:
            _check_fork()
            self.start(lives=lives, records=records)
        except OSError as error:
            self._start_again_at = time.monotonic() + _START_AGAIN_S
            if not self._start_failed:
                self._start_failed = True
                others = ", and the others train on" if self.training else ""
                say(
                    f"no worker can be started on this machine ({error.strerror or error}): it is tried again every "
                    f"{_START_AGAIN_S:g} s{others}",
                    color="yellow",
                    event="start_failed",
                    reason=str(error),
                )
            return False
        self._start_failed = False
        return True

    def replace_lost(self) -> None:
        """Start replacements for agents whose worker is lost, as often as that is allowed."""
        for agent in self._agents.values():
            if agent.due is None and _is_lost(agent) and agent.lives > self._max_restarts:
                agent.due = inf
                lost = f"a worker {_end_of(agent.process.exitcode)}"
                say(f"{lost}; it is not replaced (--max-restarts={self._max_restarts})", color="yellow", event="lost")
        for number in self.lost:
            agent = self._agents[number]
            if agent.due is None:
                pause_s = Restarts(agent.records).count.pause_s
                agent.due = time.monotonic() + pause_s
                when = f" in {pause_s:g} s" if pause_s else ""
                lost = f"a worker {_end_of(agent.process.exitcode)}"
                say(
                    f"{lost}; restarting it{when} (restart {agent.lives} of {self._max_restarts})",
                    color="yellow",
                    event="restarting",
                )
            if time.monotonic() < agent.due or (_left_orphans(agent) and self.waits_for_orphans):  # which have its GPU
                continue
            # One that is late may still write into its directory.
            records = None if _left_orphans(agent) else agent.records
            if self.try_to_start(lives=agent.lives + 1, records=records):
                self._forget(number)

    def give_up(self, number: int) -> None:
        """Start no replacement for an agent that is lost: the job is to have fewer workers."""
        self._agents[number].asked = True

    def forget_those_that_left(self) -> None:
        """Free what is held for those that have left: a job may be scaled any number of times."""
        alive = self.alive
        for number, agent in list(self._agents.items()):
            if number in alive or not (agent.asked or _has_left(agent)):
                continue
            self._some_left = self._some_left or not agent.asked
            self._failure = self._failure or read_failure(agent.records)
            self._forget(number)
            shutil.rmtree(agent.records, ignore_errors=True)

    def _forget(self, number: int) -> None:
        self._note_orphans(self._agents[number])
        process = self._agents.pop(number).process
        process.join()
        process.close()

    @property
    def lost(self) -> list[int]:
        """Agents to replace: their worker was killed, or ended because of a fault elsewhere."""
        return [
            number for number, agent in self._agents.items() if _is_lost(agent) and agent.lives <= self._max_restarts
        ]

    @property
    def orphans(self) -> list[psutil.Process]:
        """Workers whose agent a signal has ended. They leave by themselves, with a checkpoint if they are the last."""
        for agent in self._agents.values():
            self._note_orphans(agent)
        return [worker for worker in self._orphans if not has_ended(worker)]

    @property
    def waits_for_orphans(self) -> bool:
        """Whether there are such workers that are not late."""
        return any(time.monotonic() < self._orphans[worker] for worker in self.orphans)

    def _note_orphans(self, agent: _Agent) -> None:
        if not _left_orphans(agent):
            return
        for pid in pids(agent.records):
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(pid)
                if worker.environ().get(environment.CRASH_RECORDS) == str(agent.records):  # else it has got the number
                    self._orphans.setdefault(worker, time.monotonic() + self._grace_s + _LATE_S)

    def _free_device(self) -> int | None:
        """The GPU that the fewest workers have, if there are any."""
        num_devices = torch.cuda.device_count()
        if not num_devices:
            return None
        taken = [self._agents[number].device for number in self.alive]
        return min(range(num_devices), key=taken.count)

    def _device_of_rank(self) -> int | None:
        """The GPU of a rank of MPI or a task of Slurm that has one worker, and shares its machine with others."""
        number, num_devices = local_number_in(os.environ), torch.cuda.device_count()
        if number is None or self._options.num_workers > 1 or not num_devices:
            return None
        return number % num_devices

    @property
    def alive(self) -> list[int]:
        """Agents that run, in the order in which they were started."""
        return [number for number, agent in self._agents.items() if agent.process.is_alive()]

    def wait(self, signals: Signals, seconds: float) -> None:
        """Wait until one more of those that run has ended, or a signal comes, at most so long."""
        processes = [self._agents[number].process for number in self.alive]
        running = {process.sentinel: process for process in processes}
        for ended in signals.wait(seconds, running):
            running[ended].join(seconds)  # its files are closed, so its end is near

    @property
    def training(self) -> list[int]:
        """Agents that run, and whose workers neither were asked to leave nor have left by the job's own decision."""
        agents = self._agents
        return [number for number in self.alive if not agents[number].asked and not has_left(agents[number].records)]

    @property
    def leaving(self) -> list[int]:
        """Agents that run and were asked to leave."""
        return [number for number in self.alive if self._agents[number].asked]

    @property
    def finished(self) -> bool:
        """Whether an agent that was not asked to leave has reached the end of its script, and the training its own."""
        return 0 in self._statuses

    @property
    def failed(self) -> bool:
        """Whether an agent that was not asked to leave has ended in another way."""
        return any(self._statuses)

    @property
    def refused(self) -> bool:
        """Whether what was wrong was found before a worker was started; the agent has said it."""
        return set(self._statuses) == {REFUSED}

    @property
    def killed_as(self) -> int:
        """Exit status that tells why this node is lost, if a signal has ended its worker or its agent; else 0."""
        ended = [KILLED - status if status < 0 else status for status in self._statuses if status is not None]
        killed = [status for status in ended if status > KILLED or status == EXCUSED]
        return 0 if self.failure or not killed else killed[0]

    @property
    def _statuses(self) -> list[int | None]:
        return [agent.process.exitcode for agent in self._agents.values() if not agent.asked and not _has_left(agent)]

    @property
    def left(self) -> bool:
        """Whether the worker of an agent has left before the end.

        It alone was given a notice, the job let it go, or its program has ended with status 0 in a training.
        """
        return self._some_left or any(map(_has_left, self._agents.values()))

    @property
    def failure(self) -> str:
        """Why the job has failed, as far as the agents know; "" if they know of nothing."""
        return self._failure or next(filter(None, (read_failure(agent.records) for agent in self._agents.values())), "")

    def drain(self, number: int) -> None:
        """Let an agent's workers leave at the next boundary. Repeat this while it runs: they may be starting."""
        agent = self._agents[number]
        if not agent.asked:
            agent.asked = True
            ask_to_leave(agent.records)
        workers = _workers_of(agent.process.pid)
        for worker in workers:
            if worker not in agent.told:  # a second signal would end it at once
                agent.told.add(worker)
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.send_signal(signal.SIGTERM)
        pid = agent.process.pid if self._args.rdzv_backend == BACKEND else None
        if pid is not None and not workers and not agent.was_told:  # it may wait for another machine
            agent.was_told = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)

    def kill(self) -> None:
        """End all agents at once."""
        for process in [agent.process for agent in self._agents.values()]:
            victims = _workers_of(process.pid) if process.is_alive() else []
            process.kill()  # first: it would start its workers again
            _kill_groups(victims)
            process.join()
        _kill_groups(self.orphans)


def _has_left(agent: _Agent) -> bool:
    return agent.process.exitcode == 0 and ended_early(agent.records)


def _left_orphans(agent: _Agent) -> bool:
    """Whether a signal has ended the agent itself, which leaves its workers alone."""
    return (agent.process.exitcode or 0) < 0


def _is_lost(agent: _Agent) -> bool:
    status = agent.process.exitcode
    return status is not None and (status > KILLED or status < 0 or status == EXCUSED) and not agent.asked


def _kill_groups(workers: list[psutil.Process]) -> None:
    """Kill workers with their data workers."""
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


def _check_fork() -> None:
    """Raise the OSError of a process that cannot be made. multiprocessing would leave four files open with each one."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)


def _end_of(status: int | None) -> str:
    if status == EXCUSED:
        return "lost its place in the job (see above)"
    status = status or 0
    try:
        how = f"was killed by {signal.Signals(-status if status < 0 else status - KILLED).name}"
    except ValueError:
        how = f"was killed by a signal (status {status})"
    return f"lost its agent, which {how}" if status < 0 else how


def _workers_of(pid: int | None) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def _run_agent(args: argparse.Namespace, device: int | None, records: Path, local: bool, launcher: int) -> None:
    """The body of an agent's process. Its exit handlers have their turn at the end, and the launcher's have none."""
    atexit._clear()
    try:
        _be_agent(args, device, records, local, launcher)
    finally:
        atexit.unregister(end_soon)  # the interpreter collects nothing here
        atexit._run_exitfuncs()  # multiprocessing's children leave without


def _be_agent(args: argparse.Namespace, device: int | None, records: Path, local: bool, launcher: int) -> None:
    if local:  # the launcher tells of what its agents have seen, once
        for name in ("torch.distributed.elastic.multiprocessing.api", "ef_common.launch.deaths"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[environment.CRASH_RECORDS] = str(records)
    if args.log_dir is None and args.logs_specs is None and args.redirects == args.tee == "0":
        args.log_dir = str(records / "torchrun")  # else torchrun leaves a directory in /tmp for each agent
    os.setsid()  # Ctrl-C is for the launcher, which tells the workers
    for number in [*to_end(), SIGNAL]:
        signal.signal(number, signal.SIG_DFL)
    if args.rdzv_backend == BACKEND:  # whose rendezvous unblocks it
        signal.signal(SIGNAL, _ignore)  # when it heeds it no more
    else:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [SIGNAL])
    end_with_parent(signal.SIGTERM, launcher)
    if device is not None:
        names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        os.environ["CUDA_VISIBLE_DEVICES"] = names.split(",")[device]
    try:
        torchrun.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode < 0 and not read_failure(records):
            sys.exit(KILLED - failure.exitcode)
        if Restarts(records).count.excused and not read_failure(records):
            sys.exit(EXCUSED)
        if failure.exitcode >= 0 and not read_failure(records):
            say(f"a worker ended with exit status {failure.exitcode}", color="red")
        sys.exit(1)
    except SignalException as error:
        sys.exit(KILLED + int(error.sigval))
    except (AuthenticationError, CoordinatorLost, UsageError) as error:
        say(str(error), color="red")
        sys.exit(REFUSED)
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _OF_THE_MACHINE:
            raise
        traceback.print_exc()
        say(f"this node is lost, as its machine has failed it: {error!r}", color="red")
        sys.exit(EXCUSED)


def _ignore(number: int, frame: object) -> None:
    """Do nothing. Unlike an ignored signal, the programs that this process starts do not inherit that."""


class _Supervisor:
    """Starts and drains workers as ordered, until all have ended.

    Args:
        options: The command line's.
        run_dir: Directory of the run.
        agents: The agents that it supervises.
        launcher: The state that others read.
        signals: Signals that this process has received.
    """

    def __init__(self, options: Options, run_dir: Path, agents: _Agents, launcher: Launcher, signals: Signals) -> None:
        self._options = options
        self._run_dir = run_dir
        self._agents = agents
        self._launcher = launcher
        self._file = LauncherFile(run_dir)
        self._signals = signals

    def run(self) -> int:
        """Supervise the job; returns the exit status."""
        if environment.HOST not in os.environ:  # else its launcher has the log
            say(f"the event log is in {self._run_dir}", event="run_directory", run_dir=str(self._run_dir))
        for _ in range(self._options.num_workers if self._options.local else 1):
            if not self._signals:
                self._agents.start()
        self._tell()
        try:
            self._supervise()
        finally:
            self._tell(state="ended", outcome=self._outcome)
        return self._status()

    def _supervise(self) -> None:
        while True:
            had_ended = not self._agents.alive
            self._look()  # which may replace them
            waits = (self._replaces and bool(self._agents.lost)) or self._waits_for_orphans
            have_ended = not self._agents.alive and not waits
            if had_ended and have_ended:
                return
            if not have_ended:
                self._agents.wait(self._signals, _LOOK_S)

    @property
    def _is_killed(self) -> bool:
        """Whether a second signal asks to end the workers at once."""
        return len([number for number in self._signals if number not in GENTLE]) > 1

    @property
    def _waits_for_orphans(self) -> bool:
        return not self._is_killed and not self._agents.alive and self._agents.waits_for_orphans

    @property
    def _replaces(self) -> bool:
        return self._options.local and not self._signals and not self._agents.finished

    def _look(self) -> None:
        if self._signals and self._launcher.state == "running":
            self._tell(state="stopping")
            what = "saving a checkpoint and stopping" if os.environ.get(environment.CHECKPOINT) else "stopping"
            again = "" if environment.HOST in os.environ else ". Press Ctrl-C again to kill the workers."
            say(f"{what}{again}", color="yellow", event="stopping")
        if self._is_killed:
            say("killing the workers", event="killing")
            self._agents.kill()
        elif self._launcher.state == "stopping":
            for number in self._agents.alive:
                self._agents.drain(number)
        elif self._replaces:
            self._agents.replace_lost()
            self._follow_orders()

    def _follow_orders(self) -> None:
        order = self._file.order()
        if order is not None and order.number > self._launcher.order:
            training = self._agents.training
            lost = [number for number in self._agents.lost if number not in training]  # one may be lost meanwhile
            missing = order.num_workers - len(training) - len(lost)
            for number in lost[max(0, order.num_workers - len(training)) :]:
                self._agents.give_up(number)
            for number in training[order.num_workers :]:  # the newest
                self._agents.drain(number)
            if all(self._agents.try_to_start() for _ in range(missing)):  # else the next look follows the rest of it
                self._tell(order=order.number)
        for number in self._agents.leaving:
            self._agents.drain(number)
        self._agents.forget_those_that_left()

    def _tell(self, **changes: object) -> None:
        self._launcher = replace(self._launcher, num_workers=len(self._agents.training), **changes)  # type: ignore[arg-type]
        self._file.write(self._launcher)

    @property
    def _outcome(self) -> str:
        if self._agents.finished:
            return "finished, but some workers failed" if self._agents.failed else "finished"
        if self._signals:
            return "killed" if self._is_killed else "stopped"
        if self._agents.alive:  # by an error of the launcher's own
            return "failed"
        why = self._agents.failure
        return f"failed: {why}" if why else "failed" if self._agents.failed else "stopped"

    def _status(self) -> int:
        if self._options.local and (why := self._agents.failure):
            say(f"the job has failed: {why}", color="red", event="failed", reason=why)
        if self._is_killed or signal.SIGINT in self._signals:
            return INTERRUPTED
        if self._agents.finished:
            if self._agents.failed:
                say("some workers failed; the others finished", color="yellow")
            return 0
        if self._signals:
            return self._options.left_status
        has_failed = self._agents.failed or bool(self._agents.failure)
        if self._agents.left and not has_failed:
            if self._options.local:
                say("all workers have left before the training was over", color="yellow")
            return self._options.left_status
        if self._agents.refused:
            return REFUSED
        if not self._options.local and self._agents.killed_as:  # the job goes on, on other nodes
            return self._agents.killed_as
        return 1 if has_failed else 0
