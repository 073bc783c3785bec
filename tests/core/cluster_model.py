"""A cluster under a virtual clock: an API server, a scheduler, nodes, and controllers that may die at any call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from ef_common.core.cluster import (
    Cause,
    Decision,
    Job,
    JobPhase,
    Node,
    Pod,
    Record,
    Refusal,
    SharePolicy,
    WorkerReport,
    agrees,
    decide,
    doors_of,
    refused,
    rests_on_pods,
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
        generation: How often its user has changed it.
        observed: The generation of which its record is.
        quota: How many pods it is allowed by a quota; None for as many as it likes.
    """

    job: Job
    version: int = 0
    work: int = 10**9
    most: int = 0
    barred: frozenset[str] = frozenset()
    asks: int = 0
    has_sidecars: bool = False
    generation: int = 0
    observed: int = 0
    quota: int | None = None

    def change(self, **spec: object) -> None:
        """Its user changes what is wanted."""
        self.job = replace(self.job, **spec)  # type: ignore[arg-type]
        self.most = max(self.most, self.job.takes)
        self.version += 1
        self.generation += 1

    @property
    def known(self) -> Job:
        """It, as it is read: what was refused may be allowed since it was changed."""
        if self.generation == self.observed:
            return self.job
        return replace(self.job, record=replace(self.job.record, refusal=None))

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
        takes = self.job.takes or self.job.maximum
        takes = max(self.job.minimum, min(takes, self.asks)) if self.job.autoscales else takes
        return self.job.spares if takes <= self.job.maximum else 0


@dataclass(frozen=True, slots=True)
class Picture:
    """What a controller knows: each part may be of another moment.

    Args:
        jobs: Jobs without their pods, their versions, and those of what their users want.
        pods: The pods of each job.
        nodes: The nodes.
        reports: What was heard of the trainings.
        seekers: What pods (uid) have shown that look for their job in vain.
    """

    jobs: dict[str, tuple[Job, int, int]]
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
        refusals: Of jobs, as their users want them, of which a pod was refused; it may not be on record yet.
        heard_since: Since when it asks the workers.
    """

    picture: Picture
    todo: list[Iterator[object]] = field(default_factory=list)
    refusals: dict[tuple[str, int], Refusal] = field(default_factory=dict)
    heard_since: float = -inf


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
        self.sick: set[str] = set()  # nodes on which pods crash
        self.away = False  # the API server answers nobody
        self.others: dict[str, tuple[str, bool]] = {}  # name -> node, and whether it runs already
        self.jobs: dict[str, Served] = {}
        self.pods: dict[str, dict[str, Pod]] = {}
        self.losses: Counter[str] = Counter()
        self.begun: Counter[str] = Counter()  # pods that have begun to run
        self.counts: Counter[str] = Counter()  # what has happened, for those who want to know whether it has
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
        jobs = {key: (served.known, served.version, served.generation) for key, served in self.jobs.items()}
        pods = {key: tuple(pods.values()) for key, pods in self.pods.items()}
        taken = [node for node, _ in self.others.values()]
        nodes = tuple(
            Node(name, {GPU: size - taken.count(name)}) for name, size in self.nodes.items() if name not in self.down
        )
        trains = [key for key, served in self.jobs.items() if self.running(key) and served.work > 0]
        reports = {key: self._report(key, self.jobs[key]) for key in trains}
        return Picture(jobs, pods, nodes, reports, dict(self.seekers))

    def _report(self, key: str, served: Served) -> WorkerReport:
        """What a pod says of a training that goes on."""
        by = next((pod.address for pod in self.running(key) if pod.alive), "")
        return WorkerReport(self.now, 1, 1, 1, 1.0, served.asks, by=by, moved_at=self.now, moves_s=1.0)

    def running(self, key: str) -> list[Pod]:
        return [pod for pod in self.pods.get(key, {}).values() if pod.running and not pod.ended]

    def stale_picture(self) -> Picture:
        """What somebody sees whose watches are behind, each by itself; what one has seen once, it does not forget."""
        new = self.picture()
        if not self.away or not self.old:
            self.old = [*self.old[-6:], new]
        parts = [self.random.choice(self.old) for _ in range(4)]
        jobs = {key: value for key, value in parts[0].jobs.items() if key in new.jobs}
        return Picture(jobs, parts[1].pods, parts[2].nodes, parts[3].reports, parts[3].seekers)

    # ---------------------------------------------------------------- a controller

    def think(self, controller: Controller) -> dict[str, Decision]:
        known = controller.picture
        jobs = [self._known(controller, key) for key in known.jobs]
        if known.seekers:
            jobs = [replace(job, pods=tuple(_seeking(pod, known.seekers) for pod in job.pods)) for job in jobs]
        decisions = decide(jobs, known.nodes, self.now, policy=self.policy)
        controller.todo = [
            self._act(controller, job, known.jobs[job.key], decisions[job.key])
            for job in self.random.sample(jobs, len(jobs))
            if not _is_nothing(known.jobs[job.key][0].record, decisions[job.key])
        ]
        return decisions

    def _known(self, controller: Controller, key: str) -> Job:
        known = controller.picture
        job, _, generation = known.jobs[key]
        refusal = controller.refusals.get((key, generation))
        if refusal is not None and self.now < refusal.until:
            job = replace(job, record=replace(job.record, refusal=refusal))
        pods, report = known.pods.get(key, ()), known.reports.get(key)
        return replace(job, pods=pods, report=report, heard_since=controller.heard_since)

    def turn(self, controller: Controller) -> bool:
        """The controller sees what there is, and does all that it has to; then pods start. Whether it did anything."""
        controller.picture = self.picture()
        self.think(controller)
        acts = False
        while self.step(controller):
            acts = True
        self.schedule()
        self.run_pods()
        return acts

    def step(self, controller: Controller) -> bool:
        """One call of what it has to do for one of the jobs that it acts on at a time."""
        if self.away and controller.todo:
            self.counts["outage"] += 1
            controller.todo = []
        while controller.todo:
            one = self.random.choice(controller.todo[:NUM_AT_A_TIME])
            try:
                next(one)
                return True
            except StopIteration:
                controller.todo.remove(one)
        return False

    def fail(self, controller: Controller, *, is_done: bool) -> None:
        """A call of it fails, and so it does the rest for that job later; what it has asked for may be done."""
        if controller.todo:
            one = self.random.choice(controller.todo[:NUM_AT_A_TIME])
            self.counts["failed"] += 1
            controller.todo.remove(one)
            if is_done:
                next(one, None)

    def _act(
        self, controller: Controller, job: Job, known: tuple[Job, int, int], decision: Decision
    ) -> Iterator[object]:
        """Carry out a decision, call by call."""
        before, version, generation = known[0].record, known[1], known[2]
        losses = self.losses[job.key], self.begun[job.key]
        if rests_on_pods(job.record, decision.record):
            yield
            losses = self.losses[job.key], self.begun[job.key]
            if not agrees(job, list(self.pods.get(job.key, {}).values())):
                self.num_disagreements += 1
                return
        if decision.record != before:
            yield
            served = self.jobs.get(job.key)
            if served is None or served.version != version:
                self.num_conflicts += 1
                return
            self._check_shrinking(job, served, decision, losses[0])
            self._check_end(job, served, decision, losses)
            served.job = replace(served.job, record=decision.record)
            served.version += 1
            served.observed = generation
        for doom in decision.delete:
            yield
            self.delete(job.key, doom.pod, force=doom.force)
        for number, index in enumerate(decision.create):
            yield
            if not self.create(job.key, index, decision.contacts):
                refusal = refused(job, decision, number, now=self.now, why="quota")
                controller.refusals[job.key, generation] = refusal
                return
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

    def _check_end(self, job: Job, served: Served, decision: Decision, events: tuple[int, int]) -> None:
        """No job fails for its losses while its minimum runs, and none has succeeded that still trains."""
        record, before = decision.record, served.job.record
        self.counts["capped"] += record.cap is not None and before.cap is None
        self.counts["tried again"] += record.cap is None and before.cap is not None and not record.is_over
        if record.phase is before.phase:
            return
        if record.phase is JobPhase.SUCCEEDED:
            assert served.work <= 0, (job, decision)
        if record.cause is Cause.TOO_MANY_CRASHES and events == (self.losses[job.key], self.begun[job.key]):
            self.counts["failed for losses"] += 1
            run = [pod for pod in self.running(job.key) if pod.alive and pod.uid not in before.leaving]
            assert len(run) < self.policy.told_of(job).minimum, (job, decision)

    # ---------------------------------------------------------------- calls

    def create(self, key: str, index: int, contacts: DoorList) -> bool:
        """Create a pod; False if that is refused. A name that is taken is a pod that is there."""
        pods = self.pods.setdefault(key, {})
        name = f"{key}-{index}"
        if key not in self.jobs or name in pods:
            self.num_refused_names += 1
            return True
        quota = self.jobs[key].quota
        if quota is not None and len(pods) >= quota:
            self.counts["refused"] += 1
            return False
        self.num_made += 1
        assert not contacts.nonce, "nobody founds a job by what it was created with"
        pods[name] = Pod(name, f"uid{self.num_made}", index, ONE, created=self.now, told=contacts)
        assert len(pods) <= self.jobs[key].most + self.jobs[key].job.spares, pods
        return True

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

    def advance(self) -> None:
        """The scheduler and the kubelets do what they have to, if the API server answers."""
        if not self.away:
            self.schedule()
            self.run_pods()

    def run_pods(self) -> None:
        """Pods begin, and those that were told to go have gone."""
        for key, pod in self.all_pods():
            if pod.node in self.down:
                continue
            if pod.gone_by is not None or key not in self.jobs:
                del self.pods[key][pod.name]
            elif pod.node and not pod.running and not pod.ended:
                self.begun[key] += 1
                self.pods[key][pod.name] = replace(pod, running=True)
            elif pod.running and pod.node in self.sick:
                self.losses[key] += 1
                self.counts["crashed"] += 1
                self.end(key, pod, 139)
        for key, served in self.jobs.items():
            if not self.running(key):
                served.asks = 0  # nobody remembers

    def work(self) -> None:
        """Jobs with their minimum train."""
        for key, served in self.jobs.items():
            running = self.running(key)
            if len(running) >= served.job.minimum:
                served.work -= len(running)
            if served.work <= 0:
                for pod in running:
                    self.end(key, pod, FINISHED)

    def end_pod(self, status: int | None) -> None:
        running = [(key, pod) for key, pod in self.all_pods() if pod.running and not pod.ended]
        if running:
            key, pod = self.random.choice(running)
            self.losses[key] += 1
            self.end(key, pod, status)

    def cut_power(self, node: str) -> None:
        """All pods on a node end at once."""
        self.num_cuts += 1
        for key, pod in self.all_pods():
            if pod.node == node and pod.running and not pod.ended:
                self.losses[key] += 1
                self.end(key, pod, 137)

    def ask(self) -> None:
        """A training asks for a number of pods, and lets go those that are too many, whichever it likes least."""
        keys = [key for key, served in self.jobs.items() if served.job.autoscales and self.running(key)]
        if not keys:
            return
        key = self.random.choice(keys)
        served, there = self.jobs[key], self.running(key)
        served.asks = self.random.randint(1, served.job.takes or served.most)
        for pod in self.random.sample(there, max(0, len(there) - max(served.asks, served.job.minimum))):
            self.losses[key] += 1
            self.num_released += 1
            self.end(key, pod, LEFT)

    def end(self, key: str, pod: Pod, status: int | None) -> None:
        """A pod has ended with this status."""
        lingers = key in self.jobs and self.jobs[key].has_sidecars
        ended = replace(pod, ended=True, running=False, status=status, ended_at=self.now, lingers=lingers)
        self.pods[key][pod.name] = ended

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

    def mend(self) -> None:
        """Nothing is broken any more, and nothing is forbidden."""
        self.restore()
        self.sick.clear()
        self.away = False
        for served in self.jobs.values():
            served.quota = None
            served.barred = frozenset()


def _is_nothing(record: Record, decision: Decision) -> bool:
    return decision.record == record and not decision.delete and not decision.create and not decision.tell


def _seeking(pod: Pod, seekers: Mapping[str, str]) -> Pod:
    return replace(pod, seeks=seekers.get(pod.uid, ""))


EXITS = (LEFT, 137, None)
