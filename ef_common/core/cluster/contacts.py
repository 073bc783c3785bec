"""Which pods of a job are told at which addresses the others are, where no name server tells them: a pure rule.

A new pod is created with the addresses of a few pods that run, so it finds the training whatever becomes of the name
server. It must not found one by them. A pod that looks for its job in vain says so, with a nonce, and is told all
addresses (:mod:`ef_common.core.door_list`): they are read after the nonce was heard, and it is told again whenever they
have changed, until it has found its job. Where names are known, hardly any pod is told anything, which costs no call.

Cost: each pod that looks for a job of N pods is told N addresses, and again when they have changed.
"""

from __future__ import annotations

from dataclasses import replace

from ef_common.core.cluster.state import Job, Pod
from ef_common.core.door_list import MAX_LISTED, DoorList

NUM_CONTACTS = 5
"""So many addresses a new pod is created with: any of them is enough."""


def contacts_of(job: Job) -> DoorList:
    """With which addresses new pods are created, that of rank 0 first."""
    return DoorList(tuple(pod.address for pod in _running(job))[:NUM_CONTACTS])


def doors_of(job: Job, nonce: str) -> DoorList:
    """What a pod is told that has shown this nonce, if its job is known as it was after that.

    An address that is missing here could be that of a pod which founds the job at the same time: so all are there,
    except for pods that have ended.
    """
    running = {pod.address: None for pod in _running(job)}
    others = {pod.address: None for pod in job.pods if pod.address and not pod.ended and pod.address not in running}
    if len(running) + len(others) > MAX_LISTED:
        return contacts_of(job)
    return DoorList(tuple(running), tuple(others), nonce)


def seekers_of(job: Job) -> tuple[Pod, ...]:
    """The pods that look for the job and do not know what they would be told now."""
    seekers = [pod for pod in _running(job) if pod.seeks]
    if not seekers:
        return ()
    doors = doors_of(job, seekers[0].seeks)  # all of them are told the same, but for the nonce if there is one
    return tuple(pod for pod in seekers if not _is_told(pod, replace(doors, nonce=doors.nonce and pod.seeks)))


def _running(job: Job) -> list[Pod]:
    first = "" if job.report is None else job.report.first
    running = [pod for pod in job.alive if pod.running and pod.address]
    return sorted(running, key=lambda pod: (pod.address != first, pod.index))


def _is_told(pod: Pod, doors: DoorList) -> bool:
    """Whether it knows all of this, in any order."""
    told = pod.told
    return (told.nonce, set(told.doors), set(told.others)) == (doors.nonce, set(doors.doors), set(doors.others))
