"""The directory of a run, through which `elasticflow run`, `status` and `scale` communicate.

::

    events/…                the event log
    job.json                what a node has to know that joins the job
    launcher.json           the state of the launcher of a job; only the launcher writes it, completely each time
    launcher-HOST-PID.json  the same of one of the nodes of a job, which may share the directory
    wanted.json             the number of workers that it shall have; written by `elasticflow scale`, and by a job that
                            chooses its size

They communicate through files and not through a connection: anybody who may write there may scale, and nothing listens.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from ef_common.errors import UsageError
from ef_common.events import no_log
from ef_common.files import write_whole
from ef_common.launch.json_record import read_record
from ef_common.launch.process_name import process_name
from ef_common.terminal import say

PLACE = Path("elasticflow-runs")
"""Below the working directory: where runs are that were given no other place."""
_EVENTS, _LAUNCHERS, _WANTED = "events", "launcher*.json", "wanted.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_SIGNS = (_EVENTS, _LAUNCHERS, "job.json", "slurm.json", "yarn.json")
"""The directory of a run has at least one of these, whoever has started it."""
_LOOK_S = 0.1
_WORD_S = 2.0
"""How long a launcher that is stopped may take to say so in its file. It cannot say it if the disk is full."""


class Unanswered(UsageError):
    """A scheduler has not said whether it has done what it was asked to."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """The state of a launcher.

    Args:
        pid: Its process.
        began: When that has begun, in seconds since the epoch.
        command: The script and its arguments.
        num_workers: Workers that are to train, as far as it has started them.
        max_workers: Maximal number of workers that it starts.
        local: The whole job is its own, so it can be scaled.
        state: ``running``, ``stopping`` or ``ended``.
        order: Number of the newest order of `elasticflow scale` that it has followed.
        outcome: The outcome of the job in words, once it has ended.
        host: Name of its machine; "" for this one.
        process: Name of its process: another one may get the same number. "" if an earlier version has written this.
    """

    pid: int
    began: float
    command: list[str]
    num_workers: int
    max_workers: int
    local: bool
    state: str = "running"
    order: int = 0
    outcome: str = ""
    host: str = ""
    process: str = ""

    @property
    def file(self) -> str:
        """Name of the file in which it writes its state."""
        return "launcher.json" if self.local else f"launcher-{self.host or socket.gethostname()}-{self.pid}.json"

    @property
    def is_here(self) -> bool:
        """Whether the launcher is on this machine, so that its process can be examined."""
        return self.host in ("", socket.gethostname())

    @property
    def alive(self) -> bool:
        """Whether the launcher runs on this machine."""
        return self.is_here and self.state != "ended" and self._is_there

    @property
    def _is_there(self) -> bool:
        if self.process:
            return process_name(self.pid) == self.process
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() == self.began and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    @property
    def over(self) -> bool:
        """Whether the launcher has ended. On another machine only its own word counts."""
        return self.state == "ended" or (self.is_here and not self.alive)

    @property
    def seen(self) -> str:
        """The state as seen from outside; ``lost`` if it has ended without a word."""
        return "lost" if self.over and self.state != "ended" else self.state


def this_launcher(command: list[str], *, max_workers: int, local: bool) -> Launcher:
    """This process as a launcher; see :class:`Launcher`."""
    pid, began = os.getpid(), psutil.Process().create_time()
    made = Launcher(pid, began, command, num_workers=0, max_workers=max_workers, local=local)
    return replace(made, host=socket.gethostname(), process=process_name(pid))


@dataclass(frozen=True, slots=True)
class ScaleOrder:
    """An order for a number of workers.

    Args:
        number: Counts the orders.
        num_workers: The ordered number of workers.
    """

    number: int
    num_workers: int


@contextlib.contextmanager
def removed_if_refused(place: Path, *, otherwise: str) -> Iterator[None]:
    """Submit a job: if that fails, a directory that is new is removed, unless the job may have been accepted.

    Args:
        place: The directory of the run.
        otherwise: What the user should know if nobody has answered.

    Raises:
        UsageError: In place of `Unanswered`.
    """
    is_new = not place.exists()
    try:
        yield
    except Unanswered as error:
        raise UsageError(f"{error}. {otherwise}") from None
    except KeyboardInterrupt:  # perhaps while it waited for the answer
        raise
    except BaseException:
        if is_new:
            shutil.rmtree(place, ignore_errors=True)
        raise


def create(script: str, place: Path | None = None, *, local: bool = True) -> Path:
    """Make the directory of a new run, or share that of other nodes of the job, for a launcher that is yet to start.

    Args:
        script: Which program; gives the name, with the time.
        place: The directory itself, if the user has named one.
        local: See :class:`Launcher`.

    Raises:
        UsageError: Another run is going on there, or it cannot be made or written.
    """
    place = _made(script, place)
    with _refused_if_unwritable(place), locked(place):
        _clear(place, local=local, joins=False)
    return place.resolve()


@contextlib.contextmanager
def taken(script: str, place: Path | None = None, *, launcher: Launcher, joins: bool = False) -> Iterator[Path]:
    """Make the directory of a new run, or share it, and write this launcher's state there before another one looks.

    If what follows fails before it has changed that state, the state of the launcher before this one is put back.

    Args:
        script: See `create`.
        place: See `create`.
        launcher: This launcher.
        joins: The run that is active there is the one that it joins.

    Raises:
        UsageError: See `create`.
    """
    place = _made(script, place)
    file = place / launcher.file
    with _refused_if_unwritable(place), locked(place):
        _clear(place, local=launcher.local, joins=joins)
        before = _content(file)
        if not joins:
            write_launcher(place, launcher)
        written = _content(file)
    try:
        yield place.resolve()
    except BaseException:
        with contextlib.suppress(OSError):
            if _content(file) == written != before:  # else it has trained
                file.unlink() if before is None else write_whole(file, before)
        raise


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _made(script: str, place: Path | None) -> Path:
    place = place or new_place(script)
    try:
        (place / _EVENTS).mkdir(parents=True, exist_ok=True)  # `elasticflow status` knows the run by that from now on
    except OSError as error:
        raise UsageError(
            f"the run directory cannot be made: {error.strerror}. Use another --run-dir. Received: {place}"
        ) from None
    return place


@contextlib.contextmanager
def _refused_if_unwritable(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the run directory cannot be written: {error.strerror}. Use another --run-dir. Received: {place}"
        ) from None


def _clear(place: Path, *, local: bool, joins: bool) -> None:
    """Remove what earlier runs have left in the way of a new one."""
    for found in read_launchers(place):
        if found.alive and not joins and (local or found.local):
            raise UsageError(
                f"another run is active there (process {found.pid}). Use another --run-dir. Received: {place}"
            )
        if found.is_here and found.over and not found.local:
            (place / found.file).unlink(missing_ok=True)
    if local:
        (place / _WANTED).unlink(missing_ok=True)


def new_place(script: str) -> Path:
    """A directory that no other run has, named after a script and the time. It is not made."""
    stem = re.sub(r"[^\w.-]+", "-", Path(script).stem) or "run"
    return PLACE / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check_is_run(place: Path) -> Path:
    """Return a directory if it is that of a run, which may be about to start.

    Raises:
        EventLogError: It is not.
    """
    if not any(any(place.glob(sign)) for sign in _SIGNS):
        raise no_log(place)
    return place


def newest() -> Path:
    """The run that was started last from this working directory.

    Raises:
        UsageError: There is no such run.
    """
    found = newest_first()
    if not found:
        raise UsageError(f"There is no run in ./{PLACE}: name the directory that `elasticflow run` has printed")
    return found[0]


def newest_first() -> list[Path]:
    """The runs that were started from this working directory, the one that was started last first."""
    return sorted({file.parent for file in PLACE.glob(f"*/{_LAUNCHERS}")}, key=_began, reverse=True)


def _began(place: Path) -> tuple[float, float]:
    """When a run was started, and when its launchers have last written; if they cannot be read, only that is known."""
    try:
        wrote = max((file.stat().st_mtime for file in place.glob(_LAUNCHERS)), default=0.0)
    except OSError:  # it was removed meanwhile, or is another user's: then it is the oldest
        return 0.0, 0.0
    launcher = _read_or_error(place)
    return (launcher.began if isinstance(launcher, Launcher) else wrote), wrote


def newest_readable() -> Path:
    """The run that was started last, without those whose launcher has left a file that cannot be read.

    A line on stderr says which are skipped. This is for commands that show a run: one that acts would act on another
    run than the user means.

    Raises:
        UsageError: There is no such run.
    """
    problem: UsageError | None = None
    for path, found in launchers():
        if isinstance(found, Launcher):
            return path
        problem = problem or found
        say(f"the run {path} is skipped: {found}", color="yellow")
    if problem is not None:
        raise problem
    return newest()


def launchers() -> list[tuple[Path, Launcher | UsageError]]:
    """The runs that were started from this working directory, with their launchers, the newest first.

    In place of a launcher whose file cannot be read stands the error.
    """
    found = [(path, _read_or_error(path)) for path in newest_first()]
    return [(path, one) for path, one in found if one is not None]


def _read_or_error(run_dir: Path) -> Launcher | UsageError | None:
    try:
        return read_launcher(run_dir)
    except UsageError as error:
        return error


def stop(run_dir: Path, *, kill: bool = False) -> None:
    """Ask the launchers of a run on this machine to stop their workers, and wait until they have ended.

    Args:
        run_dir: Directory of the run.
        kill: At once, without a checkpoint.

    Raises:
        UsageError: There is no such launcher, or it is another user's.
    """
    _at_work(run_dir)
    at_work = [launcher for launcher in read_launchers(run_dir) if launcher.alive]
    for launcher in at_work:
        try:
            psutil.Process(launcher.pid).terminate()
        except psutil.NoSuchProcess:
            continue
        except psutil.AccessDenied:
            raise UsageError(
                f"only the user who has started that run can stop it: its process is {launcher.pid}. "
                f"Received: {run_dir}"
            ) from None
    for launcher in at_work:
        with contextlib.suppress(psutil.NoSuchProcess):
            _wait_for_end(run_dir / launcher.file, launcher, kill=kill)


def _wait_for_end(file: Path, launcher: Launcher, *, kill: bool) -> None:
    if kill:
        # A second signal kills, but two that come at once are one, and so are two SIGTERMs within a second.
        latest = time.monotonic() + _WORD_S
        while launcher.alive and launcher.state == "running" and time.monotonic() < latest:
            time.sleep(_LOOK_S)
            launcher = _read(file) or launcher
        psutil.Process(launcher.pid).send_signal(signal.SIGINT)
    while launcher.alive:  # psutil's `wait` waits for whoever is to reap it, too
        time.sleep(_LOOK_S)


def _at_work(run_dir: Path) -> Launcher:
    launcher = read_launcher(run_dir)
    if launcher is not None and not launcher.is_here and not launcher.over:
        raise UsageError(f"this run belongs to another machine: give the command there. Received: host={launcher.host}")
    if launcher is None or not launcher.alive:
        raise UsageError(f"no `elasticflow run` is at work there. Received: {run_dir}")
    return launcher


def read_launcher(run_dir: Path) -> Launcher | None:
    """The state of the run's launcher (of several, that of one at work, if possible here); None if it had none."""
    found = read_launchers(run_dir)
    return max(found, key=lambda one: (one.alive, not one.over, one.local, one.began), default=None)


def read_launchers(run_dir: Path) -> list[Launcher]:
    """The states of all launchers that share the directory of a run."""
    return [one for one in map(_read, sorted(run_dir.glob(_LAUNCHERS))) if one is not None]


def _read(file: Path) -> Launcher | None:
    return read_record(Launcher, file)


def write_launcher(run_dir: Path, launcher: Launcher) -> None:
    """Write the launcher's state; only the launcher calls this."""
    write_json(run_dir / launcher.file, asdict(launcher))


def read_order(run_dir: Path) -> ScaleOrder | None:
    """The newest order, if there is one.

    Raises:
        UsageError: Its file cannot be read.
    """
    return read_record(ScaleOrder, run_dir / _WANTED)


def order(run_dir: Path, num_workers: int, *, num_spares: int = 0) -> ScaleOrder:
    """Order a number of workers from the launcher of a run.

    Args:
        run_dir: Directory of the run.
        num_workers: How many there shall be.
        num_spares: How many of them may be spares, which the maximal number of workers does not count.

    Raises:
        UsageError: There is no such launcher, it cannot start that many workers, or the order cannot be written.
    """
    launcher = _at_work(run_dir)
    if not launcher.local:
        raise UsageError(
            "this is one node of a larger job: start or end whole nodes instead (`elasticflow run`, Ctrl-C)"
        )
    if launcher.state != "running":
        raise UsageError("the run is about to end")
    if not 1 <= num_workers <= launcher.max_workers + num_spares:
        raise UsageError(
            f"this run can have 1 to {launcher.max_workers} workers (the number behind the colon of --nnodes). "
            f"Received: {num_workers}"
        )
    try:
        with locked(run_dir):  # of two orders at the same time, the launcher follows both, one after the other
            before = read_order(run_dir)
            made = ScaleOrder((before.number if before else 0) + 1, num_workers)
            write_json(run_dir / _WANTED, asdict(made))
    except OSError as error:
        raise UsageError(
            f"the order cannot be left in the run directory: {error.strerror}. Received: {run_dir}"
        ) from None
    return made


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory. Others on this machine that ask for it wait until it is free.

    Some file systems have no locks: there, nobody waits.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write JSON so that readers find either all of it or the previous content."""
    write_whole(path, json.dumps(value).encode())
