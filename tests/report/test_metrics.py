"""Metrics: their values, and that the dashboard asks for no others."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ef_common.launch import run_directory
from tests.report.generated import BATCH, Generated, small

pytest.importorskip("prometheus_client", reason="needs the extra `live`")

from prometheus_client.parser import text_string_to_metric_families

from ef_common.report.live import Live

DASHBOARD = Path(__file__).parents[2] / "docs" / "dashboards" / "elasticflow.json"
_WORDS = {"by", "sum", "rate", "increase", "max", "min", "avg", "time", "clamp_min", "without"}


def metrics_of(run: Generated) -> dict[tuple[str, ...], float]:
    live = Live(run.run_dir, clock=lambda: run.now)
    live.update()
    text, kind = live.metrics("text/plain")
    assert kind.startswith("text/plain")
    return {
        (sample.name.removeprefix("elasticflow_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def launched(run: Generated) -> None:
    launcher = run_directory.this_launcher(["train.py"], max_workers=4, local=True)
    run_directory.write_launcher(run.run_dir, replace(launcher, num_workers=3))


def test_clock_of_the_server_that_is_behind_changes_no_value(tmp_path: Path) -> None:
    run = small(tmp_path)
    launched(run)
    right = metrics_of(run)
    run.now -= 60.0
    assert metrics_of(run) == right


def test_values_are_those_of_the_run(tmp_path: Path) -> None:
    run = small(tmp_path)
    launched(run)
    found = metrics_of(run)
    samples = BATCH * (90 * 3 + 40 * 2 + 70 * 3 + 20 * 2)
    expected = {
        ("workers",): 2,
        ("workers_wanted",): 3,
        ("view_generation",): 4,
        ("step",): 220,
        ("run_state", "running"): 1,
        ("run_state", "ended"): 0,
        ("changes_total", "lost"): 1,
        ("changes_total", "joined"): 1,
        ("changes_total", "left"): 1,
        ("changes_total", "rebuilt"): 0,
        ("samples_total",): samples,
        ("samples_undone_total",): 0,
        ("samples_dealt_again_total",): BATCH,
        ("checkpoints_total",): 2,
        ("checkpoint_failures_total",): 0,
        ("checkpoint_step",): 180,
        ("checkpoint_size_bytes",): 12_500_000,
        ("global_batch_samples",): 2 * BATCH,
        ("worker_slow", run.members[0]): 0,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["pause_seconds_total",] == pytest.approx(0.09)
    assert 0.8 < found["goodput_ratio",] < 1.0


def test_workers_that_are_gone_have_no_metrics(tmp_path: Path) -> None:
    run = small(tmp_path)
    workers = {labels[0] for name, *labels in metrics_of(run) if name.startswith("worker_")}
    assert workers == set(run.members)


def test_name_of_a_worker_cannot_forge_metrics(tmp_path: Path) -> None:
    run = Generated(tmp_path)
    name = 'x"} 1\nelasticflow_step 99\n#\\'
    run.view([name], "start")
    run.train(2)
    run.write()
    found = metrics_of(run)
    assert found["step",] == 2
    assert ("worker_slow", name) in found


def test_dashboard_asks_for_metrics_that_there_are(tmp_path: Path) -> None:
    run = small(tmp_path)
    launched(run)
    run.log(run.members[0], "epoch", epoch=0, length=10**6, epochs=3)
    run.train(1)
    run.write()
    known = {name for name, *_ in metrics_of(run)}
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 10
    for query in queries:
        names = re.findall(r"elasticflow_(\w+)", query)
        assert names, query
        assert set(names) <= known, query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    inputs = {one["name"] for one in board["__inputs"]}
    assert all(panel["datasource"]["uid"] in {f"${{{name}}}" for name in inputs} for panel in board["panels"])
