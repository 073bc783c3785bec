"""`elasticflow coordinator`, as far as no process of its own is needed."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ef_common.errors import ThreadFailed
from ef_common.launch import coordinator_alone
from ef_common.launch.coordinator_alone import Alone
from ef_common.testing.ports import free_ports
from tests.waiting import poll_until


def test_coordinator_whose_thread_has_failed_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_alone, "log_as_json", lambda: None)
    alone = Alone(f"127.0.0.1:{free_ports(1)[0]}", conf="", job="none", nnodes="1:2", local_addr=None, standby=False)

    def end_its_thread() -> None:
        def end() -> None:
            raise SystemExit(1)

        poll_until(lambda: alone._hosting.coordinator and alone._hosting.coordinator.leads)
        alone._hosting.coordinator._loop.call_soon_threadsafe(end)

    threading.Thread(target=end_its_thread, daemon=True).start()
    with pytest.raises(ThreadFailed, match="serves the workers of the job has failed"):
        alone.run()
    alone._hosting.leave()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_coordinator_that_looks_for_its_job_ends_when_it_is_told(
    monkeypatch: pytest.MonkeyPatch, hangup_not_ignored: None, number: signal.Signals, status: int
) -> None:
    monkeypatch.setattr(coordinator_alone, "log_as_json", lambda: None)
    port = free_ports(1)[0]
    doors = f"127.0.0.1:{port},127.0.0.2:{port},127.0.0.3:{port}"  # more than half of them are not there
    alone = Alone(doors, conf="", job="none", nnodes="1:2", local_addr=None, standby=False)
    before = signal.getsignal(number)

    def tell() -> None:
        poll_until(lambda: alone._hosting.coordinator)
        os.kill(os.getpid(), signal.SIGINT if signal.getsignal(number) is signal.SIG_DFL else number)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    assert alone.run() == status
    teller.join()
    assert signal.getsignal(number) == before
    alone._hosting.leave()


def test_each_signal_ends_the_search_in_case_the_code_that_it_interrupts_goes_on() -> None:
    alone = Alone("127.0.0.1:1", conf="", job="none", nnodes="1:2", local_addr=None, standby=False)
    for _ in range(2):
        with pytest.raises(coordinator_alone._ToldToEnd):
            alone._hear(signal.SIGTERM, None)
