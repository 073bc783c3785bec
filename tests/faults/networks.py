"""Network namespaces as nodes: each with its own interfaces, host name file and address, on one bridge."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PREFIX = "eftest"
NETWORK = "10.207.42"


def why_not() -> str | None:
    """Reason why this machine cannot make namespaces, or None."""
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "making network namespaces needs the package iproute2"
    return None


def address(node: int) -> str:
    return f"{NETWORK}.{10 + node}"


def inside(node: int) -> tuple[str, ...]:
    """Prefix of a command that is to run on a node."""
    return ("ip", "netns", "exec", f"{PREFIX}{node}")


@contextlib.contextmanager
def nodes(number: int) -> Iterator[None]:
    """Make so many nodes, 1 … number, and take them away again."""
    _remove(number)  # leftovers of a run that was killed
    try:
        _run("ip", "link", "add", PREFIX, "type", "bridge")
        _run("ip", "link", "set", PREFIX, "up")
        for node in range(1, number + 1):
            _add(node)
        yield
    finally:
        _remove(number)


def _add(node: int) -> None:
    name, outer = f"{PREFIX}{node}", f"{PREFIX}v{node}"
    # `ip netns exec` puts these over /etc: without DNS, a look-up would wait for a server that never answers.
    files = Path("/etc/netns") / name
    files.mkdir(parents=True, exist_ok=True)
    (files / "hosts").write_text("127.0.0.1 localhost\n")
    switch = Path("/etc/nsswitch.conf").read_text() if Path("/etc/nsswitch.conf").exists() else ""
    lines = [line for line in switch.splitlines() if not line.startswith("hosts:")]
    (files / "nsswitch.conf").write_text("\n".join([*lines, "hosts: files"]) + "\n")
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", outer, "master", PREFIX, "up")
    _run("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", device, "up")


def _remove(number: int) -> None:
    for node in range(1, number + 1):
        _run("ip", "netns", "del", f"{PREFIX}{node}", check=False)
        _run("ip", "link", "del", f"{PREFIX}v{node}", check=False)
        shutil.rmtree(Path("/etc/netns") / f"{PREFIX}{node}", ignore_errors=True)
    _run("ip", "link", "del", PREFIX, check=False)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=not check)
