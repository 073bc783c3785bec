"""What the parts of a session have in common: the process in which they run, its view, and its collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ef_common.session.collective_log import CollectiveLog
from ef_common.session.crash_record import CrashRecord
from ef_common.session.current_view import CurrentView
from ef_common.session.ports import ControlChannel, GroupFactory
from ef_common.session.progress_tracker import ProgressTracker
from ef_common.session.settling_report import Surroundings


@dataclass(frozen=True, slots=True)
class Context:
    """What the parts of a session share: what it was given, and how far it has come.

    Args:
        channel: Control connection.
        groups: Builds the process group of each view.
        on_event: Called with (kind, fields) for the event log.
        clock: Monotonic time in seconds, for the durations in the events.
        tracker: Records this worker's progress, for others to read.
        surroundings: Its software and its clock, which newcomers compare with those of the others.
        current: The view and its group.
        collectives: Those that this worker has completed.
        crash_record: Where its launcher reads what it works on.
    """

    channel: ControlChannel
    groups: GroupFactory
    on_event: Callable[..., None]
    clock: Callable[[], float]
    tracker: ProgressTracker
    surroundings: Surroundings
    current: CurrentView
    collectives: CollectiveLog
    crash_record: CrashRecord
