"""Nodes that are none: a pod on them runs as soon as it is there, and is gone as soon as it is told to go.

They say once that they are ready, and nothing after that, so their control plane has to be patient (`node_grace_s`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ef_common.errors import ClusterFailed
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.kinds import PODS
from ef_common.kubernetes.resource import Json
from ef_common.kubernetes.watching import Copy
from tests.kubernetes.kubelets import register

_NUM_THREADS = 4


class PretendedNodes:
    """Such nodes, with a GPU each.

    Args:
        kubeconfig: Where the cluster is.
        number: How many there are.
    """

    def __init__(self, kubeconfig: Path, number: int) -> None:
        self._api, self._number = Api(str(kubeconfig), manager="kubelet"), number
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._pods = Copy(self._api, PODS, on_change=self._changed.set)
        self._pool = ThreadPoolExecutor(_NUM_THREADS)
        self._thread = threading.Thread(target=self._follow, name="pretended-nodes")
        self._done: set[tuple[str, str]] = set()

    def __enter__(self) -> PretendedNodes:
        list(self._pool.map(self._register, range(self._number)))
        self._pods.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._changed.set()
        self._thread.join()
        self._pods.stop()
        self._pool.shutdown()
        self._api.close()

    def _register(self, node: int) -> None:
        address = f"10.0.{node // 250}.{node % 250 + 1}"
        register(self._api, f"pretended{node}", gpus=1, address=address)

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._changed.wait(1.0)
            self._changed.clear()
            for pod in self._pods.objects():
                if pod["metadata"].get("deletionTimestamp"):
                    self._once("end", pod, self._end)
                elif pod["spec"].get("nodeName") and pod["status"].get("phase", "Pending") == "Pending":
                    self._once("run", pod, self._run)

    def _once(self, what: str, pod: Json, act: Callable[[Json], object]) -> None:
        uid = pod["metadata"]["uid"]
        if (what, uid) not in self._done:
            self._done.add((what, uid))
            self._pool.submit(act, pod)

    def _run(self, pod: Json) -> None:
        running = {"name": pod["spec"]["containers"][0]["name"], "image": "", "imageID": "", "restartCount": 0}
        status = {"phase": "Running", "containerStatuses": [{**running, "ready": True, "state": {"running": {}}}]}
        try:
            self._api.replace(PODS, {**pod, "status": {**pod["status"], **status}}, sub="status")
        except ClusterFailed:  # it has changed since, so it will be seen again
            self._done.discard(("run", pod["metadata"]["uid"]))

    def _end(self, pod: Json) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(ClusterFailed):
            self._api.delete(PODS, meta["namespace"], meta["name"], uid=meta["uid"], grace_s=0)
