from __future__ import annotations

from collections.abc import Mapping

import pytest

from ef_common.errors import UsageError
from ef_common.launch.mpi import Hosts, Rank
from ef_common.launch.process import this_worker
from ef_common.launch.run import Options
from ef_common.launch.surroundings import (
    MeetingPlace,
    StartingPlace,
    check_alone,
    local_number_in,
    meeting_in,
    place_in,
)

SECRET = {"ELASTICFLOW_TOKEN": "secret"}
PODS = "job-node-0-0.job:29500,job-node-0-1.job:29500,job-node-0-2.job:29500,job-node-0-3.job:29500"
FIRST = {"PET_MASTER_ADDR": "first"}  # the names of the others do not follow from such a name
WITHOUT_SECRET = {
    "PET_NNODES": "4",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "PET_NODE_RANK": "2",
}
KUBEFLOW = WITHOUT_SECRET | SECRET
TF_WITHOUT_SECRET = {
    "TF_CONFIG": '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
}
TF = TF_WITHOUT_SECRET | SECRET
SKYPILOT_WITHOUT_SECRET = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.5\n10.0.0.6",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_TASK_ID": "sky-2026-01-01-00-00-00-000000_mycluster_1",
}
SKYPILOT = SKYPILOT_WITHOUT_SECRET | SECRET
SAGEMAKER = SECRET | {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
PYTORCH_JOB = {"PET_NNODES": "4", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
POD = "a pod of Kubeflow"
STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "n[1-8]",
    "SLURM_PROCID": "2",
    "ELASTICFLOW_TOKEN": "secret",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
SEVERAL = OPEN_MPI | {"ELASTICFLOW_TOKEN": "secret"}
ONE_MACHINE = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}
RANKS = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "NODE_RANK": "1"}
ONLY_POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "0",
    "MASTER_ADDR": "job-master-0",
    "WORLD_SIZE": "4",  # the workers that this pod is to start
    "RANK": "0",
}
ELASTIC_PODS = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PET_NNODES": "1:4",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "job-worker-0:29400",
}
ARRAY = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (KUBEFLOW, MeetingPlace(POD, PODS)),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, MeetingPlace(POD, PODS)),
        (KUBEFLOW | FIRST, MeetingPlace(POD, "first:29500", is_host=False)),
        (KUBEFLOW | FIRST | {"PET_NODE_RANK": "0"}, MeetingPlace(POD, "first:29500", is_host=True)),
        (
            SECRET | {"PET_NNODES": "1:4", "PET_MASTER_ADDR": "fd00::1"},
            MeetingPlace(POD, "[fd00::1]:29400", is_host=None),
        ),
        (KUBEFLOW | {"PET_NNODES": "1"}, None),
        (KUBEFLOW | {"PET_MASTER_ADDR": "127.0.0.1"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script, which runs once
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        (TF, MeetingPlace("worker 1 of TF_CONFIG", "a:2222,b:2222", num_nodes=2)),
        (  # several workers of one machine need no secret
            {"TF_CONFIG": TF["TF_CONFIG"].replace("a:2222", "localhost:1").replace("b:2222", "127.0.0.1:2")},
            MeetingPlace("worker 1 of TF_CONFIG", "localhost:1,127.0.0.1:2", num_nodes=2),
        ),
        (
            SKYPILOT,
            MeetingPlace("node 1 of 3 of SkyPilot", "10.0.0.7:26101,10.0.0.5:26101,10.0.0.6:26101", num_nodes=3),
        ),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.7"}, None),
        (SAGEMAKER, MeetingPlace("node 1 of 2 of SageMaker", "algo-1:29400,algo-2:29400", num_nodes=2)),
        (SAGEMAKER | {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, None),
        (PYTORCH_JOB | {"PET_NNODES": "1:4"}, None),
        (ONLY_POD, None),
        ({"PET_NNODES": "4"}, None),  # a job of this machine, which has as many nodes as workers
    ],
)
def test_meeting(environ: dict[str, str], expected: MeetingPlace | None) -> None:
    assert meeting_in(environ) == expected


@pytest.mark.parametrize(("number", "hosts"), [(1, "n1:20123"), (8, "n1:20123,n2:20123,n3:20123,n4:20123,n5:20123")])
def test_tasks_of_a_slurm_step_with_a_secret_meet_at_its_first_hosts(number: int, hosts: str) -> None:
    asked = []

    def hosts_of(nodes: str) -> list[str]:
        asked.append(nodes)
        return [f"n{i}" for i in range(1, number + 1)]

    assert meeting_in(STEP, hosts_of=hosts_of) == MeetingPlace("task 2 of 8 of a Slurm step", hosts, num_nodes=8)
    assert asked == ["n[1-8]"]


@pytest.mark.parametrize(("number", "some"), [(2, ["n1", "n2"]), (7, ["n1", "n2", "n3", "n4", "n5"])])
def test_ranks_of_mpi_meet_at_their_first_hosts(number: int, some: list[str]) -> None:
    hosts = Hosts([f"n{i}" for i in range(1, number + 1)], "a job")
    port = hosts.port(range(20000, 30000))
    expected = MeetingPlace("rank 2 of 8 of Open MPI", ",".join(f"{host}:{port}" for host in some), num_nodes=8)
    assert meeting_in(SEVERAL, hosts_of_ranks=lambda rank, environ: hosts) == expected


def test_ranks_of_mpi_on_one_machine_need_no_secret() -> None:
    def ask(rank: Rank, environ: Mapping[str, str]) -> Hosts:
        return Hosts(["vm"], "a job")

    meeting = meeting_in(ONE_MACHINE, hosts_of_ranks=ask)
    assert meeting is not None
    assert meeting.endpoint.startswith("127.0.0.1:2")
    assert meeting.num_nodes == 8


def test_ranks_of_mpi_count_more_than_the_step_of_its_daemons() -> None:
    meeting = meeting_in(STEP | SEVERAL, hosts_of_ranks=lambda rank, environ: Hosts(["vm"], "a job"))
    assert meeting is not None
    assert meeting.place == "rank 2 of 8 of Open MPI"


def test_tasks_of_a_slurm_step_without_a_secret_are_told_of_it() -> None:
    with pytest.raises(UsageError, match="or set ELASTICFLOW_TOKEN to one secret for all of them"):
        meeting_in({name: value for name, value in STEP.items() if name != "ELASTICFLOW_TOKEN"})


def test_run_in_a_task_of_a_slurm_step_is_one_node_of_at_most_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in STEP.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(
        meeting_in, "__kwdefaults__", {**(meeting_in.__kwdefaults__ or {}), "hosts_of": lambda nodes: ["n1", "n2"]}
    )
    options = Options.parse(["train.py"])
    assert options.torchrun.rdzv_endpoint == "n1:20123,n2:20123"
    assert (options.local, options.min_nodes, options.max_nodes) == (False, 1, 8)
    assert Options.parse(["--nnodes=2:4", "train.py"]).max_nodes == 4


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "this is task 2 of 4 of a Slurm step"),
        (OPEN_MPI, "this is rank 2 of 8 of Open MPI on several machines.*set ELASTICFLOW_TOKEN.*-x ELASTICFLOW_TOKEN"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "this is task 0 of 2 of an MPI job"),
        ({"PMI_SIZE": "3"}, r"this is task \? of 3 of an MPI launcher"),
        (SECRET | {"PMI_SIZE": "3", "SLURM_STEP_NODELIST": "n[1-3]"}, "of 3 of an MPI launcher"),  # its daemons' step
        ({"MV2_COMM_WORLD_SIZE": "3", "MV2_COMM_WORLD_RANK": "1"}, "this is task 1 of 3 of MVAPICH"),
        ({"JSM_NAMESPACE_SIZE": "3", "JSM_NAMESPACE_RANK": "1"}, "this is task 1 of 3 of jsrun"),
        ({"FLUX_JOB_SIZE": "3", "FLUX_TASK_RANK": "1"}, "this is task 1 of 3 of Flux"),
        (RANKS, "this is task 1 of 2 of a launcher that sets RANK and WORLD_SIZE"),
        (KUBEFLOW | {"PET_MASTER_PORT": "http"}, "PET_MASTER_ADDR must be HOST:PORT"),
        (WITHOUT_SECRET, "this is a pod of Kubeflow.*set ELASTICFLOW_TOKEN.*token_file=FILE"),
        (TF_WITHOUT_SECRET, "this is worker 1 of TF_CONFIG.*set ELASTICFLOW_TOKEN.*token_file=FILE"),
        (SKYPILOT_WITHOUT_SECRET, "this is node 1 of 3 of SkyPilot.*set ELASTICFLOW_TOKEN.*token_file=FILE"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, r'SM_HOSTS must be a JSON list of hosts: \["algo-1", "algo-2"\]'),
        (PYTORCH_JOB, r"one of several pods \(PET_NNODES=4\).*elasticPolicy with `rdzvBackend: elasticflow`"),
        (PYTORCH_JOB | {"PET_NNODES": "2:4"}, "each of them would run a training of its own"),
    ],
)
def test_tasks_that_would_train_apart_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        meeting_in(environ)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (STEP, "task 2 of 8 of a Slurm step"),
        (OPEN_MPI, "rank 2 of 8 of Open MPI"),
        ({"PMI_SIZE": "3", "PMI_RANK": "1"}, "task 1 of 3 of an MPI launcher"),
        (KUBEFLOW, "a pod of Kubeflow"),
        (PYTORCH_JOB, "one of several pods"),
        (TF, "worker 1 of TF_CONFIG"),
        (SKYPILOT, "node 1 of 3 of SkyPilot"),
        (SAGEMAKER, "node 1 of 2 of SageMaker"),
        (TF | RANKS, "worker 1 of TF_CONFIG"),
        (RANKS, r"task 1 of 2 of a launcher that sets RANK and WORLD_SIZE \(RANK=1, WORLD_SIZE=2\)"),
        (BY_HAND, r"task 1 of 2 of a launcher that sets NODE_RANK and WORLD_SIZE \(NODE_RANK=1, WORLD_SIZE=2\)"),
        (ONLY_POD | {"LOCAL_RANK": "1"}, "task 0 of 4 of a launcher that sets RANK"),  # another launcher, in that pod
        (ELASTIC_PODS, r"one of several pods \(PET_NNODES=1:4\)"),
    ],
)
def test_script_that_was_started_several_times_without_elasticflow_run_is_refused(
    environ: dict[str, str], found: str
) -> None:
    with pytest.raises(UsageError, match=f"this is {found}.*each of them would run a training of its own"):
        check_alone(environ)


@pytest.mark.parametrize(
    "environ",
    [
        *({}, ARRAY, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, {"PMI_SIZE": "1"}),
        *({"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "8"}, {"RANK": "", "WORLD_SIZE": "2"}),
        *({"NODE_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"}, {"NODE_RANK": "1"}, ONLY_POD),
        {name: value for name, value in ELASTIC_PODS.items() if name != "KUBERNETES_SERVICE_HOST"},  # in a shell
        ELASTIC_PODS | {"PET_NNODES": "1:1"},
        SAGEMAKER | {"SM_HOSTS": '["algo-1"]'},
        RANKS | {"TORCHELASTIC_RUN_ID": "none"},  # of which torchrun's agent takes care
    ],
)
def test_script_that_was_started_once_may_train_alone(environ: dict[str, str]) -> None:
    check_alone(environ)


@pytest.mark.parametrize(
    ("environ", "advice"),
    [
        (RANKS, r"`elasticflow run --rdzv-endpoint=HOST:PORT train.py`.*only process, unset RANK and WORLD_SIZE"),
        (STEP, r"each of them with `elasticflow run train.py`.*only process, unset SLURM_STEP_NUM_TASKS"),
        (
            {name: value for name, value in STEP.items() if name != "ELASTICFLOW_TOKEN"},
            "--rdzv-endpoint=HOST:PORT.*unset SLURM_STEP_NUM_TASKS",
        ),
        (SEVERAL, "each of them with `elasticflow run train.py` in place of `python train.py`"),
        (SAGEMAKER, "each of them with `elasticflow run train.py`.*If this is the only process, unset SM_HOSTS"),
        (SECRET | {"MV2_COMM_WORLD_SIZE": "3"}, "--rdzv-endpoint=HOST:PORT.*unset MV2_COMM_WORLD_SIZE"),
    ],
)
def test_refusal_says_what_to_do_there(environ: dict[str, str], advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        check_alone(environ)


def test_process_of_such_a_launcher_is_refused_whatever_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in RANKS.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match="this is task 1 of 2"):
        this_worker()


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, None),
        (ONE_MACHINE, 2),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "0"}, None),
        ({"SLURM_LOCALID": "3"}, None),
    ],
)
def test_tasks_that_share_a_machine_are_numbered_there(environ: dict[str, str], number: int | None) -> None:
    assert local_number_in(environ) == number


def test_task_that_is_to_train_alone_is_a_job_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in STEP.items():
        monkeypatch.setenv(variable, value)
    options = Options.parse(["--standalone", "train.py"])
    assert (options.local, options.torchrun.rdzv_endpoint, options.torchrun.standalone) == (True, "", False)
    with pytest.raises(UsageError, match="Received: --rdzv-endpoint=h:1"):
        Options.parse(["--standalone", "--rdzv-endpoint=h:1", "train.py"])
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "job-worker-0:29400")
    assert Options.parse(["--standalone", "train.py"]).local


def test_run_in_a_pod_of_kubeflow_is_one_node_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in KUBEFLOW.items():
        monkeypatch.setenv(variable, value)
    options = Options.parse(["--rdzv-conf=last_call_timeout=5", "train.py"])
    assert not options.local
    assert (options.torchrun.rdzv_endpoint, options.torchrun.rdzv_conf) == (PODS, "last_call_timeout=5")
    assert (options.min_nodes, options.max_nodes) == (4, 4)
    monkeypatch.delenv("PET_MASTER_ADDR")
    with pytest.raises(UsageError, match="at least 4 nodes needs a place where they meet"):
        Options.parse(["train.py"])
    assert Options.parse(["--nnodes=1:4", "train.py"]).local


@pytest.mark.parametrize("environ", [WITHOUT_SECRET, TF_WITHOUT_SECRET])
def test_secret_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    with pytest.raises(UsageError, match="need one secret"):
        Options.parse(["train.py"])
    assert not Options.parse(["--rdzv-conf=token_file=/run/secrets/token", "train.py"]).local


def test_run_in_a_pod_of_a_tfjob_is_one_node_of_at_most_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in TF.items():
        monkeypatch.setenv(variable, value)
    options = Options.parse(["train.py"])
    assert options.torchrun.rdzv_endpoint == "a:2222,b:2222"
    assert (options.local, options.min_nodes, options.max_nodes) == (False, 1, 2)


def test_run_with_an_endpoint_asks_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert not Options.parse(["--rdzv-endpoint=file:///shared/run", "train.py"]).local
    with pytest.raises(UsageError, match="file:///shared/folder"):
        Options.parse(["train.py"])


@pytest.mark.parametrize(
    ("environ", "name", "start"),
    [
        ({}, "none", "`torchrun --nnodes=1:8 train.py` is a job of this machine"),
        (KUBEFLOW, "a pod of Kubeflow", "one node of the job that meets at job-node-0-0.job:29500,"),
        (KUBEFLOW | {"PET_MASTER_PORT": "http"}, "a pod of Kubeflow", "PET_MASTER_ADDR must be HOST:PORT"),
        (WITHOUT_SECRET, "a pod of Kubeflow", "need one secret"),
        (TF, "worker 1 of TF_CONFIG", "one node of the job that meets at a:2222,b:2222"),
        (SKYPILOT, "node 1 of 3 of SkyPilot", "one node of the job that meets at 10.0.0.7:26101,"),
        (SKYPILOT_WITHOUT_SECRET, "a node of SkyPilot", "need one secret"),
        (PYTORCH_JOB, "a pod of Kubernetes", "Give the PyTorchJob an elasticPolicy"),
        (SEVERAL, "rank 2 of 8 of Open MPI", "one node of the job of all ranks"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "a pod of Kubernetes", "--rdzv-endpoint=SERVICE:29400"),
        (
            {"CONTAINER_ID": "container_e3_1_0008_01_2"},
            "a container of YARN (container_e3_1_0008_01_2)",
            "of the service",
        ),
        ({}, "none", "`elasticflow run --hosts=hosts.txt train.py`"),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}, "Slurm job 7 on 4 nodes", "srun --ntasks-per-node=1"),
        ({"SLURM_JOB_ID": "7"}, "Slurm job 7 on one node", "is a job of this machine"),
        (ARRAY, "task 3 of 8 of Slurm array 12", "all tasks of the array are nodes of one job"),
        (
            ARRAY | {"SLURM_RESTART_COUNT": "2"},
            "task 3 of 8 of Slurm array 12, started again (restart 2)",
            "is a job of this machine",
        ),
        (
            {"TORCHELASTIC_RUN_ID": "none", "ELASTICFLOW_COORDINATOR": "h:1", **KUBEFLOW},
            "torchrun",
            "joins the job at h:1",
        ),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun, with a rendezvous of its own", "restarted when a node joins"),
    ],
)
def test_place_is_recognized(environ: dict[str, str], name: str, start: str) -> None:
    place = place_in(environ)
    assert (place.name, place.missing) == (name, "")
    assert start in place.start


def test_place_of_a_rank_without_a_secret_lacks_it() -> None:
    place = place_in(OPEN_MPI)
    assert place.name == "rank 2 of 8 of Open MPI"
    assert place.missing == "elasticflow mpi -np … elasticflow run train.py"


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "task 2 of 4 of a Slurm step"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "task 0 of 2 of an MPI job"),
        (RANKS, "task 1 of 2 of a launcher that sets RANK and WORLD_SIZE"),
    ],
)
def test_place_of_one_of_several_tasks_lacks_an_endpoint(environ: dict[str, str], name: str) -> None:
    missing = "elasticflow run --rdzv-endpoint=file:///shared/folder train.py"
    start = "each task would run a training of its own, unless all are told where they meet"
    assert place_in(environ) == StartingPlace(name, start, missing)
