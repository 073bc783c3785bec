"""`elasticflow run --hosts`: the command line, the two sides of a connection, and what comes through it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ef_common import __version__
from ef_common.core.hosts import Host
from ef_common.errors import ProtocolError, UsageError
from ef_common.launch import joining
from ef_common.launch.command import main, of_hosts
from ef_common.launch.hosts import job as hosts_job
from ef_common.launch.hosts import lines
from ef_common.launch.hosts.folder import HostFolder
from ef_common.launch.hosts.lines import Data, NodeEnded, NodeOrder, NodeRefused, Runs, Wants
from ef_common.launch.hosts.link import command_for
from ef_common.launch.hosts.output import Output
from ef_common.launch.hosts.records import Records
from ef_common.launch.run import parser

SECRET = "not for others"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICFLOW_TOKEN", SECRET)
    (tmp_path / "hosts.txt").write_text("node1\nnode2 slots=4\n")
    (tmp_path / "train.py").touch()


def order(*argv: str) -> NodeOrder:
    """What a host is told."""
    given = ["--hosts=hosts.txt", *argv]
    job = hosts_job.HostsJob.of(parser().parse_args(given), given)
    return job.order(Host("node2", 4), port=29401, starts=True, known={}, life="")


# ---------------------------------------------------------------- the command line


def test_node_has_the_options_of_the_job_and_those_of_its_host() -> None:
    made = order("--max-restarts", "7", "--rdzv-conf=hang_timeout=9", "--run-dir=x", "train.py", "--hosts=mine", "-x")
    *options, script, first, second = made.arguments
    assert (script, first, second) == ("train.py", "--hosts=mine", "-x")
    parsed = parser().parse_args(["--rdzv-endpoint=launcher:29401", *made.arguments])
    assert (parsed.max_restarts, parsed.nnodes, parsed.nproc_per_node) == (7, "1:1024", "4")
    assert parsed.rdzv_conf == "hang_timeout=9,is_host=0"
    assert parsed.hosts is None
    assert parsed.run_dir is None
    assert made.directory == os.getcwd()
    assert not any(option.startswith("--hosts") for option in options)


@pytest.mark.parametrize("between", [[], ["--"]])
def test_arguments_behind_dashes_are_the_scripts(between: list[str]) -> None:
    made = order("--max-restarts=7", "train.py", *between, "train.py", "--", "-x")
    assert made.arguments[0] == "--max-restarts=7"
    assert made.arguments[-4:] == ["train.py", "train.py", "--", "-x"]
    parsed = parser().parse_args(["--rdzv-endpoint=launcher:29401", *made.arguments])
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", ["train.py", "--", "-x"])


def test_node_gets_the_variables_of_the_shell_without_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "SSH_AUTH_SOCK", "PET_ROLE", "HOME", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "value")
    environ = order("train.py").environ
    assert environ["WANDB_API_KEY"] == "value"
    assert environ["ELASTICFLOW_TOKEN"] == SECRET
    assert not {"SSH_AUTH_SOCK", "PET_ROLE", "HOME", "SLURM_JOB_ID"} & set(environ)


def test_token_that_nobody_has_set_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICFLOW_TOKEN")
    assert len(order("train.py").environ["ELASTICFLOW_TOKEN"]) == 32


def test_token_of_a_file_travels_with_the_order(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("of a file\n")
    made = order("--rdzv-conf=token_file=token,is_host=1", "train.py")
    assert made.environ["ELASTICFLOW_TOKEN"] == "of a file"
    assert "token_file" not in " ".join(made.arguments)
    assert SECRET not in repr(made)


def test_endpoint_of_the_user_is_that_of_the_nodes() -> None:
    made = order("--rdzv-endpoint=s3://bucket/run", "train.py")
    assert made.endpoint == "s3://bucket/run"
    assert "is_host" not in " ".join(made.arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host-discovery-script=x"], "Received: both"),
        (["--nproc-per-node=gpu"], "Received: --nproc-per-node=gpu"),
        (["--launcher-timeout=1"], "Received: --launcher-timeout=1"),
        (["--launcher-timeout=nan"], "Received: --launcher-timeout=nan"),
        (["--rdzv-backend=c10d"], "Received: --rdzv-backend=c10d"),
        (["--join=elasticflow-runs/x"], "Received: --join"),
        (["--ssh-command="], "Received: --ssh-command="),
        (["--ssh-command='"], "Received: --ssh-command='"),
        (["--left-status=300"], "Received: --left-status=300"),
        (["--nnodes=0:3"], "Received: --nnodes=0:3"),
        (["--hosts=missing.txt"], "Received: --hosts=missing.txt"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    options: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--hosts=hosts.txt", *options, "train.py"]) == 2
    error = capfd.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not Path("elasticflow-runs").exists()


def test_host_is_reached_by_the_users_shell_and_this_machine_without() -> None:
    reached = command_for("me@node1", shell="ssh -p 2222", python="/opt/python")
    assert reached[:3] == ["ssh", "-p", "2222"]
    assert "BatchMode=yes" in reached
    assert "ControlMaster=no" in reached  # or ssh would leave a process behind, which others use
    assert reached[-2] == "me@node1"
    assert reached[-1].startswith("env PYTHONPATH=")
    assert reached[-1].endswith("/opt/python -u -m ef_common.launch.hosts.far_side")
    assert command_for("node1", shell="./rsh.sh", python="p")[:2] == ["./rsh.sh", "node1"]
    assert command_for("[fe80::1]", shell="ssh", python="p")[-2] == "fe80::1"
    # A login shell's variable would name another machine than this one.
    assert command_for("localhost", shell="ssh", python="p")[:3] == ["env", "-u", "SSH_CONNECTION"]
    assert "SSH_CONNECTION" not in reached[-1]
    assert SECRET not in " ".join(reached)


# ---------------------------------------------------------------- lines


def test_lines_survive_the_way() -> None:
    made = order("train.py")
    assert lines.read_order(lines.order_line(made).decode()) == made
    assert lines.read_beat(lines.beat_line("leave").decode()) == "leave"
    for answer in (Runs("x"), Wants(2, 3), NodeEnded(137), NodeRefused("x"), Data("output", 3, b"\xff\n")):
        assert lines.read_answer(lines.answer_line(answer)) == answer
    assert lines.read_answer(lines.answer_line(NodeRefused("two\nlines\udcff"))) == NodeRefused("two lines ")
    assert lines.read_answer("Welcome to node1\n") is None


@pytest.mark.parametrize(
    "line",
    [
        '{"elasticflow": "data", "file": "../x.jsonl", "offset": 0, "content": ""}',
        '{"elasticflow": "data", "file": "a/b.jsonl", "offset": 0, "content": ""}',
        '{"elasticflow": "data", "file": "output", "offset": -1, "content": ""}',
        '{"elasticflow": "data", "file": "output", "offset": 0, "content": "?"}',
        '{"elasticflow": "ended", "status": "x"}',
        '{"elasticflow": "ended", "status": 1, "more": 1}',
        '{"elasticflow": "runs"}',
        '{"elasticflow": "what"}',
        '{"elasticflow": ',
        '{"elasticflow": []}',
    ],
)
def test_malformed_answer_raises(line: str) -> None:
    with pytest.raises(ProtocolError):
        lines.read_answer(line)


@pytest.mark.parametrize("line", ["", "[]", "{}", '{"order": {"version": "1"}}', '{"order": 1}'])
def test_malformed_order_raises(line: str) -> None:
    with pytest.raises(ProtocolError):
        lines.read_order(line)


# ---------------------------------------------------------------- what a host writes


@pytest.fixture
def output() -> Output:
    return Output()


def shown(output: Output) -> None:
    """Everything."""
    output.start()
    output.close(lambda: False)


def test_parts_of_files_are_kept_once_and_in_order(
    tmp_path: Path, output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    records = Records("node1", tmp_path, output)
    records.begin("first")
    for data in (
        Data("a.jsonl", 0, b"one\n"),
        Data("a.jsonl", 0, b"one\ntwo"),
        Data("a.jsonl", 99, b"not yet"),
        Data("a.jsonl", 7, b"\n"),
        Data("output", 0, b"1%\r50%\r99"),
        Data("output", 9, b"%\nnext\n"),
    ):
        records.keep(data)
    assert (tmp_path / "events" / "a.jsonl").read_text() == "one\ntwo\n"
    assert records.known == {"a.jsonl": 8, "output": 16}
    records.begin("first")
    assert records.known["output"] == 16
    records.begin("second")
    records.keep(Data("output", 0, b"again\n"))
    shown(output)
    assert capfd.readouterr().out == "node1: 99%\nnode1: next\nnode1: again\n"


def test_last_line_of_a_node_is_shown_without_its_end(
    tmp_path: Path, output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    records = Records("node1", tmp_path, output)
    records.begin("first")
    records.keep(Data("output", 0, b"one\nkilled in the mid"))
    records.begin("second")
    records.keep(Data("output", 0, b"accuracy: 0.9"))
    records.end()
    records.end()
    shown(output)
    assert capfd.readouterr().out == "node1: one\nnode1: killed in the mid\nnode1: accuracy: 0.9\n"


def test_events_that_cannot_be_kept_end_no_job(
    tmp_path: Path, output: Output, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").write_text("not a folder")
    records = Records("node1", tmp_path, output)
    records.begin("first")
    for data in (Data("a.jsonl", 0, b"one\n"), Data("a.jsonl", 4, b"two\n"), Data("output", 0, b"hello\n")):
        records.keep(data)
    assert records.known == {"a.jsonl": 8, "output": 6}
    shown(output)
    said = capfd.readouterr()
    assert said.out == "node1: hello\n"
    assert said.err.count("events of host node1 are no longer logged") == 1
    (tmp_path / "events").unlink()
    records.keep(Data("a.jsonl", 8, b"three\n"))
    assert not (tmp_path / "events").exists()  # there would be a gap
    records.begin("second")
    records.keep(Data("b.jsonl", 0, b"one\n"))
    assert (tmp_path / "events" / "b.jsonl").read_text() == "one\n"


# ---------------------------------------------------------------- the folder of a node


def test_folder_is_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = HostFolder.of("job", "node1")
    with folder.locked():
        folder.give({"environ": {"ELASTICFLOW_TOKEN": SECRET}})
    assert stat.S_IMODE(folder.path.stat().st_mode) == stat.S_IMODE(folder.path.parent.stat().st_mode) == 0o700
    assert folder.take() == {"environ": {"ELASTICFLOW_TOKEN": SECRET}}
    assert not any(SECRET in file.read_text() for file in folder.path.iterdir())
    assert HostFolder.of("job", "node2").path != folder.path
    folder.path.parent.chmod(0o755)
    with pytest.raises(UsageError, match="this user alone must have access"):
        HostFolder.of("job", "node1")


def test_node_whose_keeper_is_gone_was_killed(tmp_path: Path) -> None:
    folder = HostFolder(tmp_path)
    assert (folder.life, folder.is_kept) == ("", False)
    folder.keep("first")
    assert (folder.life, folder.is_kept, folder.status) == ("first", True, None)
    record = (tmp_path / "keeper").read_text()
    (tmp_path / "keeper").write_text(record.replace('"process": "', '"process": "1'))
    assert (folder.is_kept, folder.status) == (False, 137)
    folder.end(3)
    assert folder.status == 3


def test_node_is_not_taken_for_killed_when_the_clock_is_set(tmp_path: Path, set_clock: Callable[[], None]) -> None:
    folder = HostFolder(tmp_path)
    folder.keep("first")
    set_clock()
    assert (folder.is_kept, folder.status) == (True, None)


def test_other_version_is_refused() -> None:
    from ef_common.launch.hosts.far_side import FarSide

    made = order("train.py")
    other = NodeOrder(**{**{name: getattr(made, name) for name in NodeOrder.__dataclass_fields__}, "version": "0.1"})
    with pytest.raises(UsageError, match=rf"Received: {__version__} of .* here, and 0\.1 where the job was started"):
        FarSide(other)


def test_job_on_hosts_can_be_joined(tmp_path: Path) -> None:
    argv = ["--hosts=localhost", "-m", "mine.train", "--lr=1"]
    args = of_hosts(argv)
    assert args is not None
    hosts_job.HostsJob.of(args, argv).write(tmp_path, 29400)
    job = joining.read(tmp_path)
    assert (job.command, job.start) == (
        ["mine.train", "--lr=1"],
        {"module": True, "no_python": False, "run_path": False},
    )
