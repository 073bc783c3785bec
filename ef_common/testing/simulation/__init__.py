"""A job under a virtual clock with seeded faults: the coordinator and sessions are real, the rest is in memory.

``python -m ef_common.testing.simulation --seed 7`` replays one schedule and prints its trace.

From the bottom up: `scheduler` (virtual time, processes as greenlets), `network` (groups in memory),
`control` (the coordinator and the lines to it), `schedule` (the job and its faults, as data), `operations`
and `trainer` (a training loop with exact arithmetic), `invariants` (what must hold after every event),
`simulation` (one run), `campaign` (many).
"""

from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.schedule import Fault, Job, Schedule, schedule_of
from ef_common.testing.simulation.simulation import Outcome, simulate

__all__ = ["Fault", "Job", "Outcome", "Schedule", "Violation", "schedule_of", "simulate"]
