"""`elasticflow run --hosts` with Debian's sshd: hosts come, go, die, and lose their launcher."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.faults import networks, ssh_hosts
from tests.faults.conftest import check_gentle
from tests.faults.hosts import ENOUGH
from tests.faults.launched import LaunchedRun
from tests.faults.ssh_hosts import SshHosts
from tests.faults.torchrun_nodes import OPTIONS, SCRIPT
from tests.waiting import poll_until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(530),
    pytest.mark.skipif(ssh_hosts.why_not() is not None, reason=str(ssh_hosts.why_not())),
]

ROOT = Path(__file__).parents[2]
NUM_HOSTS = 3
GUARD_S = 300.0


@pytest.fixture(scope="module")
def machines() -> Iterator[SshHosts]:
    with ssh_hosts.ssh_hosts(NUM_HOSTS) as running:
        yield running


class HostsRun(LaunchedRun):
    """A training on hosts, whose launcher is `elasticflow run --hosts`.

    Attributes:
        list: The file of hosts.
    """

    def __init__(self, directory: Path, machines: SshHosts) -> None:
        super().__init__(directory, guard_s=GUARD_S, without=("SSH_",))
        self._machines = machines
        self.list = directory.with_name("hosts.txt")

    def write(self, *lines: str) -> None:
        """These are the hosts from now on."""
        self.list.write_text("".join(f"{line}\n" for line in lines))

    def start(self, *options: str, by: Sequence[str] = (), script: Sequence[str] = (), **training: Any) -> None:
        """Start the launcher."""
        training = {**OPTIONS, "stop": str(self.directory / ENOUGH), **training}
        self.launch(
            *(*self._machines.inside, sys.executable, "-m", "ef_common.cli", "run"),
            *(*(by or (f"--hosts={self.list}",)), f"--ssh-command={self._machines.ssh}", f"--run-dir={self.directory}"),
            *("--monitor-interval=0.1", *options, *(script or (str(SCRIPT), json.dumps(training)))),
        )

    def wait_for_line(self, text: str) -> None:
        self.wait_until(lambda _: text in self.said(), repr(text))

    def command(self, *arguments: str) -> str:
        """A command of ours, given on the launcher's machine; what it prints."""
        done = subprocess.run(
            (*self._machines.inside, sys.executable, "-m", "ef_common.cli", *arguments),
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=GUARD_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def finish(self) -> None:
        """The training is enough: it ends well, and with it the job."""
        (self.directory / ENOUGH).touch()
        assert self.status() == 0, self.tails()
        self.audit()

    def close(self) -> None:
        super().close()
        for node in range(1, NUM_HOSTS + 1):
            networks.set_link(node, "up")
            self._machines.kill_all(node)


@pytest.fixture
def run(machines: SshHosts, tmp_path: Path) -> Iterator[HostsRun]:
    running = HostsRun(tmp_path / "run", machines)
    yield running
    running.close()


@pytest.mark.thorough
def test_hosts_come_and_go_with_the_list_and_the_launcher_ends_as_the_training_does(
    run: HostsRun, machines: SshHosts
) -> None:
    def temporary() -> set[Path]:
        return set(machines.temporary(2).glob("elasticflow-*/*"))

    before = temporary()  # what a node leaves behind that a test has killed
    run.write("node1  # the first one", "missing", "node2 slots=1")
    run.start()
    first = run.wait_for_world(2)
    run.wait_for_steps()
    assert run.said().count("host missing: cannot be reached (ssh: Could not resolve hostname missing") == 1
    run.write("node2", "node3")
    run.wait_for_line("removed from the list of hosts: missing, node1")
    run.wait_for_world(2, after=first)
    run.wait_until(lambda _: not machines.processes(1), "node 1 has left")
    run.wait_for_steps()
    check_gentle(run)
    assert len(json.loads(run.command("status", "--json", str(run.directory)))["workers"]) == 2
    assert "worker" in run.command("logs", str(run.directory))
    run.finish()
    assert "node2: " in run.said()
    poll_until(lambda: not any(map(machines.processes, (1, 2, 3))), guard_s=GUARD_S)
    assert temporary() <= before


@pytest.mark.thorough
def test_connection_that_is_cut_is_made_again_and_the_node_has_trained_on(run: HostsRun, machines: SshHosts) -> None:
    run.write("node1", "node2")
    run.start()
    run.wait_for_world(2)
    run.wait_for_steps()
    machines.cut_connections(2)
    run.wait_for_line("host node2: the connection is lost, and its node trains on")
    run.wait_for_line("host node2 is reached")
    run.wait_for_steps()
    assert len(run.events("start")) == 2
    assert {event["generation"] for event in run.events("view")} == {1}
    run.finish()


@pytest.mark.thorough
def test_host_that_dies_is_lost_and_comes_back(run: HostsRun, machines: SshHosts) -> None:
    run.write("node1", "node2")
    run.start("--rdzv-conf=heartbeat_timeout=5")
    first = run.wait_for_world(2)
    run.wait_for_steps()
    networks.set_link(2, "down")
    machines.kill_all(2)
    second = run.wait_for_world(1, after=first)
    run.wait_for_steps()
    networks.set_link(2, "up")
    run.wait_for_world(2, after=second)
    run.wait_for_steps()
    assert "host node2: the connection is lost" in run.said()
    run.finish()


@pytest.mark.thorough
def test_node_whose_processes_are_killed_is_started_again(run: HostsRun, machines: SshHosts) -> None:
    run.write("node1", "node2")
    run.start()
    first = run.wait_for_world(2)
    run.wait_for_steps()
    machines.kill_all(2)
    second = run.wait_for_world(1, after=first)
    run.wait_for_world(2, after=second)
    run.wait_for_steps()
    assert "the node of host node2 has ended with status 137" in run.said()
    run.finish()


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launcher_that_is_told_to_end_leaves_a_checkpoint_from_which_the_next_one_goes_on(
    run: HostsRun, machines: SshHosts, number: signal.Signals, tmp_path: Path
) -> None:
    checkpoints = f"file://{tmp_path}/checkpoints"
    run.write("node1", "node2")
    run.start(checkpoint=checkpoints)
    run.wait_for_world(2)
    run.wait_for_steps(10)
    run.launcher.send_signal(number)
    assert run.status() == (130 if number == signal.SIGINT else 75)
    last = max(event["step"] for event in run.events("step"))
    assert max(event["step"] for event in run.events("checkpoint")) in (last, last + 1)
    assert "stopped" in run.command("status", "--once", str(run.directory))
    check_gentle(run)
    poll_until(lambda: not any(map(machines.processes, (1, 2))), guard_s=GUARD_S)
    run.start(checkpoint=checkpoints)
    run.wait_until(lambda _: [e for e in run.events("run") if e["resumed"]], "a run that goes on")
    run.finish()


@pytest.mark.thorough
def test_nodes_whose_launcher_is_lost_train_on_for_a_while_and_save_a_checkpoint(
    run: HostsRun, machines: SshHosts, tmp_path: Path
) -> None:
    run.write("node1", "node2")
    run.start("--launcher-timeout=40", checkpoint=f"file://{tmp_path}/checkpoints")
    run.wait_for_world(2)
    run.wait_for_steps()
    networks.set_link(NUM_HOSTS + 1, "down")
    run.launcher.kill()
    known = max(event["step"] for event in run.events("step"))
    logs = [machines.temporary(node) for node in (1, 2)]

    def ends() -> list[Path]:
        return [file for log in logs for file in log.glob("*/*/status")]

    def events(kind: str) -> list[dict[str, Any]]:
        texts = [file.read_text() for log in logs for file in log.glob("*/*/run/events/*.jsonl")]
        lines = [line for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    try:
        poll_until(lambda: max(event["step"] for event in events("step")) > known + 50, guard_s=GUARD_S)
        poll_until(lambda: len(ends()) == 2, guard_s=GUARD_S)
        assert [json.loads(end.read_text()) for end in ends()] == [{"status": 75}] * 2
    finally:
        networks.set_link(NUM_HOSTS + 1, "up")
    last = max(event["step"] for event in events("step"))
    assert max(event["step"] for event in events("checkpoint")) in (last, last + 1)


@pytest.mark.thorough
def test_job_on_hosts_is_scaled_down_and_up(run: HostsRun, machines: SshHosts) -> None:
    run.write("node1", "node2 slots=2")
    run.start()
    first = run.wait_for_world(3)
    run.wait_for_steps()
    assert "3 → 2 workers" in run.command("scale", str(run.directory), "2")
    second = run.wait_for_world(2, after=first)
    run.command("scale", str(run.directory), "3")
    run.wait_for_world(3, after=second)
    run.wait_for_steps()
    refused = subprocess.run(
        (sys.executable, "-m", "ef_common.cli", "scale", str(run.directory), "9"),
        env=run.environ,
        capture_output=True,
        text=True,
    )
    assert "can have 1 to 3 workers" in refused.stderr
    check_gentle(run)
    run.command("stop", str(run.directory))
    assert run.status() == 75


@pytest.mark.thorough
def test_job_that_chooses_its_size_begins_with_the_first_host_and_lets_one_go(
    run: HostsRun, machines: SshHosts
) -> None:
    """Two workers have enough of what all of them need, so that a third is not worth it."""
    step_s = 0.8
    run.write("node1", "node2", "node3")
    run.start(
        "--autoscale=max=3,every_steps=10",
        throttled=True,
        step_sleep_s=step_s,
        shared_per_s=2 / step_s,
        shared_in=str(run.directory),
        length=100_003,
    )
    run.wait_for_world(1)
    assert not machines.processes(2)
    run.wait_for_world(2, after=run.wait_for_world(3))
    poll_until(lambda: not machines.processes(3), guard_s=GUARD_S)
    wanted = [number for number, _ in groupby(event["wanted"] for event in run.events("autoscale"))]
    assert wanted[-2:] == [3, 2]
    run.finish()


@pytest.mark.thorough
def test_script_of_the_example_finds_the_hosts_and_the_example_trains(run: HostsRun, machines: SshHosts) -> None:
    example = ROOT / "examples"
    by = f"--host-discovery-script={example}/12-ssh-hosts/discover.sh"
    run.start(by=[by], script=[str(example / "01-lightning-digits" / "train.py"), "--epochs=2"])
    assert run.status() == 0
    assert {event["world_size"] for event in run.events("view")} >= {3}
    assert "finished" in run.command("status", "--once", str(run.directory))


def test_exception_in_the_script_fails_the_job(run: HostsRun, machines: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise ValueError('this is wrong')")
    run.write("node1", "node2", "missing")
    run.start(script=[str(tmp_path / "bad.py")])
    assert run.status() == 1
    assert "ValueError: this is wrong" in run.said()
    poll_until(lambda: not any(map(machines.processes, (1, 2))), guard_s=GUARD_S)


@pytest.mark.thorough
def test_hosts_that_cannot_have_a_node_are_named_and_this_machine_needs_no_ssh(
    run: HostsRun, machines: SshHosts
) -> None:
    run.write("localhost", "node1")
    run.start("--remote-python=/missing/python")
    run.wait_for_line("host localhost: cannot be reached")
    run.wait_for_line("/missing/python")
    run.wait_for_line("host node1: cannot be reached")
    run.launcher.terminate()
    assert run.status() == 75
    run.start()
    run.wait_for_world(2)
    run.wait_for_steps()
    run.finish()
