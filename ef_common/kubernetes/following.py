"""What the pods of a job have written, as they write it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ef_common import threads
from ef_common.errors import ClusterFailed, ThreadFailed
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import JOB_LABEL

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

_LOOK_S = 2.0


def lines(api: Api, namespace: str, job: str, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Names of pods, and lines of theirs.

    Args:
        api: The cluster.
        namespace: Where the job is.
        job: Its name.
        follow: Go on, also with pods that come later, until the job has ended.

    Raises:
        ClusterNotFound: There is no such job.
        ThreadFailed: A thread that reads has failed.
    """
    container = api.get(JOBS, namespace, job)["spec"]["template"]["spec"]["containers"][0]["name"]
    if not follow:
        for pod in _pods(api, namespace, job):
            try:
                for line in api.log(namespace, pod, container):
                    yield pod, line
            except ClusterFailed as error:  # it has not started, or has gone
                yield pod, f"({error})"
        return
    yield from _follow(api, namespace, job, container)


def _pods(api: Api, namespace: str, job: str) -> list[str]:
    found, _ = api.list(PODS, namespace, labels=f"{JOB_LABEL}={job}")
    return sorted(pod["metadata"]["name"] for pod in found if pod["status"].get("phase") != "Pending")


def _follow(api: Api, namespace: str, job: str, container: str) -> Iterator[tuple[str, str]]:
    said: SimpleQueue[tuple[str, str] | ThreadFailed | None] = SimpleQueue()

    def read(pod: str) -> None:
        try:
            for line in api.log(namespace, pod, container, follow=True):
                said.put((pod, line))
        except ClusterFailed as error:
            said.put((pod, f"({error})"))

    def look() -> None:
        known: dict[str, threading.Thread] = {}
        try:
            while True:
                phase = (api.get(JOBS, namespace, job).get("status") or {}).get("phase")
                for pod in _pods(api, namespace, job):
                    if pod not in known:
                        known[pod] = threads.start(
                            partial(read, pod), name=pod, job="reads the lines of a pod", on_failure=said.put
                        )
                if phase in ("Succeeded", "Failed"):
                    break
                threading.Event().wait(_LOOK_S)
            for thread in known.values():
                thread.join()
        except ClusterFailed as error:
            said.put((job, f"({error})"))
        said.put(None)

    threads.start(look, name="elasticflow-pods", job="looks for pods", on_failure=said.put)
    while (one := said.get()) is not None:
        if isinstance(one, ThreadFailed):
            raise one
        yield one
