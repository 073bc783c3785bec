"""What the pods of a job need beside themselves: a name, a token, and the limits of their network and disruption."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING

from ef_common.errors import ClusterExists, ClusterNotFound, ClusterRefused
from ef_common.kubernetes import kinds, reading, writing
from ef_common.kubernetes.resource import Json

if TYPE_CHECKING:
    from ef_common.kubernetes.api import Api

logger = logging.getLogger(__name__)

_NO_BUDGET: Json = {"spec": {"minAvailable": 0}}


class Belongings:
    """Makes them once, and lets the disruption budget follow the job. Threads may share it, each for other jobs.

    What has been made is remembered, so that a job that grows costs no calls for it. A controller that has just
    started makes these calls for each job once.

    Args:
        api: The cluster.
        namespace: Where the controller is, which the network policies let through.
        wait: Called before each call.
    """

    def __init__(self, api: Api, namespace: str, *, wait: Callable[[], object]) -> None:
        self._api, self._namespace, self._wait = api, namespace, wait
        self._kept: dict[str, int] = {}
        self._budgets = kinds.BUDGETS, kinds.OLD_BUDGETS  # the version that the API server has comes first

    def keep(self, thing: Json, *, had_pods: bool) -> None:
        """Let the pods of this job have what they need, as its spec is now.

        Args:
            thing: The job.
            had_pods: It has had pods, so all of this is there. The API server looks at quotas before it looks for what
                there is, so it may refuse that; the job lacks nothing then, and goes on.

        Raises:
            ClusterRefused: A job that has had no pods cannot have what they need.
        """
        uid, generation = reading.version_of(thing)
        if self._kept.get(uid) == generation:
            return
        if uid not in self._kept:
            self._make(kinds.SERVICES, writing.service_of(thing), had_pods)
            self._make(kinds.SECRETS, writing.secret_of(thing), had_pods)
            if thing["spec"].get("networkPolicy", True):
                self._make(kinds.POLICIES, writing.network_policy_of(thing, self._namespace), had_pods)
        with _passing(had_pods):
            self._limit_disruption(thing)
        self._kept[uid] = generation

    def forget_all_but(self, uids: Container[str]) -> None:
        """Forget jobs other than these."""
        self._kept = {uid: generation for uid, generation in self._kept.items() if uid in uids}

    def _make(self, kind: kinds.Kind, one: Json, had_pods: bool) -> None:
        self._wait()
        with contextlib.suppress(ClusterExists), _passing(had_pods):  # it is there, and stays as it is
            self._api.create(kind, one)

    def _limit_disruption(self, thing: Json) -> None:
        first, second = self._budgets
        try:
            self._apply_budget(thing, first)
        except ClusterNotFound:  # this API server has the other version, or there is no budget to change
            try:
                self._apply_budget(thing, second)
                self._budgets = second, first
            except ClusterNotFound:
                if writing.disruption_budget_of(thing, second.api_version) is not None:
                    raise

    def _apply_budget(self, thing: Json, kind: kinds.Kind) -> None:
        """Apply the budget. One that is no longer wanted lets all pods go; it may also never have been there."""
        self._wait()
        budget = writing.disruption_budget_of(thing, kind.api_version)
        if budget is not None:
            self._api.apply(kind, budget)
        else:
            meta = thing["metadata"]
            self._api.change(kind, meta["namespace"], writing.own_name(thing), _NO_BUDGET)


@contextlib.contextmanager
def _passing(had_pods: bool) -> Iterator[None]:
    """Log a refusal, if the job has had pods."""
    try:
        yield
    except ClusterRefused as error:
        if not had_pods:
            raise
        logger.warning("refused, and probably there already: %s", error)
