"""What people are told of a job: events, which `kubectl describe` shows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from ef_common.errors import ClusterFailed
from ef_common.kubernetes import kinds, reading
from ef_common.kubernetes.resource import API_VERSION, CONTROLLER, KIND, Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

logger = logging.getLogger(__name__)

_MAX_CHARS = 1000


class Teller:
    """Writes events. Threads may share it, as long as no two of them tell of the same job.

    Args:
        api: The cluster.
        wait: Called before each call.
    """

    def __init__(self, api: Api, *, wait: Callable[[], object]) -> None:
        self._api, self._wait = api, wait
        self._told: dict[str, str] = {}

    def tell(self, thing: Json, reason: str, message: str, *, kind: str = "Normal") -> None:
        """Write an event of a job; the same one is not told twice in a row.

        Args:
            thing: The job.
            reason: One word.
            message: In words.
            kind: `Normal` or `Warning`.
        """
        meta = thing["metadata"]
        if self._told.get(meta["uid"]) == reason + message:
            return
        self._told[meta["uid"]] = reason + message
        now = reading.time_of(time.time())
        about = {"apiVersion": API_VERSION, "kind": KIND, "name": meta["name"], "namespace": meta["namespace"]}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": {**about, "uid": meta["uid"], "resourceVersion": meta["resourceVersion"]},
            "reason": reason,
            "message": message[:_MAX_CHARS],
            "type": kind,
            "count": 1,
            "firstTimestamp": now[:19] + "Z",
            "lastTimestamp": now[:19] + "Z",
            "source": {"component": CONTROLLER},
        }
        self._wait()
        try:
            self._api.create(kinds.EVENTS, event)
        except ClusterFailed as error:
            logger.debug("an event was lost: %s", error)

    def forget_all_but(self, uids: Container[str]) -> None:
        """Forget jobs other than these."""
        self._told = {uid: text for uid, text in self._told.items() if uid in uids}
