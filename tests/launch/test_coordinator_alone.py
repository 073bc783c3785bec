"""`elasticflow coordinator`, as far as no process of its own is needed."""

from __future__ import annotations

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
