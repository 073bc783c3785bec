"""A `ThroughputMonitor` goes on measuring when rank 0 is lost, and knows how many workers there are."""

from __future__ import annotations

import csv
import functools
import importlib
import signal
from typing import Any

import pytest

from ef_common.testing.harness import Job
from ef_lightning import host as hosts
from ef_lightning.throughput import ThroughputMonitors
from tests.lightning import measured, training
from tests.lightning.conftest import HOSTS


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["training", "validation"])
def test_monitor_goes_on_measuring_when_rank_0_is_lost(job: Job, where: str) -> None:
    workers = job.start_world(2, measured.run, HOSTS[0], where)
    survivor, lost = sorted(workers, key=lambda worker: -worker.wait())
    assert lost.wait() == -signal.SIGKILL
    assert survivor.result() == [2, 1]
    job.audit()
    with (job.directory / "csv" / "version_0" / "metrics.csv").open() as file:
        measured_in = [int(row["step"]) for row in csv.DictReader(file) if row["train/samples"]]
    assert measured_in == [*range(measured_in[0], measured_in[0] + len(measured_in))]
    assert len(measured_in) > 8  # of which the lost one can have written the first four alone


def test_only_lightnings_own_hooks_are_replaced_and_put_back() -> None:
    pl = importlib.import_module(HOSTS[0])
    called: list[str] = []

    class Own(pl.callbacks.ThroughputMonitor):  # type: ignore[misc, name-defined]
        @pl.utilities.rank_zero_only  # type: ignore[untyped-decorator]
        def on_train_batch_end(self, *args: Any) -> None:
            called.append("own")

    monitor: Any = Own(batch_size_fn=len)
    session: Any = None
    monitors = ThroughputMonitors(training.trainer(pl, "auto", callbacks=[monitor]), session, hosts.HOSTS[HOSTS[0]])
    monitors.attach()
    monitor.on_train_batch_end()
    assert called == ["own"]
    assert "on_train_batch_end" not in vars(monitor)  # it runs where its author wants it to
    assert isinstance(vars(monitor)["on_train_start"], functools.partial)
    monitors.detach()
    assert "on_train_start" not in vars(monitor)
