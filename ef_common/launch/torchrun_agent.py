"""torchrun's agent, some of whose workers die while the others stay.

By itself an agent ends all of its workers when one dies, and starts all of them again if ``--max-restarts`` allows
that. The members of an elastic job need nobody's end but their own: here the agent's other workers go on, and only the
dead one is started again, after a pause and as often as ``--max-restarts`` allows; or not at all. The agent is
torchrun's own, with all of its options. What it does once no other worker of it lives is torchrun's affair, and so is
everything if the script is not one of ElasticFlow's, or if the death has ended the job.

The private parts of torch that this touches, in objects of one agent only, stand in this file, and in `PARTS`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from ef_common.errors import UnsupportedError
from ef_common.parts import Package, check, listed
from ef_common.session.crash_record import has_left, in_training, path_of, read_failure
from ef_common.terminal import say

if TYPE_CHECKING:
    from ef_common.launch.deaths import Deaths

logger = logging.getLogger(__name__)

PARTS = (
    *listed("agent", "_invoke_run(_)", "failures_of"),
    *listed("agent._invoke_run", "run_result", "failures_of"),
    *listed("agent", "_start_workers(_)", "attach", replaced=True),
    *listed("agent", "_pcontext", "_start"),
    *listed("agent", "_remaining_restarts", "_lose", int),
    *listed("context", "_poll()", "_start", replaced=True),
    *listed("context", "_running_local_ranks", "_look", set),
    *listed("context", "subprocess_handlers envs", "_revive", dict),
    *listed("process", "_popen(args, env)", "_revive"),
    *listed("process", "proc", "_revive"),
)
RELEASES = ("2.6", "2.13.0")
"""The oldest release that `pyproject.toml` allows, and the newest that the tests were run with."""


def package() -> Package:
    """The release of torch, and what it must have."""
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent  # which imports handlers

    roots = {"agent": LocalElasticAgent, "context": SubprocessContext, "process": SubprocessHandler}
    return Package("torch", torch.__version__, *RELEASES, parts=PARTS, roots=roots)


def failures_of(frame: FrameType | None) -> Mapping[int, ProcessFailure]:
    """The failures for which an agent starts its workers again, which it has in a local variable.

    Args:
        frame: One that the agent has called.
    """
    while frame is not None:
        if frame.f_code.co_name == "_invoke_run":
            failures = getattr(frame.f_locals.get("run_result"), "failures", None)
            return failures if isinstance(failures, Mapping) else {}
        frame = frame.f_back
    return {}


def agent_of(handler: Any, frame: FrameType | None) -> Any:
    """The agent that has called its rendezvous handler; None if none has.

    Args:
        handler: The handler.
        frame: One that the agent has called.
    """
    while frame is not None:
        caller: Any = frame.f_locals.get("self")
        if hasattr(caller, "get_worker_group") and caller.get_worker_group().spec.rdzv_handler is handler:
            return caller
        frame = frame.f_back
    return None


class Siblings:
    """The workers of one agent.

    Args:
        deaths: What is done about deaths.
        told: Returns whether the agent was told to go, so that it starts no workers.
        clock: Monotonic time in seconds.
    """

    def __init__(
        self, deaths: Deaths, *, told: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._deaths = deaths
        self._told = told
        self._clock = clock
        self._agent: Any = None
        self._context: Any = None
        self._due: dict[int, float] = {}  # when the dead are started again
        self._are_ours = False

    def attach(self, agent: Any) -> None:
        """Look after an agent's workers from their start on. A release with other private parts is left as it is."""
        if self._agent is not None or agent is None or agent.get_worker_group().spec.local_world_size < 2:
            return
        try:
            check([package()])
        except UnsupportedError as error:
            logger.warning("a worker that dies takes the others of this node along, because %s", error)
            return
        self._agent = agent
        start = agent._start_workers

        def start_workers(worker_group: Any) -> Any:
            started = start(worker_group)
            self._start(agent._pcontext)
            return started

        agent._start_workers = start_workers

    def _start(self, context: Any) -> None:
        self._due.clear()
        are_forked = not isinstance(context, SubprocessContext)  # by --run-path
        if are_forked:
            return
        self._context = context
        poll = context._poll
        context._poll = lambda: None if self._look() else poll()

    def _look(self) -> bool:
        """Look at all workers once; returns whether torchrun need not know of anything."""
        context = self._context
        running = context._running_local_ranks
        statuses = {rank: context.subprocess_handlers[rank].proc.poll() for rank in running}
        for rank, status in statuses.items():
            if status and not self._lose(rank, status, statuses):
                return False
        if self._told() or self._is_over(statuses):
            self._due.clear()
        for rank, due in list(self._due.items()):
            if self._clock() >= due:
                self._revive(rank)
        return bool(self._due) or None in statuses.values()

    def _is_over(self, statuses: Mapping[int, int | None]) -> bool:
        """Whether the training is over: some have ended well, and neither have left nor were in the middle of it."""
        directory = self._deaths.directory
        ended = [path_of(directory, rank) for rank, status in statuses.items() if status == 0]
        return not has_left(directory) and not all(map(in_training, ended))

    def _lose(self, rank: int, status: int, statuses: Mapping[int, int | None]) -> bool:
        """A worker has died; returns whether others go on."""
        directory, agent = self._deaths.directory, self._agent
        over = self._is_over(statuses)
        living = bool(self._due) or None in statuses.values()
        self._are_ours = self._are_ours or any(path_of(directory, other).exists() for other in self._context.envs)
        if not self._are_ours or not (living or over) or read_failure(directory):
            return False
        loss = self._deaths.of_one(rank, status)
        if loss.why:
            return False
        self._context._running_local_ranks.discard(rank)
        restarts = agent._remaining_restarts > 0 and not over and not self._told()
        if restarts:
            agent._remaining_restarts -= 1
            self._due[rank] = self._clock() + loss.pause_s
        when = f" in {loss.pause_s:g} s" if loss.pause_s else ""
        what = f"the others go on without it (--max-restarts={self._max_restarts})"
        if restarts:
            what = f"restarting it{when} (restart {self._num_restarts} of {self._max_restarts})"
        elif over:
            what = "the others have finished"
        died = f"worker {rank} of this node died {loss.death.where} ({loss.death.how})"
        say(f"{died}; {what}", color="yellow", event="restarting" if restarts else "lost", local_rank=rank)
        return True

    def _revive(self, rank: int) -> None:
        """Start a worker again in its place: its output goes on where it has ended."""
        del self._due[rank]
        process = self._context.subprocess_handlers[rank]
        count = {"TORCHELASTIC_RESTART_COUNT": f"{self._num_restarts}"}
        process.proc = process._popen(process.proc.args, {**os.environ, **self._context.envs[rank], **count})
        self._context._running_local_ranks.add(rank)
        self._agent.get_worker_group().workers[rank].id = process.proc.pid

    @property
    def _max_restarts(self) -> int:
        return int(self._agent.get_worker_group().spec.max_restarts)

    @property
    def _num_restarts(self) -> int:
        return self._max_restarts - int(self._agent._remaining_restarts)
