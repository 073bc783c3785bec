"""The controller: it looks at all jobs, pods and nodes, decides (:mod:`ef_common.core.cluster`), and does it.

Whatever changes only wakes it. It remembers nothing that matters: what must be known the next time is in the status of
the jobs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from ef_common import threads
from ef_common.core.cluster import (
    Decision,
    Job,
    JobPhase,
    Pod,
    Refusal,
    SharePolicy,
    WorkerReport,
    agrees,
    decide,
    doors_of,
    on_record,
    refused,
    rests_on_pods,
)
from ef_common.core.cluster.arrivals import Arrivals, arrive
from ef_common.core.door_list import DoorList
from ef_common.errors import (
    ClusterAway,
    ClusterConflict,
    ClusterFailed,
    ClusterNotFound,
    ClusterRefused,
    ThreadFailed,
)
from ef_common.kubernetes import excerpts, kinds, reading, writing
from ef_common.kubernetes import lease as leases
from ef_common.kubernetes.asking import Reports
from ef_common.kubernetes.belongings import Belongings
from ef_common.kubernetes.lease import Lease
from ef_common.kubernetes.limiter import Limiter
from ef_common.kubernetes.metrics import Metrics
from ef_common.kubernetes.reading import Version
from ef_common.kubernetes.resource import JOB_LABEL, Json
from ef_common.kubernetes.telling import Teller
from ef_common.kubernetes.watching import Copy

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

logger = logging.getLogger(__name__)

_TICK_S = 2.0
"""How often it looks if nothing has changed: some of what it decides depends on time."""
_COALESCE_S = 0.05
_PAUSE_S = 1.0
_PAUSES_S = (0.2, 30.0)
_MAX_FAILURES = 20
"""Once calls for this many jobs have failed, the others wait for the next look: the API server itself is in trouble."""
_CALLS_PER_S, _BURST = 200.0, 400.0
"""This is reached when many jobs come at once. An API server has limits of its own, too."""
_NUM_THREADS = 8
"""How many jobs are acted on at a time: most of a call is waiting."""
_TELL_S = 5.0
"""The shortest time between two times when a pod is told where the others are, whatever it says."""
_PROGRESS_S, _PROGRESS_PER_S = 15.0, 2.0
"""The shortest time between two updates of a training's progress in its status, and the most such updates of all jobs
together in a second: if there are many jobs, that of each is updated less often."""


class Controller:
    """A controller. There may be several: one acts at a time.

    Args:
        api: The cluster.
        namespace: Where the lease is.
        metrics: What it counts.
        lease_s: How long the lease counts.
        policy: How pods are divided among the jobs.
    """

    def __init__(
        self,
        api: Api,
        *,
        namespace: str,
        metrics: Metrics,
        lease_s: float = leases.DURATION_S,
        policy: SharePolicy = SharePolicy.FAIR,
    ) -> None:
        self._api, self._metrics, self._policy = api, metrics, policy
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._copies = {
            kinds.JOBS: Copy(api, kinds.JOBS, on_change=self._wake.set),
            kinds.PODS: Copy(api, kinds.PODS, on_change=self._wake.set, excerpt=excerpts.of_pod),
            kinds.NODES: Copy(api, kinds.NODES, on_change=self._wake.set, excerpt=excerpts.of_node),
            kinds.CLASSES: Copy(api, kinds.CLASSES, on_change=self._wake.set),
        }
        self._limiter = Limiter(_CALLS_PER_S, _BURST, clock=time.monotonic, sleep=self._stopped.wait)
        holder = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        self._lease = Lease(
            api, namespace, holder, clock=time.monotonic, wall=time.time, duration_s=lease_s, wait=self._limiter.wait
        )
        self._renew_s = min(leases.RENEW_S, lease_s / 5)
        self._pauses: dict[Version, tuple[float, float]] = {}  # of jobs whose calls fail: how long, and until when
        self._conflicts: dict[str, str] = {}  # of jobs (uid) that somebody else has changed: the version known then
        self._refusals: dict[Version, Refusal] = {}  # which may not be on record yet
        self._belongings = Belongings(api, namespace, wait=self._limiter.wait)
        self._teller = Teller(api, wait=self._limiter.wait)
        self._failing: set[str] = set()  # jobs (uid) that cannot be decided on
        self._are_tolerations_added = True  # until a pod that was created lacks them
        self._told_at: dict[str, float] = {}  # when pods (uid) were told where the others are, lately
        self._arrivals = Arrivals()
        self._reports = Reports(on_news=self._wake.set)
        self._asks_since: float | None = None  # None: this controller asks nobody
        self._failure: ThreadFailed | None = None

    def run(self) -> None:
        """Act until `stop` is called.

        Raises:
            ThreadFailed: A thread that it cannot do without has failed. The controller must be started again.
        """
        for copy in self._copies.values():
            copy.start(on_failure=self._break)
        self._reports.start(on_failure=self._break)
        threads.start(self._keep_lease, name="elasticflow-lease", job="keeps the lease", on_failure=self._break)
        while not self._stopped.is_set():
            self._wake.wait(self._rest_s())
            self._stopped.wait(_COALESCE_S)
            self._wake.clear()
            if not self._lease.is_mine:
                self._stand_by()
            elif self.is_ready:
                try:
                    self._look()
                except Exception:  # whoever restarts it would only meet the same
                    logger.exception("the controller cannot look at the cluster")
                    self._stopped.wait(_PAUSE_S)
        self._lease.give_up()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let `run` end."""
        self._stopped.set()
        self._wake.set()
        self._reports.stop()
        for copy in self._copies.values():
            copy.stop()

    @property
    def is_ready(self) -> bool:
        """Whether it knows the cluster."""
        return all(copy.is_read for copy in self._copies.values())

    @property
    def leads(self) -> bool:
        """Whether it is the one that acts."""
        return self._lease.is_mine

    def _stand_by(self) -> None:
        """Ask no workers, as only the controller that acts does so; and begin afresh when it acts again."""
        self._pauses.clear()
        self._conflicts.clear()
        self._arrivals = Arrivals()
        if self._asks_since is not None:
            self._asks_since = None
            self._reports.follow({})

    def _break(self, failure: ThreadFailed) -> None:
        self._failure = failure
        self.stop()

    def _keep_lease(self) -> None:
        leads = False
        while not self._stopped.is_set():
            before, leads = leads, self._lease.keep()
            if leads != before:
                logger.info("this controller %s", "acts" if leads else "stands by")
                self._metrics.leads(leads)
                self._wake.set()
            self._stopped.wait(self._renew_s)

    def _rest_s(self) -> float:
        """How long it may wait until it looks again."""
        if not self._arrivals.waiting:
            return _TICK_S
        return max(0.0, min(_TICK_S, self._arrivals.until - time.monotonic()))

    # ------------------------------------------------------------ look, decide, act

    def _look(self) -> None:
        things, now = self._things(), time.time()
        self._forget_all_but(things.values(), now)
        pods, others = self._sorted_pods(things)
        self._ask(pods)
        nodes = self._copies[kinds.NODES].objects()
        jobs, failures = self._read(things, pods, nodes)
        decisions = self._decide(jobs, failures, pods, nodes, others, now)
        self._metrics.decided({key: jobs[key] for key in decisions}, decisions, failing=sorted(failures))
        self._tell_failures(things, failures)
        self._act_on_all(things, jobs, decisions, now)
        self._metrics.looked(time.time())

    def _things(self) -> dict[str, Json]:
        """The jobs that count, by their keys: those that do not wait for others, and are not being deleted."""
        found = self._copies[kinds.JOBS].objects()
        things = {reading.key_of(one): one for one in found if not one["metadata"].get("deletionTimestamp")}
        new = frozenset(one["metadata"]["uid"] for one in things.values() if not one.get("status"))
        self._arrivals = arrive(self._arrivals, new, time.monotonic())
        return {key: one for key, one in things.items() if one["metadata"]["uid"] not in self._arrivals.waiting}

    def _decide(
        self,
        jobs: Mapping[str, Job],
        failures: dict[str, Exception],
        pods: Mapping[str, list[Json]],
        nodes: Collection[Json],
        others: Sequence[Json],
        now: float,
    ) -> dict[str, Decision]:
        """Decide on these jobs. If that fails, those that fail alone are left out: others must not wait for them.

        Args:
            jobs: Those that could be read.
            failures: Why others could not be read, to which those are added that cannot be decided on.
            pods: Those of all jobs. Where a job is left out, they keep their room.
            nodes: All nodes.
            others: Pods of no job.
            now: Time in seconds.
        """

        def decided() -> dict[str, Decision]:
            stay = [pod for key in failures for pod in pods.get(key, ())]
            some = [job for key, job in jobs.items() if key not in failures]
            return decide(some, reading.nodes_of(nodes, [*others, *stay]), now, policy=self._policy)

        try:
            return decided()
        except Exception:
            free, found = reading.nodes_of(nodes, others), len(failures)
            for key, job in jobs.items():
                try:
                    decide([job], free, now, policy=self._policy)
                except Exception as error:
                    failures[key] = error
            if len(failures) == found:  # none of them is to blame alone
                raise
            return decided()

    def _tell_failures(self, things: Mapping[str, Json], failures: Mapping[str, Exception]) -> None:
        """Tell once which jobs cannot be decided on."""
        failing = {things[key]["metadata"]["uid"]: key for key in failures}
        for uid in failing.keys() - self._failing:
            error = failures[failing[uid]]
            logger.error("%s cannot be decided on, and keeps the pods that it has", failing[uid], exc_info=error)
            self._teller.tell(things[failing[uid]], "Refused", f"it cannot be decided on: {error!r}", kind="Warning")
        self._failing = {*failing}

    def _act_on_all(
        self, things: Mapping[str, Json], jobs: Mapping[str, Job], decisions: Mapping[str, Decision], now: float
    ) -> None:
        """Carry out all decisions, several at a time: what is done for a job needs nothing that is done for another."""
        failures: list[ClusterFailed] = []

        def act(key: str) -> None:
            if _is_hopeless(failures) or self._stopped.is_set() or not self._lease.is_mine:
                return
            if time.monotonic() < self._pause_of(things[key])[1]:
                return
            try:
                self._act_patiently(things[key], jobs[key], decisions[key], now)
            except ClusterFailed as error:
                failures.append(error)
            self._metrics.lives(time.time())

        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="elasticflow-acts") as pool:
            list(pool.map(act, self._order(things, decisions)))
        if _is_hopeless(failures):
            logger.warning("the cluster cannot be changed now: %s", failures[-1])
            self._stopped.wait(_PAUSE_S)

    def _order(self, things: Mapping[str, Json], decisions: Mapping[str, Decision]) -> list[str]:
        """Jobs that give room come before those that take it, and last of all those whose calls have failed before."""
        return sorted(decisions, key=lambda key: (self._pause_of(things[key])[0], not decisions[key].delete))

    def _pause_of(self, thing: Json) -> tuple[float, float]:
        return self._pauses.get(reading.version_of(thing), (0.0, 0.0))

    def _sorted_pods(self, things: Mapping[str, Json]) -> tuple[dict[str, list[Json]], list[Json]]:
        """The pods of each of these jobs, and those of none of them."""
        pods: dict[str, list[Json]] = {}
        others: list[Json] = []
        for pod in self._copies[kinds.PODS].objects():
            key = reading.job_key_of(pod)
            is_ours = key in things and reading.belongs(pod, things[key])
            (pods.setdefault(key, []) if is_ours else others).append(pod)
        return pods, others

    def _read(
        self, things: Mapping[str, Json], pods: Mapping[str, list[Json]], nodes: Collection[Json]
    ) -> tuple[dict[str, Job], dict[str, Exception]]:
        """The jobs, and why others cannot be read."""
        priorities = self._priorities()
        jobs: dict[str, Job] = {}
        failures: dict[str, Exception] = {}
        for key, thing in things.items():
            try:
                jobs[key] = reading.job_of(
                    thing,
                    pods.get(key, ()),
                    nodes,
                    priorities=priorities,
                    report=self._reports.of(key),
                    seekers=self._reports.seekers_of(key),
                    idle=self._reports.idle_of(key),
                    heard_since=self._asks_since or 0.0,
                    are_tolerations_added=self._are_tolerations_added,
                )
            except Exception as error:  # it must not keep the others waiting
                failures[key] = error
        for key, job in jobs.items():
            if refusal := self._refusals.get(reading.version_of(things[key])):
                jobs[key] = replace(job, record=replace(job.record, refusal=refusal))
        return jobs, failures

    def _forget_all_but(self, things: Collection[Json], now: float) -> None:
        """Forget jobs other than these, and failures of a job that has changed since: conflicts by any change."""
        known = {one["metadata"]["uid"]: one["metadata"]["resourceVersion"] for one in things}
        self._belongings.forget_all_but(known)
        self._teller.forget_all_but(known)
        self._told_at = {uid: at for uid, at in self._told_at.items() if time.monotonic() < at + _TELL_S}
        settled = {uid for uid, version in self._conflicts.items() if known.get(uid) != version}
        self._conflicts = {uid: version for uid, version in self._conflicts.items() if uid not in settled}
        versions = {version for version in map(reading.version_of, things) if version[0] not in settled}
        self._pauses = {version: pause for version, pause in self._pauses.items() if version in versions}
        self._refusals = {version: one for version, one in self._refusals.items() if now < one.until}

    def _ask(self, pods: Mapping[str, list[Json]]) -> None:
        """Ask the workers in these pods from now on."""
        if self._asks_since is None:
            self._asks_since = time.time()
        doors = {key: [door for pod in found if (door := reading.door_of(pod))] for key, found in pods.items()}
        self._reports.follow(doors)

    def _priorities(self) -> dict[str, int]:
        classes = self._copies[kinds.CLASSES].objects()
        found = {one["metadata"]["name"]: int(one["value"]) for one in classes}
        return {**found, "": next((int(one["value"]) for one in classes if one.get("globalDefault")), 0)}

    def _act_patiently(self, thing: Json, job: Job, decision: Decision, now: float) -> None:
        """Carry out a decision, or tell why that is not possible now, and try it again later.

        Raises:
            ClusterFailed: A call has failed for a reason that may concern all jobs.
        """
        try:
            self._act(thing, job, decision, now)
            self._pauses.pop(reading.version_of(thing), None)
            self._conflicts.pop(thing["metadata"]["uid"], None)
        except ClusterConflict as error:
            logger.debug("%s has changed meanwhile: %s", job.key, error)
            self._meet_conflict(thing, job, str(error))
        except (ClusterRefused, ClusterNotFound) as error:
            self._pause(thing, job, "Refused", str(error))
        except ClusterFailed as error:  # a webhook for the pods of this job, say, or the API server itself
            self._pause(thing, job, "Delayed", str(error), is_told=not isinstance(error, ClusterAway))
            raise
        except Exception as error:  # it must not keep the others waiting
            logger.exception("%s cannot be carried out", job.key)
            self._pause(thing, job, "Refused", repr(error))

    def _meet_conflict(self, thing: Json, job: Job, why: str) -> None:
        """Look again at once; after a pause if nothing newer is known of the job than at the last conflict."""
        meta = thing["metadata"]
        if self._conflicts.get(meta["uid"]) == meta["resourceVersion"]:
            self._pause(thing, job, "Delayed", why, is_told=False)
            return
        self._conflicts[meta["uid"]] = meta["resourceVersion"]
        self._wake.set()

    def _pause(self, thing: Json, job: Job, reason: str, why: str, *, is_told: bool = True) -> None:
        pause_s = min(_PAUSES_S[1], 2 * (self._pause_of(thing)[0] or _PAUSES_S[0] / 2))
        self._pauses[reading.version_of(thing)] = (pause_s, time.monotonic() + pause_s)
        logger.warning("%s waits for %.1f s: %s", job.key, pause_s, why)
        if is_told:
            self._teller.tell(thing, reason, why, kind="Warning")

    def _act(self, thing: Json, job: Job, decision: Decision, now: float) -> None:
        """Carry out a decision; see there for why in this order."""
        status = writing.status_of(thing, job, decision, now=now, told=self._what_is_told(thing, job, now))
        if status != thing.get("status"):
            if rests_on_pods(job.record, decision.record) and not self._still_agrees(thing, job):
                raise ClusterConflict("its pods are not those that were known")
            self._limiter.wait()
            before = thing.get("status") or {}
            thing = self._api.replace(kinds.JOBS, {**thing, "status": status}, sub="status")
            self._copies[kinds.JOBS].update(thing)
            self._tell_phase(thing, job, decision)
            if status.get("changes") != before.get("changes"):
                self._teller.tell(thing, "Trains", writing.change_text(status["changes"][-1]))
        namespace = thing["metadata"]["namespace"]
        for doom in decision.delete:
            self._delete(namespace, doom.pod.name, doom.pod.uid, force=doom.force)
        num_created = 0
        try:
            if decision.create or (job.pods and not decision.record.is_over):
                self._belongings.keep(thing, had_pods=bool(job.pods or job.record.starts))
            for index in decision.create:
                self._create(thing, index, decision.contacts)
                num_created += 1
        except ClusterRefused as error:  # a quota, or a template that is wrong: the next decision knows of it
            refusal = refused(job, decision, num_created, now=time.time(), why=str(error))
            self._refusals[reading.version_of(thing)] = refusal
            raise
        if decision.delete or decision.create:
            logger.info("%s %s", job.key, decision.why)
            self._teller.tell(thing, "Resized", decision.why)
        self._tell_doors(thing, job, decision.tell)
        if decision.remove:
            self._limiter.wait()
            self._api.delete(kinds.JOBS, namespace, thing["metadata"]["name"], uid=thing["metadata"]["uid"])

    def _what_is_told(self, thing: Json, job: Job, now: float) -> WorkerReport | None:
        """What the status says of the training."""
        before = reading.report_of(thing.get("status") or {})
        every_s = max(_PROGRESS_S, self._copies[kinds.JOBS].num_objects / _PROGRESS_PER_S)
        return on_record(before, job.report, now=now, since=self._asks_since or now, every_s=every_s)

    def _still_agrees(self, thing: Json, job: Job) -> bool:
        """Read the pods of a job, after its record."""
        return agrees(job, [reading.pod_of(pod) for pod in self._pods_of(thing)])

    def _pods_of(self, thing: Json) -> list[Json]:
        """The pods of a job, as the API server has them now."""
        self._limiter.wait()
        meta = thing["metadata"]
        found, _ = self._api.list(kinds.PODS, meta["namespace"], labels=f"{JOB_LABEL}={meta['name']}")
        return [pod for pod in found if reading.belongs(pod, thing)]

    def _tell_doors(self, thing: Json, job: Job, seekers: Sequence[Pod]) -> None:
        """Tell these pods the addresses of the others, which are read after their nonces were heard.

        What keeps one from being told keeps nobody from anything else.
        """
        now = time.monotonic()
        due = {pod.uid: pod for pod in seekers if now >= self._told_at.get(pod.uid, -inf) + _TELL_S}
        if not due:
            return
        found = self._pods_of(thing)
        known = replace(job, pods=tuple(reading.pod_of(pod) for pod in found))
        for pod in found:
            seeker = due.get(pod["metadata"]["uid"])
            if seeker is None:
                continue
            self._told_at[seeker.uid] = now
            self._limiter.wait()
            meta, patch = pod["metadata"], writing.doors_patch(pod, doors_of(known, seeker.seeks))
            try:
                made = self._api.change(kinds.PODS, meta["namespace"], meta["name"], patch)
            except (ClusterConflict, ClusterNotFound) as error:
                logger.debug("%s has changed meanwhile: %s", meta["name"], error)
                self._told_at.pop(seeker.uid)
            except ClusterRefused as error:
                why = f"{meta['name']} cannot be told the addresses of other pods: {error}"
                self._teller.tell(thing, "Refused", why, kind="Warning")
            else:
                self._copies[kinds.PODS].update(made)

    def _delete(self, namespace: str, name: str, uid: str, *, force: bool) -> None:
        self._limiter.wait()
        try:
            gone = self._api.delete(kinds.PODS, namespace, name, uid=uid, grace_s=0 if force else None)
            self._metrics.deleted()
            if gone.get("metadata", {}).get("deletionTimestamp"):
                self._copies[kinds.PODS].update(gone)
        except (ClusterNotFound, ClusterConflict):  # it has gone, and another one may have its name
            pass

    def _create(self, thing: Json, index: int, contacts: DoorList) -> None:
        self._limiter.wait()
        try:
            made = self._api.create(kinds.PODS, writing.pod_of(thing, index, contacts))
        except ClusterConflict:  # it is there, or will be made at the next look
            return
        self._metrics.created()
        self._copies[kinds.PODS].update(made)
        if self._are_tolerations_added and reading.lacks_tolerations(made["spec"]):
            self._are_tolerations_added = False
            logger.info("pods get no tolerations here for the resources that they ask for (ExtendedResourceToleration)")

    # ------------------------------------------------------------ what people are told

    def _tell_phase(self, thing: Json, job: Job, decision: Decision) -> None:
        phase = decision.record.phase
        if phase is job.record.phase and decision.record.why == job.record.why:
            return
        is_bad = phase is JobPhase.FAILED or bool(decision.record.why and not decision.record.is_over)
        text = decision.record.why or decision.why
        logger.info("%s is %s: %s", job.key, phase.value, text)
        self._teller.tell(thing, phase.value, text, kind="Warning" if is_bad else "Normal")


def _is_hopeless(failures: Sequence[ClusterFailed]) -> bool:
    """Whether calls that have failed in a look say that the others would fail, too."""
    return len(failures) >= _MAX_FAILURES or any(isinstance(error, ClusterAway) for error in failures)
