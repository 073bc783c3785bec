"""What starts and ends nodes of the job that this worker belongs to."""

from __future__ import annotations

import os
from pathlib import Path

from ef_common.data.provisioners import Orders, Provisioner, ScaleCommand
from ef_common.errors import UsageError
from ef_common.launch import run_directory, yarn
from ef_common.launch.environment import CONTROLLER, HOST, WorkerEnvironment
from ef_common.launch.hosts.folder import wish_for
from ef_common.launch.slurm import SlurmJob, job_in, limit

_NUM_SPARES = 1  # one that replaces a straggler; it is no member until that has gone


class LocalJob:
    """The workers of `elasticflow run` on this machine, through the orders that `elasticflow scale` gives, too.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def provide(self, nodes: int, *, present: int) -> None:
        """Order so many workers: each of them is a node.

        Raises:
            UsageError: The launcher cannot start so many, or has ended.
        """
        run_directory.order(self._run_dir, nodes, num_spares=_NUM_SPARES)

    def stop(self) -> None:
        """An order is given at once."""


class SlurmArray:
    """The nodes of a job that `elasticflow slurm submit` has submitted: tasks of an array.

    A node that the job has let go has been queued again by its script, and starts when the array may have one more.

    Args:
        job: The array.
    """

    def __init__(self, job: SlurmJob) -> None:
        self._job = job

    def provide(self, nodes: int, *, present: int) -> None:
        """Let Slurm start nodes until there are so many.

        Raises:
            UsageError: Slurm refuses it.
        """
        limit(self._job, nodes)

    def stop(self) -> None:
        """Slurm answers soon, or not at all."""


class ListedHosts:
    """The hosts of `elasticflow run --hosts`: its launcher, on another machine, hears of an order.

    Args:
        run_dir: Directory of the run on this host.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def provide(self, nodes: int, *, present: int) -> None:
        """Order the workers of so many hosts, as far as the list names them."""
        wish_for(self._run_dir, nodes)

    def stop(self) -> None:
        """An order is given at once."""


class YarnService:
    """The containers of a service that `elasticflow yarn submit` has submitted.

    Args:
        job: The service.
    """

    def __init__(self, job: yarn.YarnJob) -> None:
        self._job = job

    def provide(self, nodes: int, *, present: int) -> None:
        """Flex the service.

        Raises:
            UsageError: YARN refuses it.
        """
        yarn.scale(self._job, nodes)

    def stop(self) -> None:
        """YARN answers soon, or not at all."""


class PodsOfJob:
    """The pods of an `ElasticJob`, whose controller reads from the metrics of the workers how many they want.

    Args:
        most: As many pods it may have; None if that is not known.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most

    def provide(self, nodes: int, *, present: int) -> None:
        """Whatever the job wants is in the metrics: what the coordinator has told, and who is to be replaced.

        Raises:
            UsageError: The job may not have so many.
        """
        if self._most is not None and nodes > self._most:
            raise UsageError(f"the job has at most {self._most} pods (maxWorkers)")

    def stop(self) -> None:
        """There is nothing to stop."""


def provisioner_for(environment: WorkerEnvironment) -> Provisioner | None:
    """The provisioner of a worker's job; None where nothing starts nodes for it."""
    if environment.scale_command is not None:
        command = ScaleCommand(environment.scale_command, environ=os.environ, timeout_s=environment.scale_timeout_s)
        return Orders(command, name=f"the scale command ({environment.scale_command})", repeats=False)
    if CONTROLLER in os.environ:
        most = None if environment.autoscale is None else environment.autoscale.max
        return Orders(PodsOfJob(most), name="the controller of the cluster", repeats=True)
    if environment.run_dir is None:
        return None
    if (array := job_in(environment.run_dir)) is not None:
        return Orders(SlurmArray(array), name=f"Slurm (array {array.number})", repeats=True)
    if (service := yarn.job_in(environment.run_dir)) is not None:
        return Orders(YarnService(service), name=f"YARN (service {service.name})", repeats=True)
    if HOST in os.environ:
        return Orders(ListedHosts(environment.run_dir), name="`elasticflow run --hosts`", repeats=True)
    if _is_local(environment.run_dir):
        return Orders(LocalJob(environment.run_dir), name="`elasticflow run`", repeats=True)
    return None


def _is_local(run_dir: Path) -> bool:
    try:
        launcher = run_directory.read_launcher(run_dir)
    except UsageError:  # of another version
        return False
    return launcher is not None and launcher.local and launcher.alive
