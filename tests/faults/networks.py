"""Network namespaces as nodes: each with its own interface, host name file and address, on one switch.

The switch (:mod:`tests.faults.switch`) can lose, delay and slow down what goes from one node to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tests.faults.switch import TUN, Switch, in_a_process

PREFIX = "eftest"
NETWORK = "10.207.42"
_FILES = Path("/etc/netns")  # `ip netns exec` puts these over /etc
_SPACES = Path("/var/run/netns")
_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Reason why this machine cannot make namespaces, or None."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "making network namespaces needs the package iproute2"
    return None if TUN.exists() else f"the switch between network namespaces needs {TUN}"


def address(node: int) -> str:
    return f"{NETWORK}.{10 + node}"


def inside(node: int) -> tuple[str, ...]:
    """Prefix of a command that is to run on a node."""
    return ("ip", "netns", "exec", _name(os.getpid(), node))


def inside_as(node: int, host: str) -> tuple[str, ...]:
    """The same under a host name of its own. Other than `ip netns exec`, it leaves cgroups to be seen."""
    name = _name(os.getpid(), node)
    files = ("hosts", "nsswitch.conf", *(["resolv.conf"] if (_FILES / name / "resolv.conf").exists() else []))
    mounts = (f"mount --bind {_FILES}/{name}/{file} /etc/{file}" for file in files)
    as_host = " && ".join([f"hostname {host}", *mounts, 'exec "$@"'])
    return ("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount", "sh", "-c", as_host, "sh")


def processes(node: int) -> list[int]:
    """Those of a node."""
    done = subprocess.run(["ip", "netns", "pids", _name(os.getpid(), node)], capture_output=True, text=True)
    return [int(pid) for pid in done.stdout.split()]


def set_link(node: int, state: str) -> None:
    """Take a node's interface "down", as if its cable was pulled out, or "up" again."""
    _run("ip", "-n", _name(os.getpid(), node), "link", "set", "eth0", state)


def set_names(node: int, names: Mapping[str, Sequence[str]]) -> None:
    """What these names stand for on a node, from now on."""
    lines = [f"{one} {name}" for name, addresses in names.items() for one in addresses]
    _write_hosts(_name(os.getpid(), node), lines)


def names(node: int) -> str:
    """The names that a node knows by itself."""
    return (_FILES / _name(os.getpid(), node) / "hosts").read_text()


def unset_name_server(node: int) -> None:
    """A node asks nobody any more for names which it does not know."""
    files = _FILES / _name(os.getpid(), node)
    (files / "resolv.conf").unlink()
    _write_name_services(files, "files")


def set_name_server(node: int, server: int) -> None:
    """A node asks the DNS server on another one for names which it does not know, from now on."""
    files = _FILES / _name(os.getpid(), node)
    (files / "resolv.conf").write_text(f"nameserver {address(server)}\noptions timeout:1 attempts:2\n")
    _write_name_services(files, "files dns")


@contextlib.contextmanager
def served(node: int, target: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """A server of this machine is at an address of a node, too, which is given."""
    with ThreadPoolExecutor(1) as pool:  # a thread that enters the node stays there
        listener = pool.submit(_listen_inside, node).result()
    started: Future[Callable[[], object]] = Future()
    thread = threading.Thread(target=_run_forwarder, args=(listener, target, started), name="forwarder")
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        started.result()()
        thread.join()


def _listen_inside(node: int) -> socket.socket:
    with (_SPACES / _name(os.getpid(), node)).open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "a thread cannot enter a network namespace")
    return socket.create_server((address(node), 0))


def _run_forwarder(listener: socket.socket, target: tuple[str, int], started: Future[Callable[[], object]]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_forward(listener, target, started))


async def _forward(listener: socket.socket, target: tuple[str, int], started: Future[Callable[[], object]]) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(*target)
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    server = await asyncio.start_server(connect, sock=listener)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
    try:
        await asyncio.Event().wait()
    finally:
        server.close()


@contextlib.contextmanager
def nodes(number: int) -> Iterator[Switch]:
    """Make so many nodes, 1 … number, and take them away again."""
    _remove_leftovers()
    with in_a_process() as switch:
        try:
            for node in range(1, number + 1):
                _add(node, switch)
            switch.start()
            yield switch
        finally:
            switch.stop()
            for node in range(1, number + 1):
                _remove(_name(os.getpid(), node))


def _name(process: int, node: int) -> str:
    return f"{PREFIX}-{process}-{node}"


def _add(node: int, switch: Switch) -> None:
    name = _name(os.getpid(), node)
    # Without DNS, a look-up would wait for a server that never answers.
    files = _FILES / name
    files.mkdir(parents=True, exist_ok=True)
    _write_hosts(name, [])
    _write_name_services(files, "files")
    _run("ip", "netns", "add", name)
    switch.plug(node, name)
    _run("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")


def _write_hosts(name: str, lines: Sequence[str]) -> None:
    (_FILES / name / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))


def _write_name_services(files: Path, hosts: str) -> None:
    switch_file = Path("/etc/nsswitch.conf")
    lines = switch_file.read_text().splitlines() if switch_file.exists() else []
    kept = [line for line in lines if not line.startswith("hosts:")]
    (files / "nsswitch.conf").write_text("\n".join([*kept, f"hosts: {hosts}"]) + "\n")


def _remove(name: str) -> None:
    _run("ip", "netns", "del", name, check=False)
    shutil.rmtree(_FILES / name, ignore_errors=True)


def _remove_leftovers() -> None:
    """Of runs that were killed; others may be under way at the same time."""
    for path in _FILES.glob(f"{PREFIX}-*-*"):
        process = path.name.split("-")[1]
        if not Path("/proc", process).exists() or process == str(os.getpid()):
            _remove(path.name)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)
