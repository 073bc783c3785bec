"""The state of a run as a table for people, and as JSON for programs."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ef_common.launch.run_directory import Launcher, read_launcher
from ef_common.report.status import Status, WorkerStatus, verdict
from ef_common.story import size_in_words

_GPU_LOOK_S = 5.0
_GPU_QUERY = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_MIB = 1 << 20
_STATES = {"running": "green", "stopping": "yellow", "finished": "green"}


@dataclass
class Usage:
    """The resources that the processes of a run's workers use, as far as they are on this machine."""

    _processes: dict[int, psutil.Process] = field(default_factory=dict)
    _gpu_memory: dict[int, int] = field(default_factory=dict)
    _gpu_at: float = -_GPU_LOOK_S

    def of(self, worker: WorkerStatus) -> dict[str, float | None]:
        """A worker's `cpu_percent` of one core since the last look, `memory_bytes`, and `gpu_memory_bytes`.

        At the first look it is the percentage since the process began. None where it is not known: on other machines,
        after the end, without a GPU.
        """
        found: dict[str, float | None] = dict.fromkeys(("cpu_percent", "memory_bytes", "gpu_memory_bytes"))
        if worker.host != socket.gethostname() or not worker.pid:
            return found
        try:
            known = self._processes.get(worker.pid)
            process = known or self._processes.setdefault(worker.pid, psutil.Process(worker.pid))
            if process.create_time() > worker.time:  # another process has its number
                return found
            percent = process.cpu_percent()  # the first call has nothing to compare with
            found["cpu_percent"] = percent if known else _percent_since_start(process)
            found["memory_bytes"] = process.memory_info().rss
        except psutil.Error:
            return found
        if time.monotonic() - self._gpu_at >= _GPU_LOOK_S:
            self._gpu_at, self._gpu_memory = time.monotonic(), _gpu_memory()
        found["gpu_memory_bytes"] = self._gpu_memory.get(worker.pid)
        return found


def _percent_since_start(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(100.0 * (used.user + used.system) / max(time.time() - process.create_time(), 0.1))


def _gpu_memory() -> dict[int, int]:
    """GPU memory of each process in bytes, according to the driver."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}
    try:
        told = subprocess.run([command, *_GPU_QUERY], capture_output=True, text=True, timeout=_GPU_LOOK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[int, int] = {}
    for line in told.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdecimal() and used.strip().isdecimal():
            found[int(pid)] = found.get(int(pid), 0) + int(used) * _MIB
    return found


# ---------------------------------------------------------------- for programs


def as_json(status: Status, usage: Usage, now: float) -> dict[str, Any]:
    """The whole state, as plain values.

    Args:
        status: Status of the run.
        usage: Resources that its processes use.
        now: In seconds since the epoch.
    """
    launcher = read_launcher(status.run_dir)
    eta_s = status.eta_s(now)
    return {
        "run": str(status.run_dir),
        "state": None if launcher is None else launcher.seen,
        "verdict": verdict(launcher) or None,
        "command": None if launcher is None else launcher.command,
        "workers_wanted": launcher.num_workers if launcher is not None and launcher.local else None,
        "max_workers": launcher.max_workers if launcher is not None and launcher.local else None,
        "world_size": len(status.members),
        "generation": status.generation,
        "step": status.step,
        "epoch": status.epoch,
        "num_epochs": status.num_epochs,
        "epoch_progress": status.progress,
        "eta_s": eta_s,
        "samples_per_s": status.samples_per_second(now),
        "global_batch_size": status.global_batch_size,
        "lr_scale": status.lr_scale,
        "num_changes": status.num_changes,
        "paused_s": status.paused_s,
        "num_checkpoints": status.num_checkpoints,
        "nodes_wanted": None if status.autoscale is None else status.autoscale["wanted"],
        "nodes_reason": None if status.autoscale is None else status.autoscale["reason"],
        "samples_per_s_by_nodes": {
            str(nodes): record["samples_per_s"] for nodes, record in sorted(status.throughputs.items())
        },
        "checkpoint_step": None if status.checkpoint is None else status.checkpoint["step"],
        "workers": [
            {
                "worker": name,
                "rank": rank,
                "pid": one.pid,
                "host": one.host,
                "step": one.step,
                "loss": one.loss,
                "samples_per_s": one.speed.at(now),
                "slow": one.slow,
                "heard_s_ago": now - one.time if one.time else None,
                **usage.of(one),
            }
            for rank, (name, one) in enumerate(_members(status))
        ],
        "changes": [{"time": change.time, "text": str(change)} for change in status.changes],
    }


def _members(status: Status) -> Iterator[tuple[str, WorkerStatus]]:
    for name in status.members:
        yield name, status.workers.get(name, WorkerStatus())


# ---------------------------------------------------------------- for people


def render(status: Status, usage: Usage, now: float) -> Group:
    """The state as a table.

    Args:
        status: Status of the run.
        usage: Resources that its processes use.
        now: In seconds since the epoch.
    """
    launcher = read_launcher(status.run_dir)
    head = Table.grid(padding=(0, 2))
    for name, value in _facts(status, launcher, now):
        head.add_row(Text(name, style="bold"), Text(value) if isinstance(value, str) else value)
    rows = [(name, one, usage.of(one)) for name, one in _members(status)]
    has_gpu = any(used["gpu_memory_bytes"] for _, _, used in rows)
    has_hosts = any(one.host not in ("", socket.gethostname()) for _, one, _ in rows)
    workers = Table("rank", show_edge=False)
    workers.add_column("worker", overflow="fold")  # the only one that gives way on a narrow terminal
    for title in ("pid", *(["host"] if has_hosts else []), "step", "loss", "samples/s", "CPU", "memory"):
        workers.add_column(title, no_wrap=True)
    for title in (*(["GPU memory"] if has_gpu else []), "seen"):
        workers.add_column(title, no_wrap=True)
    for rank, (name, one, used) in enumerate(rows):
        cpu, memory, gpu = used.values()
        workers.add_row(
            str(rank),
            escape(name) + (" [yellow]slow[/]" if one.slow else ""),
            str(one.pid or ""),
            *([escape(one.host)] if has_hosts else []),
            str(one.step),
            "" if one.loss is None else f"{one.loss:.4g}",
            f"{one.speed.at(now):.0f}",
            "" if cpu is None else f"{cpu:.0f} %",
            _size(memory),
            *([_size(gpu)] if has_gpu else []),
            _ago(now - one.time) if one.time else "",
        )
    changes = Table("when", "what", show_edge=False)
    for change in status.changes:
        changes.add_row(_ago(now - change.time), escape(str(change)))
    return Group(head, "", workers, "", changes)


def _facts(status: Status, launcher: Launcher | None, now: float) -> Iterator[tuple[str, Text | str]]:
    yield "run", str(status.run_dir)
    if launcher is not None:
        state = verdict(launcher) or launcher.seen
        yield "state", Text(state, style=_STATES.get(state, "red" if launcher.over else ""))
        yield "command", f"{' '.join(launcher.command)} (launcher: process {launcher.pid})"
    wanted = ""
    if launcher is not None and launcher.local and launcher.alive:
        wanted = f" of {launcher.num_workers} wanted (at most {launcher.max_workers})"
    yield "workers", f"{len(status.members)}{wanted}, view {status.generation}"
    yield "progress", _progress(status, now)
    batch = "" if status.global_batch_size is None else f", global batch of {status.global_batch_size}"
    scale = "" if status.lr_scale in (None, 1.0) else f", learning rate × {status.lr_scale:.3g}"
    yield "speed", f"{status.samples_per_second(now):.0f} samples/s{batch}{scale}"
    if status.throughputs:
        yield "measured", _measured(status)
    if status.autoscale is not None:
        yield "autoscale", f"{size_in_words(status.autoscale)} ({_ago(now - status.autoscale['time'])})"
    if status.num_changes:
        plural = "s" if status.num_changes > 1 else ""
        yield "changes", f"{status.num_changes} change{plural} of workers, {status.paused_s:.3g} s of pauses"
    if status.checkpoint is not None:
        when = _ago(now - status.checkpoint["time"])
        size = status.checkpoint["bytes"] / 1e6
        yield "checkpoint", f"step {status.checkpoint['step']}, {when} ({size:.1f} MB; {status.num_checkpoints} saved)"
    if status.latest is not None:
        yield "latest", f"{status.latest} ({_ago(now - status.latest.time)})"


def _progress(status: Status, now: float) -> str:
    of_all = "" if status.num_epochs is None else f" of {status.num_epochs}"
    part = "" if status.progress is None else f", {status.progress:.0%} of it"
    eta_s = status.eta_s(now)
    left = "" if eta_s is None else f", about {_rough(eta_s)} left"
    return f"step {status.step}, epoch {status.epoch + 1}{of_all}{part}{left}"


def _measured(status: Status) -> str:
    """The throughput at each number of nodes."""
    found = sorted(status.throughputs.items())
    sizes = ", ".join(f"{nodes} node{'s' * (nodes > 1)}: {one['samples_per_s']:.0f}" for nodes, one in found)
    newest = max(status.throughputs.values(), key=lambda one: float(one["time"]))
    pause = f"; a change pauses training for {newest['change_s']:.2g} s" if "change_s" in newest else ""
    noise = f"; noise scale {newest['noise_scale']:.4g}" if "noise_scale" in newest else ""
    return f"{sizes} samples/s{pause}{noise}"


def _ago(seconds: float) -> str:
    return "now" if seconds < 1.0 else f"{_rough(seconds)} ago"


def _rough(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(number: float | None) -> str:
    return "" if number is None else f"{number / _MIB:.0f} MiB"
