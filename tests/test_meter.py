"""What loggers show of the workers, from row to row."""

from __future__ import annotations

from types import SimpleNamespace

from ef_common.core.throughput import Measure, SpeedHistory
from ef_common.core.view import Member, View
from ef_common.data.meter import COLUMNS, Meter
from ef_common.session.stats import Stats


def test_row_has_the_speed_and_the_pauses_since_the_one_before() -> None:
    now = 100.0
    members = tuple(Member(name, "node", "127.0.0.1") for name in "ab")
    session = SimpleNamespace(completed_in=View(1, members), stats=Stats(num_samples_trained=50.0, paused_s=2.0))
    meter = Meter(session, clock=lambda: now)  # type: ignore[arg-type]
    now, session.stats.num_samples_trained = 104.0, 250.0
    assert meter.row() == {"world_size": 2.0, "samples_per_s": 50.0, "pause_s": 0.0}
    now, session.stats.num_samples_trained, session.stats.paused_s = 105.0, 260.0, 2.75
    session.completed_in = View(2, members[:1])
    assert meter.row() == {"world_size": 1.0, "samples_per_s": 10.0, "pause_s": 0.75}
    assert set(meter.row()) < set(COLUMNS)
    scaler = SimpleNamespace(wanted_nodes=3, history=SpeedHistory())
    chooses = Meter(session, scaler, clock=lambda: now)  # type: ignore[arg-type]
    assert chooses.row()["wanted_nodes"] == 3.0
    assert not {"noise_scale", "samples_per_s_spread", "change_s"} & set(chooses.row())
    measures = [Measure(size, 90.0 * size, 4.0 * size, 10.0, 50.0 * size) for size in (1, 2)]
    scaler.history = SpeedHistory().with_noise_scale(200.0).with_change(1.5).with_measure(measures[0])
    scaler.history = scaler.history.with_measure(measures[1])
    row = chooses.row()
    assert (row["noise_scale"], row["samples_per_s_spread"], row["change_s"]) == (200.0, 8.0, 1.5)
    assert set(row) < set(COLUMNS)
    scaler.wanted_nodes = None  # it only replaces stragglers
    assert "noise_scale" not in chooses.row()
