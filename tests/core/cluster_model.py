"""A cluster under a virtual clock: an API server, a scheduler, nodes, and controllers that may die at any call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ef_common.core.cluster import (
    Decision,
    Job,
    JobPhase,
    Node,
    Pod,
    SharePolicy,
    WorkerReport,
    agrees,
    decide,
    doors_of,
)
from ef_common.core.cluster.state import FINISHED, LEFT
from ef_common.core.door_list import DoorList

GPU = "gpu"
ONE = {GPU: 1}
GRACE_S = 30.0
NUM_AT_A_TIME = 3
"""On so many jobs a controller acts at a time."""


@dataclass(slots=True)
class Served:
    """A job, as the API server has it.

    Args:
        job: It, without its pods.
        version: How often it was written.
        work: How many pod steps it needs.
        most: How many pods it was allowed at any time.
        barred: Nodes on which the scheduler puts no pods of it, for reasons that the controller does not know.
        asks: How many pods its training asks for; 0 if it has not asked for a number.
        has_sidecars: Its pods have a container that never ends by itself.
    """

    job: Job
    version: int = 0
    work: int = 10**9
    most: int = 0
    barred: frozenset[str] = frozenset()
    asks: int = 0
    has_sidecars: bool = False

    @property
    def cap(self) -> int:
        """How many pods it shall have at most."""
        asks = self.asks if self.job.autoscales else 0
        return min(self.job.maximum, max(self.job.minimum, asks or self.job.maximum))

    @property
    def num_spares(self) -> int:
        """How many spares it may have, as its training takes no more than it has."""
        if self.job.autoscales and not self.asks:
            return 0
        takes = max(self.job.minimum, min(self.most, self.asks)) if self.job.autoscales else self.most
        return self.job.spares if takes <= self.job.maximum else 0


@dataclass(frozen=True, slots=True)
class Picture:
    """What a controller knows: each part may be of another moment.

    Args:
        jobs: Jobs without their pods, and their versions.
        pods: The pods of each job.
        nodes: The nodes.
        reports: What was heard of the trainings.
        seekers: What pods (uid) have shown that look for their job in vain.
    """

    jobs: dict[str, tuple[Job, int]]
    pods: dict[str, tuple[Pod, ...]]
    nodes: tuple[Node, ...]
    reports: dict[str, WorkerReport]
    seekers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Controller:
    """One controller: what it knows, and what it still has to do.

    Args:
        picture: What it knows.
        todo: The rest of what it has decided.
    """

    picture: Picture
    todo: list[Iterator[object]] = field(default_factory=list)


class Cluster:
    """The cluster.

    Args:
        seed: Of all that happens by chance.
        nodes: GPUs of each node.
        num_controllers: How many controllers there are.
        policy: That of all of them.
    """

    def __init__(
        self, seed: int, nodes: dict[str, int], *, num_controllers: int = 1, policy: SharePolicy = SharePolicy.FAIR
    ) -> None:
        self.random = random.Random(seed)
        self.policy = policy
        self.now = 1000.0
        self.nodes = nodes
        self.down: set[str] = set()
        self.others: dict[str, tuple[str, bool]] = {}  # name -> node, and whether it runs already
        self.jobs: dict[str, Served] = {}
        self.pods: dict[str, dict[str, Pod]] = {}
        self.losses: Counter[str] = Counter()
        self.num_made = 0
        self.num_conflicts = 0
        self.num_refused_names = 0
        self.num_disagreements = 0
        self.num_released = 0
        self.num_cuts = 0
        self.seekers: dict[str, str] = {}
        self.there: dict[str, frozenset[str]] = {}  # pods (uid) that had an address when this nonce was drawn
        self.num_addresses = 0
        self.num_told = 0
        self.num_late = 0
        self.old: list[Picture] = []
        self.controllers = [Controller(self.picture()) for _ in range(num_controllers)]

    # ---------------------------------------------------------------- what the API server says

    def picture(self) -> Picture:
        jobs = {key: (served.job, served.version) for key, served in self.jobs.items()}
        pods = {key: tuple(pods.values()) for key, pods in self.pods.items()}
        taken = [node for node, _ in self.others.values()]
        nodes = tuple(
            Node(name, {GPU: size - taken.count(name)}) for name, size in self.nodes.items() if name not in self.down
        )
        reports = {
            key: WorkerReport(self.now, 1, 1, 1, 1.0, served.asks)
            for key, served in self.jobs.items()
            if self.running(key)
        }
        return Picture(jobs, pods, nodes, reports, dict(self.seekers))

    def running(self, key: str) -> list[Pod]:
        return [pod for pod in self.pods.get(key, {}).values() if pod.running and not pod.ended]

    def stale_picture(self) -> Picture:
        """What somebody sees whose watches are behind, each by itself; what one has seen once, it does not forget."""
        new = self.picture()
        self.old = [*self.old[-6:], new]
        parts = [self.random.choice(self.old) for _ in range(4)]
        jobs = {key: value for key, value in parts[0].jobs.items() if key in new.jobs}
        return Picture(jobs, parts[1].pods, parts[2].nodes, parts[3].reports, parts[3].seekers)

    # ---------------------------------------------------------------- a controller

    def think(self, controller: Controller) -> dict[str, Decision]:
        known = controller.picture
        jobs = [
            replace(job, pods=known.pods.get(key, ()), report=known.reports.get(key))
            for key, (job, _) in known.jobs.items()
        ]
        if known.seekers:
            jobs = [replace(job, pods=tuple(_seeking(pod, known.seekers) for pod in job.pods)) for job in jobs]
        decisions = decide(jobs, known.nodes, self.now, policy=self.policy)
        controller.todo = [
            self._act(job, known.jobs[job.key][1], decisions[job.key])
            for job in self.random.sample(jobs, len(jobs))
            if not _is_nothing(job, decisions[job.key])
        ]
        return decisions

    def step(self, controller: Controller) -> bool:
        """One call of what it has to do for one of the jobs that it acts on at a time."""
        while controller.todo:
            one = self.random.choice(controller.todo[:NUM_AT_A_TIME])
            try:
                next(one)
                return True
            except StopIteration:
                controller.todo.remove(one)
        return False

    def _act(self, job: Job, version: int, decision: Decision) -> Iterator[object]:
        """Carry out a decision, call by call."""
        losses = 0
        if decision.record.leaving - job.record.leaving:
            yield
            losses = self.losses[job.key]
            if not agrees(job, list(self.pods.get(job.key, {}).values())):
                self.num_disagreements += 1
                return
        if decision.record != job.record:
            yield
            served = self.jobs.get(job.key)
            if served is None or served.version != version:
                self.num_conflicts += 1
                return
            self._check_shrinking(job, served, decision, losses)
            served.job = replace(served.job, record=decision.record)
            served.version += 1
        for doom in decision.delete:
            yield
            self.delete(job.key, doom.pod, force=doom.force)
        for index in decision.create:
            yield
            self.create(job.key, index, decision.contacts)
        if decision.tell:
            yield
            read = self.read_pods(job)
            for seeker in decision.tell:
                for pod in read.pods:
                    if pod.uid == seeker.uid:
                        yield
                        self.tell(job.key, pod, doors_of(read, seeker.seeks))

    def read_pods(self, job: Job) -> Job:
        """The job with its pods as they are now."""
        return replace(job, pods=tuple(self.pods.get(job.key, {}).values()))

    def _check_shrinking(self, job: Job, served: Served, decision: Decision, losses: int) -> None:
        """Never below the minimum by the controller's own doing, as the API server sees it.

        What others have taken since the pods were read is not its doing.
        """
        minimum = self.policy.told_of(job).minimum
        new = decision.record.leaving - served.job.record.leaving
        there = [pod for pod in self.pods.get(job.key, {}).values() if pod.alive and pod.node]
        before = {pod.uid for pod in there} - served.job.record.leaving
        if not new or served.job.record.phase is not JobPhase.RUNNING or decision.record.is_over or job.suspended:
            return
        if losses != self.losses[job.key] or len(before) < minimum:
            return
        assert len(before - new) >= minimum, (job, decision)

    # ---------------------------------------------------------------- calls

    def create(self, key: str, index: int, contacts: DoorList) -> None:
        pods = self.pods.setdefault(key, {})
        name = f"{key}-{index}"
        if key not in self.jobs or name in pods:
            self.num_refused_names += 1
            return
        self.num_made += 1
        assert not contacts.nonce, "nobody founds a job by what it was created with"
        pods[name] = Pod(name, f"uid{self.num_made}", index, ONE, created=self.now, told=contacts)
        assert len(pods) <= self.jobs[key].most + self.jobs[key].job.spares, pods

    def delete(self, key: str, pod: Pod, *, force: bool = False) -> None:
        there = self.pods.get(key, {}).get(pod.name)
        if there is None or there.uid != pod.uid:
            return
        if force or not there.node or not there.takes_room:
            del self.pods[key][pod.name]
        elif there.gone_by is None:
            self.pods[key][pod.name] = replace(there, gone_by=self.now + GRACE_S)

    def tell(self, key: str, pod: Pod, doors: DoorList) -> None:
        """A pod is told where the others are, if it is as it was read: all who were there when it asked."""
        there = self.pods.get(key, {}).get(pod.name)
        if there != pod:
            self.num_late += 1
            return
        self.num_told += 1
        listed = {*doors.doors, *doors.others}
        known = [one for one in self.pods[key].values() if one.uid in self.there[doors.nonce] and not one.ended]
        assert {one.address for one in known} <= listed, (doors, known)
        self.pods[key][pod.name] = replace(pod, told=doors)

    def seek(self) -> None:
        """An agent looks for its job in vain, and draws a nonce."""
        running = [(key, pod) for key, pod in self.all_pods() if pod.running and not pod.ended]
        if running:
            key, pod = self.random.choice(running)
            nonce = f"nonce{len(self.there)}"
            self.there[nonce] = frozenset(one.uid for one in self.pods[key].values() if one.address and not one.ended)
            self.seekers[pod.uid] = nonce

    # ---------------------------------------------------------------- the rest of the cluster

    def all_pods(self) -> list[tuple[str, Pod]]:
        return [(key, pod) for key, pods in self.pods.items() for pod in pods.values()]

    def free(self, node: str) -> int:
        used = sum(where == node for where, _ in self.others.values())
        return self.nodes[node] - used - sum(pod.node == node and pod.takes_room for _, pod in self.all_pods())

    def schedule(self) -> None:
        for key, pod in self.all_pods():
            if pod.node or not pod.alive:
                continue
            served = self.jobs.get(key)
            places = [
                node
                for node in self.nodes
                if served and node in served.job.nodes - served.barred - self.down and self.free(node) > 0
            ]
            if places:
                where = self.random.choice(places)
                self.num_addresses += 1
                address = f"10.0.{self.num_addresses // 256}.{self.num_addresses % 256}"
                self.pods[key][pod.name] = replace(pod, node=where, unschedulable_since=None, address=address)
            elif pod.unschedulable_since is None:
                self.pods[key][pod.name] = replace(pod, unschedulable_since=self.now)

    def run_pods(self) -> None:
        """Pods begin, and those that were told to go have gone."""
        for key, pod in self.all_pods():
            if pod.node in self.down:
                continue
            if pod.gone_by is not None or key not in self.jobs:
                del self.pods[key][pod.name]
            elif pod.node and not pod.running and not pod.ended:
                self.pods[key][pod.name] = replace(pod, running=True)
        for key, served in self.jobs.items():
            if not self.running(key):
                served.asks = 0  # nobody remembers

    def work(self) -> None:
        """Jobs with their minimum train."""
        for key, served in self.jobs.items():
            running = [pod for pod in self.pods.get(key, {}).values() if pod.running and not pod.ended]
            if len(running) >= served.job.minimum:
                served.work -= len(running)
            if served.work <= 0:
                for pod in running:
                    self._end(key, pod, FINISHED)

    def end_pod(self, status: int | None) -> None:
        running = [(key, pod) for key, pod in self.all_pods() if pod.running and not pod.ended]
        if running:
            key, pod = self.random.choice(running)
            self.losses[key] += 1
            self._end(key, pod, status)

    def cut_power(self, node: str) -> None:
        """All pods on a node end at once."""
        self.num_cuts += 1
        for key, pod in self.all_pods():
            if pod.node == node and pod.running and not pod.ended:
                self.losses[key] += 1
                self._end(key, pod, 137)

    def ask(self) -> None:
        """A training asks for a number of pods, and lets go those that are too many, whichever it likes least."""
        keys = [key for key, served in self.jobs.items() if served.job.autoscales and self.running(key)]
        if not keys:
            return
        key = self.random.choice(keys)
        served, there = self.jobs[key], self.running(key)
        served.asks = self.random.randint(1, served.most)
        for pod in self.random.sample(there, max(0, len(there) - max(served.asks, served.job.minimum))):
            self.losses[key] += 1
            self.num_released += 1
            self._end(key, pod, LEFT)

    def _end(self, key: str, pod: Pod, status: int | None) -> None:
        lingers = key in self.jobs and self.jobs[key].has_sidecars
        self.pods[key][pod.name] = replace(pod, ended=True, running=False, status=status, lingers=lingers)

    @property
    def num_spares(self) -> int:
        """How many pods there are beyond what the trainings take."""
        sizes = {key: sum(pod.alive for pod in self.pods.get(key, {}).values()) for key in self.jobs}
        return sum(max(0, size - self.jobs[key].cap) for key, size in sizes.items())

    def preempt(self) -> None:
        """Somebody else gets a GPU, as the scheduler does it: a pod of ours is deleted first."""
        node = self.random.choice(sorted(self.nodes))
        if node in self.down or sum(where == node for where, _ in self.others.values()) >= self.nodes[node]:
            return
        if self.free(node) <= 0:
            ours = [(key, pod) for key, pod in self.all_pods() if pod.node == node and pod.alive]
            if not ours:
                return
            key, pod = self.random.choice(ours)
            self.losses[key] += 1
            self.delete(key, pod)
        self.num_made += 1
        self.others[f"other{self.num_made}"] = (node, True)

    def lose(self, node: str) -> None:
        self.down.add(node)
        for key, pod in self.all_pods():
            if pod.node == node and pod.gone_by is None:
                self.losses[key] += 1
                self.pods[key][pod.name] = replace(pod, gone_by=self.now + GRACE_S)

    def restore(self) -> None:
        self.down.clear()


def _is_nothing(job: Job, decision: Decision) -> bool:
    return decision.record == job.record and not decision.delete and not decision.create and not decision.tell


def _seeking(pod: Pod, seekers: Mapping[str, str]) -> Pod:
    return replace(pod, seeks=seekers.get(pod.uid, ""))


EXITS = (LEFT, 137, None)
