from __future__ import annotations

from ef_common.testing.simulation.scheduler import Process, Scheduler, Ticket


def test_scheduler_with_events_at_one_time_keeps_their_order() -> None:
    scheduler = Scheduler(0)
    seen: list[str] = []
    scheduler.after(2.0, seen.append, "c")
    scheduler.after(1.0, seen.append, "a")
    scheduler.after(1.0, seen.append, "b")

    while scheduler.advance():
        pass

    assert seen == ["a", "b", "c"]
    assert scheduler.now == 2.0


def test_process_that_sleeps_wakes_at_its_time() -> None:
    scheduler = Scheduler(0)
    woke: list[float] = []

    def run() -> None:
        process.sleep(1.5)
        woke.append(scheduler.now)

    process = Process(scheduler, "p", run)
    process.start()
    while scheduler.advance():
        pass

    assert woke == [1.5]
    assert not process.alive


def test_process_frozen_while_it_waits_goes_on_when_it_thaws() -> None:
    scheduler = Scheduler(0)
    seen: list[object] = []

    def run() -> None:
        seen.append(process.wait())

    process = Process(scheduler, "p", run)
    process.start()
    ticket = Ticket(process)
    process.freeze()
    ticket.resolve("value")
    ticket.resolve("again")
    assert seen == []

    process.thaw()

    assert seen == ["value"]


def test_process_killed_while_it_waits_never_goes_on() -> None:
    scheduler = Scheduler(0)
    seen: list[object] = []

    def run() -> None:
        seen.append(process.wait())

    process = Process(scheduler, "p", run)
    process.start()
    process.kill()
    Ticket(process).resolve("value")

    assert seen == []
    assert not process.alive
