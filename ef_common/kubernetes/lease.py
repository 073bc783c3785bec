"""Which of several controllers acts: the one that holds a Lease. All others watch, and take over if it is not renewed.

The lease saves work, and keeps two controllers from contending for each step. Whether what they do is right does not
depend on it (:mod:`ef_common.core.cluster.decide`): one that was stopped for a while may still act on what it knew
before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ef_common.errors import ClusterConflict, ClusterFailed, ClusterNotFound
from ef_common.kubernetes.kinds import LEASES
from ef_common.kubernetes.reading import time_of
from ef_common.kubernetes.resource import CONTROLLER, Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

logger = logging.getLogger(__name__)

DURATION_S = 15.0
"""How long a lease counts that is not renewed, by the clock of the one that waits for it."""
RENEW_S = 3.0


class Lease:
    """The lease, from the view of one controller.

    Args:
        api: Where it is.
        namespace: Where it is.
        holder: This controller; no other one may have its name.
        clock: Monotonic time in seconds.
        wall: Time of the day in seconds, for people.
        duration_s: How long it counts.
        wait: Called before each call.
    """

    def __init__(
        self,
        api: Api,
        namespace: str,
        holder: str,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        duration_s: float = DURATION_S,
        wait: Callable[[], object] = lambda: None,
    ) -> None:
        self._api, self._namespace, self._holder, self._wait = api, namespace, holder, wait
        self._clock, self._wall, self._duration_s = clock, wall, duration_s
        self._seen: tuple[str, float] | None = None  # version, and since when
        self._renewed_at: float | None = None

    @property
    def is_mine(self) -> bool:
        """Whether it is held, and the time in which nobody else takes it has not passed."""
        return self._renewed_at is not None and self._clock() < self._renewed_at + self._duration_s / 2

    def keep(self) -> bool:
        """Take it, or renew it, if that is possible; whether it is held."""
        asked_at = self._clock()
        try:
            if self._take(asked_at):
                self._renewed_at = asked_at
            else:
                self._renewed_at = None
        except ClusterConflict:
            self._renewed_at = None
        except ClusterFailed:  # perhaps it was renewed: it is not held any more after a while
            pass
        except Exception:  # the next call tries again, or nobody would ever take over
            logger.exception("the lease cannot be read or renewed")
        return self.is_mine

    def give_up(self) -> None:
        """Another one need not wait."""
        if self.is_mine:
            self._renewed_at = None
            try:
                lease = self._read()
                spec = lease.get("spec") or {}
                if spec.get("holderIdentity") == self._holder:
                    self._write({**lease, "spec": {**spec, "holderIdentity": ""}})
            except ClusterFailed:
                pass

    def _take(self, now: float) -> bool:
        try:
            lease = self._read()
        except ClusterNotFound:
            meta = {"name": CONTROLLER, "namespace": self._namespace}
            self._wait()
            self._api.create(LEASES, {**_head(), "metadata": meta, "spec": self._spec({})})
            return True
        spec = lease.get("spec") or {}
        version, holder = lease["metadata"]["resourceVersion"], spec.get("holderIdentity") or ""
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        if holder not in ("", self._holder) and now < self._seen[1] + self._duration_s:
            return False
        self._write({**lease, **_head(), "spec": self._spec(spec)})
        return True

    def _read(self) -> Json:
        self._wait()
        return self._api.get(LEASES, self._namespace, CONTROLLER)

    def _write(self, lease: Json) -> None:
        self._wait()
        self._api.replace(LEASES, lease)

    def _spec(self, before: Json) -> Json:
        holder = before.get("holderIdentity") or ""
        is_new = holder != self._holder
        return {
            **before,
            "holderIdentity": self._holder,
            "leaseDurationSeconds": int(self._duration_s) or 1,
            "leaseTransitions": (before.get("leaseTransitions") or 0) + (is_new and bool(before)),
            "renewTime": time_of(self._wall()),
            "acquireTime": time_of(self._wall()) if is_new else before.get("acquireTime"),
        }


def _head() -> Json:
    return {"apiVersion": LEASES.api_version, "kind": LEASES.kind}
