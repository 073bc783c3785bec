"""Hosts that ssh reaches: nodes of a network, on each of which a real sshd runs. The last one is the launcher's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.entered import Entered
from tests.faults import networks
from tests.waiting import poll_until

SSHD = "/usr/sbin/sshd"
_GUARD_S = 60.0
_SSHD = """\
ListenAddress {address}:22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
Subsystem sftp internal-sftp
SetEnv TMPDIR={folder}/tmp-{node}
"""
_SSH = """\
Host *
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


def why_not() -> str | None:
    """Reason why this machine cannot have such hosts, or None."""
    missing = [program for program in (SSHD, "ssh", "ssh-keygen", "setpriv") if shutil.which(program) is None]
    if missing:
        return f"not installed (openssh-server, openssh-client): {', '.join(missing)}"
    return networks.why_not()


class SshHosts(Entered):
    """Hosts `node1`, `node2`, …, between entering and leaving it.

    Args:
        folder: For their files.
        number: Of hosts, which are there already as nodes, with one more for the launcher.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._launcher = number + 1
        self._nodes = range(1, number + 1)
        self._daemons: dict[int, subprocess.Popen[bytes]] = {}

    def __exit__(self, *_: object) -> None:
        for node in (*self._nodes, self._launcher):
            self.kill_all(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _start(self) -> None:
        folder = self._folder
        Path("/run/sshd").mkdir(exist_ok=True)  # where sshd confines itself to
        for name in ("key", "host_key"):
            command = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
            subprocess.run(command, check=True)
        names = {f"node{node}": [networks.address(node)] for node in self._nodes}
        host_key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"{name} {host_key}" for name in names))
        (folder / "ssh_config").write_text(_SSH.format(folder=folder))
        for node in (*self._nodes, self._launcher):
            networks.set_names(node, names)
        for node in self._nodes:
            (folder / f"tmp-{node}").mkdir()
            self.start_sshd(node)

    def start_sshd(self, node: int) -> None:
        """Start the sshd of a node, and wait until it answers."""
        config = self._folder / f"sshd-{node}"
        config.write_text(_SSHD.format(folder=self._folder, node=node, address=networks.address(node)))
        command = ("setpriv", "--pdeathsig", "KILL", *networks.inside(node), SSHD, "-D", "-e", "-f", str(config))
        with (self._folder / f"sshd-{node}.out").open("ab") as output:
            self._daemons[node] = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        poll_until(lambda: self._answers(node), guard_s=_GUARD_S)

    def _answers(self, node: int) -> bool:
        command = (*networks.inside(node), "ss", "-Hltn", "sport", "=", ":22")
        return bool(subprocess.run(command, capture_output=True).stdout)

    @property
    def ssh(self) -> str:
        """The command that reaches them."""
        return f"ssh -F {self._folder}/ssh_config"

    @property
    def inside(self) -> tuple[str, ...]:
        """Prefix of a command that is to run on the launcher's machine."""
        return networks.inside(self._launcher)

    def temporary(self, node: int) -> Path:
        """The temporary directory of a node."""
        return self._folder / f"tmp-{node}"

    def processes(self, node: int) -> list[int]:
        """Those of a node, without its sshd and what that has for each connection."""
        return [pid for pid in networks.processes(node) if not _program(pid).startswith("sshd")]

    def kill_all(self, node: int) -> None:
        """End all that runs on a node but its sshd."""
        while pids := self.processes(node):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut_connections(self, node: int) -> None:
        """End the connections of ssh to a node, and nothing else there."""
        for pid in networks.processes(node):
            if _program(pid).startswith("sshd") and pid != self._daemon_of(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _daemon_of(self, node: int) -> int:
        return self._daemons[node].pid  # setpriv and `ip netns exec` become the daemon


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextlib.contextmanager
def ssh_hosts(number: int) -> Iterator[SshHosts]:
    """Make so many hosts, and take them away again."""
    with (
        tempfile.TemporaryDirectory(prefix="ef-ssh-", ignore_cleanup_errors=True) as folder,
        networks.nodes(number + 1),
        SshHosts(Path(folder), number) as running,
    ):
        yield running
