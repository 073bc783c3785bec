"""A real job: where its token is, and a peer that knows it, and lies to all who listen."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ef_common.control.leader_request import Conversation
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError
from ef_common.launch import environment
from ef_common.launch.certificates import trust_of
from ef_common.protocol.addresses import LOOPBACK, Address, parse_address
from ef_common.protocol.auth import Token, new_nonce
from ef_common.testing.ports import free_ports
from ef_common.tls import Tls
from tests.control.conftest import Peer
from tests.control.lies import Call, calls
from tests.faults.hosts import ENOUGH
from tests.launch.test_certificates import write
from tests.launch.test_run import Launched, script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

NUM_CALLS = 150


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Launched]]:
    """Start a job that logs all it can, and whose temporary files lie in `tmp_path`, too."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("import logging\nlogging.basicConfig(level=logging.DEBUG)\n")
    monkeypatch.syspath_prepend(tmp_path / "path")
    run = Launched(tmp_path / "run")

    def start(*arguments: str, **environ: str) -> Launched:
        run.start(*arguments, TMPDIR=str(tmp_path / "tmp"), **environ)
        return run

    yield start
    run.end()


def files_with(secret: str, directory: Path) -> set[Path]:
    return {path for path in directory.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()}


def command_lines() -> list[str]:
    """Of all processes: everybody on a machine may read them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found.append("\0".join(process.cmdline()))
    return found


def environ_of(pid: int) -> dict[str, str]:
    """Only its user may read it."""
    path = Path(f"/proc/{pid}/environ")
    assert path.stat().st_mode & 0o077 == 0
    return dict(one.split("=", 1) for one in path.read_text().split("\0") if "=" in one)


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["environment", "file"])
def test_token_of_a_job_is_in_no_log_event_file_or_command_line(
    launch: Callable[..., Launched], tmp_path: Path, how: str
) -> None:
    secret = secrets.token_hex(20)
    arguments = ["--nproc-per-node=2", f"--checkpoint={tmp_path / 'store'}", *script(checkpoint_steps=5)]
    if how == "environment":
        run = launch(*arguments, ELASTICFLOW_TOKEN=secret)
    else:
        (tmp_path / "token").write_text(secret)
        (port,) = free_ports(1)
        conf = f"--rdzv-conf=is_host=1,token_file={tmp_path / 'token'}"
        run = launch(f"--rdzv-endpoint=127.0.0.1:{port}", conf, "--nnodes=1", *arguments)
    run.wait_for_world(2)
    run.wait_for_step(12)
    stranger, (worker, *_) = new_nonce(), run.workers()
    variables = environ_of(worker)
    assert variables[environment.TOKEN] == secret
    coordinator = parse_address(variables[environment.COORDINATOR], what="its coordinator")
    with contextlib.closing(Peer(coordinator)) as peer:
        peer.introduce("stranger", Token(stranger))  # a refusal is logged, too
    lines = command_lines()
    assert any(str(run.directory) in line for line in lines)
    assert not [line for line in lines if secret in line]
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    assert "DEBUG" in run.output.read_text()
    assert files_with("world_size", tmp_path)
    assert files_with(secret, tmp_path) == ({tmp_path / "token"} if how == "file" else set())


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["derived", "files"])
def test_workers_of_a_job_under_tls_have_keys_of_their_own_and_no_token(
    launch: Callable[..., Launched], tmp_path: Path, how: str
) -> None:
    """One is killed, and its replacement gets the state over the network."""
    secret = secrets.token_hex(20)
    tls = "1"
    if how == "files":
        (tmp_path / "keys").mkdir()
        tls = write(trust_of(Token("an authority of the user's"), "1"), tmp_path / "keys")
    run = launch(f"--tls={tls}", "--nproc-per-node=2", *script(), ELASTICFLOW_TOKEN=secret)
    generation = run.wait_for_world(2)
    run.wait_for_step(3)
    os.kill(run.workers()[-1], signal.SIGKILL)
    run.wait_for_world(2, after=generation)
    variables = environ_of(run.workers()[-1])
    assert variables[environment.TOKEN] == Token(secret).for_workers().secret
    assert secret not in str(variables)
    key = json.loads(variables[environment.CREDENTIALS])["key"].splitlines()[1]
    assert not [line for line in command_lines() if secret in line or key in line]
    with contextlib.closing(Peer(parse_address(variables[environment.COORDINATOR], what="its coordinator"))) as peer:
        assert peer.hear() is None  # nothing is said to a stranger
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    assert files_with(secret, tmp_path) == set()
    assert files_with(key, tmp_path) == ({tmp_path / "keys" / "worker.key"} if how == "files" else set())
    run.audit()


def greet(address: Address, variables: dict[str, str], name: str) -> Conversation:
    """Be a worker of this name, that knows what the one with these variables does."""
    worker = environment.read_environment(variables)
    tls = None if worker.credentials is None else Tls(worker.credentials)
    return Conversation(address, Member(name, name, ""), worker.token, tls=tls)


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tls", ["0", "1"])
def test_job_trains_on_while_its_nodes_replace_the_secret_in_three_rounds(tmp_path: Path, tls: str) -> None:
    """First the nodes know the new one, then they use it, then the old one is refused."""
    with contextlib.ExitStack() as stack:
        starts = itertools.count()

        def start(number: int, token: str) -> Launched:
            (tmp_path / f"token-{number}").write_text(token)
            node = Launched(tmp_path / "run")
            stack.callback(node.end)
            conf = f"--rdzv-conf=token_file={tmp_path}/token-{number},tls={tls},last_call_timeout=60"
            door = f"--rdzv-endpoint=file://{tmp_path}/at"
            node.start(door, conf, "--nnodes=1:2", *script(), name=f"launcher-{next(starts)}")
            return node

        nodes = [start(number, "old") for number in range(2)]
        generation = nodes[0].wait_for_world(2)
        variables = [environ_of(worker) for worker in nodes[0].workers()]
        for token in ("old\nnew", "new\nold", "new"):
            for number, node in enumerate(nodes):
                node.wait_for_step(max((event["step"] for event in node.events("step")), default=0) + 3)
                node.process.send_signal(signal.SIGTERM)
                assert node.wait() == os.EX_TEMPFAIL
                nodes[number] = start(number, token)
                generation = nodes[number].wait_for_world(2, after=generation)
                variables.append(environ_of(nodes[number].workers()[-1]))
        run, newest = nodes[0], variables[-1]
        where = parse_address(newest[environment.COORDINATOR], what="its coordinator")
        greet(where, newest, "knows the new one").close()
        with pytest.raises((AuthenticationError, OSError)):
            greet(where, variables[0], "knows the old one").close()
        (run.directory / ENOUGH).touch()
        assert [node.wait() for node in nodes] == [0, 0]
        known = [one[environment.TOKEN] for one in variables]
        old, new = known[0], known[-1]
        assert old != new
        assert known == [old] * 4 + [new] * 4  # agents know both meanwhile, and workers what theirs uses
        assert len(run.events("start")) == 8
        assert run.events("rollback") == []
        run.audit()


def lie(addresses: list[Address], token: Token, made_up: list[tuple[int, Call]]) -> None:
    """Call them; all connections stay open until everything is said."""
    peers = []
    for which, (name, returning, messages) in made_up:
        with contextlib.suppress(OSError):  # it was refused
            peers.append(Peer(addresses[which % len(addresses)]))
            peers[-1].introduce(name, token, returning=returning)
            for message in messages:
                peers[-1].say(message)
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_WR)
            peer.hear_all()
        peer.close()


@pytest.mark.thorough
def test_job_trains_on_whatever_a_peer_with_the_token_says_to_its_coordinator_and_standbys(
    launch: Callable[..., Launched],
) -> None:
    token = Token(secrets.token_hex(20))
    run = launch("--nproc-per-node=2", *script(), ELASTICFLOW_TOKEN=token.secret)
    run.wait_for_world(2)
    members = run.events("view", world_size=2)[-1]["members"]
    workers = run.workers()
    environs = [environ_of(worker) for worker in workers]
    addresses = [parse_address(environs[0][environment.COORDINATOR], what="its coordinator")]
    addresses += [(LOOPBACK, int(variables[environment.STANDBY])) for variables in environs]

    @settings(max_examples=NUM_CALLS, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(calls([*members, "liar", "ghost"]), calls([*members, "liar"]), st.integers(0, 2), st.integers(0, 2))
    def attack(first: Call, second: Call, one: int, other: int) -> None:
        lie(addresses, token, [(one, first), (other, second)])

    attack()
    step = max(event["step"] for event in run.events("step"))
    run.wait_for_step(step + 20)
    assert run.workers() == workers
    run.wait_until(lambda _: run.events("view")[-1]["members"] == members, "a view of the honest")
    (run.directory / ENOUGH).touch()
    assert run.wait() == 0
    assert len(run.events("start")) == 2
    run.audit()
