"""torchrun's rendezvous "elasticflow": agents supervise their own workers, and the coordinator decides on membership.

::

    torchrun --nnodes=1:8 --rdzv-endpoint=HOST:PORT train.py

A range of nodes without a named backend is ours (:mod:`ef_common.launch.unnamed_rendezvous`), and so is
``--rdzv-backend=elasticflow``.

Each agent is told that the world is its own node and that nobody ever waits, so it never restarts healthy workers. It
restarts those that crash, as ``--max-restarts`` says: the first time at once, then after growing pauses. Others of its
node go on meanwhile (:mod:`ef_common.launch.torchrun_agent`). It restarts none when an exception of the user's code has
ended the job, and ends the job itself when its workers die at the same step repeatedly
(:mod:`ef_common.launch.restarts`). The agent that can bind the endpoint hosts the coordinator; each
other agent keeps a standby ready. The workers learn everything they need from the environment.

The endpoint may also be a registry: a URL of a shared folder, an object store or etcd, at which agents find the job
wherever it is by then (:mod:`ef_common.launch.finding`). ``--rdzv-id`` tells jobs at one URL apart.

An agent that is told to go passes that on to its workers (:mod:`ef_common.launch.departure`). When these have left, one
that hosts the leading coordinator hands over to the coordinator of another node, and ends.

The keys of ``--rdzv-conf`` are in :mod:`ef_common.launch.rendezvous_options`.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from ef_common.errors import ElasticFlowError, JobFinished
from ef_common.launch import environment
from ef_common.launch.deaths import Deaths, directory_for_records
from ef_common.launch.departure import SIGNAL, Departure
from ef_common.launch.ending import end_soon
from ef_common.launch.frozen import Watch
from ef_common.launch.hosting import Hosting, node_name
from ef_common.launch.notice_sources import this_agent
from ef_common.launch.plain_script import PlainScript
from ef_common.launch.rendezvous_options import BACKEND, Parameters, RendezvousOptions
from ef_common.launch.torchrun_agent import Siblings, agent_of
from ef_common.launch.unnamed_rendezvous import HERE, Unnamed, take_unnamed_rendezvous
from ef_common.protocol.addresses import LOOPBACK
from ef_common.session.crash_record import is_asked_to_leave, write_left
from ef_common.storage.failures import redact
from ef_common.terminal import say

logger = logging.getLogger(__name__)


class ElasticFlowRendezvous(RendezvousHandler):
    """An agent's part: it may host the coordinator, and keeps torchrun out of membership.

    Args:
        options: Options of the rendezvous.
        run_id: torchrun's id of the job.
        local_addr: torchrun's ``--local-addr``: address at which others reach this node.
        local: The job is on this machine alone.
    """

    def __init__(
        self, options: RendezvousOptions, *, run_id: str, local_addr: str | None = None, local: bool = False
    ) -> None:
        self._run_id = run_id
        self._node = node_name()
        self._hosting = Hosting(options, run_id=run_id, node=self._node, local_addr=local_addr)
        self._closed = False
        self._local = local
        self._deaths: Deaths | None = None
        self._siblings: Siblings | None = None
        self._plain: PlainScript | None = None
        self._master_port = 0
        self._watch: Watch | None = None
        self._departure = Departure()
        self._has_begun = False
        self._given_token: str | None = None

    def start(self) -> None:
        """Find the job, and prepare the environment that workers inherit; see :meth:`Hosting.find`.

        Raises:
            SystemExit: This agent was told to go.
        """
        self._deaths = Deaths(directory_for_records(), node=self._node, report=self._hosting.report)
        self._departure.listen()
        try:
            with self._departure.before_workers(self._leave):
                if self._is_told():  # before it could hear the signal
                    self._leave()
                self._hosting.find()
        except BaseException:
            self._departure.stop()
            raise
        self._siblings = Siblings(self._deaths, told=self._is_told)
        self._plain = None if self._local else PlainScript(self._deaths.directory)
        self._watch = Watch(self._deaths.directory, self._hosting.ask_about)
        self._watch.start()
        self._given_token = os.environ.get(environment.TOKEN)
        os.environ.update(self._hosting.variables())
        os.environ[environment.AGENT] = this_agent()
        os.environ[environment.CRASH_RECORDS] = str(self._deaths.directory)

    # ------------------------------------------------------------ torchrun's interface

    def get_backend(self) -> str:
        """Name of the backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """False, because workers do not need the agent's store."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a world of this node alone, at once or, after repeated deaths of workers, after a pause.

        Raises:
            ChildFailedError, JobFailed: The job has failed, so they are not started again.
            SystemExit: This agent was told to go.
        """
        if self._is_told():
            self._leave()
        if self._has_begun and self._deaths is not None:
            self._deaths.before_restart(told=self._is_told)
            if self._is_told():
                self._leave()
        self._has_begun = True
        if self._siblings is not None:
            self._siblings.attach(agent_of(self, inspect.currentframe()))
        store = HashStore()
        info = RendezvousStoreInfo.build(0, store, LOOPBACK)
        self._master_port = info.master_port
        return RendezvousInfo(store, 0, 1, info)

    def is_closed(self) -> bool:
        """Whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Note that torchrun closes the rendezvous; the workers close the job itself."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0, because the coordinator handles newcomers. torchrun asks while its workers run."""
        if self._plain is not None:
            self._plain.look(self._master_port)
        return 0

    def get_run_id(self) -> str:
        """Id of the job, as torchrun was told."""
        return self._run_id

    def shutdown(self) -> bool:
        """End; an agent with the leading coordinator first hands over, or waits for the workers of other nodes.

        Raises:
            SystemExit: This agent was told to go before its workers could hear of that, which is no failure.
        """
        if self._given_token is not None:  # the next job of this process is not to take that of the workers for it
            os.environ[environment.TOKEN] = self._given_token
        if self._watch is not None:
            self._watch.stop()
        if self._deaths is not None:
            self._deaths.at_the_end()
        self._hosting.end()
        self._departure.stop()
        atexit.register(end_soon)
        failure = sys.exc_info()[1]  # torchrun's, as it shuts down on its way out
        if isinstance(failure, ChildFailedError) and self._is_told() and _were_told(failure):
            self._leave()
        return True

    def _is_told(self) -> bool:
        return self._departure.told or (self._deaths is not None and is_asked_to_leave(self._deaths.directory))

    def _leave(self) -> NoReturn:
        """End this agent, whose workers were told to go before they could heed that."""
        if self._deaths is not None:
            write_left(self._deaths.directory)
        raise SystemExit(0)


def _were_told(error: ChildFailedError) -> bool:
    """Whether workers have ended by nothing but the signals with which they are told to go."""
    return {failure.exitcode for failure in error.failures.values()} <= {-SIGNAL, -signal.SIGTERM}


def create_handler(params: RendezvousParameters, *, unnamed: Unnamed | None = None) -> RendezvousHandler:
    """Create the handler of one agent, and start it.

    Args:
        params: torchrun's.
        unnamed: The command line names no rendezvous; None if it does.

    Raises:
        SystemExit: The training is over (status 0), or what is wrong was told in one line (status 2).
    """
    try:
        told: Parameters = params
        if unnamed is not None:
            unnamed.take_back(os.environ)
            told = unnamed.complete(params, os.environ)
        options = RendezvousOptions.parse(told)
        local = unnamed is not None and told.endpoint == HERE
        if local:  # nobody else knows of it
            options = replace(options, settings=replace(options.settings, start_nodes=1))
        if unnamed is not None:
            _tell(told, local)
        handler = ElasticFlowRendezvous(options, run_id=params.run_id, local_addr=params.local_addr, local=local)
        handler.start()
    except JobFinished as finished:
        logger.warning("%s", finished)
        raise SystemExit(0) from None
    except ElasticFlowError as error:
        say(str(error), color="red")
        raise SystemExit(2) from None
    return handler


def _tell(params: Parameters, local: bool) -> None:
    where = (
        "of this machine (--rdzv-endpoint=HOST:PORT lets more nodes join)" if local else f"at {redact(params.endpoint)}"
    )
    say(
        f"--nnodes={params.min_nodes}:{params.max_nodes} names no rendezvous, so this is a node of an elastic job "
        f"{where}; torchrun's own is --rdzv-backend=c10d",
        event="unnamed_rendezvous",
    )


def get_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Entry point of the group ``torchrun.handlers``, which torchrun asks before it builds its parser."""
    return partial(create_handler, unnamed=take_unnamed_rendezvous())
