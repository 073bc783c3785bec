"""The rendezvous under real torchrun, with a worker that only follows the membership."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from ef_common.control.client import CoordinatorClient
from ef_common.core.doors import DoorAnswer
from ef_common.core.view import Member
from ef_common.errors import CoordinatorLost, JobFailed, UsageError
from ef_common.launch import door_search
from ef_common.launch.environment import read_environment
from ef_common.launch.registry import Registry
from ef_common.launch.rendezvous_options import RendezvousOptions
from ef_common.launch.torchrun_handler import ElasticFlowRendezvous, create_handler, get_handler
from ef_common.protocol import wire
from ef_common.protocol.addresses import parse_address
from ef_common.protocol.auth import Token
from ef_common.session.crash_record import CrashRecord
from ef_common.storage.claims import place_for
from ef_common.testing.ports import free_ports
from ef_common.tls import Tls
from tests.waiting import poll_until


def parameters(endpoint: str = "127.0.0.1:29400", *, run_id: str = "run-1", **config: object) -> RendezvousParameters:
    return RendezvousParameters("elasticflow", endpoint, run_id, 2, 5, **config)


@pytest.fixture(autouse=True)
def restore_environment(monkeypatch):
    for name in ("COORDINATOR", "TOKEN", "NODE", "ADDRESS", "STANDBY", "CRASH_RECORDS", "CREDENTIALS"):
        monkeypatch.setenv(f"ELASTICFLOW_{name}", "x")  # so that it is put back
        monkeypatch.delenv(f"ELASTICFLOW_{name}")


# ---------------------------------------------------------------- options


def test_options_defaults():
    options = RendezvousOptions.parse(parameters("example.org", timeout="900", unknown="1"))
    assert options.endpoint == ("example.org", 29400)
    assert (options.token, options.is_host, options.heartbeat_timeout_s) == (None, None, 5.0)
    assert (options.settings.min_nodes, options.settings.max_nodes, options.settings.last_call_s) == (
        2,
        5,
        1.0,
    )


def test_options_are_read(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hunter2\n")
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "another")
    options = RendezvousOptions.parse(
        parameters(token_file=str(tmp_path / "token"), heartbeat_timeout="0.5", last_call_timeout="7", is_host="1")
    )
    assert options.token.secret == "hunter2"
    assert (options.heartbeat_timeout_s, options.settings.last_call_s, options.is_host) == (0.5, 7.0, True)
    assert "hunter2" not in repr(options)


@pytest.mark.parametrize(
    ("variable", "given", "expected"), [(None, {}, None), ("7", {}, 7.0), ("7", {"hang_timeout": "0"}, 0.0)]
)
def test_options_limit_of_hangs_is_given_or_in_the_environment(monkeypatch, variable, given, expected):
    if variable is not None:
        monkeypatch.setenv("ELASTICFLOW_HANG_TIMEOUT", variable)
    assert RendezvousOptions.parse(parameters(**given)).hang_timeout_s == expected


@pytest.mark.parametrize(
    ("variable", "given", "expected"), [(None, {}, 5.0), ("7", {}, 7.0), ("7", {"heartbeat_timeout": "0.5"}, 0.5)]
)
def test_options_limit_of_silence_is_given_or_in_the_environment(monkeypatch, variable, given, expected):
    if variable is not None:
        monkeypatch.setenv("ELASTICFLOW_HEARTBEAT_TIMEOUT", variable)
    assert RendezvousOptions.parse(parameters(**given)).heartbeat_timeout_s == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heartbeat_timeout", "0"),
        ("heartbeat_timeout", "nan"),
        ("heartbeat_timeout", "soon"),
        ("last_call_timeout", "-1"),
        ("hang_timeout", "-1"),
        ("is_group", "maybe"),
        ("is_host", "maybe"),
        ("token_file", "/does/not/exist"),
    ],
)
def test_options_malformed_one_is_named(key, value):
    with pytest.raises(UsageError, match=key):
        RendezvousOptions.parse(parameters(**{key: value}))


def test_options_malformed_endpoint_is_named():
    with pytest.raises(UsageError, match="host:port"):
        RendezvousOptions.parse(parameters("host:port"))


@pytest.mark.parametrize("url", ["file://shared/run", "memory://run", "local://run"])
def test_options_place_that_others_do_not_share_is_refused(url):
    with pytest.raises(UsageError, match="file:///FOLDER"):
        RendezvousOptions.parse(parameters(url))


def test_options_registry_is_no_host():
    options = RendezvousOptions.parse(parameters("s3://bucket/run"))
    assert options.registry == "s3://bucket/run"
    assert RendezvousOptions.parse(parameters()).registry == ""
    with pytest.raises(UsageError, match="is_host is for an endpoint HOST:PORT"):
        RendezvousOptions.parse(parameters("etcd://a,b/run", is_host="1"))


def test_options_list_of_endpoints():
    options = RendezvousOptions.parse(parameters("h1:1,h2, [::1]:3"))
    assert options.doors == (("h1", 1), ("h2", 29400), ("::1", 3))
    assert (options.endpoint, options.registry) == (("h1", 1), "")
    assert RendezvousOptions.parse(parameters("h1:1")).doors == ()
    assert RendezvousOptions.parse(parameters("etcd://a,b/run")).registry == "etcd://a,b/run"


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [
        ("h1:1,", "is missing"),
        (",h1:1", "is missing"),
        ("h1:1,,h2:1", "is missing"),
        ("h1:1,h2:1,h1:1", "stands twice"),
        ("h1,h1:29400", "stands twice"),
        ("h1:1,file:///shared", "has no URLs"),
        ("h1:1,h2:0", "not 0"),
        ("h1:1,h2:x", "HOST:PORT"),
    ],
)
def test_options_malformed_list_is_one_error(endpoint, what):
    with pytest.raises(UsageError, match=what):
        RendezvousOptions.parse(parameters(endpoint))


def test_options_of_a_list_name_no_host():
    with pytest.raises(UsageError, match="is_host is for an endpoint HOST:PORT"):
        RendezvousOptions.parse(parameters("h1:1,h2:1", is_host="1"))


def test_options_name_of_a_group_is_a_host_that_nobody_has_alone():
    assert RendezvousOptions.parse(parameters("workers:1", is_group="1")).is_group
    assert not RendezvousOptions.parse(parameters("workers:1")).is_group
    for endpoint, more in (("h1:1,h2:1", {}), ("s3://bucket/run", {}), ("h1:1", {"is_host": "1"})):
        with pytest.raises(UsageError, match="is_group is for an endpoint HOST:PORT"):
            RendezvousOptions.parse(parameters(endpoint, is_group="1", **more))


# ---------------------------------------------------------------- one agent, in this process


def test_handler_keeps_torchrun_out_of_membership():
    handler = get_handler()(parameters("127.0.0.1:0"))
    try:
        info = handler.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert handler.num_nodes_waiting() == 0
        assert not handler.use_agent_store
        assert (handler.get_backend(), handler.get_run_id()) == ("elasticflow", "run-1")
        assert not handler.is_closed()
        handler.set_closed()
        assert handler.is_closed()
    finally:
        assert handler.shutdown()


def test_handlers_that_meet_at_a_registry_make_one_job_whose_token_no_other_start_has(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "hunter2")

    def told(place):
        handler = create_handler(parameters(f"file://{tmp_path}/{place}"))
        handlers.append(handler)
        return os.environ["ELASTICFLOW_COORDINATOR"], os.environ["ELASTICFLOW_TOKEN"]

    handlers = []
    try:
        founder = told("a")
        monkeypatch.setenv("ELASTICFLOW_TOKEN", "hunter2")
        assert told("a") == founder
        monkeypatch.setenv("ELASTICFLOW_TOKEN", "hunter2")
        other = told("b")
        assert len({founder[1], other[1], "hunter2"}) == 3
        assert founder[0] != other[0]
    finally:
        for handler in reversed(handlers):
            assert handler.shutdown()
    assert os.environ["ELASTICFLOW_TOKEN"] == "hunter2"


def test_handlers_at_a_list_make_one_job_and_a_latecomer_hears_of_its_end(caplog):
    ports = free_ports(2)
    endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
    handlers = []
    agents = [threading.Thread(target=lambda: handlers.append(create_handler(parameters(endpoint)))) for _ in ports]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    try:
        assert os.environ["ELASTICFLOW_COORDINATOR"] == f"127.0.0.1:{ports[0]}"
        handlers.append(create_handler(parameters(endpoint)))  # no door is left
        assert os.environ["ELASTICFLOW_COORDINATOR"] == f"127.0.0.1:{ports[0]}"
        assert int(os.environ["ELASTICFLOW_STANDBY"]) not in ports
        with training_that_is_over(("127.0.0.1", ports[0])):
            assert_over(caplog, endpoint)
    finally:
        for handler in reversed(handlers):
            assert handler.shutdown()


def test_handler_waits_for_the_name_of_its_group_to_have_an_address(monkeypatch):
    (port,) = free_ports(1)
    answers = [[], [], ["127.0.0.1"]]
    monkeypatch.setattr(door_search, "addresses_of", lambda host: answers.pop(0) if len(answers) > 1 else answers[0])
    monkeypatch.setattr(door_search.Resolved, "settle_s", 0.0)
    handler = create_handler(parameters(f"workers.test:{port}", is_group="1"))
    try:
        assert os.environ["ELASTICFLOW_COORDINATOR"] == f"127.0.0.1:{port}"
        assert answers == [["127.0.0.1"]]
    finally:
        assert handler.shutdown()


def test_handler_at_a_registry_hears_of_the_end_while_workers_are_still_there(tmp_path, caplog):
    endpoint = f"file://{tmp_path}"
    handler = create_handler(parameters(endpoint))
    address = parse_address(os.environ["ELASTICFLOW_COORDINATOR"], what="the coordinator")
    with training_that_is_over(address):
        assert_over(caplog, endpoint)
    assert handler.shutdown()


@contextmanager
def training_that_is_over(coordinator: tuple[str, int]) -> Iterator[None]:
    """Two workers have trained, and one has said that this is all; none has gone."""
    workers = [CoordinatorClient(coordinator, Member(f"w{number}", f"n{number}", ""), None) for number in range(2)]
    threads = [threading.Thread(target=worker.start, args=(lambda generation: None,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    workers[0].send("close")
    try:
        yield
    finally:
        for worker in workers:
            worker.stop()


def assert_over(caplog, endpoint: str) -> None:
    """One that comes now hears that the training is over, and ends with status 0."""
    with pytest.raises(SystemExit) as ended:
        create_handler(parameters(endpoint))
    assert ended.value.code == 0
    assert caplog.text.count("the training is over") == 1


def test_handler_at_a_name_for_this_machine_founds_the_job(monkeypatch):
    (port,) = free_ports(1)
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kw: real("127.0.0.1" if host == "a.test" else host, *args, **kw)
    )
    handler = create_handler(parameters(f"a.test:{port}"))
    try:
        assert os.environ["ELASTICFLOW_COORDINATOR"] == f"127.0.0.1:{port}"
        assert handler._hosting.coordinator.leads
    finally:
        assert handler.shutdown()


def test_handler_tells_the_workers_where_the_coordinator_is(tmp_path):
    (tmp_path / "token").write_text("hunter2\n")
    handler = create_handler(parameters("localhost:0", token_file=str(tmp_path / "token")))
    try:
        host, port = os.environ["ELASTICFLOW_COORDINATOR"].split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert os.environ["ELASTICFLOW_TOKEN"] == "hunter2"
        assert os.environ["ELASTICFLOW_ADDRESS"] == ""
        node = os.environ["ELASTICFLOW_NODE"]
        guest = create_handler(parameters(f"localhost:{port}"))  # the port is taken: it is a client
        assert os.environ["ELASTICFLOW_COORDINATOR"] == f"localhost:{port}"
        assert os.environ["ELASTICFLOW_NODE"] != node
        assert guest.shutdown()
    finally:
        assert handler.shutdown()


def test_handler_under_tls_gives_the_workers_credentials_and_puts_the_token_back(tmp_path, monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "new\nold")
    monkeypatch.setenv("ELASTICFLOW_TLS", "1")
    handler = create_handler(parameters("localhost:0"))
    try:
        given = read_environment()
        assert given.token.text == Token("new").for_workers().secret
        worker = CoordinatorClient(given.coordinator, given.member(), given.token, tls=Tls(given.credentials))

        def start() -> None:
            with suppress(CoordinatorLost):  # it is stopped before there is a view
                worker.start(lambda generation: None)

        starting = threading.Thread(target=start)
        starting.start()
        poll_until(lambda: handler._hosting.coordinator.has_begun)
        assert handler._hosting.ask_about("nobody") is not None
        worker.stop()
        starting.join()
    finally:
        assert handler.shutdown()
    assert os.environ["ELASTICFLOW_TOKEN"] == "new\nold"


def test_options_tls_is_given_or_in_the_environment(monkeypatch):
    assert RendezvousOptions.parse(parameters()).tls == ""
    monkeypatch.setenv("ELASTICFLOW_TLS", "/keys")
    assert RendezvousOptions.parse(parameters()).tls == "/keys"
    assert RendezvousOptions.parse(parameters(tls="0")).tls == "0"


@pytest.fixture
def _coordinator_elsewhere(monkeypatch):
    """There is one at each endpoint that is not on this machine."""
    monkeypatch.setattr("ef_common.launch.hosting.LeaderRequests.seek", lambda *args, **kwargs: DoorAnswer(leads=True))


@pytest.mark.usefixtures("_coordinator_elsewhere")
def test_handler_elsewhere_leaves_hosting_to_the_endpoint():
    handler = create_handler(parameters("192.0.2.1:29400"))
    assert os.environ["ELASTICFLOW_COORDINATOR"] == "192.0.2.1:29400"
    assert os.environ["ELASTICFLOW_ADDRESS"] == ""
    assert handler.shutdown()


@pytest.mark.usefixtures("_coordinator_elsewhere")
def test_handler_elsewhere_tells_its_workers_where_others_reach_them(monkeypatch):
    """One that returns to the standby of its own node would else be known as 127.0.0.1."""
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "hunter2")
    monkeypatch.setattr("ef_common.launch.hosting.host_facing", {("192.0.2.1", 29400): "198.51.100.7"}.get)
    handler = create_handler(parameters("192.0.2.1:29400"))
    assert os.environ["ELASTICFLOW_ADDRESS"] == "198.51.100.7"
    assert handler.shutdown()


def test_handler_host_of_a_public_endpoint_is_reachable_under_it(monkeypatch):
    monkeypatch.setenv("ELASTICFLOW_TOKEN", "hunter2")
    handler = create_handler(parameters("192.0.2.1:0", is_host="1"))
    try:
        assert os.environ["ELASTICFLOW_ADDRESS"] == "192.0.2.1"
        assert os.environ["ELASTICFLOW_COORDINATOR"].startswith("192.0.2.1:")
    finally:
        assert handler.shutdown()


def test_handler_host_without_token_gives_its_workers_the_loopback_address():
    handler = create_handler(parameters("192.0.2.1:0", is_host="1"))
    try:
        assert os.environ["ELASTICFLOW_COORDINATOR"].startswith("127.0.0.1:")
    finally:
        assert handler.shutdown()


@pytest.mark.usefixtures("_coordinator_elsewhere")
def test_handler_local_addr_wins():
    options = RendezvousOptions.parse(parameters("192.0.2.1:29400"))
    handler = ElasticFlowRendezvous(options, run_id="r", local_addr="198.51.100.7")
    handler.start()
    assert os.environ["ELASTICFLOW_ADDRESS"] == "198.51.100.7"


def test_handler_that_must_host_and_cannot_says_so_and_ends(capfd):
    handler = create_handler(parameters("127.0.0.1:0"))
    try:
        port = os.environ["ELASTICFLOW_COORDINATOR"].split(":")[1]
        assert_refused(capfd, "cannot host", f"127.0.0.1:{port}", is_host="true")
    finally:
        assert handler.shutdown()


def assert_refused(capfd, text, endpoint, **config):
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        create_handler(parameters(endpoint, **config))
    assert ended.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert text in line


def test_handler_with_another_token_than_the_coordinator_says_so_and_ends(tmp_path, capfd):
    tokens = [tmp_path / name for name in ("ours", "theirs")]
    for path in tokens:
        path.write_text(f"{path.name}\n")
    handler = create_handler(parameters("localhost:0", token_file=str(tokens[0])))
    try:
        port = os.environ["ELASTICFLOW_COORDINATOR"].split(":")[1]
        assert_refused(capfd, "token", f"localhost:{port}", is_host="0", token_file=str(tokens[1]))
    finally:
        assert handler.shutdown()


@pytest.mark.parametrize("how", ["one host", "the same host", "a list"])
def test_handler_at_whose_endpoint_another_job_is_led_says_so_and_ends(capfd, how):
    handler = create_handler(parameters("localhost:0"))
    try:
        door = f"localhost:{os.environ['ELASTICFLOW_COORDINATOR'].split(':')[1]}"
        config = {"is_host": "0"} if how == "one host" else {}
        endpoint = f"{door},localhost:{free_ports(1)[0]}" if how == "a list" else door
        text = "is another job's: it is of the job 'run-1', and not of 'run-2'"
        assert_refused(capfd, text, endpoint, run_id="run-2", **config)
        same = create_handler(parameters(door, run_id="none", is_host="0"))
        assert same.shutdown()
    finally:
        assert handler.shutdown()


@pytest.mark.parametrize("name", ["x" * 129, "two\nlines"], ids=["long", "lines"])
def test_handler_with_a_name_that_cannot_be_told_joins_the_job_at_its_endpoint(name):
    handler = create_handler(parameters("localhost:0"))
    try:
        door = f"localhost:{os.environ['ELASTICFLOW_COORDINATOR'].split(':')[1]}"
        other = create_handler(parameters(door, run_id=name, is_host="0"))
        assert other.shutdown()
    finally:
        assert handler.shutdown()


def test_handler_at_whose_endpoint_is_something_else_says_so_and_ends(capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        port = server.getsockname()[1]
        assert_refused(
            capfd, f"no coordinator of this version is at 127.0.0.1:{port}", f"127.0.0.1:{port}", is_host="0"
        )
        answering.join()


@contextmanager
def job_on_record(registry: Registry, address: tuple[str, int]) -> Iterator[None]:
    """A job that lives, whose coordinator is to be found at this address."""
    ended = threading.Event()

    def live() -> None:
        beats = 0
        while not ended.wait(0.2):
            registry.beat(1, beats, address)
            beats += 1

    registry.found(1)
    registry.add(1, address)
    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def job_of_another_version(registry: Registry) -> Iterator[None]:
    """A job on record that lives, whose coordinator speaks another version of the protocol."""
    ended = threading.Event()

    def answer(server: socket.socket) -> None:
        while not ended.is_set():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b'{"v":99,"t":"challenge","nonce":""}\n')

    with socket.create_server(("127.0.0.1", 0)) as server, job_on_record(registry, server.getsockname()):
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            socket.create_connection(server.getsockname()).close()
            thread.join()


def test_handler_at_a_registry_whose_job_has_another_version_names_both_and_ends(tmp_path, capfd):
    registry = Registry(place_for(f"file://{tmp_path}"), "run-1", "there")
    with job_of_another_version(registry):
        assert_refused(capfd, f"expected version {wire.VERSION} of the protocol", f"file://{tmp_path}")
    assert registry.newest() is not None
    assert registry.newest().number == 1


def test_handler_at_a_registry_whose_address_is_another_jobs_by_now_does_not_join_that_one(tmp_path, capfd):
    handler = create_handler(parameters("localhost:0"))
    try:
        address = ("127.0.0.1", int(os.environ["ELASTICFLOW_COORDINATOR"].split(":")[1]))
        with job_on_record(Registry(place_for(f"file://{tmp_path}"), "run-2", "there"), address):
            assert_refused(capfd, "is another job's: it is of the job 'run-1'", f"file://{tmp_path}", run_id="run-2")
    finally:
        assert handler.shutdown()


def test_handler_at_a_folder_that_cannot_be_written_says_so_and_ends(tmp_path, capfd):
    (tmp_path / "file").touch()
    endpoint = f"file://{tmp_path}/file/run"  # an administrator may write to all others
    assert_refused(capfd, f"agents cannot find each other at {endpoint}: cannot", endpoint)


def test_node_that_reaches_no_coordinator_ends_without_a_traceback(tmp_path):
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=elasticflow"]
    command += [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0,join_timeout=1", str(tmp_path / "train.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert f"no coordinator answers at 127.0.0.1:{port}, which --rdzv-endpoint names" in ended.stderr
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------- workers that have died


@pytest.fixture
def pauses(monkeypatch):
    """What the handler would wait."""
    waited: list[float] = []
    monkeypatch.setattr("ef_common.launch.deaths._wait", lambda seconds, until: waited.append(seconds))
    return waited


def _invoke_run(handler, status: int | None):
    """As torchrun's agent does, by its name and with its variable, it asks for another rendezvous."""
    failures = {} if status is None else {0: ProcessFailure(0, 4711, status, "")}
    run_result = RunResult(WorkerState.FAILED, failures=failures)
    handler.next_rendezvous()
    return run_result


@pytest.fixture
def handler():
    handler = create_handler(parameters("127.0.0.1:0"))
    yield handler
    handler.shutdown()


def records() -> Path:
    return Path(os.environ["ELASTICFLOW_CRASH_RECORDS"])


def test_handler_restarts_after_longer_and_longer_pauses(handler, pauses, caplog):
    handler.next_rendezvous()
    assert pauses == []
    for step in range(8):
        CrashRecord(records()).begin(0, step, [(0, 4)])
        _invoke_run(handler, -9)
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert "a worker died at step 1 of epoch 0 (SIGKILL); restarting it in 1 s (death 2 in a row)" in caplog.text


def test_handler_begins_to_count_anew_once_a_worker_has_trained_for_a_minute(handler, pauses):
    handler.next_rendezvous()
    for trained_s in (1.0, 1.0, 61.0, 1.0):
        record = CrashRecord(records(), clock=iter([0.0, 0.0, trained_s]).__next__)
        record.begin(0, 1, [(0, 4)])
        record.begin(0, 2 + len(pauses), [(0, 4)])
        _invoke_run(handler, -9)
    assert pauses == [0, 1, 0, 1]


def test_handler_that_is_told_to_go_in_a_pause_starts_no_worker(handler, monkeypatch):
    def sleep(seconds: float) -> None:
        handler._departure.told = True

    handler.next_rendezvous()
    _invoke_run(handler, -9)
    monkeypatch.setattr("ef_common.launch.deaths.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    with pytest.raises(SystemExit) as ended:
        _invoke_run(handler, -9)
    assert ended.value.code == 0


def test_handler_ends_when_its_worker_has_noted_that_the_job_has_failed(handler, pauses, caplog):
    handler.next_rendezvous()
    CrashRecord(records()).fail("worker w raised ValueError")
    with pytest.raises(ChildFailedError) as caught:
        _invoke_run(handler, 1)
    assert caught.value.failures[0].exitcode == 1
    assert caplog.text.count("the job has failed: worker w raised ValueError") == 1


def test_handler_that_does_not_know_how_its_worker_died_ends_all_the_same(handler, pauses):
    handler.next_rendezvous()
    _invoke_run(handler, None)
    CrashRecord(records()).fail("worker w raised ValueError")
    with pytest.raises(JobFailed, match="ValueError"):
        handler.next_rendezvous()


def test_handler_ends_the_job_at_the_third_death_at_one_step(handler, pauses, caplog):
    handler.next_rendezvous()
    for number in range(3):
        CrashRecord(records()).begin(0, 6, [(20, 24)])
        if number < 2:
            _invoke_run(handler, -11)
    with pytest.raises(ChildFailedError):
        _invoke_run(handler, -11)
    why = handler._hosting.coordinator._server.state.failed
    assert "has died 3 times at step 6 of epoch 0 (SIGSEGV), on the positions 20-23" in why
    assert f"the job has failed: {why}" in caplog.text
    assert pauses == [0, 1]


def test_handler_tells_of_an_exception_before_there_was_a_worker(handler, pauses):
    handler.next_rendezvous()
    with pytest.raises(ChildFailedError):
        _invoke_run(handler, 1)
    assert "raised an exception before it had joined" in handler._hosting.coordinator._server.state.failed


@pytest.mark.parametrize(("status", "joined"), [(-9, False), (2, False), (1, True)])
def test_handler_restarts_a_worker_that_ended_in_any_other_way(handler, pauses, status, joined):
    handler.next_rendezvous()
    if joined:
        CrashRecord(records())
    _invoke_run(handler, status)
    assert not handler._hosting.coordinator._server.state.failed


def test_handler_without_restarts_left_tells_why_when_it_ends(caplog):
    handler = create_handler(parameters("127.0.0.1:0"))
    handler.next_rendezvous()
    CrashRecord(records()).fail("worker w raised ValueError")
    with pytest.raises(ChildFailedError):  # noqa: PT012
        try:
            raise ChildFailedError("train.py", {0: ProcessFailure(0, 4711, 1, "")})
        finally:
            handler.shutdown()
    assert "the job has failed: worker w raised ValueError" in caplog.text


# ---------------------------------------------------------------- real agents


@pytest.mark.processes
def test_torchrun_killed_node_leaves_the_other_worker_in_its_process_and_a_new_one_joins(job, start_two):
    first, host, second, guest = start_two()
    job.kill(second)
    job.wait_for("view", pid=host, generation=2, size=1)
    third = job.agent("--nnodes=2:8")
    job.wait_for("newcomer")
    job.wait_for("view", 2, generation=3, size=2)
    assert {r["pid"] for r in job.records("start")} > {host, guest}
    assert len(job.records("start")) == 3  # nobody was restarted
    job.tell("end")
    assert job.wait_exit(third) == 0
    assert job.wait_exit(first) == 0


@pytest.mark.thorough
@pytest.mark.processes
def test_torchrun_crashed_worker_is_restarted_and_rejoins(job, start_two):
    first, host, second, guest = start_two("--max-restarts=1")
    job.tell("crash", guest)
    (newcomer,) = job.wait_for("newcomer")
    job.wait_for("view", 2, generation=3, size=2)
    assert newcomer["pid"] not in (host, guest)
    assert newcomer["node"] == job.wait_for("view", pid=guest)[0]["node"]
    assert "a worker died before its first step (exit status 17); restarting it (death 1 in a row)\n" in job.logs()
    job.tell("end")
    assert [job.wait_exit(agent) for agent in (first, second)] == [0, 0]


@pytest.mark.processes
def test_torchrun_settings_from_the_environment_and_two_workers_a_node(job, entry_point, tmp_path):
    (tmp_path / "token").write_text("hunter2")
    agent = job.agent(
        flags=False,
        PET_RDZV_BACKEND="elasticflow",
        PET_RDZV_ENDPOINT=job.endpoint,
        PET_NNODES="1:8",
        PET_NPROC_PER_NODE="2",
        PET_RDZV_CONF=f"last_call_timeout=0,token_file={tmp_path / 'token'}",
    )
    views = job.wait_for("view", 2, generation=1, size=2)
    assert all(sorted(view["local_ranks"]) == [0, 1] for view in views)
    assert len(set(views[0]["nodes"])) == 1
    assert all(record["has_token"] for record in job.records("start"))
    job.tell("end")
    assert job.wait_exit(agent) == 0
    assert "hunter2" not in job.logs()


@pytest.mark.processes
def test_torchrun_join_after_the_end_is_told_so_and_host_waits_for_other_nodes(job, start_two):
    first, host, second, guest = start_two()
    job.tell("stay", guest)
    job.tell("end")
    job.wait_for("exit", pid=host)
    late = job.agent("--nnodes=2:8")
    assert job.wait_exit(late) == 0
    assert "the training is over: there is nothing to join" in job.logs()
    assert first.poll() is None
    job.untell("stay", guest)
    assert [job.wait_exit(agent) for agent in (second, first)] == [0, 0]
    assert "waiting for the workers of other nodes" in job.logs()
