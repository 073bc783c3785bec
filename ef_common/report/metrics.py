"""The state of a run as metrics for Prometheus.

Their number grows with the workers that are in the job now, not with those that ever were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ef_common.launch.run_directory import Launcher
from ef_common.report.timeline import Timeline

PREFIX = "elasticflow_"
STATES = ("running", "stopping", "ended", "lost", "unknown")
TONES = ("lost", "left", "joined", "rebuilt")


class RunCollector(Collector):
    """Reports a run to Prometheus's client.

    Args:
        timeline: Timeline of the run.
        launcher: State of its launcher; None if it had none.
        now: In seconds since the epoch.
    """

    def __init__(self, timeline: Timeline, launcher: Launcher | None, now: float) -> None:
        self._timeline, self._launcher = timeline, launcher
        self._now = timeline.not_before_newest(now)

    def collect(self) -> Iterator[Metric]:
        yield from self._of_the_job()
        yield from self._of_its_past()
        yield from self._of_checkpoints()
        yield from self._of_workers()

    def _of_the_job(self) -> Iterator[Metric]:
        status, launcher = self._timeline.status, self._launcher
        state = "unknown" if launcher is None else launcher.seen
        yield _labelled("run_state", "1 for the state that the run is in.", "state", [(s, s == state) for s in STATES])
        yield _gauge("workers", "Workers in the current view.", len(status.members))
        if launcher is not None and launcher.local:
            yield _gauge("workers_wanted", "Workers that the launcher is to have.", launcher.num_workers)
        yield _gauge("view_generation", "Number of the current view.", status.generation)
        yield _gauge("step", "Updates of the current training.", status.step)
        yield _gauge("epoch", "Current epoch, from 0 on.", status.epoch)
        yield _gauge("epoch_progress_ratio", "Part of the epoch that is done.", status.progress)
        yield _gauge("eta_seconds", "Time until the last epoch ends.", status.eta_s(self._now))
        yield _gauge("samples_per_second", "Samples of all workers lately.", status.samples_per_second(self._now))
        losses = [status.workers[name].loss for name in status.members if name in status.workers]
        known = [loss for loss in losses if loss is not None]
        yield _gauge("loss", "Mean of the workers' newest losses.", sum(known) / len(known) if known else None)
        yield _gauge("global_batch_samples", "Samples of an update.", status.global_batch_size)
        yield _gauge("lr_scale_ratio", "Factor of the learning rate.", status.lr_scale)
        yield _gauge("last_event_timestamp_seconds", "Time of the newest event.", self._timeline.newest or None)

    def _of_its_past(self) -> Iterator[Metric]:
        timeline, status, ledger = self._timeline, self._timeline.status, self._timeline.ledger
        changes = Counter(timeline.tones)
        yield _labelled(
            "changes", "Changes of the workers.", "kind", [(t, changes[t]) for t in TONES], CounterMetricFamily
        )
        yield _counter("pause_seconds", "Pauses for these changes.", status.paused_s)
        yield _counter("samples", "Samples that were trained.", ledger.samples + ledger.undone_samples)
        yield _counter("samples_undone", "Samples of updates that were undone.", ledger.undone_samples)
        yield _counter("samples_dealt_again", "Samples of lost workers, dealt again.", status.num_dealt_again)
        yield _counter("steps_repeated", "Steps that workers have made again.", ledger.num_repeated)
        yield _gauge("goodput_ratio", "Part of the workers' time that was kept training.", timeline.goodput(self._now))

    def _of_checkpoints(self) -> Iterator[Metric]:
        status, newest = self._timeline.status, self._timeline.status.checkpoint
        yield _counter("checkpoints", "Checkpoints that were saved.", status.num_checkpoints)
        yield _counter(
            "checkpoint_failures", "Attempts to save one that failed.", self._timeline.num_failed_checkpoints
        )
        if newest is not None:
            yield _gauge("checkpoint_step", "Update of the newest checkpoint.", newest["step"])
            yield _gauge("checkpoint_timestamp_seconds", "Time of the newest checkpoint.", newest["time"])
            yield _gauge("checkpoint_duration_seconds", "What its saving took.", newest["seconds"])
            yield _gauge("checkpoint_size_bytes", "Its size.", newest["bytes"])

    def _of_workers(self) -> Iterator[Metric]:
        status = self._timeline.status
        workers = [(name, status.workers[name]) for name in status.members if name in status.workers]
        speeds = [(name, one.speed.at(self._now)) for name, one in workers]
        yield _labelled("worker_samples_per_second", "Samples of a worker lately.", "worker", speeds)
        yield _labelled(
            "worker_slow", "1 if it keeps the others waiting.", "worker", [(n, one.slow) for n, one in workers]
        )
        heard = [(name, one.time) for name, one in workers]
        yield _labelled("worker_last_event_timestamp_seconds", "Time of its newest event.", "worker", heard)


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """A gauge, without a value if that is unknown."""
    family = GaugeMetricFamily(PREFIX + name, text)
    if value is not None:
        family.add_metric([], float(value))
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=float(value))


def _labelled(
    name: str,
    text: str,
    label: str,
    values: Iterable[tuple[str, float]],
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    family = kind(PREFIX + name, text, labels=[label])
    for value_of_label, value in values:
        family.add_metric([value_of_label], float(value))
    return family
