"""Which exceptions are told, and how."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common.core.view import Member
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
    ProtocolError,
    StorageFailed,
    UsageError,
)
from ef_common.launch.ending import InOrder
from ef_common.launch.failing import Failing, describe, is_users
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session.crash_record import CrashRecord, path_of, read, read_failure


class Told:
    """A session that notes what it is told."""

    worker = Member("w-1", "n", "")

    def __init__(self) -> None:
        self.crash_record, self.job = CrashRecord(), self
        self.told: list[str] = []
        self.entering = False
        self.stopped = 0
        self.newcomer = False
        self.world_size = 1

    def fail(self, why: str) -> bool:
        self.told.append(why)
        return True

    def stop(self) -> None:
        self.stopped += 1


def raised(error: BaseException, *, within: BaseException | None = None, cause: BaseException | None = None):
    try:
        if within is None:
            raise error from cause
        try:
            raise within
        except BaseException:
            raise error  # noqa: B904
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("error", [ValueError("x"), RuntimeError("x"), MemoryError(), UsageError("x"), Exception()])
def test_exception_of_the_code_is_the_users(error):
    assert is_users(raised(error))
    assert is_users(raised(error, within=KeyError("y")))
    # Handing on a result may fail, while the session recovers from a loss.
    assert is_users(raised(error, within=GroupBroken("y")))


@pytest.mark.parametrize(
    "fault",
    [
        Evicted("x"),
        CoordinatorLost("x"),
        JobFailed("x"),
        DataWorkersLost("x"),
        StorageFailed("x"),
        ProtocolError("x"),
        JobFinished(),
        Left(""),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_fault_and_what_follows_from_it_are_not_the_users(fault):
    assert not is_users(raised(fault))
    assert not is_users(raised(ValueError("x"), within=fault))
    assert not is_users(raised(ValueError("x"), cause=fault))


@pytest.mark.parametrize(
    "fault",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously …"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: no CUDA-capable device is detected"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ],
    ids=str,
)
def test_broken_machine_is_not_the_users(fault):
    assert not is_users(raised(fault))
    assert not is_users(raised(ValueError("x"), cause=fault))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("unknown error"),
    ],
    ids=str,
)
def test_what_the_code_can_be_the_cause_of_is_the_users(error):
    assert is_users(raised(error))


@pytest.mark.parametrize("error", [SystemExit(), SystemExit(0), InOrder(75), GroupBroken("x")], ids=repr)
def test_what_is_no_exception_of_the_code_is_not_told(error):
    session = Told()
    Failing(session).tell(raised(error))  # type: ignore[arg-type]
    assert session.told == []


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit("no data are there")], ids=repr)
def test_exit_with_another_status_than_0_is_an_exception_of_the_code(error):
    session = Told()
    Failing(session).tell(raised(error))  # type: ignore[arg-type]
    (why,) = session.told
    assert f"raised SystemExit: {error.code} (in raised, " in why


def test_exit_after_a_fault_an_interrupt_or_a_notice_is_none():
    for earlier in (KeyboardInterrupt(), Evicted("x")):
        assert not is_users(raised(SystemExit(1), within=earlier))
    session = Told()
    Failing(session, is_told=lambda: True).tell(raised(SystemExit(143)))  # type: ignore[arg-type]
    assert session.told == []


class Leaves:
    """A handler that is no function."""

    def __call__(self, number, frame):
        sys.exit(128 + number)


@pytest.mark.parametrize(
    "handler", [lambda number, frame: sys.exit(128 + number), Leaves()], ids=["function", "object"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_exit_in_a_handler_of_the_programs_own_is_none(number, handler):
    before, session = signal.signal(number, handler), Told()
    try:
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(number)
        Failing(session).tell(ended.value)  # type: ignore[arg-type]
    finally:
        signal.signal(number, before)
    assert session.told == []


def test_interrupt_that_code_raises_is_one_in_each_worker():
    session = Told()
    Failing(session).tell(raised(KeyboardInterrupt()))  # type: ignore[arg-type]
    (why,) = session.told
    with pytest.raises(KeyboardInterrupt, match="interrupted the job") as interrupt, leaving_cleanly():
        raise JobFailed(why)
    other = Told()
    Failing(other).tell(interrupt.value)  # type: ignore[arg-type]
    assert other.told == []


def test_signal_from_outside_interrupts_this_worker_alone(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    ends: list[str] = []
    monkeypatch.setattr("ef_common.launch.failing.end_soon", lambda: ends.append("soon"))
    session = Told()
    failing = Failing(session)  # type: ignore[arg-type]
    failing.end_soon_if_interrupted()
    assert ends == []
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        failing.install()
        with pytest.raises(KeyboardInterrupt) as interrupt:
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    failing.tell(interrupt.value)
    assert session.told == []
    failing.end_soon_if_interrupted()
    assert ends == ["soon"]


def test_fault_excuses_the_worker_and_nothing_else_does(tmp_path):
    for error, excused in (
        (raised(Evicted("x")), True),
        (raised(JobFailed("boom")), False),
        (raised(KeyError()), False),
    ):
        session = Told()
        session.crash_record = CrashRecord(tmp_path)
        Failing(session).tell(error)  # type: ignore[arg-type]
        noted = read(path_of(tmp_path, 0))
        assert noted is not None
        assert noted.excused is excused
        (tmp_path / "worker-0").unlink()
    assert read_failure(tmp_path) == session.told[0]


def test_failure_of_another_worker_is_noted(tmp_path):
    session = Told()
    session.crash_record = CrashRecord(tmp_path)
    Failing(session).tell(raised(Evicted("x")))  # type: ignore[arg-type]
    assert read_failure(tmp_path) == ""
    Failing(session).tell(raised(JobFailed("boom")))  # type: ignore[arg-type]
    assert read_failure(tmp_path) == "boom"


def test_exception_that_the_others_have_not_heard_of_is_not_noted_as_the_end_of_the_job(tmp_path):
    session = Told()
    session.crash_record = CrashRecord(tmp_path)
    session.fail = lambda why: False  # type: ignore[method-assign]
    Failing(session).tell(raised(KeyError()))  # type: ignore[arg-type]
    assert read_failure(tmp_path) == ""


def test_exception_is_told_once_with_worker_node_message_and_place():
    session = Told()
    failing = Failing(session)  # type: ignore[arg-type]
    failing.tell(raised(ValueError("too large")))
    failing.tell(raised(KeyError("y")))
    (why,) = session.told
    assert why.startswith("worker w-1 (node n) raised ValueError: too large (in raised, ")
    assert f"{__file__}:" in why


def test_long_message_leaves_room_for_the_place():
    assert "(in raised, " in describe(raised(ValueError("y" * 10_000)))[:400]


def test_exception_that_nobody_catches_is_shown_and_told(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    session = Told()
    Failing(session).install()  # type: ignore[arg-type]
    error = raised(ValueError("too large"))
    sys.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.count("ValueError: too large") == 1
    assert len(session.told) == 1


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Ends a worker by an exception."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    Failing(Told()).install()  # type: ignore[arg-type]
    return lambda error: sys.excepthook(type(error), error, error.__traceback__)


class Output(io.StringIO):
    """Notes each write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        if text:
            self.writes.append(text)
        return len(text)


def test_traceback_is_printed_at_once(hook, monkeypatch):
    output = Output()
    monkeypatch.setattr(sys, "stderr", output)
    hook(raised(ValueError("too large"), within=KeyError("y")))
    (text,) = output.writes
    assert text.startswith("Traceback ")
    assert "KeyError: 'y'" in text
    assert text.endswith("\nValueError: too large\n")


@pytest.mark.parametrize("within", [None, GroupBroken("peer")])
def test_failure_of_another_worker_is_one_line(hook, capsys, within):
    hook(raised(JobFailed("worker w-2 (node n) raised ValueError: x"), within=within))
    assert capsys.readouterr().err == "ef_common.errors.JobFailed: worker w-2 (node n) raised ValueError: x\n"


@pytest.mark.parametrize("kind", [AuthenticationError, CoordinatorLost, Evicted, CannotJoin])
def test_fault_of_the_job_is_one_line(hook, capsys, kind):
    hook(raised(kind("the tokens differ"), within=ConnectionResetError("peer")))
    assert capsys.readouterr().err == f"ef_common.errors.{kind.__name__}: the tokens differ\n"


def test_usage_error_at_which_a_newcomer_failed_is_told_in_its_own_line(hook, capsys):
    error = CannotJoin("it cannot go on. The reason: UsageError: x")
    error.__cause__ = raised(UsageError("x"))
    hook(error)
    assert capsys.readouterr().err == f"ef_common.errors.CannotJoin: {error}\n"


def test_error_at_which_a_newcomer_failed_is_shown(hook, capsys):
    error = CannotJoin("it cannot go on")
    error.__cause__ = raised(KeyError("layer.weight"))
    hook(error)
    assert "Traceback" in capsys.readouterr().err


def test_failure_of_another_worker_does_not_hide_an_exception_of_this_one(hook, capsys):
    hook(raised(JobFailed("boom"), within=ValueError("too large")))
    text = capsys.readouterr().err
    assert "ValueError: too large" in text
    assert "JobFailed: boom" in text


def test_hook_of_the_user_shows_exceptions_in_its_own_way(monkeypatch, capsys):
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    Failing(Told()).install()  # type: ignore[arg-type]
    error = raised(ValueError("x"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert shown == [error]
    assert capsys.readouterr().err == ""


def test_exception_is_told_even_if_it_cannot_be_shown(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "stderr", None)
    session = Told()
    Failing(session).install()  # type: ignore[arg-type]
    error = raised(ValueError("x"))
    sys.excepthook(ValueError, error, error.__traceback__)
    assert len(session.told) == 1


def test_exception_that_is_caught_is_told_at_the_end_unless_another_training_begins():
    session = Told()
    failing = Failing(session)  # type: ignore[arg-type]
    failing.postpone(raised(ValueError("too large")))
    failing.forget()
    failing.tell_postponed()
    assert session.told == []
    failing.postpone(raised(ValueError("too small")))
    failing.tell_postponed()
    failing.tell_postponed()
    (why,) = session.told
    assert "too small" in why


def test_exception_that_was_told_is_not_told_again_at_the_end():
    session = Told()
    failing = Failing(session)  # type: ignore[arg-type]
    failing.postpone(raised(ValueError("x")))
    failing.tell(raised(ValueError("x")))
    failing.tell_postponed()
    assert len(session.told) == 1


def test_exception_before_the_first_step_of_a_newcomer_ends_it_alone() -> None:
    session = Told()
    session.entering = True
    Failing(session).tell(ValueError("this machine lacks a file"))  # type: ignore[arg-type]
    assert (session.told, session.stopped) == ([], 1)


@pytest.mark.parametrize("newcomer", [True, False])
def test_newcomer_that_the_others_do_without_is_excused(newcomer: bool, tmp_path: Path) -> None:
    session = Told()
    session.newcomer, session.crash_record = newcomer, CrashRecord(tmp_path, 0)
    session.fail = lambda why: False  # type: ignore[method-assign]
    Failing(session).tell(raised(ValueError("this machine lacks a file")))  # type: ignore[arg-type]
    record = read(path_of(tmp_path, 0))
    assert record is not None
    assert record.excused is newcomer
    assert not read_failure(tmp_path)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("others", ["none", "members", "those that it joins"])
def test_exception_that_leaves_a_training_is_told_at_once_if_there_are_others(error: BaseException, others: str):
    session = Told()
    session.newcomer, session.world_size = others == "those that it joins", 1 + (others == "members")
    failing = Failing(session)  # type: ignore[arg-type]
    failing.tell_if_heard(raised(error))
    assert len(session.told) == (others != "none")
    failing.tell_postponed()
    assert len(session.told) == 1
