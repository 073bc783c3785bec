"""What the variables of a scheduler say of a command: whether it is one of several, and where they meet.

Without an endpoint each of them would silently run a training of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ef_common.errors import UsageError
from ef_common.launch import clouds, kubeflow, mpi, tf_config
from ef_common.launch.environment import COORDINATOR, TOKEN
from ef_common.launch.mpi import Hosts, Rank, rank_in
from ef_common.launch.slurm import hostnames
from ef_common.protocol.addresses import LOOPBACK, Address, format_address, is_loopback

_STEP = "a Slurm step"
_TASKS = {
    _STEP: ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "an MPI job": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "an MPI launcher": ("PMI_SIZE", "PMI_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    "Flux": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
}
"""Who starts the same command several times: the variables of how often, and of which one this is."""
_RANKS = "a launcher that sets {} and WORLD_SIZE"
"""Such as those of DeepSpeed and Azure ML: each process is told for torch.distributed who it is. So does torchrun. Who
sets these variables for Lightning by hand sets NODE_RANK in place of RANK."""
_POD = "a pod of Kubernetes"
_NUM_DOORS = 5
"""Hosts of a step at which its tasks meet; more than half of them must be there, and each is asked by all."""
AskForHosts = Callable[[Rank, Mapping[str, str]], Hosts]
_PORTS = range(20000, 30000)
"""Those of steps, so that several can be on a machine."""


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where the nodes of a job meet.

    Args:
        place: Who has started them.
        endpoint: Host and port, or several.
        is_host: Whether that is this node; None if the variables do not say so.
        num_nodes: How many nodes there are; 0 if the variables do not say so.
    """

    place: str
    endpoint: str
    is_host: bool | None = None
    num_nodes: int = 0


def meeting_in(
    environ: Mapping[str, str],
    *,
    has_token: bool = False,
    hosts_of: Callable[[str], list[str]] = hostnames,
    hosts_of_ranks: AskForHosts = mpi.hosts_of,
) -> MeetingPlace | None:
    """Where the nodes meet, as Kubeflow, MPI, Slurm or a cloud tells them; None for a job on this machine.

    Args:
        environ: The variables.
        has_token: The job has a secret, even if the variables have none.
        hosts_of: Takes a list of nodes apart that Slurm has written.
        hosts_of_ranks: Asks MPI's process manager for the hosts of all ranks.

    Raises:
        UsageError: This is one of several tasks, and nothing says where they meet; or they have no secret; or a
            variable is malformed.
    """
    has_token = has_token or bool(environ.get(TOKEN, "").strip())
    match _one_of_several(environ):
        case kubeflow.KubeflowPod() as pod:
            is_host = pod.is_first if len(pod.addresses) == 1 else None
            return _meeting_at(pod.addresses, place=str(pod), has_token=has_token, is_host=is_host)
        case Rank() as rank:
            _check_token_of(rank, has_token)
            return _meeting_of_ranks(rank, hosts_of_ranks(rank, environ))
        case _Task() as task:
            return _meeting_of_tasks(task, environ, has_token=has_token, hosts_of=hosts_of)
        case tf_config.Task() as task:
            num_nodes = len(task.addresses)
            return _meeting_at(task.addresses, place=str(task), has_token=has_token, num_nodes=num_nodes)
        case clouds.CloudNode(hosts=hosts) as node:
            addresses = [(host, node.port(_PORTS)) for host in hosts]
            return _meeting_at(addresses, place=str(node), has_token=has_token, num_nodes=len(hosts))
        case None:
            return None


def _meeting_at(
    addresses: Sequence[Address], *, place: str, has_token: bool, is_host: bool | None = None, num_nodes: int = 0
) -> MeetingPlace:
    """Where those meet who know the addresses of all: at the first ones."""
    if not has_token and not all(is_loopback(host) for host, _ in addresses):
        raise UsageError(
            f"this is {place}, and the nodes of a job on several machines need one secret: set {TOKEN} in all of them, "
            "or name a file that has it with --rdzv-conf=token_file=FILE"
        )
    return MeetingPlace(place, ",".join(map(format_address, addresses[:_NUM_DOORS])), is_host, num_nodes)


def _meeting_of_ranks(rank: Rank, hosts: Hosts) -> MeetingPlace:
    """Where the ranks of MPI meet: on one machine at its loopback interface, else at the first hosts."""
    port = hosts.port(_PORTS)
    names = [LOOPBACK] if rank.is_on_one_machine else hosts.names[:_NUM_DOORS]
    return MeetingPlace(str(rank), ",".join(format_address((name, port)) for name in names), num_nodes=rank.size)


def _meeting_of_tasks(
    task: _Task, environ: Mapping[str, str], *, has_token: bool, hosts_of: Callable[[str], list[str]]
) -> MeetingPlace:
    """Where the tasks of a Slurm step meet: at its first hosts. Others are refused."""
    nodes = environ.get("SLURM_STEP_NODELIST", "") if task.launcher == _STEP else ""
    if nodes and has_token:
        doors = ",".join(f"{host}:{_port_in(environ)}" for host in hosts_of(nodes)[:_NUM_DOORS])
        return MeetingPlace(str(task), doors, num_nodes=task.size)
    by_itself = f", or set {TOKEN} to one secret for all of them, and they meet by themselves" if nodes else ""
    raise UsageError(
        f"this is {task} ({task.told_by}), and each of them would run a training of its own. Pass "
        "--rdzv-endpoint=HOST:PORT of one of them, or a place that all of them reach: "
        f"--rdzv-endpoint=file:///shared/folder{by_itself}. With --standalone, each of them trains alone"
    )


def _check_token_of(rank: Rank, has_token: bool) -> None:
    if not rank.is_on_one_machine and not has_token:
        raise UsageError(
            f"this is {rank} on several machines, which need one secret: set {TOKEN}, and pass it on "
            f"(`{mpi.PASS_ON[rank.launcher]}`), or start them with `elasticflow mpi`"
        )


def _port_in(environ: Mapping[str, str]) -> int:
    """The port of a step, which no other one is likely to have."""
    job, step = (environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = (int(job) if job.isdecimal() else 0) * 10 + (int(step) if step.isdecimal() else 0)
    return _PORTS[number % len(_PORTS)]


@dataclass(frozen=True, slots=True)
class _Task:
    """One of several times that a command was started.

    Args:
        launcher: Who has started it.
        size: How often.
        number: Which one this is; "?" if that is not known.
        variables: What says so.
    """

    launcher: str
    size: int
    number: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return f"task {self.number} of {self.size} of {self.launcher}"

    @property
    def told_by(self) -> str:
        """These variables, for people."""
        return ", ".join(f"{name}={value}" for name, value in self.variables.items())


def _task_in(environ: Mapping[str, str]) -> _Task | None:
    """Which task this is; None for a command that was started once."""
    for launcher, (size_in, number_in) in _TASKS.items():
        size = environ.get(size_in, "").strip()
        if size.isdecimal() and int(size) > 1:
            return _Task(launcher, int(size), environ.get(number_in, "?"), {size_in: size})
    return None


def _rank_for_torch_in(environ: Mapping[str, str]) -> _Task | None:
    """Which process this is of a launcher that knows no more than what `torch.distributed` needs."""
    is_only_pod = environ.get(kubeflow.NNODES, "").strip() == "1" and "LOCAL_RANK" not in environ
    if "TORCHELASTIC_RUN_ID" in environ or is_only_pod:  # an operator counts the workers that such a pod is to start
        return None
    size = environ.get("WORLD_SIZE", "").strip()
    name = "NODE_RANK" if "RANK" not in environ and "MASTER_ADDR" in environ else "RANK"
    number = environ.get(name, "").strip()
    if not (size.isdecimal() and number.isdecimal() and int(number) < int(size) > 1):
        return None
    return _Task(_RANKS.format(name), int(size), number, {name: number, "WORLD_SIZE": size})


def _one_of_several(
    environ: Mapping[str, str],
) -> kubeflow.KubeflowPod | Rank | _Task | tf_config.Task | clouds.CloudNode | None:
    """What this process is if it was started several times; None if it was started once.

    Ranks come before tasks, as Slurm may have started MPI's daemons; what says least comes last.
    """
    return (
        kubeflow.pod_in(environ)
        or rank_in(environ)
        or _task_in(environ)
        or tf_config.task_in(environ)
        or clouds.node_in(environ)
        or _rank_for_torch_in(environ)
    )


def check_alone(environ: Mapping[str, str]) -> None:
    """Refuse a script that would train alone although it was started several times, and not by `elasticflow run`.

    Raises:
        UsageError: It was; or a variable is malformed.
    """
    found = _one_of_several(environ)
    if found is not None:
        what = str(found)
    elif kubeflow.is_one_of_elastic_pods(environ):
        what = f"one of several pods ({kubeflow.NNODES}={environ[kubeflow.NNODES].strip()})"
    else:
        return
    command, otherwise = "`elasticflow run train.py`", ""
    if isinstance(found, _Task):
        what += f" ({found.told_by})"
        otherwise = f". If this is the only process, unset {' and '.join(found.variables)}"
        if found.launcher != _STEP or not environ.get(TOKEN, "").strip():
            command = (
                "`elasticflow run --rdzv-endpoint=HOST:PORT train.py` (or `--rdzv-endpoint=file:///shared/folder`)"
            )
    elif isinstance(found, clouds.CloudNode):
        otherwise = f". If this is the only process, unset {found.variable}"
    raise UsageError(
        f"this is {what}, and each of them would run a training of its own. Start each of them with {command} in "
        "place of `python train.py`, and they are one job; or with `elasticflow run --standalone` if each of them is "
        f"to train alone{otherwise}"
    )


def local_number_in(environ: Mapping[str, str]) -> int | None:
    """Which rank of MPI or task of Slurm this is on its machine; None if there is one, or this is neither."""
    rank = rank_in(environ)
    if rank is not None:
        return rank.local_number if rank.local_size > 1 else None
    tasks, nodes, number = (
        environ.get(f"SLURM_{name}", "").strip() for name in ("STEP_NUM_TASKS", "STEP_NUM_NODES", "LOCALID")
    )
    if not (tasks.isdecimal() and nodes.isdecimal() and number.isdecimal()) or int(tasks) <= int(nodes):
        return None
    return int(number)


@dataclass(frozen=True, slots=True)
class StartingPlace:
    """Where a command is started, for people.

    Args:
        name: Who has started it.
        start: How a job starts there.
        missing: A command that says what the variables do not; "" if nothing is missing.
    """

    name: str
    start: str
    missing: str = ""


_HERE = "`elasticflow run train.py` or `torchrun --nnodes=1:8 train.py` is a job of this machine"
_SRUN = "`srun --ntasks-per-node=1 elasticflow run --rdzv-endpoint=HOST:29400 train.py` is one of all nodes"
_ARRAY = "with `--rdzv-endpoint=file:///shared/folder`, all tasks of the array are nodes of one job"
_HOSTS = "`elasticflow run --hosts=hosts.txt train.py` is one of the machines that the file names, if ssh reaches them"
_CONTAINERS = "with `--rdzv-endpoint=file:///shared/folder`, all containers of the service are nodes of one job"
_PODS = "with `--rdzv-endpoint=SERVICE:29400`, the name of a headless service, it is one of all of its pods"


def place_in(environ: Mapping[str, str]) -> StartingPlace:
    """Which launcher has started this process, and how a job would start from here."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _place_under_torchrun(environ)
    of_mpi = rank_in(environ)
    if of_mpi is not None:
        return _place_of(of_mpi, environ)
    try:
        meeting = meeting_in(environ)
    except UsageError as error:
        task = _task_in(environ) or _rank_for_torch_in(environ)
        if task is not None:
            start = "each task would run a training of its own, unless all are told where they meet"
            command = "elasticflow run --rdzv-endpoint=file:///shared/folder train.py"
            return StartingPlace(str(task), start, command)
        cloud = next((f"a node of {name}" for variable, name in clouds.NAMES.items() if variable in environ), _POD)
        return StartingPlace(kubeflow.POD if kubeflow.MASTER_ADDR in environ else cloud, str(error))
    if meeting is not None:
        return StartingPlace(
            meeting.place, f"`elasticflow run train.py` is one node of the job that meets at {meeting.endpoint}"
        )
    if "SLURM_ARRAY_JOB_ID" in environ:
        return _place_in_array(environ)
    if "SLURM_JOB_ID" in environ:
        number = environ.get("SLURM_JOB_NUM_NODES", "1")
        nodes = "one node" if number == "1" else f"{number} nodes"
        return StartingPlace(f"Slurm job {environ['SLURM_JOB_ID']} on {nodes}", f"{_HERE}; {_SRUN}")
    if "KUBERNETES_SERVICE_HOST" in environ:
        return StartingPlace(_POD, f"{_HERE}; {_PODS}")
    if environ.get("CONTAINER_ID", "").startswith("container_"):
        return StartingPlace(f"a container of YARN ({environ['CONTAINER_ID']})", f"{_HERE}; {_CONTAINERS}")
    return StartingPlace("none", f"{_HERE}; {_HOSTS}")


def _place_of(rank: Rank, environ: Mapping[str, str]) -> StartingPlace:
    """A rank of MPI, whose process manager is not asked."""
    try:
        _check_token_of(rank, bool(environ.get(TOKEN, "").strip()))
    except UsageError:
        start = "the ranks are on several machines, which need one secret"
        return StartingPlace(str(rank), start, "elasticflow mpi -np … elasticflow run train.py")
    return StartingPlace(str(rank), "`elasticflow run train.py` is one node of the job of all ranks")


def _place_in_array(environ: Mapping[str, str]) -> StartingPlace:
    """A task of an array; such an array may be a search for hyperparameters as well, whose tasks train apart."""
    number, of = environ.get("SLURM_ARRAY_TASK_ID", "?"), environ.get("SLURM_ARRAY_TASK_COUNT", "?")
    restarts = environ.get("SLURM_RESTART_COUNT", "0")
    again = "" if restarts == "0" else f", started again (restart {restarts})"
    return StartingPlace(
        f"task {number} of {of} of Slurm array {environ['SLURM_ARRAY_JOB_ID']}{again}", f"{_HERE}; {_ARRAY}"
    )


def _place_under_torchrun(environ: Mapping[str, str]) -> StartingPlace:
    if COORDINATOR in environ:
        return StartingPlace("torchrun", f"`python train.py` joins the job at {environ[COORDINATOR]}")
    text = "`python train.py` survives losses, but all workers are restarted when a node joins"
    return StartingPlace("torchrun, with a rendezvous of its own", text)
