"""torchrun with a range of nodes and no rendezvous: when it is ours, and real torchrun processes with it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed import run as torchrun

from ef_common.errors import UsageError
from ef_common.launch import unnamed_rendezvous as unnamed
from ef_common.launch.rendezvous_options import GivenParameters
from ef_common.launch.unnamed_rendezvous import FLAGS, Unnamed, unnamed_rendezvous
from tests.launch.conftest import GUARD_S, ROOT, Job
from tests.waiting import poll_until

LOCAL = Unnamed({"PET_RDZV_BACKEND": "elasticflow", "PET_RDZV_ENDPOINT": "localhost:0"})
NODE = Unnamed({"PET_RDZV_BACKEND": "elasticflow"})
KUBEFLOW = {"PET_MASTER_ADDR": "first.job", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "2"}


# ---------------------------------------------------------------- the rule


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ("--nnodes=1:8 train.py", {}, LOCAL),
        ("--nnodes 1:8 --nproc_per_node 2 -m train", {}, LOCAL),
        ("--nnod 1:8 --no-python -r3 -t 3 --role x train.py", {}, LOCAL),
        ("--run-path --nnodes=2:3 /train.py", {}, LOCAL),
        ("train.py --rdzv-backend=c10d", {"PET_NNODES": "1:8"}, LOCAL),
        ("--nnodes=1:8 train.py", {"PET_STANDALONE": "0"}, LOCAL),
        ("--nnodes=1:8 train.py", KUBEFLOW, LOCAL),
        ("--nnodes=1:8 --rdzv-endpoint=host train.py", {}, NODE),
        ("--nnodes=1:8 --rdzv_endpoint host train.py", {}, NODE),
        ("--nnodes=1:8 train.py", {"PET_RDZV_ENDPOINT": "host"}, NODE),
        ("--nnodes=1:8 --rdzv-backend=c10d train.py", {}, None),
        ("--nnodes=1:8 --rdzv-b static train.py", {}, None),
        ("--nnodes=1:8 --rdzv_backend elasticflow train.py", {}, None),
        ("--nnodes=1:8 train.py", {"PET_RDZV_BACKEND": "c10d"}, None),
        ("--nnodes=1:8 --standalone train.py", {}, None),
        ("--nnodes=1:8 train.py", {"PET_STANDALONE": "1"}, None),
        ("--nnodes=1:8 --master-addr=host train.py", {}, None),
        ("--nnodes=1:8 --node_rank 1 train.py", {}, None),
        ("--nnodes=4 train.py", {}, None),
        ("--nnodes=4:4 train.py", {}, None),
        ("--nnodes=4 train.py", {"PET_NNODES": "1:8"}, None),
        ("--nnodes=8:1 train.py", {}, None),
        ("--nnodes=one train.py", {}, None),
        ("train.py --nnodes=1:8", {}, None),
        ("--role --nnodes=1:8 train.py", {}, None),
        ("-- train.py --nnodes=1:8", {}, None),
        ("", {}, None),
    ],
)
def test_range_of_nodes_without_a_rendezvous_is_ours(
    arguments: str, environ: Mapping[str, str], expected: Unnamed | None
) -> None:
    assert unnamed_rendezvous(arguments.split(), environ) == expected


def test_options_are_told_from_their_values_as_torchrun_does() -> None:
    actions = torchrun.get_args_parser()._actions
    options = {option for action in actions for option in action.option_strings}
    flags = {option.replace("_", "-") for action in actions if action.nargs == 0 for option in action.option_strings}
    assert flags <= set(FLAGS)
    assert set(FLAGS) - flags <= {"--virtual-local-rank"}  # an older torch
    assert {"--nnodes", "--rdzv-endpoint", *unnamed._NAMES} <= options


def test_torchrun_takes_the_variables_as_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOCAL.variables.items():
        monkeypatch.setenv(name, value)
    args = torchrun.parse_args(["--nnodes=1:8", "train.py"])
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("elasticflow", "localhost:0")
    assert torchrun.parse_args(["--rdzv-backend=c10d", "train.py"]).rdzv_backend == "c10d"
    LOCAL.take_back(os.environ)
    assert torchrun.parse_args(["--nnodes=1:8", "train.py"]).rdzv_backend == "static"


@pytest.mark.parametrize(
    ("program", "spec", "expected"),
    [
        ("/usr/bin/torchrun", None, True),
        ("/site-packages/torch/distributed/run.py", "torch.distributed.run", True),
        ("train.py", None, False),
        ("/here/run.py", None, False),
        ("/usr/bin/elasticflow", None, False),
        ("/site-packages/torch/distributed/launch.py", "torch.distributed.launch", False),
        ("/torchrun/__main__.py", "torchrun.__main__", False),
    ],
)
def test_variables_are_set_in_torchrun_only(
    monkeypatch: pytest.MonkeyPatch, program: str, spec: str | None, expected: bool
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if spec is None else SimpleNamespace(name=spec)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", [program, "--nnodes=1:8", "train.py"])
    environ = {"A": "1"}
    monkeypatch.setattr(os, "environ", environ)
    assert (unnamed.take_unnamed_rendezvous() is not None) == expected
    assert environ == {"A": "1", **(LOCAL.variables if expected else {})}


def test_endpoint_is_this_machine_or_the_master_of_the_pods() -> None:
    params = GivenParameters("", 1, 8, {"last_call_timeout": "5"})
    assert LOCAL.complete(params, {}) == GivenParameters("localhost:0", 1, 8, {"last_call_timeout": "5"})
    pods = GivenParameters("first.job:29500", 1, 8, {"is_host": False, "last_call_timeout": "5"})
    assert LOCAL.complete(params, KUBEFLOW | {"ELASTICFLOW_TOKEN": "secret"}) == pods
    in_file = {"token_file": "/run/secrets/token"}
    assert LOCAL.complete(GivenParameters("", 1, 8, in_file), KUBEFLOW).config == {"is_host": False, **in_file}
    named = GivenParameters("host:1", 2, 8, {})
    assert NODE.complete(named, KUBEFLOW) is named


@pytest.mark.parametrize(
    ("low", "environ", "message"),
    [
        (2, {}, r"at least 2 nodes needs a place .* --nnodes=1:8 on this machine\. Received: --nnodes=2:8"),
        (1, {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "this is task 2 of 4 of a Slurm step"),
        (1, KUBEFLOW, "this is a pod of Kubeflow.* need one secret"),
    ],
)
def test_nodes_that_could_not_find_each_other_are_refused(low: int, environ: Mapping[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LOCAL.complete(GivenParameters("", low, 8, {}), environ)


# ---------------------------------------------------------------- real processes

pytestmark = pytest.mark.usefixtures("entry_point")
PLAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
os.write(1, ("TOTAL %s %s\\n" % (total.item(), os.environ.get("PET_RDZV_BACKEND"))).encode())  # two print at once
{then}
dist.destroy_process_group()
"""


def start(directory: Path, script: str, *options: str, program: str = "-m", **variables: str) -> subprocess.Popen[str]:
    (directory / "script.py").write_text(script)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_"))}
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    if program == "torchrun":
        launcher = [sys.executable, str(Path(sysconfig.get_path("scripts"), "torchrun"))]
    return subprocess.Popen(
        [*launcher, *options, str(directory / "script.py")],
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.processes
def test_torchrun_with_a_range_alone_starts_a_local_job_at_once(job: Job) -> None:
    agent = job.agent("--nnodes=1:8", "--nproc-per-node=2", flags=False)
    views = job.wait_for("view", 2, generation=1, size=2)
    assert len({node for view in views for node in view["nodes"]}) == 1
    job.tell("end")
    assert job.wait_exit(agent) == 0
    said = "--nnodes=1:8 names no rendezvous, so this is a node of an elastic job of this machine"
    assert job.logs().count(said) == 1
    assert "static" not in job.logs()


@pytest.mark.processes
def test_torchrun_with_a_range_and_an_endpoint_is_a_node_that_others_join(job: Job) -> None:
    options = ("--nnodes=1:8", f"--rdzv-endpoint={job.endpoint}")
    first = job.agent(*options, flags=False)
    job.wait_for("view", generation=1, size=1)
    second = job.agent(*options, flags=False)
    job.wait_for("view", 2, size=2)
    assert len(job.records("start")) == 2
    job.tell("end")
    assert [job.wait_exit(agent) for agent in (first, second)] == [0, 0]


@pytest.mark.processes
@pytest.mark.parametrize("options", [["--rdzv-backend=c10d"], []], ids=["option", "variable"])
def test_torchrun_with_a_named_backend_has_it(job: Job, options: list[str]) -> None:
    variables = {} if options else {"PET_RDZV_BACKEND": "c10d"}
    endpoint = f"--rdzv-endpoint={job.endpoint}"
    agent = job.agent("--nnodes=1:2", *options, endpoint, "--rdzv-conf=last_call_timeout=1", flags=False, **variables)
    job.wait_for("c10d")
    job.tell("end")
    assert job.wait_exit(agent) == 0
    assert "names no rendezvous" not in job.logs()


@pytest.mark.thorough
@pytest.mark.processes
def test_torchrun_with_a_number_of_nodes_waits_for_them(job: Job) -> None:
    options = ("--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={job.endpoint.rpartition(':')[2]}")
    first = job.agent(*options, "--node-rank=0", flags=False)
    second = job.agent(*options, "--node-rank=1", flags=False)
    job.wait_for("c10d", 2)
    job.wait_for("view", 2, size=2)
    job.tell("end")
    assert [job.wait_exit(agent) for agent in (first, second)] == [0, 0]
    assert "names no rendezvous" not in job.logs()


@pytest.mark.processes
@pytest.mark.parametrize("program", ["-m", "torchrun"])
def test_plain_script_on_one_machine_trains_as_under_torchruns_own_rendezvous(tmp_path: Path, program: str) -> None:
    agent = start(tmp_path, PLAIN.format(then=""), "--nnodes=1:8", "--nproc-per-node=2", program=program)
    output, _ = agent.communicate(timeout=GUARD_S)
    assert agent.returncode == 0, output
    assert output.count("TOTAL 3.0 None") == 2
    assert "names no rendezvous" in output


@pytest.mark.thorough
@pytest.mark.processes
def test_plain_script_that_loses_a_worker_ends_as_under_torchruns_own_rendezvous(tmp_path: Path) -> None:
    then = "import signal, time\nif dist.get_rank(): os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    agent = start(tmp_path, PLAIN.format(then=then), "--nnodes=1:8", "--nproc-per-node=2")
    output, _ = agent.communicate(timeout=GUARD_S)
    assert agent.returncode == 1, output
    assert "ChildFailedError" in output


@pytest.mark.thorough
@pytest.mark.processes
def test_plain_script_on_one_of_several_nodes_is_told_that_it_trains_by_itself(job: Job, tmp_path: Path) -> None:
    then = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'end').exists(): time.sleep(0.05)"
    options = ("--nnodes=1:8", f"--rdzv-endpoint={job.endpoint}")
    agent = start(tmp_path, PLAIN.format(then=then), *options)
    assert agent.stdout is not None
    lines: list[str] = []
    poll_until(
        lambda: lines.append(agent.stdout.readline()) or "trains on each node by itself" in lines[-1], guard_s=GUARD_S
    )
    (tmp_path / "end").touch()
    rest, _ = agent.communicate(timeout=GUARD_S)
    assert agent.returncode == 0, rest
    assert "--rdzv-backend=c10d" in lines[-1]


@pytest.mark.processes
def test_torchrun_that_needs_more_nodes_and_has_no_endpoint_says_so_and_ends(tmp_path: Path) -> None:
    agent = start(tmp_path, "", "--nnodes=2:8")
    output, _ = agent.communicate(timeout=GUARD_S)
    assert agent.returncode == 2
    assert "needs a place where they meet: add --rdzv-endpoint=HOST:PORT" in output
    assert "Traceback" not in output
