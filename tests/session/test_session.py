"""What a session does by itself, before any other member is there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from ef_common.core.replay import FRESH
from ef_common.core.view import Member, View
from ef_common.core.watermark import Watermark
from ef_common.errors import (
    CannotJoin,
    CoordinatorLost,
    GroupBroken,
    JobFinished,
    Left,
    MembershipError,
    ProtocolError,
    UnsupportedError,
)
from ef_common.session import Barrier, Session
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.settling_report import Surroundings


class Channel:
    """A channel to a coordinator that tells a newcomer, once it is ready, that the job is over."""

    change_pending = False

    def __init__(self, order: list[str]) -> None:
        self._order = order

    def start(self, on_view: Any) -> bool:
        return True

    def send(self, kind: str, generation: int = 0) -> None:
        self._order.append(kind)

    def next_view(self, after: int) -> Any:
        raise JobFinished("it is over")


class State:
    def __init__(self, order: list[str]) -> None:
        self._order = order

    def prepare(self) -> None:
        self._order.append("prepare")


def test_newcomer_prepares_before_the_others_are_told_to_wait_for_it() -> None:
    order: list[str] = []
    channel: Any = Channel(order)
    session = Session(Member("w", "n", ""), channel=channel, groups=None)  # type: ignore[arg-type]
    session.state = State(order)  # type: ignore[assignment]
    assert session.start()
    with pytest.raises(JobFinished):
        session.join()
    assert order == ["prepare", "ready"]


class Founding:
    """A channel to a coordinator whose first view has so many members."""

    change_pending = False

    def __init__(self, num_members: int) -> None:
        self.view = View(1, tuple(Member(name, "n", "") for name in "wxyz"[:num_members]))
        self.watermarks: list[Watermark] = []

    def start(self, on_view: Any) -> bool:
        return False

    def send(self, kind: str, generation: int = 0) -> None: ...

    def next_view(self, after: int) -> View:
        return self.view

    def bootstrap(self, generation: int) -> None: ...

    def tell_watermark(self, watermark: Watermark) -> None:
        self.watermarks.append(watermark)


class Group:
    """Everybody says what this worker says."""

    def __init__(self, size: int) -> None:
        self._size = size

    def meet(self, call: str, tensors: Any = None) -> Group:
        return self

    def wait(self) -> None: ...

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        return [payload] * self._size

    def send(self, tensors: Any, target: int) -> None: ...


class Groups:
    def build(self, view: View, *, rank: int, bootstrap: Any) -> Group:
        return Group(view.world_size)


def test_collective_of_what_is_called_in_one_worker_alone_is_refused_and_named() -> None:
    session = Session(Member("w", "n", ""), channel=None, groups=None)  # type: ignore[arg-type]
    with (
        session.alone("on_save_checkpoint"),
        pytest.raises(UnsupportedError, match="on_save_checkpoint exchanges values with the other workers"),
    ):
        session.run(Barrier())
    session.run(Barrier())


def test_collective_is_possible_again_after_what_was_called_alone_has_failed() -> None:
    session = Session(Member("w", "n", ""), channel=None, groups=None)  # type: ignore[arg-type]
    with pytest.raises(ArithmeticError), session.alone("on_save_checkpoint"):
        raise ArithmeticError
    session.run(Barrier())


def test_wish_that_a_newcomer_computes_by_itself_is_not_heard() -> None:
    session = Session(Member("w", "n", ""), channel=Channel([]), groups=None)  # type: ignore[arg-type]
    session.start()
    session.agree(0.0, 1.0)
    assert not session.agreements.take_wish(session.completed_in)


# ---------------------------------------------------------------- leaving


class Lonely(Founding):
    """A channel that is lost after the first view."""

    def next_view(self, after: int) -> View:
        if after:
            raise CoordinatorLost("it is gone")
        return self.view


def saving(session: Session) -> list[str]:
    saved: list[str] = []
    session.on_last_leave = lambda: saved.append(session.worker.id)
    return saved


def assert_saves_at_the_boundary_and_leaves(session: Session) -> None:
    saved = saving(session)
    assert not session.boundary()
    session.leave()
    with pytest.raises(Left):
        session.boundary()
    assert saved == ["w"]


def test_session_without_a_coordinator_saves_at_the_boundary_and_leaves() -> None:
    session = Session(Member("w", "n", ""), channel=None, groups=None)  # type: ignore[arg-type]
    assert_saves_at_the_boundary_and_leaves(session)


def test_session_alone_leaves_also_if_the_coordinator_is_lost() -> None:
    channel: Any = Lonely(1)
    session = Session(channel.view.members[0], channel=channel, groups=Groups())  # type: ignore[arg-type]
    session.start()
    assert_saves_at_the_boundary_and_leaves(session)


def test_session_that_cannot_save_ends_with_the_error() -> None:
    session = Session(Member("w", "n", ""), channel=None, groups=None)  # type: ignore[arg-type]
    session.on_last_leave = lambda: int("no number")
    session.leave()
    with pytest.raises(ValueError, match="no number"):
        session.boundary()


def test_member_whose_group_has_broken_before_a_boundary_tells_so_and_does_not_wait_as_if_all_had_met() -> None:
    """Others may wait in the meeting for ever: it may have broken at this end alone."""

    class Broken(Group):
        def meet(self, call: str, tensors: Any = None) -> Group:
            raise GroupBroken("a worker is lost")

        def abort(self) -> None: ...

    class Planning(Founding):
        """A channel over which no view comes after the first one."""

        def __init__(self) -> None:
            super().__init__(2)
            self.sent: list[tuple[str, int]] = []

        def send(self, kind: str, generation: int = 0) -> None:
            self.sent.append((kind, generation))

        def next_view(self, after: int) -> View:
            if after:
                raise CoordinatorLost("it is gone")
            return self.view

    channel: Any = Planning()
    groups: Any = SimpleNamespace(build=lambda view, rank, bootstrap: Broken(2))
    session = Session(channel.view.members[0], channel=channel, groups=groups)
    session.start()
    session.agree(2.0)
    with pytest.raises(CoordinatorLost):
        session.boundary()
    told = [message for message in channel.sent if message[0] in ("suspect", "at_boundary")]
    assert told == [("suspect", session.view.generation)]


@pytest.mark.parametrize("call", [Session.start, Session.join])
def test_session_that_is_no_member_leaves_before_it_asks_for_anything(call: Any) -> None:
    order: list[str] = []
    channel: Any = Channel(order)
    session = Session(Member("w", "n", ""), channel=channel, groups=None)  # type: ignore[arg-type]
    saved = saving(session)
    if call is Session.join:
        session.start()
    session.leave()
    with pytest.raises(Left):
        call(session)
    assert (order, saved) == (["leave"], [])


class Picky(State):
    def __init__(self, order: list[str], *, at: str) -> None:
        super().__init__(order)
        self._at = at

    def tensors(self, header: bytes | None) -> list[Any]:
        if self._at == "tensors":
            raise ValueError("of another shape")
        return []

    def adopt(self, header: bytes) -> None:
        raise ValueError("of another model")


class Sending(Group):
    """A member that sends a state."""

    aborted = False

    def receive(self, tensors: list[Any], source: int, target: int | None = None) -> None:
        for tensor in tensors:
            tensor[:] = (1).to_bytes(len(tensor), "big")

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        return [Surroundings().report(completed, 1).dump() for completed in (7, FRESH)]

    def abort(self) -> None:
        self.aborted = True


class Admitting(Founding):
    """A channel to a coordinator that admits a newcomer as the second of two."""

    def __init__(self, order: list[str]) -> None:
        super().__init__(2)
        self._order = order

    def start(self, on_view: Any) -> bool:
        return True

    def send(self, kind: str, generation: int = 0) -> None:
        self._order.append(kind)

    def stop(self) -> None:
        self._order.append("stop")


@pytest.mark.parametrize("at", ["tensors", "adopt"])
def test_newcomer_that_cannot_take_in_the_state_says_goodbye_and_holds_up_nobody(at: str) -> None:
    order: list[str] = []
    group, channel = Sending(2), Admitting(order)
    groups: Any = SimpleNamespace(build=lambda view, rank, bootstrap: group)
    session = Session(Member("x", "n", ""), channel=cast(Any, channel), groups=groups)
    session.state = cast(Any, Picky(order, at=at))
    assert session.start()
    with pytest.raises(CannotJoin, match=r"ends, .* cannot go on .* ValueError: of another") as raised:
        session.join()
    assert isinstance(raised.value.__cause__, ValueError)
    assert order[-2:] == ["bye", "stop"]
    assert group.aborted
    assert session.newcomer


def test_newcomer_answers_its_own_collectives_until_its_first_step() -> None:
    session = Session(Member("w", "n", ""), channel=cast(Any, Founding(2)), groups=cast(Any, Groups()))
    session.start()
    completed, session.entering = session.completed, True
    assert session.run(Barrier()).ids == ("w",)
    assert session.completed == completed


# ---------------------------------------------------------------- trainings


class Telling(Founding):
    """A channel that keeps what is told. The others are in this training."""

    def __init__(self, *, newcomer: bool = False, training: int = 1) -> None:
        super().__init__(2)
        self.view = View(1, (Member("x", "n", ""), Member("y", "n", "")))
        self.told: list[tuple[str, int]] = []
        self.newcomer, self.training = newcomer, training

    def start(self, on_view: Any) -> bool:
        return self.newcomer

    def send(self, kind: str, generation: int = 0) -> None:
        self.told.append((kind, generation))

    def job_training(self) -> int:
        return self.training


class Gathering(Groups):
    """Others say this."""

    def __init__(self, *others: bytes) -> None:
        self._others = list(others)

    def build(self, view: View, *, rank: int, bootstrap: Any) -> Group:
        group, others = Group(view.world_size), self._others
        if others:
            group.all_gather = lambda payload, call="": [*others, payload]  # type: ignore[method-assign]
        return group


def session_of(channel: Any, groups: Any = None) -> Session:
    return Session(Member("x", "n", ""), channel=channel, groups=groups or Groups())


def test_member_tells_of_later_trainings_and_of_the_end_of_a_program_that_has_trained() -> None:
    channel = Telling()
    session = session_of(channel)
    session.start()
    del channel.told[:]
    session.close()
    assert channel.told == []  # it has only evaluated
    session.trainings.begin(1)
    session.trainings.end()
    session.trainings.begin(2)
    session.close()  # in the middle of a training
    assert channel.told == [("begin", 2)]
    session.trainings.end()
    session.close()
    assert channel.told == [("begin", 2), ("close", 0)]


def test_member_is_never_behind() -> None:
    channel = Telling(training=2)
    session = session_of(channel)
    session.start()
    assert not session.trainings.is_behind


def test_newcomer_tells_its_training_when_it_is_ready_and_nothing_else() -> None:
    channel = Telling(newcomer=True, training=2)
    session = session_of(channel)
    assert session.start()
    session.trainings.begin(1)
    assert session.trainings.is_behind
    session.trainings.skip(has_result=False)
    session.trainings.end()
    session.close()
    session.trainings.begin(2)
    assert not session.trainings.is_behind
    assert channel.told == []
    session.join()
    assert channel.told[0] == ("ready", 2)
    assert not session.trainings.is_behind


def test_newcomer_that_is_admitted_to_another_training_takes_no_state() -> None:
    session = session_of(Telling(newcomer=True), Gathering(Surroundings().report(3, 2).dump()))
    session.state = State([])  # type: ignore[assignment]
    session.start()
    with pytest.raises(ProtocolError, match=r"admitted to training 1 while others are in \[2\]"):
        session.join()


@pytest.mark.parametrize("has_result", [False, True])
def test_newcomer_that_lacks_a_result_does_not_begin_anew_without_the_others(has_result: bool) -> None:
    channel = Telling(newcomer=True)
    channel.view = View(2, (Member("x", "n", ""), Member("y", "n", "")))
    session = session_of(channel, Gathering(Surroundings().report(FRESH, 2).dump()))
    session.start()
    session.trainings.begin(1)
    session.trainings.skip(has_result=has_result)
    session.trainings.begin(2)
    if has_result:
        session.join()
    else:
        with pytest.raises(MembershipError, match="begins with the first training"):
            session.join()


def test_process_is_not_watched_between_trainings() -> None:
    tracker = ProgressTracker(lambda: 0.0)
    session = Session(Member("x", "n", ""), channel=None, groups=None, tracker=tracker)  # type: ignore[arg-type]
    session.trainings.begin(1)
    assert not tracker.rests
    session.trainings.end()
    assert tracker.rests
    session.trainings.begin(2)
    assert not tracker.rests
