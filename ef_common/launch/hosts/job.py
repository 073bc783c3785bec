"""`elasticflow run --hosts`: a training on machines that are reached by ssh, from a list that may change meanwhile.

Each host has one node, which is `elasticflow run` there, and as many workers as the list gives it slots. This process
hosts the coordinator, and each node keeps a standby: if this machine is lost, the nodes train on, until they notice
that their launcher is gone. :mod:`ef_common.core.hosts` says which hosts are called, :mod:`ef_common.launch.hosts.link`
calls them, and :mod:`ef_common.launch.hosts.far_side` is what answers.

The event logs of the nodes come back through the connections, so the directory of the run need not be shared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from ef_common import __version__
from ef_common.control.coordinator import Coordinator
from ef_common.core.hosts import Host, HostsVerdict
from ef_common.errors import UsageError
from ef_common.launch import environment, joining, run_directory
from ef_common.launch.certificates import trust_of
from ef_common.launch.finding import own_host
from ef_common.launch.hosts import lines
from ef_common.launch.hosts.launcher import HostsLauncher
from ef_common.launch.hosts.link import HostLink, command_for
from ef_common.launch.hosts.list import HostList, file_of_hosts, script_of_hosts
from ef_common.launch.hosts.records import Records
from ef_common.launch.nnodes import DEFAULT_NNODES, nodes_of
from ef_common.launch.rendezvous_options import (
    BACKEND,
    JOIN_TIMEOUT_S,
    config_of,
    joined_conf,
    options_of_a_local_job,
)
from ef_common.launch.signals import GENTLE, listening
from ef_common.protocol.addresses import format_address, is_loopback
from ef_common.protocol.auth import Token
from ef_common.terminal import say

MAX_NODES = 1024
LAST_CALL_S = 10.0
INTERRUPTED = 128 + signal.SIGINT
_STATUSES = {HostsVerdict.FINISHED: 0, HostsVerdict.FAILED: 1, HostsVerdict.REFUSED: 2, HostsVerdict.NOBODY: 2}
_NOT_FOR_NODES = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TERM", "SHLVL", "MAIL", "TMPDIR", "PYTHONPATH"),
    *("_", environment.RUN_DIR, environment.CRASH_RECORDS, environment.AGENT, environment.NODE, environment.ADDRESS),
)
_NOT_FOR_NODES_PREFIXES = ("SSH_", "XDG_", "DBUS_", "BASH_FUNC_", "SUDO_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "PET_")
"""Variables that are those of this machine or of its launcher."""


def _for_nodes(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    """The options of the command line that are meant for the nodes, as they are."""
    options = list(argv[: len(argv) - len(args.training_script_args)])
    while options.pop() != args.training_script:  # a `--` behind it is no argument of the script
        pass
    ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in (
        *("hosts", "host-discovery-script", "ssh-command", "remote-python", "launcher-timeout", "run-dir"),
        *("local-addr", "nnodes", "nproc-per-node", "rdzv-endpoint", "rdzv-conf", "left-status"),
    ):
        ours.add_argument(f"--{name}", f"--{name.replace('-', '_')}")
    return ours.parse_known_args(options)[1]


@dataclass(frozen=True, slots=True)
class HostsJob:
    """What all nodes of the job have in common.

    Args:
        args: The command line's.
        arguments: Options of it for the nodes.
        token: The secret of the job.
        made_token: It was made here, so that nobody knows it.
        nodes: Minimal and maximal number of nodes.
        conf: ``--rdzv-conf``.
        name: Of the job.
    """

    args: argparse.Namespace
    arguments: list[str]
    token: Token
    made_token: bool
    nodes: tuple[int, int]
    conf: str
    name: str

    @classmethod
    def of(cls, args: argparse.Namespace, argv: Sequence[str]) -> HostsJob:
        """Read the command line.

        Raises:
            UsageError: Values that do not go together.
        """
        if args.hosts is not None and args.host_discovery_script is not None:
            raise UsageError("name a file of hosts or a script that prints them. Received: both")
        if args.join or args.rdzv_backend != BACKEND:
            option = "--join" if args.join else f"--rdzv-backend={args.rdzv_backend}"
            raise UsageError(f"a job on a list of hosts starts its own nodes. Received: {option}")
        if not args.nproc_per_node.isdecimal() or not int(args.nproc_per_node):
            raise UsageError(
                "with a list of hosts, the workers of a host that names no slots are a number. "
                f"Received: --nproc-per-node={args.nproc_per_node}"
            )
        if not 0 <= args.launcher_timeout < float("inf") or 0 < args.launcher_timeout < 2 * lines.SILENT_S:
            raise UsageError(
                f"nodes can wait for their launcher for {2 * lines.SILENT_S:g} seconds or more, or for ever (0). "
                f"Received: --launcher-timeout={args.launcher_timeout:g}"
            )
        if not 0 <= args.left_status <= 255:
            raise UsageError(f"an exit status is 0 to 255. Received: --left-status={args.left_status}")
        nodes = (1, MAX_NODES) if args.nnodes == DEFAULT_NNODES else nodes_of(args.nnodes)
        given = options_of_a_local_job(args.rdzv_conf, min_nodes=nodes[0], max_nodes=nodes[1], last_call_s=LAST_CALL_S)
        kept = {k: v for k, v in config_of(args.rdzv_conf).items() if k not in ("token_file", "is_host", "join")}
        conf = ",".join(f"{key}={value}" for key, value in kept.items())
        token = given.token or Token(secrets.token_hex(16), source=environment.TOKEN)
        return cls(args, _for_nodes(args, argv), token, given.token is None, nodes, conf, secrets.token_hex(8))

    @property
    def script(self) -> list[str]:
        """The script and its arguments."""
        return [self.args.training_script, *self.args.training_script_args]

    @property
    def first_nodes(self) -> int:
        """How many nodes the job begins with, if it chooses its size; else as many as there are, some of them spares.

        Raises:
            UsageError: What it is to choose its size by is wrong.
        """
        given = {environment.AUTOSCALE: self.args.autoscale} if self.args.autoscale is not None else {}
        return self.nodes[0] if environment.check_autoscale({**os.environ, **given}) else sys.maxsize

    @property
    def patience_s(self) -> float:
        """The job is given up if no host can be had for this long."""
        return float(config_of(self.conf).get("join_timeout", JOIN_TIMEOUT_S))

    def command_for(self, host: str) -> list[str]:
        """The command that calls a host."""
        return command_for(host, shell=self.args.ssh_command, python=self.args.remote_python)

    def write(self, run_dir: Path, port: int) -> None:
        """Leave in the run directory what a node has to know that joins the job by itself."""
        args = argparse.Namespace(**vars(self.args))
        args.nnodes = f"{self.nodes[0]}:{self.nodes[1]}"
        args.rdzv_conf = self.conf
        args.rdzv_endpoint = args.rdzv_endpoint or format_address((args.local_addr or _own_address(), port))
        token = self.token.text if self.made_token and not environment.read_environment().tls else ""
        joining.write(run_dir, args, self.script, local=False, token=token)

    def order(self, host: Host, *, port: int, starts: bool, known: Mapping[str, int], life: str) -> lines.NodeOrder:
        """What a host is to do."""
        args = self.args
        is_host = "" if args.rdzv_endpoint else "is_host=0"
        options = [
            *self.arguments,
            f"--nnodes={self.nodes[0]}:{self.nodes[1]}",
            f"--nproc-per-node={host.slots}",
            *([f"--rdzv-conf={conf}"] if (conf := joined_conf(self.conf, is_host)) else []),
        ]
        return lines.NodeOrder(
            version=__version__,
            job=self.name,
            host=host.name,
            starts=starts,
            endpoint=args.rdzv_endpoint,
            port=port,
            launcher=args.local_addr or "",
            elsewhere=_own_address(),
            arguments=[*options, *self.script],
            environ={**_environ_for_nodes(os.environ), environment.TOKEN: self.token.text, environment.HOST: host.name},
            directory=os.getcwd(),
            orphan_s=args.launcher_timeout,
            life=life,
            known=dict(known),
        )


def _own_address() -> str:
    """An address of this machine, for a node that ssh does not tell one: that of the default route, or another one."""
    host = own_host()
    if host != socket.gethostname():
        return host
    interfaces = psutil.net_if_addrs().values()
    addresses = (one.address for some in interfaces for one in some if one.family == socket.AF_INET)
    return next((address for address in addresses if not is_loopback(address)), host)


def _environ_for_nodes(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name not in _NOT_FOR_NODES and not name.startswith(_NOT_FOR_NODES_PREFIXES)
    }


def main(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run the job to its end.

    Returns:
        Exit status.

    Raises:
        UsageError: The command line or the list of hosts is wrong.
    """
    job = HostsJob.of(args, argv)
    read = file_of_hosts(args.hosts) if args.hosts else script_of_hosts(args.host_discovery_script)
    source = str(args.hosts or args.host_discovery_script)
    hosts = HostList(read, slots=int(args.nproc_per_node), source=source, say=lambda text: say(text, color="yellow"))
    job.command_for("-")  # so that a malformed one is known before anything is started
    num_first = job.first_nodes
    hosts.start()
    try:
        if args.checkpoint:
            os.environ[environment.CHECKPOINT] = args.checkpoint
        first = hosts.hosts[:num_first]
        this = run_directory.this_launcher(job.script, max_workers=0, local=True)
        with (
            run_directory.taken(args.training_script, args.run_dir, launcher=this) as run_dir,
            listening() as signals,
            _coordinator(job, len(first)) as coordinator,
        ):
            port = coordinator.address[1]
            job.write(run_dir, port)
            launcher = HostsLauncher(
                *(hosts, partial(_call, job, port), run_dir, job.script),
                signals=signals,
                failure=lambda: coordinator.failure,
                patience_s=job.patience_s,
            )
            if len(first) < len(hosts.hosts):
                launcher.limit(sum(host.slots for host in first))
            verdict = launcher.run()
            why = coordinator.failure
    finally:
        hosts.stop()
    if verdict is HostsVerdict.NOBODY:
        say(f"no host could be had for {job.patience_s:g} s", color="red", event="failed")
    if verdict is HostsVerdict.FAILED:
        text = f"the job has failed: {why}" if why else "the job has failed (see above)"
        say(text, color="red", event="failed", reason=why)
    if verdict is HostsVerdict.STOPPED:
        is_killed = len([number for number in signals if number not in GENTLE]) > 1
        return INTERRUPTED if is_killed or signal.SIGINT in signals else int(args.left_status)
    return _STATUSES[verdict]


def _call(
    job: HostsJob,
    port: int,
    host: Host,
    records: Records,
    *,
    starts: bool,
    on_answer: Callable[[lines.Answer | None], object],
) -> HostLink:
    order = job.order(host, port=port, starts=starts, known=records.known, life=records.life)
    return HostLink(job.command_for(host.name), order, on_answer)


@contextlib.contextmanager
def _coordinator(job: HostsJob, num_first: int) -> Iterator[Coordinator]:
    """The coordinator of the job, unless the user has named an endpoint: then it idles."""
    given = options_of_a_local_job(
        job.args.rdzv_conf, min_nodes=job.nodes[0], max_nodes=job.nodes[1], last_call_s=LAST_CALL_S
    )
    trust = trust_of(job.token, given.tls)
    coordinator = Coordinator(
        ("", 0),
        token=trust.token or job.token,
        credentials=trust.coordinator,
        settings=replace(given.settings, start_nodes=min(num_first, job.nodes[1])),
        heartbeat_timeout_s=given.heartbeat_timeout_s,
        hang_timeout_s=given.hang_timeout_s,
    )
    coordinator.start()
    try:
        yield coordinator
    finally:
        coordinator.stop()
