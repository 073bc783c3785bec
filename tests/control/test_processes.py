"""What only separate processes can show: forked children, and a coordinator without files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from ef_common.errors import CoordinatorLost

pytestmark = pytest.mark.processes


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Run a script in a process group of its own, which is killed at the end."""
    with contextlib.ExitStack() as stack:

        def kill(process: subprocess.Popen[str]) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

        def make(script: str, *args: object) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            stack.callback(kill, process)
            return process

        yield make


def kill_parent_only(process: subprocess.Popen[str]) -> int:
    """SIGKILL the process but not its forked child; returns the pid of the child, which still lives."""
    assert process.stdout is not None
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)
    os.kill(child, 0)
    return child


def test_killed_worker_with_a_living_forked_child_is_noticed_by_the_end_of_its_connection(serve, join, spawn):
    coordinator = serve(2, heartbeat_timeout_s=600)  # so it is not the silence
    process = spawn(
        """
        import os, sys, time
        from ef_common.control.client import CoordinatorClient
        from ef_common.core.view import Member
        client = CoordinatorClient(("127.0.0.1", int(sys.argv[1])), Member("parent", "n", ""), None)
        client.start(lambda generation: None)
        child = os.fork()
        if not child:
            client.send("bye")  # the connection is the parent's: this must do nothing
            client.stop()
            time.sleep(600)
        print(child, flush=True)
        time.sleep(600)
        """,
        coordinator.address[1],
    )
    survivor = join(coordinator, "survivor").started()
    child = kill_parent_only(process)
    view = survivor.client.next_view(1)
    assert view.ids == ("survivor",)
    assert view.reason == "parent gone (its connection ended)"
    os.kill(child, 0)


def test_killed_host_with_a_living_forked_child_is_noticed_and_its_port_is_free(join, spawn):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    process = spawn(
        """
        import os, sys, time
        from ef_common.control.coordinator import Coordinator
        coordinator = Coordinator(("127.0.0.1", int(sys.argv[1])), heartbeat_timeout_s=600)
        coordinator.start()
        while not coordinator._population:
            time.sleep(0.01)
        time.sleep(0.1)
        child = os.fork()
        if not child:
            time.sleep(600)
        print(child, flush=True)
        time.sleep(600)
        """,
        port,
    )
    worker = join(("127.0.0.1", port), "w").started()
    child = kill_parent_only(process)
    with pytest.raises(CoordinatorLost):
        worker.client.next_view(1)
    socket.create_server(("127.0.0.1", port)).close()
    os.kill(child, 0)


def test_coordinator_without_files_recovers_and_keeps_its_workers(join, spawn):
    process = spawn(
        """
        import resource, time
        from ef_common.control.coordinator import Coordinator
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        coordinator = Coordinator(("127.0.0.1", 0), heartbeat_timeout_s=600)
        coordinator.start()
        print(coordinator.address[1], flush=True)
        time.sleep(600)
        """
    )
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))
    worker = join(address, "first").started()
    crowd = [socket.create_connection(address) for _ in range(200)]
    try:
        assert join(address, "second").started().warm_up is True
        assert worker.views_noticed == [1]
    finally:
        for sock in crowd:
            sock.close()


def test_stopped_worker_is_evicted_and_learns_it_when_it_wakes(serve, join, spawn):
    coordinator = serve(2, heartbeat_timeout_s=0.5)
    process = spawn(
        """
        import sys, time
        from ef_common.control.client import CoordinatorClient
        from ef_common.core.view import Member
        from ef_common.errors import Evicted
        client = CoordinatorClient(("127.0.0.1", int(sys.argv[1])), Member("sleeper", "n", ""), None)
        client.start(lambda generation: None)
        print("in", flush=True)
        try:
            client.next_view(1)
        except Evicted as error:
            print(error, flush=True)
        """,
        coordinator.address[1],
    )
    survivor = join(coordinator, "survivor").started()
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    os.kill(process.pid, signal.SIGSTOP)
    assert survivor.client.next_view(1).ids == ("survivor",)
    time.sleep(1.5)  # its connection is closed, and aborted
    os.kill(process.pid, signal.SIGCONT)
    assert "silent for" in process.stdout.readline()
