"""Loggers go on in the same run when rank 0 is lost, and when a worker joins."""

from __future__ import annotations

import importlib.util
import json
import signal
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests.lightning import loggers
from tests.lightning.conftest import HOSTS

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def csv_runs(directory: Path) -> dict[str, set[int]]:
    runs = {}
    for path in directory.rglob("metrics.csv"):
        header, *rows = [line.split(",") for line in path.read_text().splitlines()]
        runs[path.parent.name] = {int(row[header.index("step")]) for row in rows}
    return runs


def tensorboard_runs(directory: Path) -> dict[str, set[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        runs = {}
        for path in {path.parent for path in directory.rglob("events.out.*")}:
            events = EventAccumulator(str(path))
            events.Reload()
            runs[path.name] = {event.step for event in events.Scalars("number")}
        return runs


MLFLOW = {"mlflow": "sqlite:///{}.db", "mlflow-files": "file:{}"}
"""Where it keeps its runs."""


def mlflow_runs(directory: Path, kind: str) -> dict[str, set[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        client = MlflowClient(MLFLOW[kind].format(directory))
        experiment = client.get_experiment_by_name("experiment")
        found = client.search_runs([experiment.experiment_id])
        assert {run.info.status for run in found} == {"FINISHED"}
        return {
            run.info.run_id: {metric.step for metric in client.get_metric_history(run.info.run_id, "number")}
            for run in found
        }


def prepare_mlflow(directory: Path, kind: str) -> None:
    """MLflow's tables, or files, are made by one process, or two of them make them at once, of which one fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        MlflowClient(MLFLOW[kind].format(directory)).search_experiments()


def wandb_runs(directory: Path) -> dict[str, set[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from wandb.proto import wandb_internal_pb2

    runs: dict[str, set[int]] = {}
    for path in directory.rglob("run-*.wandb"):
        steps = runs.setdefault(path.stem.removeprefix("run-"), set())
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if "number" in items:
                steps.add(int(items["trainer/global_step"]))
    return runs


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Records of a file of W&B's: in blocks of 32 KiB, each part with a checksum, its length, and which part it is."""
    offset, record = 7, b""
    while offset + 7 <= len(content):
        if (left := -offset % 32768) and left < 7:
            offset += left  # padding
            continue
        length, part = struct.unpack_from("<HB", content, offset + 4)
        if offset + 7 + length > len(content):
            return  # torn
        record += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if part in (1, 4):  # whole, or the last one
            yield record
            record = b""


def comet_runs(directory: Path) -> dict[str, set[int]]:
    """What was archived; a killed process archives nothing."""
    runs: dict[str, set[int]] = {}
    for path in directory.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            lines = archive.read("messages.json").splitlines() if "messages.json" in archive.namelist() else []
        metrics = [json.loads(line)["payload"].get("metric") for line in lines]
        steps = {metric["step"] for metric in metrics if metric and metric["metricName"] == "number"}
        if steps:
            runs.setdefault(path.name.split("-")[0], set()).update(steps)
    return runs


KINDS: dict[str, tuple[str, Callable[[Path], dict[str, set[int]]]]] = {
    "csv": ("csv", csv_runs),
    "tensorboard": ("tensorboard", tensorboard_runs),
    "wandb": ("wandb", wandb_runs),
    "mlflow": ("mlflow", lambda directory: mlflow_runs(directory, "mlflow")),
    "mlflow-files": ("mlflow", lambda directory: mlflow_runs(directory, "mlflow-files")),
    "comet": ("comet_ml", comet_runs),
}


@pytest.fixture
def runs(job: Job, kind: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, set[int]]]:
    """Asks for the steps of each run that this kind of logger has written."""
    package, runs_of = KINDS[kind]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'elasticflow-training[loggers]'")
    directory = job.directory / "logged"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if kind in MLFLOW:
        prepare_mlflow(directory, kind)
    return lambda: runs_of(directory)


def missing_steps(job: Job, runs: dict[str, set[int]], result: dict[str, Any]) -> set[int]:
    """Steps that the only run has not; it is the one that the first rank 0 has begun."""
    (run,) = runs
    assert result["version"] == (job.directory / "version").read_text()
    assert run in (result["version"], f"version_{result['version']}")
    return set(range(result["step"])) - runs[run]


@pytest.mark.parametrize("kind", KINDS)
def test_logger_goes_on_in_the_same_run_without_rank_0(
    job: Job, kind: str, runs: Callable[[], dict[str, set[int]]]
) -> None:
    workers = job.start_world(2, loggers.run, HOSTS[0], kind, "dies")
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0]
    (result,) = [worker.result() for worker in workers if worker.wait() == 0]
    # W&B and Comet write late, so what the killed process had given them is lost with it.
    lost = set(range(loggers.DIES_AT)) if kind in ("wandb", "comet") else set()
    assert missing_steps(job, runs(), result) <= lost


@pytest.mark.parametrize("kind", KINDS)
def test_logger_goes_on_in_the_same_run_in_a_newcomer_that_becomes_rank_0(
    job: Job, kind: str, runs: Callable[[], dict[str, set[int]]]
) -> None:
    (founder,) = job.start_world(1, loggers.run, HOSTS[0], kind, "hands over")
    job.wait_for_step(2)
    newcomer = job.start(loggers.run, HOSTS[0], kind, "hands over")
    assert founder.wait() == -signal.SIGKILL
    result = newcomer.result()
    missing = missing_steps(job, runs(), result)
    own = set(range(result["step"] - loggers.NUM_STEPS, result["step"]))
    assert not missing & own
    assert not missing or kind in ("wandb", "comet")
