"""Plain torchrun with its own backends: rank 0 hosts the coordinator."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import HashStore

from ef_common.errors import CoordinatorLost, UsageError
from ef_common.launch import c10d
from ef_common.launch.c10d import host_or_find_coordinator, is_plain_torchrun, read_torchrun_environment
from ef_common.launch.environment import read_environment

TORCHRUN = {"RANK": "3", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0"}


def test_plain_torchrun_is_recognized():
    assert is_plain_torchrun({"TORCHELASTIC_RUN_ID": "none"})
    assert not is_plain_torchrun({"TORCHELASTIC_RUN_ID": "none", "ELASTICFLOW_COORDINATOR": "a:1"})
    assert not is_plain_torchrun({})


def test_torchrun_environment_is_read():
    env = read_torchrun_environment(TORCHRUN)
    assert (env.rank, env.node, env.num_nodes, env.master_addr) == (3, 1, 2, "node0")


@pytest.mark.parametrize("name", TORCHRUN)
def test_torchrun_environment_without_a_variable_raises_usage_error(name):
    with pytest.raises(UsageError, match=name):
        read_torchrun_environment({key: value for key, value in TORCHRUN.items() if key != name})


def test_worker_of_a_later_round_is_not_misled_by_the_address_of_an_earlier_one(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    store = HashStore()
    monkeypatch.setattr(c10d, "_join_store", lambda timeout_s: store)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        stale = sock.getsockname()[1]
    store.set("elasticflow/coordinator", f"127.0.0.1:{stale}")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        fresh = sock.getsockname()
        publish = threading.Timer(0.3, store.set, ("elasticflow/coordinator", f"127.0.0.1:{fresh[1]}"))
        publish.start()
        job = host_or_find_coordinator(read_environment({}))
        publish.join()
    assert job.environment.coordinator == fresh
    assert job.environment.node.endswith("-1")
    job.close()
    with pytest.raises(CoordinatorLost, match="cannot be reached"):
        host_or_find_coordinator(read_environment({}), timeout_s=0.1)


@pytest.mark.parametrize(
    ("environ", "address"),
    [({"ELASTICFLOW_TOKEN": "hunter2"}, "node0"), ({"ELASTICFLOW_ADDRESS": "10.0.0.1"}, "10.0.0.1"), ({}, "")],
)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_worker_on_the_node_of_the_coordinator_is_known_under_the_name_by_which_others_reach_it(
    monkeypatch, environ, address, rank
):
    """Though the node's own name stands for a loopback address there, as on Debian."""
    for name, value in {**TORCHRUN, "RANK": rank, "GROUP_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **kw: real("127.0.1.1" if host == "node0" else host, *args, **kw)
    )
    store = HashStore()
    monkeypatch.setattr(c10d, "_join_store", lambda timeout_s: store)
    with socket.create_server(("", 0)) as other:
        where = "node0" if "ELASTICFLOW_TOKEN" in environ else "127.0.0.1"
        store.set("elasticflow/coordinator", f"{where}:{other.getsockname()[1]}")
        job = host_or_find_coordinator(read_environment(environ))
        job.close()
    assert job.environment.address == address


def test_host_takes_the_limits_of_its_environment():
    environ = {"ELASTICFLOW_HEARTBEAT_TIMEOUT": "7", "ELASTICFLOW_HANG_TIMEOUT": "30"}
    given = read_torchrun_environment({**TORCHRUN, "MASTER_ADDR": "localhost"})
    coordinator = c10d._host(given, read_environment(environ), None)
    coordinator.stop()
    assert (coordinator._heartbeat_timeout_s, coordinator._limits.hang_timeout_s) == (7.0, 30.0)


def start(job, nnodes: str, *, is_host: bool, **variables: str):
    arguments = ("--rdzv-backend=c10d", f"--rdzv-endpoint={job.endpoint}", "--local-addr=127.0.0.1")
    return job.agent(
        f"--nnodes={nnodes}",
        *arguments,
        f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=1",
        flags=False,
        **variables,
    )


@pytest.mark.processes
def test_c10d_two_nodes_form_a_view_and_a_killed_one_leaves_the_other(job):
    # The first one, which has the smaller process id, gets rank 0; it hosts torchrun's store, too, and must not die.
    agents = [start(job, "2", is_host=is_host) for is_host in (True, False)]
    views = job.wait_for("view", 2, generation=1, size=2)
    assert len(set(views[0]["nodes"])) == 2
    (host,) = [r["pid"] for r in job.records("c10d") if r["hosts"]]
    guest = next(view["pid"] for view in views if view["pid"] != host)
    job.kill(next(agent for agent in agents if is_child_of(guest, agent.pid)))
    job.wait_for("view", pid=host, generation=2, size=1)
    job.tell("end")
    job.wait_for("exit", pid=host)
    assert len(job.records("start")) == 2


@pytest.mark.processes
@pytest.mark.thorough
def test_c10d_node_that_joins_restarts_all_workers_which_form_a_view_with_it(job):
    # Where agents share the store of their rendezvous with the workers, all may exit when a node joins (torch 2.13).
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [start(job, "2:3", is_host=is_host, **environ) for is_host in (True, False)]
    before = {view["pid"] for view in job.wait_for("view", 2, generation=1, size=2)}
    agents.append(start(job, "2:3", is_host=False, **environ))
    after = {view["pid"] for view in job.wait_for("view", 3, size=3)}
    assert not before & after
    assert {record["pid"] for record in job.records("start")} >= before | after
    job.tell("end")
    assert [job.wait_exit(agent) for agent in agents] == [0, 0, 0]


@pytest.mark.processes
def test_static_single_node_of_two_workers_forms_a_view_and_the_host_ends_last(job):
    agent = job.agent("--nproc-per-node=2", "--master-port", job.endpoint.split(":")[1], flags=False)
    job.wait_for("view", 2, generation=1, size=2)
    job.tell("end")
    assert job.wait_exit(agent) == 0
    assert len(job.records("exit")) == 2


def is_child_of(pid: int, parent: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1]) == parent
