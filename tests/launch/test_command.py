"""The command line of `elasticflow run`, where torch's parser is not needed to read it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ef_common.launch.command import main, of_hosts, usual
from ef_common.launch.run import parser

HOSTS = "--hosts=hosts.txt"


@pytest.fixture(autouse=True)
def no_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PET_NNODES", raising=False)


@pytest.mark.parametrize(
    "argv",
    [
        [HOSTS, "train.py"],
        [HOSTS, "--nnodes=2:4", "--nproc-per-node", "2", "--rdzv-conf=hang_timeout=9", "train.py", "--hosts=x", "-m"],
        ["--host-discovery-script", "./hosts.sh", "--rdzv_endpoint=s3://bucket/run", "--rdzv_id=7", "-m", "package"],
        [HOSTS, "--no_python", "--max-restarts=7", "--monitor_interval=2", "--role=r", "--log_dir=logs", "./train.sh"],
        [HOSTS, "--local-addr=10.0.0.1", "--launcher-timeout=0", "--ssh-command=ssh -p 1", "--tls=1", "train.py", "--"],
    ],
)
def test_job_on_hosts_is_read_as_torchrun_reads_it(argv: list[str]) -> None:
    args, full = of_hosts(argv), vars(parser().parse_args(argv))
    assert args is not None
    assert vars(args) == {name: full[name] for name in vars(args)}


def test_path_of_an_option_may_begin_in_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    args = of_hosts(["--hosts=~/hosts.txt", "--run-dir=~/run", "train.py"])
    assert args is not None
    assert [str(args.hosts), str(args.run_dir)] == ["/home/me/hosts.txt", "/home/me/run"]


def test_each_usual_option_is_one_of_torchruns() -> None:
    full = {name: action for action in parser()._actions for name in action.option_strings}
    for action in usual()._actions:
        for name in action.option_strings:
            assert (action.dest, action.nargs) == (full[name].dest, full[name].nargs)


@pytest.mark.parametrize(
    "argv",
    [
        ["train.py"],
        ["train.py", HOSTS],
        ["--rdzv-endpoint=host:1", "train.py", HOSTS],
        [HOSTS, "--start-method=fork", "train.py"],
        [HOSTS, "--start-method", "fork", "train.py"],
        [HOSTS, "--nproc=2", "train.py"],
        [HOSTS, "--max-restarts=some", "train.py"],
        [HOSTS],
        [HOSTS, "--help"],
    ],
)
def test_everything_else_is_left_to_torchruns_parser(argv: list[str]) -> None:
    assert of_hosts(argv) is None


def test_variables_of_torchrun_are_left_to_its_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2:3")
    assert of_hosts([HOSTS, "train.py"]) is None


def test_job_on_hosts_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from ef_common.launch.command import main\n"
        "sys.exit(main(['--hosts=none.txt', 'train.py']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "none.txt" in done.stderr


def test_without_torch_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ef_common.launch.run", None)
    assert main(["train.py"]) == 2
    assert "elasticflow run needs torch (pip install 'elasticflow-training[torch]')" in capfd.readouterr().err
