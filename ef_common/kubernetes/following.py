"""What the pods of a job have written, as they write it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ef_common import threads
from ef_common.errors import ClusterAway, ClusterFailed, ClusterNotFound, ClusterRefused, ThreadFailed
from ef_common.kubernetes.kinds import JOBS, PODS
from ef_common.kubernetes.resource import JOB_LABEL

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

_LOOK_S = 2.0
_Said = SimpleQueue["tuple[str, str] | ThreadFailed | None"]


def lines(api: Api, namespace: str, job: str, *, follow: bool) -> Iterator[tuple[str, str]]:
    """Names of pods, and lines of theirs.

    Args:
        api: The cluster.
        namespace: Where the job is.
        job: Its name.
        follow: Go on, also with pods that come later, until the job has ended. While the API server is away, it is
            asked again every two seconds, and what was written meanwhile follows.

    Raises:
        ClusterNotFound: There is no such job.
        ThreadFailed: A thread that reads has failed.
    """
    container = api.get(JOBS, namespace, job)["spec"]["template"]["spec"]["containers"][0]["name"]
    if not follow:
        for pod in _pods(api, namespace, job).values():
            try:
                for line in api.log(namespace, pod, container):
                    yield pod, line
            except ClusterFailed as error:  # it has not started, or has gone
                yield pod, f"({error})"
        return
    yield from _follow(api, namespace, job, container)


def _pods(api: Api, namespace: str, job: str) -> dict[str, str]:
    """The uids of pods that have started, and their names, in order of these."""
    found, _ = api.list(PODS, namespace, labels=f"{JOB_LABEL}={job}")
    started = (pod["metadata"] for pod in found if pod["status"].get("phase") != "Pending")
    return {meta["uid"]: meta["name"] for meta in sorted(started, key=itemgetter("name"))}


def _follow(api: Api, namespace: str, job: str, container: str) -> Iterator[tuple[str, str]]:
    said: _Said = SimpleQueue()

    def look() -> None:
        readers: dict[str, _Reader] = {}
        is_away = False
        while True:
            try:
                phase = (api.get(JOBS, namespace, job).get("status") or {}).get("phase")
                pods = _pods(api, namespace, job)
            except (ClusterNotFound, ClusterRefused) as error:
                said.put((job, f"({error})"))
                break
            except ClusterFailed as error:
                if not is_away:
                    said.put((job, f"({error}. The pods are followed again as soon as that is possible)"))
                is_away = True
            else:
                is_away = False
                for uid, pod in pods.items():
                    if uid not in readers:
                        readers[uid] = _Reader(partial(api.follow_log, namespace, pod, container), pod, said)
                    readers[uid].go()
                if phase in ("Succeeded", "Failed"):
                    whole = {uid for uid, reader in readers.items() if reader.has_read_all()}
                    if pods.keys() <= whole:
                        break
            threading.Event().wait(_LOOK_S)
        said.put(None)

    threads.start(look, name="elasticflow-pods", job="looks for pods", on_failure=said.put)
    while (one := said.get()) is not None:
        if isinstance(one, ThreadFailed):
            raise one
        yield one


class _Reader:
    """Reads the log of a pod in a thread.

    Args:
        follow: Follows the log since a time.
        pod: Name of the pod.
        said: Where the lines are put.
    """

    def __init__(self, follow: Callable[..., Iterator[tuple[str, str]]], pod: str, said: _Said) -> None:
        self._follow, self._pod, self._said = follow, pod, said
        self._since = ""
        self._is_broken = False
        self._thread: threading.Thread | None = None

    def go(self) -> None:
        """Begin, or go on behind the last line if the connection has broken."""
        if self._thread is None or (self._is_broken and not self._thread.is_alive()):
            self._is_broken = False
            job = "reads the lines of a pod"
            name = f"elasticflow-pod-{self._pod}"
            self._thread = threads.start(self._read, name=name, job=job, on_failure=self._said.put)

    def has_read_all(self) -> bool:
        """Wait until it stops; whether nothing more comes."""
        if self._thread is not None:
            self._thread.join()
        return not self._is_broken

    def _read(self) -> None:
        try:
            for at, line in self._follow(since=self._since):
                self._since = at
                self._said.put((self._pod, line))
        except ClusterAway:
            self._is_broken = True
        except ClusterFailed as error:
            self._said.put((self._pod, f"({error})"))
