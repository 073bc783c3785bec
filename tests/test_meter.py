"""What loggers show of the workers, from row to row."""

from __future__ import annotations

from types import SimpleNamespace

from ef_common.core.throughput import History
from ef_common.core.view import Member, View
from ef_common.data.meter import COLUMNS, Meter


def test_row_has_the_speed_and_the_pauses_since_the_one_before() -> None:
    now = 100.0
    members = tuple(Member(name, "node", "127.0.0.1") for name in "ab")
    session = SimpleNamespace(completed_in=View(1, members), num_samples_trained=50.0, paused_s=2.0)
    meter = Meter(session, clock=lambda: now)  # type: ignore[arg-type]
    now, session.num_samples_trained = 104.0, 250.0
    assert meter.row() == {"world_size": 2.0, "samples_per_s": 50.0, "pause_s": 0.0}
    now, session.num_samples_trained, session.paused_s = 105.0, 260.0, 2.75
    session.completed_in = View(2, members[:1])
    assert meter.row() == {"world_size": 1.0, "samples_per_s": 10.0, "pause_s": 0.75}
    assert set(meter.row()) < set(COLUMNS)
    scaler = SimpleNamespace(wanted_nodes=3, history=History())
    chooses = Meter(session, scaler, clock=lambda: now)  # type: ignore[arg-type]
    assert chooses.row()["wanted_nodes"] == 3.0
    assert "noise_scale" not in chooses.row()
    scaler.history = History().with_noise_scale(200.0)
    assert chooses.row()["noise_scale"] == 200.0
    assert set(chooses.row()) < set(COLUMNS)
    scaler.wanted_nodes = None  # it only replaces stragglers
    assert "noise_scale" not in chooses.row()
