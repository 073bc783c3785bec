"""`elasticflow slurm`: the batch script, which runs here with commands that stand in for Slurm's."""

from __future__ import annotations

import json
import os
import shlex
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.data.provisioners import Orders
from ef_common.errors import UsageError
from ef_common.launch import slurm
from ef_common.launch.environment import read_environment
from ef_common.launch.provisioning import SlurmArray, provisioner_for
from ef_common.launch.run import parser
from ef_common.launch.slurm_script import OF_RUN, SlurmSubmission, script_of
from tests.waiting import poll_until

SUBMISSION = SlurmSubmission(1, 4, "1", (), (), ("train.py",))
VARIABLES = {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes commands that write down how they were called, and do what they are told."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")

    def make(**bodies: str) -> None:
        for name, body in {"squeue": "", "scontrol": "", "scancel": "", "sbatch": "echo 12", **bodies}.items():
            file = tmp_path / "bin" / name
            file.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{body}\n')
            file.chmod(0o755)

    return make


def calls(name: str = "") -> list[str]:
    file = Path("calls")
    return [line for line in file.read_text().splitlines() if line.startswith(name)] if file.exists() else []


def elasticflow(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def run_script(tmp_path: Path, submission: SlurmSubmission = SUBMISSION) -> subprocess.Popen[str]:
    """Run the batch script as one task of an array."""
    script = script_of(submission, tmp_path / "run", directory=tmp_path)
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "token").write_text("secret\n")
    # What the script puts first on the path is this environment's own command.
    script = script.replace("export PATH=", f"export PATH={tmp_path}/bin:")
    (tmp_path / "job.sh").write_text(script)
    return subprocess.Popen(["bash", "job.sh"], env={**os.environ, **VARIABLES}, stdout=subprocess.PIPE, text=True)


# ---------------------------------------------------------------- the command line


def test_options_are_those_of_sbatch_of_run_and_of_the_script() -> None:
    arguments = [
        "--partition=gpu",
        "-t60",
        "--max-restarts=5",
        "--rdzv_conf=last_call_timeout=9",
        "train.py",
        "--tls=x",
    ]
    assert SlurmSubmission.parse("2:4", arguments, per_node="gpu") == SlurmSubmission(
        2,
        4,
        "gpu",
        sbatch=("--partition=gpu", "-t60"),
        run=("--max-restarts=5", "--rdzv_conf=last_call_timeout=9"),
        command=("train.py", "--tls=x"),
    )


def test_options_of_run_are_known() -> None:
    own = {"checkpoint", "nnodes", "nproc-per-node", "run-dir"}
    senseless = {"help", "join", "left-status", "local-addr", "module", "no-python", "run-path", "signals-to-handle"}
    another_rendezvous = {"master-addr", "master-port", "node-rank", "rdzv-backend", "standalone"}
    of_hosts = {"hosts", "host-discovery-script", "launcher-timeout", "remote-python", "ssh-command"}
    names = {name for action in parser()._actions for name in action.option_strings}
    theirs = {name.removeprefix("--") for name in names if name.startswith("--") and "_" not in name}
    assert theirs <= set(OF_RUN) | own | senseless | another_rendezvous | of_hosts


@pytest.mark.parametrize(
    ("nodes", "arguments", "message"),
    [
        ("8:1", ["train.py"], r"expected MIN:MAX, with at least one node. Received: --nodes=8:1"),
        ("all", ["train.py"], r"Received: --nodes=all"),
        ("1:8", [], r"then a script that is there.* Received: no script"),
        ("1:8", ["--partition", "gpu", "train.py"], r"each as --name=value.* Received: gpu"),
        ("1:8", ["missing.py"], r"Received: missing.py"),
        ("1:8", ["--array=0-3", "train.py"], r"--nodes=MIN:MAX says how many there are. Received: --array=0-3"),
        ("1:8", ["-N2", "train.py"], r"Received: -N2"),
        ("1:8", ["--no-requeue", "train.py"], r"Received: --no-requeue"),
    ],
)
def test_what_is_wrong_on_the_command_line_is_said_in_one_line(nodes: str, arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SlurmSubmission.parse(nodes, arguments)
    found = elasticflow("slurm", "submit", f"--nodes={nodes}", *arguments)
    assert found.exit_code == 2
    assert found.output.startswith("elasticflow slurm submit: ")
    assert found.output.count("\n") == 1


# ---------------------------------------------------------------- the script


def test_dry_run_prints_the_script_and_does_nothing(tmp_path: Path) -> None:
    found = elasticflow(
        "slurm", "submit", "--nodes=2:8", "--partition=gpu", "--comment=a b", "--dry-run", "train.py", "x y"
    )
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    options = [shlex.split(line.removeprefix("#SBATCH"))[0] for line in lines if line.startswith("#SBATCH")]
    assert {"--array=0-7", "--nodes=1", "--requeue", "--signal=B:USR1@60", "--job-name=train"} <= set(options)
    assert options[-2:] == ["--partition=gpu", "--comment=a b"]
    (run,) = (line for line in lines if line.startswith("run="))
    assert run.startswith(f"run={tmp_path}/elasticflow-runs/train-")
    assert "    --nnodes=2:8 train.py 'x y' &" in lines
    assert '--rdzv-endpoint="file://$run" --checkpoint="file://$run" ' in found.stdout
    assert not Path("elasticflow-runs").exists()
    assert subprocess.run(["bash", "-n"], input=found.stdout, text=True).returncode == 0


def test_script_of_one_node_cancels_nobody_and_what_is_named_is_taken(tmp_path: Path) -> None:
    submission = SlurmSubmission(1, 1, "4", (), ("--rdzv-endpoint=etcd://h:1/run",), ("train.py",))
    script = script_of(submission, tmp_path / "a%b", directory=tmp_path, checkpoint="s3://bucket/run")
    assert "scancel" not in script
    assert "file://" not in script
    assert f"--output={tmp_path}/a%%b/slurm-%A_%a.out" in script
    assert "--nnodes=1:1 --nproc-per-node=4 --rdzv-endpoint=etcd://h:1/run --checkpoint=s3://bucket/run" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize(
    ("status", "state", "called"),
    [
        (0, "RUNNING", "scancel --quiet --state=PENDING 12_[1-3]"),
        (1, "RUNNING", "scancel --quiet --state=PENDING 12_[1-3]"),
        (2, "RUNNING", "scontrol requeue 12_3"),  # it could be run before, as it was queued again
        (69, "RUNNING", "scontrol requeue 12_3"),
        (3, "RUNNING", ""),
        (75, "RUNNING", "scontrol requeue 12_3"),
        (137, "RUNNING", "scontrol requeue 12_3"),
        (75, "COMPLETING", ""),
    ],
)
def test_status_of_a_node_says_what_becomes_of_its_task(
    tools: Callable[..., None], tmp_path: Path, status: int, state: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "19")
    tools(elasticflow=f'echo "$ELASTICFLOW_TOKEN"; exit {status}', squeue=f"echo {state}")
    task = run_script(tmp_path)
    assert task.communicate(timeout=60)[0] == "secret\n"
    assert task.returncode == status
    assert calls("elasticflow") == [
        f"elasticflow run --run-dir={tmp_path}/run --rdzv-endpoint=file://{tmp_path}/run "
        f"--checkpoint=file://{tmp_path}/run --nnodes=1:4 train.py"
    ]
    assert calls("sc") == ([called] if called else [])


def test_command_that_cannot_be_run_is_not_queued_again(tools: Callable[..., None], tmp_path: Path) -> None:
    tools(elasticflow="exit 2", squeue="echo RUNNING")
    task = run_script(tmp_path)
    task.communicate(timeout=60)
    assert task.returncode == 2
    assert calls("sc") == []


@pytest.mark.parametrize("tool", ["squeue", "scontrol"])
def test_task_is_queued_again_although_slurm_has_not_answered_at_once(
    tools: Callable[..., None], tmp_path: Path, tool: str
) -> None:
    fails_once = "[ -e asked ] || { touch asked; exit 1; }"
    tools(**{"elasticflow": "exit 75", "squeue": "echo RUNNING", tool: f"{fails_once}; echo RUNNING"})
    task = run_script(tmp_path)
    task.communicate(timeout=60)
    assert task.returncode == 75
    assert calls("scontrol") == ["scontrol requeue 12_3"] * (2 if tool == "scontrol" else 1)


@pytest.mark.parametrize(("status", "times"), [(137, 0), (69, 0), (2, 0), (75, 1)])
def test_node_that_is_killed_again_and_again_is_given_up(
    tools: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, times: int
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "20")
    tools(elasticflow=f"exit {status}", squeue="echo RUNNING")
    task = run_script(tmp_path)
    task.communicate(timeout=60)
    assert task.returncode == status
    assert len(calls("scontrol")) == times


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_notice_to_the_script_is_passed_on_as_usr1_and_its_status_awaited(
    tools: Callable[..., None], tmp_path: Path, number: signal.Signals
) -> None:
    tools(
        elasticflow="trap 'sleep 0.3; exit 75' USR1; touch ready; while :; do sleep 0.05; done", squeue="echo RUNNING"
    )
    task = run_script(tmp_path)
    poll_until(Path("ready").exists)
    task.send_signal(number)
    assert task.wait(60) == 75
    assert calls("scontrol") == ["scontrol requeue 12_3"]
    task.communicate()


def test_script_of_the_example_ends_as_the_one_that_is_written(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "11-slurm" / "job.sh"
    written = script_of(SlurmSubmission(1, 8, "1", (), (), ("train.py",)), tmp_path, directory=tmp_path)
    assert example.read_text().partition("node=$!")[2] == written.partition("node=$!")[2]
    assert "trap 'kill -USR1 $node 2>/dev/null' USR1 TERM" in example.read_text()


# ---------------------------------------------------------------- Slurm's commands


def test_submission_leaves_what_the_nodes_need_and_says_what_to_type_next(
    tools: Callable[..., None], tmp_path: Path
) -> None:
    tools(sbatch="echo '12;cluster'")
    found = elasticflow("slurm", "submit", "--nodes=1:4", "--nproc-per-node=2", "train.py")
    assert found.exit_code == 0, found.output
    (place,) = Path("elasticflow-runs").iterdir()
    assert calls("sbatch") == [f"sbatch --parsable {place.resolve()}/job.sh"]
    assert stat.S_IMODE((place / "token").stat().st_mode) == 0o600
    assert slurm.job_in(place) == slurm.SlurmJob("12", 4, 2)
    assert found.output.startswith("Slurm job 12 starts with 1 to 4 nodes.")
    for command in ("squeue --jobs=12 ", f"elasticflow status {place} ", f"elasticflow scale {place} ", "scancel 12 "):
        assert f"  {command}" in found.output


def test_token_of_the_user_is_not_replaced(tools: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    tools()
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "mine")
    assert elasticflow("slurm", "submit", "--run-dir=run", "train.py").exit_code == 0
    assert not Path("run/token").exists()


def test_run_directory_in_the_home_is_where_the_shell_would_put_it(
    tools: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert elasticflow("slurm", "submit", "--run-dir=~/run", "train.py").exit_code == 0
    assert (tmp_path / "home/run/job.sh").exists()
    assert not Path("~").exists()


def test_refusal_of_slurm_is_said_in_its_own_words_and_leaves_nothing(tools: Callable[..., None]) -> None:
    tools(sbatch="echo 'sbatch: error: invalid partition specified: x' >&2; echo 'sbatch: error: failed' >&2; exit 1")
    found = elasticflow("slurm", "submit", "--partition=x", "train.py")
    assert found.exit_code == 2
    assert found.output == "elasticflow slurm submit: sbatch: invalid partition specified: x; failed\n"
    assert not list(Path("elasticflow-runs").iterdir())


def test_file_that_cannot_be_written_is_named_in_one_line(tools: Callable[..., None]) -> None:
    tools(sbatch="echo 12")
    Path("run/job.sh").mkdir(parents=True)
    found = elasticflow("slurm", "submit", "--run-dir=run", "train.py")
    assert found.exit_code == 2
    assert found.output == f"elasticflow slurm submit: {Path.cwd()}/run/job.sh: Is a directory\n"


def test_directory_of_a_job_that_may_be_queued_is_kept(tools: Callable[..., None]) -> None:
    tools(sbatch="echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv' >&2; exit 1")
    found = elasticflow("slurm", "submit", "train.py")
    assert found.exit_code == 2
    assert "The job may be in the queue all the same: `squeue --me` shows it" in found.output
    (place,) = Path("elasticflow-runs").iterdir()
    assert {"token", "job.sh"} <= {path.name for path in place.iterdir()}


def test_machine_without_slurm_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = elasticflow("slurm", "submit", "train.py")
    assert found.exit_code == 2
    assert "there is no `sbatch` on the path" in found.output
    assert not Path("elasticflow-runs").exists()


def test_directory_of_a_job_that_is_queued_is_refused(tools: Callable[..., None]) -> None:
    tools(squeue="echo '12_0 RUNNING'")
    submit = ("slurm", "submit", "--run-dir=run", "train.py")
    assert elasticflow(*submit).exit_code == 0
    found = elasticflow(*submit)
    assert found.exit_code == 2
    assert "Slurm job 12 trains there" in found.output
    tools(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sbatch="echo 13")
    assert elasticflow(*submit).exit_code == 0
    assert slurm.job_in(Path("run")) == slurm.SlurmJob("13", 8, 1)


def test_record_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slurm.json").write_text(json.dumps({"number": "1"}))
    with pytest.raises(UsageError, match=r"slurm\.json is not one of this version"):
        slurm.job_in(tmp_path)
    (tmp_path / "slurm.json").write_text(json.dumps({"number": "1", "max_nodes": None, "per_node": 1}))
    with pytest.raises(UsageError, match="Received: max_nodes=None"):
        slurm.job_in(tmp_path)
    assert slurm.job_in(tmp_path / "another") is None


def test_list_of_nodes_is_taken_apart_by_slurm(tools: Callable[..., None]) -> None:
    tools(scontrol="printf 'n1\\nn2\\n'")
    assert slurm.hostnames("n[1-2]") == ["n1", "n2"]
    assert calls() == ["scontrol show hostnames n[1-2]"]
    tools(scontrol="echo 'scontrol: error: Invalid hostlist: n[1' >&2; exit 1")
    with pytest.raises(UsageError, match="scontrol: Invalid hostlist"):
        slurm.hostnames("n[1")


# ---------------------------------------------------------------- more nodes, fewer nodes, none


def test_scaling_sets_the_throttle_and_lets_the_newest_tasks_leave(tools: Callable[..., None]) -> None:
    tools(squeue="printf '2\\n0\\n1\\n'")
    slurm.scale(slurm.SlurmJob("12", 4, 2), 4)
    assert calls("scontrol") == ["scontrol update JobId=12 ArrayTaskThrottle=2"]
    assert calls("scancel") == ["scancel --batch --signal=USR1 12_1"]


def test_nodes_that_a_job_orders_of_slurm_are_those_that_may_run(tools: Callable[..., None], tmp_path: Path) -> None:
    tools()
    slurm.submit(SUBMISSION, tmp_path / "run", checkpoint="")
    found = provisioner_for(read_environment({"ELASTICFLOW_RUN_DIR": str(tmp_path / "run")}))
    assert isinstance(found, Orders)
    assert found.repeats
    place = SlurmArray(slurm.SlurmJob("12", 4, 2))
    place.provide(3, present=2)
    place.provide(1, present=3)
    assert calls("scontrol") == [f"scontrol update JobId=12 ArrayTaskThrottle={nodes}" for nodes in (3, 1)]
    assert calls("scancel") == []  # the job itself lets nodes go
    with pytest.raises(UsageError, match="the array has 4 tasks, each of which is one node"):
        place.provide(5, present=4)


def test_job_that_chooses_its_size_begins_with_the_fewest_nodes(tmp_path: Path) -> None:
    for options, array in (((), "0-7"), (("--autoscale=max=8",), "0-7%2")):
        submission = SlurmSubmission(2, 8, "1", (), options, ("train.py",))
        assert f"#SBATCH --array={array}\n" in script_of(submission, tmp_path / "run", directory=tmp_path)


@pytest.mark.parametrize(
    ("per_node", "workers", "message"),
    [
        (1, 5, "can have 1 to 4 workers. Received: 5"),
        (1, 0, "Received: 0"),
        (2, 3, "can have 2 to 8 workers, 2 in each node. Received: 3"),
        (0, 3, "`scontrol update JobId=12 ArrayTaskThrottle=NODES`. Received: 3"),
    ],
)
def test_number_of_workers_that_nodes_cannot_have_is_refused(
    tools: Callable[..., None], per_node: int, workers: int, message: str
) -> None:
    tools()
    with pytest.raises(UsageError, match=message):
        slurm.scale(slurm.SlurmJob("12", 4, per_node), workers)
    assert not calls()


def test_commands_for_a_run_are_those_of_its_job(tools: Callable[..., None]) -> None:
    tools()
    assert elasticflow("slurm", "submit", "--nodes=1:4", "--run-dir=run", "train.py").exit_code == 0
    Path("calls").unlink()
    assert elasticflow("scale", "--no-wait", "run", "3").output == "0 → 3 workers ordered\n"
    assert calls("scontrol") == ["scontrol update JobId=12 ArrayTaskThrottle=3"]
    assert elasticflow("scale", "run", "5").exit_code == 2
    assert elasticflow("stop", "run").exit_code == 0
    assert calls("scancel") == ["scancel 12"]
    assert elasticflow("stop", "--kill", "run").exit_code == 0
    assert calls("scancel")[1:] == ["scancel --full --signal=KILL 12", "scancel 12"]
