"""What the controller of a cluster knows of nodes, pods and jobs, and what it decides, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from ef_common.core.cluster.report import WorkerReport
from ef_common.core.door_list import NO_DOORS, DoorList

Resources = Mapping[str, int]
"""How much of each resource, in the smallest unit of each (thousandths of a core, bytes, pieces)."""

FINISHED = 0
"""Exit status of a pod whose training is over."""
FAILED = 1
"""Exit status of a pod whose training has failed: all of the job's pods end with it."""
LEFT = 75
"""Exit status of a pod that was told to go, and has gone."""


class JobPhase(Enum):
    """What a job does."""

    PENDING = "Pending"  # it has less than its minimum, and has not trained since its last start
    RUNNING = "Running"  # it has had its minimum, and pods are left
    SUSPENDED = "Suspended"  # its user wants it to have no pods
    SUCCEEDED = "Succeeded"  # its training is over
    FAILED = "Failed"  # it is not started again


class Cause(Enum):
    """Why a job is in its phase, in one word, for programs; conditions in Kubernetes have such a reason."""

    NONE = ""  # the phase says it
    INVALID = "InvalidJob"
    COMPLETED = "TrainingCompleted"
    TRAINING_FAILED = "TrainingFailed"
    TOO_MANY_CRASHES = "BackoffLimitExceeded"
    NO_ROOM = "NoRoomForMinimum"
    REFUSED = "PodsRefused"  # by the scheduler, or by a quota
    CANNOT_START = "PodCannotStart"
    POD_LOST = "PodLost"
    NOT_REPLACED = "PodsNotReplaced"  # as they are lost again and again


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster.

    Args:
        name: Its name.
        free: What the pods of others leave of it. Those count that run there, or that the scheduler will put there.
    """

    name: str
    free: Resources


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker pod.

    Args:
        name: Its name.
        uid: What tells it from others that have had the name.
        index: Its number in its job, from which its name follows.
        request: What it needs of a node.
        node: Where it is; "" if it is nowhere yet.
        running: The container that trains runs.
        ended: That container has ended by itself.
        lingers: It has, but others of the pod still run, so the pod keeps its room until it is deleted.
        status: Exit status; None if it still runs, or nobody knows.
        ended_at: When that container has ended, as its node says; 0 if that is not known.
        gone_by: When it should be gone, if somebody has deleted it.
        unschedulable_since: Since when the scheduler finds no node for it; None if it does, or has not looked.
        created: When it was created, in seconds.
        problem: Why its containers cannot be started; "" for nothing.
        waits: What its containers wait for on a node, in a word; "" if they run, or nothing is known.
        waits_since: Since when it is there.
        slow: A worker of it is slower than the others of the job, which wait for it.
        idle: It was asked, and did not train.
        address: Where it is reached; "" if it has no address yet.
        seeks: The nonce that it has shown, if it looks for its job in vain; "" if it does not.
        told: The addresses that it was told last, if it looks for its job.
    """

    name: str
    uid: str
    index: int
    request: Resources
    node: str = ""
    running: bool = False
    ended: bool = False
    lingers: bool = False
    status: int | None = None
    ended_at: float = 0.0
    gone_by: float | None = None
    unschedulable_since: float | None = None
    created: float = 0.0
    problem: str = ""
    waits: str = ""
    waits_since: float = 0.0
    slow: bool = False
    idle: bool = False
    address: str = ""
    seeks: str = ""
    told: DoorList = NO_DOORS

    @property
    def takes_room(self) -> bool:
        """Whether nobody else can have what it needs of its node."""
        return not self.ended or self.lingers

    @property
    def alive(self) -> bool:
        """Whether it works, or will."""
        return not self.ended and self.gone_by is None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The scheduler, or a quota, has refused more pods.

    Args:
        limit: How many the job has had then, and has at most.
        until: When more are tried again.
        why: In words.
        tries: How often in a row more pods were refused. It stays on record for a while after `until`.
    """

    limit: int
    until: float
    why: str
    tries: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What is on record of a job, in its status; it is written before the pods are touched that it names.

    Args:
        phase: What the job does.
        starts: How often its training was started: with at least its minimum, after it had no pods.
        leaving: Pods (uid) that are to go. One that was named once is never kept.
        counted: Pods (uid) whose end is on record: in `crashes`, or in `asked`.
        crashes: How often pods were lost in a row, each time soon after the one before. Pods that were there together
            are lost together.
        crashed_at: When the last time was.
        lost: What has become of the pod that was lost last; "" once as many pods run as the job shall have.
        cap: How many pods it has at most while those that are lost are not replaced; None if they are.
        refusal: That of more pods, or None.
        asked: How many pods the training asks for; 0 if that is not known, or it does not choose its size.
        asked_at: When it has asked for so many.
        ended_at: When the job has succeeded or failed.
        cause: Reason for the phase, in one word.
        why: The same in a sentence.
    """

    phase: JobPhase = JobPhase.PENDING
    starts: int = 0
    leaving: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    crashes: int = 0
    crashed_at: float = 0.0
    lost: str = ""
    cap: int | None = None
    refusal: Refusal | None = None
    asked: int = 0
    asked_at: float = 0.0
    ended_at: float | None = None
    cause: Cause = Cause.NONE
    why: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)


@dataclass(frozen=True, slots=True)
class Job:
    """An elastic job.

    Args:
        key: Its name, which no other job has.
        minimum: Pods, without which it does not train.
        maximum: Pods, of which it has no more, but for spares.
        request: What a pod needs of a node.
        nodes: Names of the nodes on which its pods may be.
        priority: Of two that wait, that of the higher one is served first.
        created: When it was created, in seconds.
        suspended: It shall have no pods.
        backoff_limit: If pods are lost more often than this in a row, they are not replaced for a while.
        ttl_s: How long it stays after its end; None for ever.
        problem: What is wrong with what the user has written; "" for nothing.
        takes: Pods that the training takes, if it asks for no number; those beyond are spares. 0 for the maximum.
        spares: Pods beyond those, which wait in case one is lost.
        autoscales: The training chooses how many pods it has, up to the maximum.
        report: What a worker has said last of the training; None if nobody has.
        heard_since: Since when the controller that decides asks its workers, in seconds.
        pods: Its pods, those that have ended, too.
        record: What is on record of it.
    """

    key: str
    minimum: int
    maximum: int
    request: Resources
    nodes: frozenset[str]
    priority: int = 0
    created: float = 0.0
    suspended: bool = False
    backoff_limit: int = 6
    ttl_s: float | None = None
    problem: str = ""
    takes: int = 0
    spares: int = 0
    autoscales: bool = False
    report: WorkerReport | None = None
    heard_since: float = -inf
    pods: tuple[Pod, ...] = ()
    record: Record = Record()

    @property
    def alive(self) -> list[Pod]:
        """Pods that work, or will, and are not to go."""
        return [pod for pod in self.pods if pod.alive and pod.uid not in self.record.leaving]

    @property
    def rank(self) -> tuple[int, float, str]:
        """Its place among those that wait."""
        return (-self.priority, self.created, self.key)


@dataclass(frozen=True, slots=True)
class Doom:
    """A pod that is to be deleted.

    Args:
        pod: It.
        why: In words.
        force: Nobody can be asked to end it: its node does not answer.
    """

    pod: Pod
    why: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done for a job, in this order.

    Args:
        record: What is written first. If somebody has written since, nothing else of this is done.
        delete: Pods to delete.
        create: Numbers of pods to create.
        wanted: How many pods it shall have, with spares.
        spares: How many of these are spares.
        why: One line.
        remove: The job itself is to be deleted.
        contacts: Addresses that new pods are created with.
        tell: Pods that are to be told the addresses of the others.
    """

    record: Record
    delete: tuple[Doom, ...] = ()
    create: tuple[int, ...] = ()
    wanted: int = 0
    spares: int = 0
    why: str = ""
    remove: bool = False
    contacts: DoorList = NO_DOORS
    tell: tuple[Pod, ...] = ()
