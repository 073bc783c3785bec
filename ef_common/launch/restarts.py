"""What a launcher does when one of its workers has died: count, wait longer each time, and finally give up.

The count is in a directory, next to the workers' crash records (:mod:`ef_common.session.crash_record`), so it outlives
the launcher's own process.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ef_common.core.doubling import doubled_s
from ef_common.launch.run_directory import write_json
from ef_common.session import crash_record
from ef_common.session.crash_record import Crash

MAX_AT_ONE_STEP = 3
"""Number of deaths at one step that ends the job."""
TRAINED_WELL_S = 60.0
"""A worker that has trained for this long resets the count of failures."""
LONGEST_PAUSE_S = 30.0
_COUNT = "deaths"
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Death:
    """The death of a worker.

    Args:
        local_rank: Local rank of the worker.
        status: Its exit status, minus the signal that ended it; None if it is not known.
        crash: Its crash record; None if it never became a worker.
    """

    local_rank: int
    status: int | None
    crash: Crash | None

    @property
    def how(self) -> str:
        """The signal, or the exit status."""
        if self.status is None:
            return "it is not known how"
        if self.status >= 0:
            return f"exit status {self.status}"
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"

    @property
    def at(self) -> tuple[int, int, bool] | None:
        """Epoch, step, and whether it was in the step; None before the first step or if the fault was elsewhere."""
        if self.crash is None or self.crash.excused or self.crash.epoch < 0:
            return None
        return self.crash.epoch, self.crash.step, self.crash.in_step

    @property
    def where(self) -> str:
        """The step, in words."""
        if self.crash is None:
            return "before it had joined"
        if self.crash.epoch < 0:
            return "before its first step"
        return f"{'at' if self.crash.in_step else 'after'} step {self.crash.step} of epoch {self.crash.epoch}"

    @property
    def positions(self) -> str:
        """The positions that it was working on, in words."""
        if self.crash is None or not self.crash.in_step or not self.crash.ranges:
            return ""
        spans = [f"{start}-{stop - 1}" if stop - start > 1 else f"{start}" for start, stop in self.crash.ranges]
        shown = sum(stop - start for start, stop in self.crash.ranges[:_MAX_SHOWN])
        more = f" and {self.crash.num_positions - shown} more" if shown < self.crash.num_positions else ""
        return (
            f", on the positions {', '.join(spans[:_MAX_SHOWN])}{more} in the order of the epoch (which are indices of "
            "the data set only if nothing shuffles)"
        )


@dataclass(frozen=True, slots=True)
class Count:
    """The deaths so far.

    Args:
        in_a_row: Since a worker has trained well.
        total: All of them.
        at: Where the newest was; see :attr:`Death.at`.
        times: How many have been there, one after the other.
        excused: The newest was the fault of a peer, the network, a store or this machine, as far as anybody can tell.
    """

    in_a_row: int = 0
    total: int = 0
    at: tuple[int, int, bool] | None = None
    times: int = 0
    excused: bool = False

    def after(self, death: Death) -> Count:
        """The count with one more death."""
        trained_well = death.crash is not None and death.crash.trained_s >= TRAINED_WELL_S
        again = death.at is not None and death.at == self.at
        return Count(
            in_a_row=1 if trained_well else self.in_a_row + 1,
            total=self.total + 1,
            at=death.at,
            times=(self.times if again else 0) + (death.at is not None),
            excused=death.crash is not None and death.crash.excused,
        )

    @property
    def pause_s(self) -> float:
        """How long to wait before the next start: 0, 1, 2, 4 … s."""
        return 0.0 if self.in_a_row <= 1 else doubled_s(1.0, self.in_a_row - 2, most_s=LONGEST_PAUSE_S)


class Restarts:
    """The deaths of the workers whose crash records are in a directory.

    Args:
        directory: The directory.
        local_rank: The only one of these workers that is meant: it dies alone, and is counted for itself.
    """

    def __init__(self, directory: Path, local_rank: int | None = None) -> None:
        self.directory = directory
        self._file = directory / (_COUNT if local_rank is None else f"{_COUNT}-{local_rank}")
        self._records = "worker-*" if local_rank is None else crash_record.path_of(directory, local_rank).name

    @property
    def count(self) -> Count:
        """The count so far."""
        try:
            fields = json.loads(self._file.read_text())
            at = None if fields["at"] is None else tuple(fields["at"])
            return Count(fields["in_a_row"], fields["total"], at, fields["times"], fields["excused"])
        except (OSError, ValueError, KeyError, TypeError):
            return Count()

    def died(self, statuses: Sequence[tuple[int, int | None]]) -> Death:
        """Record a death, and remove the workers' crash records.

        Args:
            statuses: Local rank and exit status of those that have died by themselves, the first one first; the others
                of the node were ended for that.
        """
        deaths = [
            Death(rank, status, crash_record.read(crash_record.path_of(self.directory, rank)))
            for rank, status in statuses
        ]
        death = next((one for one in deaths if one.at is not None), deaths[0])
        for path in self.directory.glob(self._records):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            write_json(self._file, asdict(self.count.after(death)))
        return death

    def excuse(self) -> None:
        """Count the newest death as a fault of this machine: the worker had not joined, and the job goes on."""
        with contextlib.suppress(OSError):
            write_json(self._file, asdict(replace(self.count, excused=True)))

    def too_often(self, death: Death, *, node: str) -> str:
        """Why the job ends now; "" if it continues."""
        times = self.count.times
        if times < MAX_AT_ONE_STEP:
            return ""
        return f"a worker of node {node} has died {times} times {death.where} ({death.how}){death.positions}"
