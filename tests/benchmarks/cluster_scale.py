"""What the controller costs a large cluster: 50 jobs on 200 nodes of a real control plane, with pods of nothing.

After each change, the time counts until no pod and no status changes any more. Requests are counted by the API server's
audit log, without those for the lease; watches count when they end. The nodes are pretended ones, whose pods run as
soon as they are bound. API server, etcd, scheduler, controller manager, the controller and the nodes share two cores.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from ef_common.kubernetes.installation import NAMESPACE
from ef_common.kubernetes.kinds import JOBS
from ef_common.kubernetes.resource import CONTROLLER
from tests.benchmarks.cluster_lives import Lives
from tests.benchmarks.figure import Figure, emit, is_quick, of_samples
from tests.benchmarks.processes import ROOT
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.control_plane import control_plane, why_not
from tests.kubernetes.kubelets import GPU
from tests.kubernetes.pretended import PretendedNodes

RESULTS = ROOT / "build" / "cluster_scale.json"
NUM_JOBS, NUM_NODES, WANTED = 50, 200, 8
NUM_ROUNDS = 3
PATIENCE_S = 3600
QUIET_S, GUARD_S = 3.0, 180.0
REST_S = 30.0
MOST_SETTLE_S, MOST_CPU = 5.0, 0.05
USER = f"system:serviceaccount:{NAMESPACE}:{CONTROLLER}"
_HERE = "default"


@dataclass(frozen=True)
class Change:
    """What followed a change.

    Args:
        what: The change.
        settled_s: Time until nothing changed any more.
        num_pods: Pods of jobs that were created or had to go.
        requests: Of the controller, by verb and resource.
        cpu_s: Of the controller.
    """

    what: str
    settled_s: float
    num_pods: int
    requests: dict[str, int]
    cpu_s: float


class Scale:
    """The cluster, and its controller.

    Args:
        cluster: The cluster, in which nothing is yet.
        lives: Watches it.
    """

    def __init__(self, cluster: Cluster, lives: Lives) -> None:
        self._cluster, self._lives = cluster, lives
        self._controller = psutil.Process(cluster.start_controller(kubeconfig=cluster.kubeconfig()).pid)
        cluster.wait_until(lambda: "this controller acts" in cluster.log(), "a controller that acts")
        time.sleep(QUIET_S)
        self._audit = cluster.plane.audit_log.open()

    def close(self) -> None:
        """End it."""
        self._audit.close()

    def measure(self, what: str, act: Callable[[], object]) -> Change:
        """Make a change, and wait until everything has settled."""
        self._news()
        before, cpu_s = self._num_pods(), self._cpu_s()
        began = time.time()
        act()
        while time.time() < max(self._lives.changed_at, began) + QUIET_S:
            if time.time() > began + GUARD_S:
                raise TimeoutError(f"{what}: the cluster does not settle\n{self._cluster.story()}")
            time.sleep(0.05)
        settled_s = self._lives.changed_at - began
        found = Change(
            what, round(settled_s, 3), self._num_pods() - before, self._news(), round(self._cpu_s() - cpu_s, 3)
        )
        print(found, flush=True)
        return found

    def rest(self) -> float:
        """Share of a core that the controller needs while nothing happens."""
        before = self._cpu_s()
        time.sleep(REST_S)
        return (self._cpu_s() - before) / REST_S

    def _num_pods(self) -> int:
        """Pods that were created so far, and those that had to go."""
        rows = [row for row in self._lives.as_rows(0.0) if row["job"]]
        return len(rows) + sum(row["ended"] is not None for row in rows)

    def _cpu_s(self) -> float:
        times = self._controller.cpu_times()
        return float(times.user + times.system)

    def _news(self) -> dict[str, int]:
        calls: Counter[str] = Counter()
        for line in self._audit:
            event = json.loads(line)
            place = event.get("objectRef") or {}
            if place.get("resource") != "leases":
                calls[
                    f"{event['verb']} {'/'.join(filter(None, (place.get('resource'), place.get('subresource'))))}"
                ] += 1
        return dict(calls)

    # ------------------------------------------------------------ changes

    def submit(self, *numbers: int) -> None:
        """Submit these jobs."""
        for number in numbers:
            container = {"name": "worker", "image": "none", "resources": {"limits": {GPU: "1"}}}
            spec = {
                "maxWorkers": WANTED,
                "priorityClassName": "training",
                "template": {"spec": {"containers": [container]}},
            }
            meta = {"name": _name(number), "namespace": _HERE}
            head = {"apiVersion": JOBS.api_version, "kind": JOBS.kind}
            self._cluster.api.create(JOBS, {**head, "metadata": meta, "spec": spec})

    def remove(self, number: int) -> None:
        """Delete a job."""
        self._cluster.api.delete(JOBS, _HERE, _name(number))

    def scale(self, number: int, workers: int) -> None:
        """Let a job have so many pods at most."""
        self._cluster.api.change(JOBS, _HERE, _name(number), {"spec": {"workers": workers}})

    def check(self) -> None:
        """Every node has a pod, and the jobs have equally many."""
        rows = [row for row in self._lives.as_rows(0.0) if row["ended"] is None]
        sizes = Counter(row["job"] for row in rows if row["job"])
        limits = {job["metadata"]["name"]: job["spec"].get("workers", WANTED) for job in self._cluster.jobs()}
        full = [size for name, size in sizes.items() if size < limits[name]]
        if len(rows) != NUM_NODES or set(sizes) != set(limits) or max(full) - min(full) > 1:
            raise RuntimeError(f"the shares are not equal: {sizes}")


def _name(number: int) -> str:
    return f"job{number}"


@contextlib.contextmanager
def _scale() -> Iterator[Scale]:
    with (
        tempfile.TemporaryDirectory(prefix="ef-bench-", ignore_cleanup_errors=True) as folder,
        control_plane(node_grace_s=PATIENCE_S, audited=USER) as plane,
        PretendedNodes(plane.kubeconfig, NUM_NODES),
    ):
        cluster = Cluster(plane, None, Path(folder), door=(0, ""))  # type: ignore[arg-type]
        cluster.install()
        lives = Lives(cluster.api).start()
        scale = Scale(cluster, lives)
        try:
            yield scale
        finally:
            scale.close()
            lives.stop()
            cluster.stop_controllers()
            cluster.api.close()


@dataclass(frozen=True)
class Round:
    """What was measured in one cluster.

    Args:
        first: All jobs have come at once.
        changes: What has changed after that, one thing after the other.
        rest: Share of a core that the controller needs while nothing happens.
    """

    first: Change
    changes: list[Change]
    rest: float


def run(*, quick: bool) -> dict[str, Figure]:
    """Measure, each time in a new cluster."""
    if (why := why_not()) is not None:
        print(why)
        return {}
    rounds: list[Round] = []
    for _ in range(1 if quick else NUM_ROUNDS):
        rounds.append(_round())
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps([asdict(one) for one in rounds]) + "\n")
    return _figures(rounds)


def _round() -> Round:
    with _scale() as scale:
        first = scale.measure(f"{NUM_JOBS} jobs come at once", lambda: scale.submit(*range(NUM_JOBS)))
        scale.check()
        rest = scale.rest()
        acts: dict[str, Callable[[], object]] = {
            "a job comes": lambda: scale.submit(NUM_JOBS),
            "a job is scaled": lambda: scale.scale(0, 2),
            "a serving pod comes": lambda: scale._cluster.serve("serving"),
            "a serving pod goes": lambda: scale._cluster.remove("serving"),
            "a job is deleted": lambda: scale.remove(10),
        }
        changes = []
        for what, act in acts.items():
            changes.append(scale.measure(what, act))
            scale.check()
    return Round(first, changes, rest)


def _figures(rounds: list[Round]) -> dict[str, Figure]:
    changes = [change for one in rounds for change in one.changes]
    per_pod = median(sum(one.requests.values()) / one.num_pods for one in changes if one.num_pods)
    settled = {what: median(one.settled_s for one in changes if one.what == what) for what in (c.what for c in changes)}
    details: dict[str, Any] = {
        "requests_per_pod": round(per_pod, 2),
        "cpu_s": round(median(one.cpu_s for one in changes), 3),
        "settled_s": settled,
        "load": os.getloadavg(),
    }
    firsts = {
        "requests": [sum(one.first.requests.values()) for one in rounds],
        "num_pods": [one.first.num_pods for one in rounds],
        "cpu_s": [one.first.cpu_s for one in rounds],
    }
    slowest = [max(change.settled_s for change in one.changes) for one in rounds]
    return {
        "cluster_settle_50_jobs": of_samples(
            [one.first.settled_s for one in rounds], [MOST_SETTLE_S], target=1.0, unit="s", **firsts
        ),
        "cluster_settle_change": of_samples(slowest, [MOST_SETTLE_S], target=1.0, unit="s", **details),
        "cluster_controller_cpu": of_samples([one.rest for one in rounds], [MOST_CPU], target=1.0, unit="cores"),
    }


if __name__ == "__main__":
    emit(run(quick=is_quick(__doc__)))
