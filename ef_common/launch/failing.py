"""What a worker reports when an exception ends it.

An exception of the user's code would recur wherever it is tried again, so it ends the job: the coordinator tells the
others. In a newcomer that has not begun its first step, it ends only this newcomer. A lasting failure of a peer, the
network, a store or this machine (its GPU, its disks) is not the code's fault: it costs only this worker, which its
launcher may start again.

A KeyboardInterrupt that code raises ends the job, too, and is raised in each worker. SIGINT from outside is a fault
like any other, and costs only this worker. `sys.exit` with a status other than 0 in a training is an exception of the
code, unless a handler of the program's own calls it on a notice to leave.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import FrameType, NoneType, TracebackType

from ef_common.errors import (
    AuthenticationError,
    CannotJoin,
    CoordinatorLost,
    DataWorkersLost,
    Evicted,
    GroupBroken,
    JobFailed,
    JobFinished,
    Left,
    MembershipError,
    ProtocolError,
    StorageError,
    ThreadFailed,
    UsageError,
)
from ef_common.launch.ending import InOrder, end_soon
from ef_common.launch.notices import SIGNALS
from ef_common.session import Session

logger = logging.getLogger(__name__)

_NO_FAULT_OF_THE_CODE = (
    MembershipError,
    StorageError,
    DataWorkersLost,
    ThreadFailed,
    ProtocolError,
    JobFinished,
    Left,
)
_NO_FAULT_OF_THE_PROGRAM = (AuthenticationError, CoordinatorLost, Evicted)
_OF_A_DISK = (errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENODEV, errno.ENXIO)
# What CUDA says of a GPU that is broken or gone. Its other errors (out of memory, an assertion or an illegal access in
# a kernel) come from the code.
_OF_A_GPU = re.compile(
    r"CUDA.*(uncorrectable (ECC|NVLink) error|hardware (stack )?error|unspecified launch failure|unknown error"
    r"|no CUDA-capable device|busy or unavailable|fallen off the bus)",
    re.IGNORECASE | re.DOTALL,
)
_FROM_OUTSIDE = (signal.SIGINT, *SIGNALS)
_NO_ERROR = (SystemExit, KeyboardInterrupt, GeneratorExit)
_INTERRUPTED = "interrupted the job by a KeyboardInterrupt"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Failing:
    """Reports the exception that ends this worker to the others, once.

    Args:
        session: The worker's session.
        is_told: Returns whether a signal has told this worker to leave.

    Attributes:
        has_failed: An exception ends this process.
    """

    def __init__(self, session: Session, *, is_told: Callable[[], bool] = lambda: False) -> None:
        self.has_failed = False
        self._session = session
        self._is_told = is_told
        self._told = False
        self._signalled = False
        self._postponed: str | None = None
        self._before: Hook = sys.__excepthook__

    def install(self) -> None:
        """Also report uncaught exceptions, after they have been printed."""
        self._before, sys.excepthook = sys.excepthook, self._show_and_tell
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupted)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        signal.default_int_handler(number, frame)

    def end_soon_if_interrupted(self) -> None:
        """Be called at the end of the process, when the others know of it: the launcher still waits for that end."""
        if self._signalled:
            end_soon()

    def _show_and_tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # the output may be gone
            if self._before is sys.__excepthook__:
                _show(error)
            else:
                self._before(kind, error, trace)
            sys.stderr.flush()
        self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Report this exception if the user's code has raised it. Waits for at most two seconds."""
        self.has_failed = True
        if isinstance(error, KeyboardInterrupt) and isinstance(error.__cause__, JobFailed):
            error = error.__cause__
        if self._told:
            return
        if self._session.entering:
            self._leave()
            return
        if self._is_of_the_code(error):
            self._tell(self._why(error))
            return
        if isinstance(error, _NO_ERROR):
            return
        self._told = True
        record = self._session.crash_record
        if isinstance(error, JobFailed):
            record.fail(str(error))
        else:
            record.excuse()

    def _leave(self) -> None:
        """Handle an exception before the first step, which the others wait for. This machine may have caused it."""
        self._told = True
        logger.warning("this worker has joined, but fails before its first step: the others continue without it")
        self._session.stop()
        self._session.crash_record.excuse()

    def tell_if_heard(self, error: BaseException) -> None:
        """Report an exception that leaves a training.

        Where there are no others, the program may catch it and train again, so newcomers are told at its end.
        """
        session = self._session
        if session.newcomer or session.world_size > 1 or not self._is_of_the_code(error):
            self.tell(error)
        else:
            self.postpone(error)

    def postpone(self, error: BaseException) -> None:
        """Report an exception of the user's code at the end of the program, unless another training begins.

        The exception itself is let go of: it holds all that was on the stack.
        """
        self._postponed = self._why(error)

    def forget(self) -> None:
        """The program continues, so a postponed exception is not reported."""
        self._postponed, self.has_failed = None, False

    def tell_postponed(self) -> None:
        """The program ends: report a postponed exception, if there is one."""
        if self._postponed is not None and not self._told:
            self._tell(self._postponed)

    def _is_of_the_code(self, error: BaseException) -> bool:
        if isinstance(error, KeyboardInterrupt):
            return not self._signalled
        if isinstance(error, SystemExit) and (self._is_told() or _is_of_a_handler(error)):
            return False
        return is_users(error)

    def _why(self, error: BaseException) -> str:
        worker, record = self._session.worker, self._session.crash_record
        where = f" at step {record.step} of epoch {record.epoch}" if record.epoch >= 0 else ""
        what = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"raised {describe(error)}"
        return f"worker {worker.id} (node {worker.node}) {what}{where}"

    def _tell(self, why: str) -> None:
        self._told = True
        if self._session.job.fail(why):
            self._session.crash_record.fail(why)
        elif self._session.newcomer:
            self._session.crash_record.excuse()  # the job goes on without it: its machine may lack something
        else:
            logger.warning("not all other workers have heard that an exception of its own ends this worker")


def is_interruption(failure: JobFailed) -> bool:
    """Whether another worker's code has raised a KeyboardInterrupt."""
    return _INTERRUPTED in str(failure)


def is_users(error: BaseException) -> bool:
    """Whether this is an exception of the user's code, and not the consequence of a fault.

    >>> is_users(ValueError("x")), is_users(MembershipError("x"))
    (True, False)
    """
    if ends_in_order(error) or isinstance(error, (KeyboardInterrupt, GeneratorExit, GroupBroken)):
        return False
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):  # as Lightning ends then
        return False
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _NO_FAULT_OF_THE_CODE) or _is_the_machines(cause):
            return False
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return True


def _is_of_a_handler(error: BaseException) -> bool:
    """Whether an exception was raised in the handler of a signal from outside, the program's own or one around it."""
    handlers = [signal.getsignal(number) for number in _FROM_OUTSIDE]
    codes = {
        getattr(one, "__code__", getattr(type(one).__call__, "__code__", None)) for one in handlers if callable(one)
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def ends_in_order(error: BaseException) -> bool:
    """Whether the process ends as it is meant to: by `sys.exit` with status 0, or because its worker leaves.

    >>> ends_in_order(SystemExit()), ends_in_order(SystemExit(3)), ends_in_order(SystemExit("no data"))
    (True, False, False)
    """
    return isinstance(error, InOrder) or (isinstance(error, SystemExit) and error.code in (0, None))


def _show(error: BaseException) -> None:
    """Print the traceback in one piece, so that it does not mix with those of workers that share the output.

    Where the job's own faults have reached this worker explains nothing: of these only the message is printed.
    """
    is_elsewhere = isinstance(error, JobFailed) and isinstance(error.__context__, (GroupBroken, NoneType))
    says_all = isinstance(error, CannotJoin) and isinstance(error.__cause__, UsageError | None)
    is_plain = says_all or isinstance(error, _NO_FAULT_OF_THE_PROGRAM)
    lines = traceback.format_exception_only(error) if is_elsewhere or is_plain else traceback.format_exception(error)
    sys.stderr.write("".join(lines))


def _is_the_machines(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _OF_A_DISK
    return isinstance(error, RuntimeError) and _OF_A_GPU.search(str(error)) is not None


def describe(error: BaseException) -> str:
    """The exception's type, message and last frame.

    >>> describe(ValueError("too large"))
    'ValueError: too large'
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text[:300]} (in {last.name}, {last.filename}:{last.lineno})"
