"""What only real processes can show."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from socket import AF_INET
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from ef_common.collectives import torch_group
from ef_common.collectives.bootstrap import SharedValues
from ef_common.collectives.torch_group import TorchGroup, TorchGroups
from ef_common.core.membership import Settings
from ef_common.core.view import View
from ef_common.errors import GroupBroken, UsageError
from ef_common.testing.harness import Job
from tests import warm
from tests.collectives import scripts, seats
from tests.collectives.seats import ENGINES, preload, run_in_processes, sit, view_of
from tests.waiting import poll_until

SILENT_S = 8.0
"""Longer than a busy machine lets a worker wait for a core, as the others must not be taken for silent."""


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Addresses(dict[str, bytes]):
    """The bootstrap of a view, of which there is one member only."""

    def put(self, key: str, value: bytes) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return super().get(key, b"1")

    def replaced(self) -> bool:
        return False


class NobodyComes(Addresses):
    def get(self, key: str) -> bytes:
        if key not in self and not key.startswith("listener/"):
            raise GroupBroken("replaced")
        return super().get(key)


def connect_in_vain() -> list[list[int]]:
    """Threads and open files of this process before it has tried three times, and after that."""
    gc.collect()
    gc.disable()
    groups, found = TorchGroups(), [usage()]
    for _ in range(3):
        with pytest.raises(GroupBroken):
            groups.build(view_of(2), rank=0, bootstrap=NobodyComes())
    return [*found, usage()]


class Half:
    """The bootstrap of one of two members. The second one reads nothing, and the first one waits for it for ever."""

    def __init__(self, values: SharedValues, *, reads: bool) -> None:
        self._values, self._reads = values, reads
        self._num_asked = 0
        self.asked, self.over = threading.Event(), threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self._values.put(key, value)

    def get(self, key: str) -> bytes:
        self._num_asked += key == "listener/1"
        if not self._reads or self._num_asked == 2:  # Gloo may have connected to it by then
            self.asked.set()
            threading.Event().wait()
        return self._values.get(key)

    def replaced(self) -> bool:
        return self.over.is_set()


def stranger_at_an_abandoned_group() -> str:
    """What becomes of a stranger at the listener of a group that was given up, and which Gloo still has."""
    values = SharedValues()
    first, second = Half(values, reads=True), Half(values, reads=False)

    def build(rank: int, bootstrap: Half) -> None:
        with contextlib.suppress(GroupBroken):
            TorchGroups().build(view_of(2), rank=rank, bootstrap=bootstrap)

    members = [threading.Thread(target=build, args=each, daemon=True) for each in enumerate((first, second))]
    members[1].start()
    second.asked.wait()  # so it listens
    members[0].start()
    host, _, port = values.get("listener/0").decode().rpartition(" ")
    first.over.set()
    members[0].join()
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError as error:
        return type(error).__name__
    return "reached"


class Member:
    """The bootstrap of a member that connects, or only comes, until the view is replaced."""

    def __init__(self, values: SharedValues, *, connects: bool) -> None:
        self._values, self._connects = values, connects
        self.has_come, self._over = threading.Event(), threading.Event()

    def put(self, key: str, value: bytes) -> None:
        self._values.put(key, value)

    def get(self, key: str) -> bytes:
        self.has_come.set()
        if not self._connects:
            self._over.wait()
            raise GroupBroken("replaced")
        return self._values.get(key)

    def replaced(self) -> bool:
        return self._over.is_set()

    def replace(self) -> None:
        self._over.set()

    def build(self, view: View, rank: int) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(GroupBroken):
                TorchGroups().build(view, rank=rank, bootstrap=self).abort()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def usage() -> list[int]:
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_all_reduce_takes_every_type_that_models_have(directory: Path, engine: str) -> None:
    for found in run_in_processes(scripts.reduce_every_type, 2, directory, engine=engine):
        assert len(found) >= 9
        assert all(values == ([1.0] * 3 if "bool" in kind else [3.0] * 3) for kind, values in found.items())


def test_all_reduce_takes_many_of_every_type(directory: Path, engine: str) -> None:
    for found in run_in_processes(scripts.reduce_many_of_every_type, 2, directory, engine=engine):
        assert len(found) >= 9
        assert all(values == ([1.0] if "bool" in kind else [3.0]) for kind, values in found.items())


def test_all_reduce_takes_what_is_empty_and_what_has_no_dimension(directory: Path, engine: str) -> None:
    assert run_in_processes(scripts.reduce_nothing_and_one_number, 2, directory, engine=engine) == [[0.0, 3.0]] * 2


def test_all_reduce_returns_before_the_others_have_come(directory: Path, engine: str) -> None:
    assert run_in_processes(scripts.reduce_without_waiting, 3, directory, engine=engine) == [True] * 3


def test_engine_imports_no_framework_but_its_own(directory: Path, engine: str) -> None:
    expected = "tensorflow" if engine.startswith("horovod-tensorflow") else "torch"
    for found in run_in_processes(scripts.frameworks, 2, directory, engine=engine, modules=[seats.__name__]):
        assert expected in found
        assert set(found) <= {expected, "keras"}


@pytest.mark.parametrize("engine", [one for one in ENGINES if one.values[0] in ("gloo", "horovod")])
def test_strangers_who_connect_to_the_listeners_cost_no_descriptor(directory: Path, engine: str) -> None:
    for num_listeners, more, total in run_in_processes(scripts.strangers_come, 2, directory, engine=engine):
        # Horovod's Gloo listens for each connection by itself, until that stands.
        assert num_listeners == 0 if engine == "horovod" else num_listeners >= 1
        assert more == 0
        assert total == 2.0


class Work:
    """An operation in flight, which has ended when `wait` returns."""

    def __init__(self, wait: Callable[[object], object]) -> None:
        self._wait, self._has_ended = wait, False

    def wait(self, timeout: object = None) -> None:
        self._wait(timeout)
        self._has_ended = True

    def is_completed(self) -> bool:
        return self._has_ended


def test_operation_may_be_finished_by_its_thread_while_the_group_is_aborted() -> None:
    group = TorchGroups().build(view_of(1), rank=0, bootstrap=Addresses())
    begun, aborting = threading.Event(), threading.Event()

    def wait_for_abort(timeout: object) -> None:
        begun.set()
        aborting.wait(10)

    later = Work(wait_for_abort)
    thread = threading.Thread(target=group.finish, args=[later])

    def let_the_other_end(timeout: object) -> None:
        aborting.set()
        thread.join(10)

    group._flying.update({Work(let_the_other_end): (), later: ()})
    thread.start()
    assert begun.wait(10)
    group.abort()
    assert not thread.is_alive()
    assert group._flying == {}


def test_abort_wakes_peers_at_once(directory: Path, engine: str) -> None:
    assert run_in_processes(scripts.abort_wakes_peers, 3, directory, engine=engine) == [True] * 3


@pytest.mark.processes
def test_group_that_cannot_be_connected_leaves_no_thread_and_no_file(directory: Path) -> None:
    """Its exception held the frames that held it, until the garbage collector came by."""
    with Job(directory, preload=warm.TORCH) as job:
        before, after = job.start(connect_in_vain).result()
    assert after == before


@pytest.mark.processes
def test_stranger_does_not_reach_a_group_that_was_given_up_while_it_was_connected(directory: Path) -> None:
    """Gloo listens until its timeout, an hour later."""
    with Job(directory, preload=warm.TORCH) as job:
        assert job.start(stranger_at_an_abandoned_group).result() == "TimeoutError"


def test_group_that_was_given_up_is_gone_when_gloo_has_tried_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member has come, and dies before it connects. Gloo tries five times."""
    monkeypatch.setattr(torch_group, "CONNECT_TIMEOUT", timedelta(seconds=0.05))
    for rank in range(2):  # one of the two connects, and the other one waits for that
        values = SharedValues()
        lost, here = Member(values, connects=False), Member(values, connects=True)
        builds = [lost.build(view_of(2), 1 - rank)]
        lost.has_come.wait()
        builds.append(here.build(view_of(2), rank))
        here.has_come.wait()
        here.replace()
        builds[1].join(60.0)
        poll_until(lambda: num_connecting() == 1)
        lost.replace()
        builds[0].join(60.0)
        poll_until(lambda: num_connecting() == 0)
    wait_for_closed_groups()


def num_connecting() -> int:
    return sum(thread.name.startswith("ef-connect-") for thread in threading.enumerate())


def test_gloo_connects_when_all_members_have_come() -> None:
    """A member may be late, as a long validation is no failure; Gloo does not wait for it for so long."""
    asked: list[str] = []

    class OneIsLate(Addresses):
        def get(self, key: str) -> bytes:
            asked.append(key)
            if key == "listener/2":
                raise GroupBroken("replaced")
            return super().get(key)

    with pytest.raises(GroupBroken):
        TorchGroups().build(view_of(3), rank=0, bootstrap=OneIsLate())
    assert asked == ["listener/0", "listener/1", "listener/2"]


_OPERATIONS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all-reduce": lambda group, tensor: group.allreduce([tensor]),
    "broadcast": lambda group, tensor: group.broadcast(tensor, 1),
    "all-gather": lambda group, tensor: group.allgather([[torch.empty(2), torch.empty(2)]], [tensor]),
    "all-to-all": lambda group, tensor: group.alltoall_base(torch.empty(2), tensor, [1, 1], [1, 1]),
}


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="in torch 2.6, Gloo knows only the timeout of the whole group"
)
@pytest.mark.parametrize("operation", _OPERATIONS)
def test_operation_has_its_own_timeout_and_not_that_of_connecting(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it is shorter, so that the test need not wait for long: the other member never begins."""
    monkeypatch.setattr(torch_group, "CONNECT_TIMEOUT", timedelta(seconds=20))
    monkeypatch.setattr(torch_group, "OPERATION_TIMEOUT", timedelta(milliseconds=123))
    values, groups = SharedValues(), {}

    def build(rank: int) -> None:
        groups[rank] = TorchGroups().build(view_of(2), rank=rank, bootstrap=values)

    members = [threading.Thread(target=build, args=(rank,), daemon=True) for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join(60.0)
    group: Any = groups[0]
    with pytest.raises(GroupBroken, match="Timed out waiting 123ms"):
        group.start(_OPERATIONS[operation], torch.ones(2)).wait()
    for group in groups.values():
        group.abort()
    wait_for_closed_groups()


def test_worker_whose_kernel_keeps_no_stranger_out_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, inode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("ef_common.collectives.torch_group.keep_out", refuse)
    groups = TorchGroups()
    for _ in range(2):
        groups.build(view_of(1), rank=0, bootstrap=Addresses()).abort()
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("the kernel does not keep strangers from Gloo's ports")
    assert warnings[0].endswith("Operation not permitted")
    wait_for_closed_groups()


def test_group_that_is_aborted_while_an_operation_begins_is_let_go_of_in_a_thread() -> None:
    """Gloo's destructor waits for an operation that is lost, and whoever begins it has the last reference."""
    ended_in: list[str] = []

    class ProcessGroup:
        def __del__(self) -> None:
            ended_in.append(threading.current_thread().name)

    def begin(_: ProcessGroup) -> Any:
        group.abort()
        wait_for_closed_groups()
        return Ended()

    class Ended:
        def is_completed(self) -> bool:
            return True

    group = TorchGroup(ProcessGroup(), view_of(2), 0, (), NoPeers())  # type: ignore[arg-type]
    group.start(begin)
    wait_for_closed_groups()
    assert ended_in == ["ef-close-group"]


def test_group_is_let_go_of_although_waiting_for_its_operations_fails(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[bool] = []

    class ProcessGroup:
        def __del__(self) -> None:
            ended.append(True)

    class Broken:
        def is_completed(self) -> bool:
            return False

        def wait(self, timeout: Any = None) -> None:
            if timeout is None:
                raise ValueError("out of order")

    group = TorchGroup(ProcessGroup(), view_of(2), 0, (), NoPeers())  # type: ignore[arg-type]
    group._flying = {Broken(): ()}
    group.abort()
    wait_for_closed_groups()
    assert "the thread that lets go of a group has failed: ValueError: out of order" in caplog.text
    assert ended


@pytest.mark.parametrize("begins", ["before the abort", "after the abort"])
def test_thread_that_lets_go_of_a_group_does_not_wait_for_what_has_ended(begins: str) -> None:
    """Torch keeps 128 bytes for ever of each thread that has waited for an operation with success."""
    waited_in: list[str] = []
    process_group = gloo(dist.HashStore(), 0, world_size=1)

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def is_completed(self) -> bool:
            return bool(self._work.is_completed())

        def wait(self, *timeout: Any) -> None:
            waited_in.append(threading.current_thread().name)
            self._work.wait(*timeout)

    def begin(process_group: Any) -> Work:
        if begins == "after the abort":
            group.abort()
        work = process_group.allreduce([torch.ones(3)])
        poll_until(work.is_completed)
        return Work(work)

    group = TorchGroup(process_group, view_of(2), 0, (), NoPeers())  # type: ignore[arg-type]
    group.start(begin)
    del process_group
    group.abort()
    wait_for_closed_groups()
    assert not waited_in


class NoPeers:
    def close(self) -> None:
        pass


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("begins", ["before the abort", "after the abort"])
def test_operation_that_gloo_has_lost_does_not_keep_the_memory_of_its_tensors(begins: str, evaluates: bool) -> None:
    """Gloo keeps them until its timeout, an hour later."""
    ended, store = threading.Event(), dist.HashStore()
    peer = threading.Thread(target=lambda: (gloo(store, 1), ended.wait(60.0)), daemon=True)
    peer.start()
    group = TorchGroup(gloo(store, 0), view_of(2), 0, (), NoPeers())  # type: ignore[arg-type]

    def begin(process_group: Any, tensor: Any) -> Any:
        if begins == "after the abort":
            group.abort()
        return process_group.allreduce([tensor])

    array = np.ones(1000, np.float32)
    memory = weakref.ref(array)
    with torch.inference_mode(evaluates):
        pending = group.start(begin, torch.from_numpy(array))  # the other one never comes
    group.abort()
    del array
    poll_until(lambda: memory() is None)
    assert not pending.is_over()
    ended.set()
    peer.join(60.0)
    wait_for_closed_groups()


def test_group_that_is_aborted_is_gone_at_once_and_not_when_garbage_is_collected() -> None:
    """Each has megabytes of room for messages; of many recoveries, many groups were there."""
    store, view, groups = dist.HashStore(), view_of(2), {}

    def take_part(rank: int) -> None:
        group = groups[rank] = TorchGroup(gloo(store, rank), view, rank, (), NoPeers())  # type: ignore[arg-type]
        group.all_gather(b"x")
        group.all_reduce(np.ones(2, np.float32)).wait()
        group.all_reduce(np.ones(1_000_000, np.float32)).wait()

    members = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(2)]
    gc.collect()
    gc.disable()
    try:
        for member in members:
            member.start()
        for member in members:
            member.join(60.0)
        waits = groups[0].all_reduce(np.ones(1_000_000, np.float32))  # for the other one, who never comes
        for rank in range(2):
            groups[rank].abort()
        with pytest.raises(GroupBroken):
            waits.wait()
        del waits
        left = [weakref.ref(groups.pop(rank)) for rank in range(2)]
        poll_until(lambda: not any(group() for group in left))
    finally:
        gc.enable()


def gloo(store: Any, rank: int, *, world_size: int = 2) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def wait_for_closed_groups() -> None:
    for thread in [thread for thread in threading.enumerate() if thread.name == "ef-close-group"]:
        thread.join(20.0)


def test_misuse_is_not_taken_for_a_loss(directory: Path, engine: str) -> None:
    for found in run_in_processes(scripts.misuse_reaches_the_caller, 2, directory, engine=engine):
        assert len(found) == 5
        assert "GroupBroken" not in found


def test_killed_peer_with_messages_half_sent_others_go_on(directory: Path, engine: str) -> None:
    results = run_in_processes(scripts.killed_in_a_large_reduction, 3, directory, lost=(0,), engine=engine)
    assert results == [None, [True, 2, [1.0]], [True, 2, [1.0]]]


@pytest.mark.thorough
def test_stopped_peer_with_a_message_half_sent_others_go_on(directory: Path, engine: str) -> None:
    with Job(directory, preload=preload(engine), heartbeat_timeout_s=SILENT_S) as job:
        workers = job.start_world(3, sit, scripts.stopped_in_a_large_transfer, engine)
        job.wait_until(lambda events: len(list(job.results.iterdir())) == 2, "the results of two")
        ended = [worker for worker in workers if (job.results / f"{worker.name}.json").exists()]
        assert [worker.result()["result"] for worker in ended] == [[True, 2, [1.0]]] * 2
        (stopped,) = set(workers) - set(ended)
        assert stopped.alive


def test_stopped_peer_is_not_waited_for_until_gloo_gives_up(directory: Path, engine: str) -> None:
    patient = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600", "LOCAL_WORLD_SIZE": "3"}
    with Job(directory, preload=preload(engine), heartbeat_timeout_s=SILENT_S) as job:
        seats = [{**patient, "LOCAL_RANK": str(rank)} for rank in range(3)]
        script = scripts.stopped_at_rest
        workers = [job.start(sit, script, engine, node="founders", environ=environ) for environ in seats]
        job.wait_until(lambda events: len(list(job.results.iterdir())) == 2, "the results of two")
        ended = [worker for worker in workers if (job.results / f"{worker.name}.json").exists()]
        assert [worker.result()["result"] for worker in ended] == [[True, 2, [1.0]]] * 2


def test_killed_member_while_the_group_is_built_others_build_the_next(directory: Path, engine: str) -> None:
    results = run_in_processes(scripts.killed_while_a_group_is_built, 3, directory, lost=(0,), engine=engine)
    assert results == [None, [True, 2, [1.0]], [True, 2, [1.0]]]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_data_plane_is_on_the_interface_that_is_named(directory: Path) -> None:
    """The members know each other by the loopback address. (Horovod connects by the node's own name, too.)"""
    found = [(name, one.address) for name, of in psutil.net_if_addrs().items() for one in of if one.family == AF_INET]
    others = [(name, address) for name, address in found if not address.startswith("127.")]
    if not others:
        pytest.skip("there is no network interface but the loopback")
    for name, address in (*others[:1], ("", "127.0.0.1")):
        settings = Settings(min_nodes=2, last_call_s=0.0)
        with Job(directory / name, preload=warm.TORCH, settings=settings) as job:
            environ = {"GLOO_SOCKET_IFNAME": name}
            workers = [job.start(sit, scripts.addresses_of_connections, environ=environ) for _ in range(2)]
            assert [worker.result()["result"] for worker in workers] == [[address]] * 2


def test_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77,lo")
    with pytest.raises(UsageError, match=r"Expected one of \[.*'lo'.*\]\. Received: GLOO_SOCKET_IFNAME='eth77'"):
        TorchGroups().build(view_of(2), rank=0, bootstrap=Addresses())


def test_build_is_abandoned_when_the_view_is_replaced() -> None:
    class Replaced:
        """The other member never comes."""

        def __init__(self) -> None:
            self._replaced = threading.Event()
            threading.Timer(0.1, self._replaced.set).start()

        def put(self, key: str, value: bytes) -> None: ...

        def get(self, key: str) -> bytes:
            self._replaced.wait()
            raise GroupBroken("replaced")

        def replaced(self) -> bool:
            return self._replaced.is_set()

    with pytest.raises(GroupBroken):
        TorchGroups().build(view_of(2), rank=0, bootstrap=Replaced())
