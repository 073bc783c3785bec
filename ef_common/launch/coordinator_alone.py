"""`elasticflow coordinator`: a coordinator on a machine without workers, as long as the job lasts."""

from __future__ import annotations

import signal
import time

from ef_common.errors import JobFinished, UsageError
from ef_common.launch.hosting import Hosting, node_name
from ef_common.launch.nnodes import nodes_of
from ef_common.launch.rendezvous_options import GivenParameters, RendezvousOptions, config_of
from ef_common.launch.signals import handled, to_end
from ef_common.protocol.addresses import format_address
from ef_common.terminal import log_as_json, say

_LINGER_S = 5.0
"""How long it waits for another worker that wants to hear that the training is over."""
_LOOK_S = 0.1
_INTERRUPTED = 128 + signal.SIGINT


class _ToldToEnd(BaseException):
    """A signal asks this process to end before it has found the job."""


class Alone:
    """A coordinator that has no agent.

    Args:
        endpoint: ``--rdzv-endpoint``, as the nodes of the job have it.
        conf: ``--rdzv-conf``.
        job: ``--rdzv-id``.
        nnodes: ``--nnodes``.
        local_addr: Address at which others reach this machine; None to find it.
        standby: It never founds the job.

    Raises:
        UsageError: An option is malformed.
    """

    def __init__(
        self, endpoint: str, *, conf: str, job: str, nnodes: str, local_addr: str | None, standby: bool
    ) -> None:
        options = RendezvousOptions.parse(GivenParameters(endpoint, *nodes_of(nnodes), config_of(conf)))
        self._hosting = Hosting(
            options, run_id=job, node=node_name(), local_addr=local_addr, founds=not standby, is_alone=True
        )
        self._signals: list[int] = []
        self._is_serving = False

    def run(self) -> int:
        """Serve until a signal asks it to end, or the training is over.

        Returns:
            Exit status.

        Raises:
            ElasticFlowError: It cannot listen there, or cannot find the job, or its thread has failed.
        """
        log_as_json()
        try:
            with handled(to_end(), self._hear):
                self._hosting.find()
                self._is_serving = True
                return self._serve()
        except JobFinished as finished:
            say(str(finished))
        except _ToldToEnd:
            if signal.SIGINT in self._signals:
                return _INTERRUPTED
        return 0

    def _hear(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if not self._is_serving:
            raise _ToldToEnd  # which ends whatever it waits for

    def _serve(self) -> int:
        coordinator = self._hosting.coordinator
        if coordinator is None:
            raise UsageError(
                "this machine is not the one that the endpoint names, so nobody would find its coordinator"
            )
        led: bool | None = None
        ended_at: float | None = None
        while not self._signals and (ended_at is None or time.monotonic() < ended_at + _LINGER_S):
            coordinator.check()  # whoever watches over this process starts another one
            if coordinator.leads != led:
                led = coordinator.leads
                what = "leads the job" if led else "stands by"
                say(f"the coordinator at {format_address(coordinator.address)} {what}", event="coordinator", leads=led)
            time.sleep(_LOOK_S)
            is_over = coordinator.is_over and coordinator.wait_until_idle(0)
            ended_at = (ended_at or time.monotonic()) if is_over else None
        self._hosting.leave()
        if self._signals:
            return 0
        why = coordinator.failure
        say(f"the job has failed: {why}" if why else "the training is over", color="red" if why else None)
        return 1 if why else 0
