"""MPI launchers: the variables of their ranks, what their process managers say, and `elasticflow mpi`."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.errors import UsageError
from ef_common.launch import command, mpi, mpirun, pmi
from ef_common.launch.mpi import MPICH, OPEN_MPI, Hosts, Rank, rank_in
from tests.waiting import poll_until

OF_OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
OF_MPICH = {"PMI_RANK": "2", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OF_OPEN_MPI, Rank(OPEN_MPI, 2, 8, 1, 4)),
        (OF_MPICH, Rank(MPICH, 2, 8, 1, 4)),
        (OF_MPICH | {"PMI_SIZE": "1"}, None),
        (OF_OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "x"}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "8"}, None),  # of Slurm
        ({}, None),
    ],
)
def test_rank_is_what_the_variables_say(environ: Mapping[str, str], expected: Rank | None) -> None:
    assert rank_in(environ) == expected


def test_jobs_have_ports_of_their_own_and_ranks_the_same() -> None:
    ports = {Hosts([host], job).port(range(20000, 30000)) for job in map(str, range(50)) for host in ("a", "b")}
    assert len(ports) in (48, 49, 50)
    assert min(ports) >= 20000
    assert max(ports) < 30000


def test_pmix_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PMIX_")]:
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="rank 2 of 8 of Open MPI, and PMIx does not tell where the other ranks are: "):
        mpi.hosts_of(Rank(OPEN_MPI, 2, 8, 1, 4), {})


class Manager:
    """A process manager that speaks PMI 1 with one rank.

    Args:
        answers: To its commands.
    """

    def __init__(self, answers: Mapping[str, str]) -> None:
        self.line, self._mine = socket.socketpair()
        self.said: list[str] = []
        self._answers = answers
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError), self._mine, self._mine.makefile("rw") as file:
            for line in file:
                self.said.append(line.strip())
                answer = self._answers.get(line.split()[0].removeprefix("cmd="))
                if answer is None:
                    return
                file.write(answer.format(key=line.rpartition("-")[2].strip()) + "\n")
                file.flush()

    def exchange(self) -> tuple[list[str], str]:
        with self.line:
            return pmi.exchange("here", rank=1, size=3, fd=self.line.fileno(), timeout_s=5.0)


ANSWERS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname=kvs_7",
    "put": "cmd=put_result rc=0 msg=success",
    "barrier_in": "cmd=barrier_out",
    "get": "cmd=get_result rc=0 msg=success value=host{key}",
    "finalize": "cmd=finalize_ack",
}


def test_ranks_tell_each_other_where_they_are() -> None:
    manager = Manager(ANSWERS)
    assert manager.exchange() == (["host0", "host1", "host2"], "kvs_7")
    assert manager.said == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_my_kvsname",
        "cmd=put kvsname=kvs_7 key=elasticflow-1 value=here",
        "cmd=barrier_in",
        *(f"cmd=get kvsname=kvs_7 key=elasticflow-{rank}" for rank in range(3)),
        "cmd=finalize",
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"put": "cmd=put_result rc=-1 msg=full"}, "has answered `put .*` with `cmd=put_result rc=-1 msg=full`"),
        ({"init": "cmd=what"}, "has answered `init .*` with `cmd=what`"),
        ({"barrier_in": "x" * 5000}, "does not answer `barrier_in`: the line does not end"),
        ({"get": None}, "does not answer `get .*`: it has closed the line"),
    ],
)
def test_manager_that_speaks_otherwise_is_one_line(changed: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Manager({**ANSWERS, **changed}).exchange()


# ---------------------------------------------------------------- `elasticflow mpi`


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """An mpirun that says its version, or else does what the test has written."""
    file = tmp_path / "mpirun"
    file.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then cat {tmp_path}/version; exit 0; fi\nexec sh {tmp_path}/does\n'
    )
    file.chmod(0o755)
    (tmp_path / "version").write_text("mpirun (Open MPI) 4.1.4\n")
    return file


def elasticflow_mpi(program: Path, *arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["mpi", f"--mpirun={program}", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("version", "options"),
    [
        (
            "mpirun (Open MPI) 4.1.4",
            "--enable-recovery -x ELASTICFLOW_TOKEN -x ELASTICFLOW_RANK_STATUS",
        ),
        ("HYDRA build details:\n    Launchers: ssh slurm \n    Version:  4.0.2", "-disable-auto-cleanup"),
        ("slurm 22.05.8", "--kill-on-bad-exit=0 --no-kill"),
        ("slurm-wlm 22.05.8", "--kill-on-bad-exit=0 --no-kill"),
    ],
)
def test_command_is_printed_with_the_options_of_the_launcher(program: Path, version: str, options: str) -> None:
    program.with_name("version").write_text(version)
    status, said, _ = elasticflow_mpi(program, "--dry-run", "-np", "4", "elasticflow", "run", "train.py", "-x")
    shell = f"bash -c {shlex.quote(mpirun._RANK)} rank " if "HYDRA" in version else ""
    assert (status, said) == (0, f"{program} {options} -np 4 {shell}elasticflow run train.py -x\n")


def test_step_of_slurm_is_started_with_srun(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.rename(program.with_name("srun"))
    program.with_name("version").write_text("slurm 22.05.8\n")
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    arguments = ("slurm", "srun", "--dry-run", "--ntasks-per-node=1", "elasticflow", "run", "train.py", "-x")
    found = CliRunner().invoke(main, arguments)
    expected = "srun --kill-on-bad-exit=0 --no-kill --ntasks-per-node=1 elasticflow run train.py -x\n"
    assert (found.exit_code, found.stdout) == (0, expected)


@pytest.mark.parametrize(("does", "status"), [("exit 3", 3), ("kill -KILL $$", 137), ("sleep 30", 138)])
def test_rank_of_mpich_has_an_exit_status_whatever_ends_it(tmp_path: Path, does: str, status: int) -> None:
    (tmp_path / "inner").write_text(f"touch {tmp_path}/begun; {does}")
    with subprocess.Popen(["bash", "-c", mpirun._RANK, "rank", "bash", str(tmp_path / "inner")]) as process:
        if "sleep" in does:
            poll_until((tmp_path / "begun").exists, guard_s=30.0)
            process.send_signal(signal.SIGUSR1)
        assert process.wait(20.0) == status


def test_rank_of_mpich_is_told_of_a_signal_that_comes_as_it_begins(tmp_path: Path) -> None:
    (tmp_path / "inner").write_text("kill -USR1 $PPID; sleep 30")
    command = ["bash", "-c", mpirun._RANK, "rank", "bash", str(tmp_path / "inner")]
    with ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command)) for _ in range(20)]
        for process in processes:
            stack.callback(process.kill)
        assert [process.wait(20.0) for process in processes] == [138] * 20


@pytest.mark.parametrize(
    ("version", "arguments", "words"),
    [
        ("mpirun (Open MPI) 4.1.4", ("-np", "4", "train.py"), "Received: -np 4 train.py"),
        ("mpirun (Open MPI) 4.1.4", ("-np", "4", "torchrun", "train.py"), "Received: -np 4 torchrun train.py"),
        ("mpirun (Open MPI) 4.1.4", (), "Received: nothing"),
        ("my own thing", ("elasticflow", "run", "train.py"), "which says: my own thing"),
    ],
)
def test_command_that_cannot_be_is_one_line(
    program: Path, version: str, arguments: tuple[str, ...], words: str
) -> None:
    program.with_name("version").write_text(version)
    status, _, error = elasticflow_mpi(program, *arguments)
    assert (status, error.count("\n")) == (2, 1)
    assert words in error


def test_mpi_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    status, _, error = elasticflow_mpi(tmp_path / "missing", "elasticflow", "run", "train.py")
    assert (status, error.count("\n")) == (2, 1)
    assert "there is no `" in error


@pytest.mark.parametrize(
    ("launcher", "ranks", "expected"),
    [
        (0, [0, 0], 0),
        (0, [0, 137, 75], 0),
        (9, [0], 0),
        (0, [1, 1], 1),
        (0, [1, 137], 1),
        (0, [2, 2], 2),
        (0, [75, 75], 75),
        (0, [137, 75], 75),
        (0, [69, 75], 75),
        (0, [69, 1], 1),
        (0, [69, 69], 69),
        (0, [69, 137], 137),
        (0, [], 1),
        (3, [], 3),
        (-9, [], 137),
    ],
)
def test_exit_status_is_that_of_the_training(launcher: int, ranks: list[int], expected: int) -> None:
    assert mpirun.status_of(launcher, ranks) == expected


def test_what_ranks_say_is_passed_on_without_their_statuses(
    program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ELASTICFLOW_TOKEN", raising=False)
    program.with_name("does").write_text(
        'echo "a line" >&2; echo "1: elasticflow-rank-status: 1 137" >&2; echo "elasticflow-rank-status: 0 0" >&2\n'
        'echo "secret of ${#ELASTICFLOW_TOKEN}" >&2; exit 9\n'
    )
    assert mpirun.run([str(program)]) == 0
    assert capfd.readouterr().err == "a line\nsecret of 32\n"
    monkeypatch.delenv("ELASTICFLOW_TOKEN")
    monkeypatch.delenv("ELASTICFLOW_RANK_STATUS")


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({"OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "0"}, 2),  # Slurm has started a daemon of MPI's
        ({"PMI_RANK": "2", "SLURM_PROCID": "0"}, 2),
        ({"SLURM_PROCID": "3"}, 3),
        ({}, 0),
    ],
)
def test_each_rank_says_its_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], environ: dict[str, str], number: int
) -> None:
    for name in mpirun._NUMBERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_main", lambda argv: 7)
    assert command.main([]) == 7
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("ELASTICFLOW_RANK_STATUS", "1")
    assert command.main([]) == 7
    assert capfd.readouterr().err == f"\nelasticflow-rank-status: {number} 7\n"  # behind whatever is unfinished


def test_launcher_does_not_wait_for_a_thread_that_has_failed(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its ranks say fills a pipe."""
    program.with_name("does").write_text("trap '' PIPE; head -c 1000000 /dev/zero >&2; exit 9\n")
    monkeypatch.setattr(mpirun, "_pass_on", lambda source, statuses: 1 / 0)
    assert mpirun.run([str(program)]) == 9


def test_line_with_a_number_that_is_no_status_is_passed_on(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"elasticflow-rank-status: 0 {'9' * 5000}"
    program.with_name("does").write_text(f"echo '{line}' >&2; echo 'elasticflow-rank-status: 0 0' >&2\n")
    assert mpirun.run([str(program)]) == 0
    assert capfd.readouterr().err == f"{line}\n"


STATUS = "\nelasticflow-rank-status: 0 0\n"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (f"a line\n{STATUS}", "a line\n"),
        (f"a line\n\n{STATUS}\nb\n", "a line\n\n\nb\n"),  # with the empty lines that are not ours
        (f"50%{STATUS}", "50%\n"),
        (f"\r50%{STATUS}100%\n", "\r50%\n100%\n"),
        (f"\r50%\r    \r{STATUS}", "\r50%\r    \r\n"),
        (f"\r    \r{STATUS}", "\r    \r"),  # a bar that has gone leaves no empty line
        ("0: a line\n0: \n0: elasticflow-rank-status: 0 0\n", "0: a line\n"),  # `srun --label`
        ("[1,0]<stderr>:\n[1,0]<stderr>:elasticflow-rank-status: 0 0\n", "[1,0]<stderr>:\n[1,0]<stderr>:"),
        ("\r50%elasticflow-rank-status: 0 0\n", "\r50%"),
        (STATUS.replace("\n", "\r\n"), "\r"),  # `srun --pty`
        (f"{STATUS}\n", "\n"),
    ],
)
def test_status_is_found_behind_what_has_no_end(
    program: Path, capfd: pytest.CaptureFixture[str], said: str, shown: str
) -> None:
    """A progress bar has none, neither of this rank nor of another one."""
    (program.parent / "said").write_bytes(said.encode())
    program.with_name("does").write_text(f"cat {program.parent}/said >&2; exit 1\n")
    assert mpirun.run([str(program)]) == 0
    assert capfd.readouterr().err == shown


def test_line_without_an_end_is_passed_on(
    program: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mpirun, "_MAX_BYTES", 100)
    program.with_name("does").write_text('printf "%250s" x >&2; echo >&2; echo "elasticflow-rank-status: 0 0" >&2\n')
    assert mpirun.run([str(program)]) == 0
    assert capfd.readouterr().err == " " * 249 + "x\n"


def test_signal_that_comes_twice_at_once_lets_the_ranks_leave() -> None:
    with subprocess.Popen(
        ["bash", "-c", "trap 'exit 3' USR1; echo; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it has set its trap
        ending = mpirun._Ending(process)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP):
            ending.note(number, None)
        assert process.wait(60) == 3
    assert ending.signals == [signal.SIGTERM]
