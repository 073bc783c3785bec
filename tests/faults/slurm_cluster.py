"""A real Slurm on nodes of a network: a controller, which is the login node, too, and nodes that take one job each."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.entered import Entered
from tests.faults import networks
from tests.waiting import poll_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "setpriv", "nsenter")
SERVE = "serve"
"""A partition whose jobs take nodes away from those of the other one, which are queued again."""
_CGROUPS = Path("/sys/fs/cgroup")
_GUARD_S = 120.0
_POLL_S = 0.2
_CONF = """\
ClusterName=test
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=30
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=60
TreeWidth=65533
{nodes}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName={serve} Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def why_not() -> str | None:
    """Reason why this machine cannot have a Slurm, or None."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return networks.why_not() or (None if _CGROUPS.is_mount() else f"Slurm's daemons need {_CGROUPS}")


class Cluster(Entered):
    """Its daemons run between entering and leaving it, and end with this process in any case.

    Args:
        folder: For its files. Its path must be short: a socket is in it.
        number: Of nodes, which are there already, with one more for the controller.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._control = number + 1
        self._hosts = {node: f"node{node}" for node in range(1, number + 1)} | {self._control: "control"}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        for node in self._hosts:
            self._kill_all(node)

    def _start(self) -> None:
        names = {host: [networks.address(node)] for node, host in self._hosts.items()}
        for node in self._hosts:
            networks.set_names(node, names)
        nodes = [node for node in self._hosts if node != self._control]
        lines = [
            f"NodeName={self._hosts[node]} NodeAddr={networks.address(node)} CPUs=4 RealMemory=1000 State=UNKNOWN"
            for node in nodes
        ]
        values = {"control": networks.address(self._control), "folder": self._folder, "serve": SERVE}
        (self._folder / "slurm.conf").write_text(_CONF.format(**values, nodes="\n".join(lines)))
        for name in ("state", *(f"spool-{self._hosts[node]}" for node in nodes)):
            (self._folder / name).mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key": key, "pid": self._folder / "munge.pid", "log": self._folder / "munge.log"}
        options = (f"--{name}-file={file}" for name, file in files.items())
        seed = f"--seed-file={self._folder}/munge.seed"
        self._run("munged", "--force", "--foreground", f"--socket={self._folder}/munge.sock", *options, seed)
        poll_until((self._folder / "munge.sock").exists, guard_s=_GUARD_S)
        self._run("slurmctld", "-D", "-i", on=self._control)
        for node in nodes:
            self._run("slurmd", "-D", "-N", self._hosts[node], on=node)
        self.wait_until(lambda: self._states() == ["idle"] * len(nodes))

    def _states(self) -> list[str]:
        with contextlib.suppress(subprocess.CalledProcessError):  # it does not answer yet
            return self.ask("sinfo", "--noheader", "--Node", "--partition=train", "--format=%T").split()
        return []

    def _run(self, *command: str, on: int = 0) -> None:
        prefix = self._inside(on) if on else ()
        with (self._folder / f"{command[0]}-{on}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *prefix, *command],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def _inside(self, node: int) -> tuple[str, ...]:
        """Prefix of a command on a node. Slurm needs to see the cgroups."""
        return networks.inside_as(node, self._hosts[node])

    def _kill_all(self, node: int) -> None:
        """End what still runs on a node: Slurm has no cgroup here in which it would find all."""
        for pid in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ------------------------------------------------------------ in use

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command on the login node."""
        return self._inside(self._control)

    @property
    def environ(self) -> dict[str, str]:
        """Of its commands, and so of its jobs: what a launcher, or another Slurm, has set is not in it."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_", "SLURM_", "SBATCH_"))}
        path = os.pathsep.join(filter(None, sys.path))
        return {**kept, "SLURM_CONF": f"{self._folder}/slurm.conf", "PYTHONPATH": path}

    def processes(self, node: int) -> list[int]:
        """Those of a node."""
        return networks.processes(node)

    def node_of(self, host: str) -> int:
        """The number of a node with this name."""
        return next(node for node, name in self._hosts.items() if name == host)

    def call(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Give a command on the login node."""
        return subprocess.run(
            [*self._inside(self._control), *command],
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=_GUARD_S,
        )

    def ask(self, *command: str) -> str:
        """The same for one that must not fail; what it has printed."""
        done = self.call(*command)
        done.check_returncode()
        return done.stdout.strip()

    def elasticflow(self, *arguments: str, environ: Mapping[str, str] | None = None) -> str:
        """Give a command of ours, which must not fail; what it has printed."""
        done = self.call(sys.executable, "-m", "ef_common.cli", *arguments, environ=environ)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def occupy(self, *options: str) -> str:
        """Submit a job that takes one whole node until it is cancelled; its number."""
        return self.ask("sbatch", "--parsable", "--exclusive", "--output=/dev/null", *options, "--wrap=sleep 1000")

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until this holds, which asks Slurm."""
        deadline = time.monotonic() + _GUARD_S
        while not condition():
            assert time.monotonic() < deadline, self.call("scontrol", "show", "nodes").stdout
            time.sleep(_POLL_S)

    def tasks(self, job: str) -> dict[int, dict[str, str]]:
        """What Slurm says of the tasks of an array, of those that have ended, too."""
        found: dict[int, dict[str, str]] = {}
        for line in self.ask("scontrol", "--oneliner", "show", "job", job).splitlines():
            record = dict(re.findall(r"(\w+)=(\S*)", line))
            for number in _numbers(record["ArrayTaskId"]):
                found[number] = record
        return found

    def states(self, job: str) -> list[str]:
        """The states of the tasks, in their order."""
        return [record["JobState"] for _, record in sorted(self.tasks(job).items())]

    def state(self, job: str) -> str:
        """The state of a job that is no array."""
        return self.ask("scontrol", "--oneliner", "show", "job", job).partition("JobState=")[2].split()[0]

    def cancel_all(self) -> None:
        """Nobody has a node any more."""
        if jobs := self.ask("squeue", "--noheader", "--format=%A").split():
            self.call("scancel", *jobs)
            self.call("scancel", "--full", "--signal=KILL", *jobs)
        nodes = [node for node in self._hosts if node != self._control]
        self.wait_until(lambda: self._states() == ["idle"] * len(nodes))


def _numbers(text: str) -> Iterator[int]:
    """Numbers of tasks, as `3` or `1,4-7` or `0-7%2`."""
    for part in text.partition("%")[0].split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


@contextlib.contextmanager
def cluster(number: int) -> Iterator[Cluster]:
    """Make so many nodes with a Slurm, and take them away again."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-", ignore_cleanup_errors=True) as folder,
        networks.nodes(number + 1),
        Cluster(Path(folder), number) as running,
    ):
        yield running
