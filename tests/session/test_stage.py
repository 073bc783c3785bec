"""The diagram of the stages of a session shows what leads where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ef_common import errors
from ef_common.core.view import Member, View
from ef_common.errors import CallMismatch, CoordinatorLost, GroupBroken, TrainingOver
from ef_common.session import Barrier, Session, stage
from ef_common.session.settling_report import Surroundings
from ef_common.session.stage import Stage
from ef_common.testing.simulation.schedule import FAMILIES
from ef_common.testing.simulation.simulation import simulate
from tests.diagrams import rows, states, watch

ME, OTHER = Member("w", "n", ""), Member("v", "n", "")
ALONE, BOTH = View(1, (ME,)), View(1, (OTHER, ME))
NEXT, WITHOUT = View(2, (OTHER, ME), admitted_at=2), View(2, (OTHER,))


class Channel:
    """A channel over which these views come, or errors, each after a second."""

    change_pending = False

    def __init__(self, *coming: View | Exception, runs: bool = False) -> None:
        self._coming = list(coming)
        self._runs = runs
        self.sent: list[str] = []
        self.now = 0.0
        self.before_view: Callable[[], object] = lambda: None

    def start(self, on_view: Any) -> bool:
        return self._runs

    def send(self, kind: str, generation: int = 0) -> None:
        self.sent.append(kind)

    def next_view(self, after: int) -> View:
        self.now += 1.0
        self.before_view()
        found = self._coming.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def bootstrap(self, generation: int) -> None: ...

    def stop(self) -> None: ...


class Group:
    """The other member has completed as many collectives, or as many as a newcomer finds. Nothing travels.

    Args:
        newcomer: Whether this worker is one.
        error: What the meeting at a boundary raises.
        breaks_in: Generation of a view in which it breaks.
    """

    def __init__(
        self, view: View, *, newcomer: bool = False, error: Exception | None = None, breaks_in: int = 0
    ) -> None:
        self._newcomer, self._error, self._breaks = newcomer, error, view.generation == breaks_in
        self.is_aborted = False

    def all_gather(self, payload: bytes, call: str = "") -> list[bytes]:
        if self._breaks:
            raise GroupBroken("lost")
        return [Surroundings().report(7, 1).dump() if self._newcomer else payload, payload]

    def meet(self, call: str, tensors: Any = None) -> Group:
        return self

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def send(self, tensors: Any, target: int) -> None: ...

    def receive(self, tensors: Any, source: int, target: int | None = None) -> None:
        for tensor in tensors:
            tensor[:] = (1).to_bytes(len(tensor), "big")

    def abort(self) -> None:
        self.is_aborted = True


class Watched(Session):
    """Notes what leads from one stage to the next."""

    def __init__(self, channel: Channel | None, **group: Any) -> None:
        self.changes: list[str] = []
        self.channel = channel
        self.events: list[dict[str, Any]] = []
        groups = SimpleNamespace(build=lambda view, rank, bootstrap: Group(view, **group))
        super().__init__(
            ME,
            channel=cast(Any, channel),
            groups=cast(Any, groups),
            on_event=lambda kind, **fields: self.events.append(fields),
            clock=lambda: 0.0 if channel is None else channel.now,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "stage" and value is not self.__dict__.get(name, value):
            self.changes.append(f"{self.stage.name} → {value.name}")
        super().__setattr__(name, value)


class Breaking(Barrier):
    """The first attempt fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._errors = [error]

    def run(self, group: Any, view: View) -> None:
        if self._errors:
            raise self._errors.pop()
        super().run(group, view)


def founder(*coming: View | Exception, first: View = BOTH, **group: Any) -> Watched:
    """A member of the first view; it holds no state to begin with, and takes none in."""
    session = Watched(Channel(first, *coming), **group)
    session.start()
    return session


def newcomer(*coming: View | Exception) -> Watched:
    session = Watched(Channel(*coming, runs=True), newcomer=True)
    session.start()
    return session


def run(session: Watched, error: Exception) -> Watched:
    session.run(Breaking(error))
    return session


def go_to_boundary(session: Watched) -> Watched:
    session.agree(2.0)
    session.boundary()
    return session


def join(session: Watched, state: Any = None) -> Watched:
    session.state = state
    session.join()
    return session


def leave(session: Watched, act: Callable[[Watched], object]) -> Watched:
    session.leave()
    act(session)
    return session


def misfit() -> Any:
    def refuse(header: bytes) -> None:
        raise ValueError("of another model")

    return SimpleNamespace(prepare=lambda: None, tensors=lambda header: [], adopt=refuse)


WITNESSES: dict[str, Callable[[], Watched]] = {
    "OUTSIDE → RECOVERING": lambda: founder(first=ALONE),
    "OUTSIDE → WARMING": newcomer,
    "WARMING → JOINING": lambda: join(newcomer(BOTH)),
    "JOINING → WARMING": lambda: join(newcomer(TrainingOver("it is over"))),
    "JOINING → STEPPING": lambda: join(newcomer(BOTH)),
    "STEPPING → AT_BOUNDARY": lambda: go_to_boundary(founder(NEXT)),
    "AT_BOUNDARY → RECOVERING": lambda: go_to_boundary(founder(NEXT, error=GroupBroken("lost"))),
    "STEPPING → RECOVERING": lambda: run(founder(NEXT), GroupBroken("lost")),
    "RECOVERING → STEPPING": lambda: founder(first=ALONE),
    "OUTSIDE → Left": lambda: leave(Watched(Channel()), Session.start),
    "WARMING → Left": lambda: leave(newcomer(), Session.join),
    "JOINING → CannotJoin": lambda: join(newcomer(BOTH), misfit()),
    "STEPPING → CallMismatch": lambda: run(founder(), CallMismatch("other calls")),
    "AT_BOUNDARY → CallMismatch": lambda: go_to_boundary(founder(error=CallMismatch("other calls"))),
    "RECOVERING → Left": lambda: leave(founder(WITHOUT), cast(Any, go_to_boundary)),
    "RECOVERING → CoordinatorLost": lambda: run(founder(CoordinatorLost("it is gone")), GroupBroken("lost")),
    "ALONE → Left": lambda: leave(Watched(None), Session.boundary),
}


def test_diagram_has_a_witness_for_each_row() -> None:
    assert rows(stage) == list(WITNESSES)
    assert states(stage) == set(Stage.__members__)


@pytest.mark.parametrize("row", WITNESSES)
def test_each_row_of_the_diagram_is_true(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Watched] = []
    monkeypatch.setattr(Watched, "__init__", _noting(Watched.__init__, sessions))
    before, after = row.split(" → ")
    if after in Stage.__members__:
        with suppress(TrainingOver):
            WITNESSES[row]()
        assert row in sessions[0].changes
    else:
        with pytest.raises(getattr(errors, after)):
            WITNESSES[row]()
        assert sessions[0].stage.name == before


def _noting(init: Any, sessions: list[Watched]) -> Any:
    def noting(self: Watched, *args: Any, **kwargs: Any) -> None:
        sessions.append(self)
        init(self, *args, **kwargs)

    return noting


def test_nothing_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watch(monkeypatch, Session, "stage")
    for family in ("", "trainings"):
        for seed in range(10):
            assert simulate(FAMILIES[family](seed)).violation is None
    assert set(changes) == {row for row in WITNESSES if row.rpartition(" ")[2].isupper()}
