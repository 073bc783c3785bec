"""A job under a virtual clock with seeded faults.

The coordinators' servers, the workers' clients with all that they say, byte for byte, and the sessions are the real
ones. Sockets, threads, clocks, process groups and the store of claims are in memory.

``python -m ef_common.testing.simulation --seed 7`` replays one schedule and prints its trace.

From the bottom up: `scheduler` (virtual time, processes as greenlets), `streams` (connections), `coordinator` and
`channel` (they run a server and a client), `network` (groups), `schedule` (the job and its faults, as data),
`operations` and `trainer` (a training loop with exact arithmetic), `invariants` (what must hold after every event),
`simulation` (one run), `campaign` (many).
"""

from ef_common.testing.simulation.invariants import Violation
from ef_common.testing.simulation.schedule import Fault, Job, Schedule
from ef_common.testing.simulation.simulation import Outcome, simulate

__all__ = ["Fault", "Job", "Outcome", "Schedule", "Violation", "simulate"]
