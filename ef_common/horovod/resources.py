"""What this process may use of its machine: cores and memory, within the limits of its control groups.

A container, and a job of Slurm, is a control group (cgroup) or lies within one. Each group above it may limit it as
well. In a container, only the lowest ones can be seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_MEMORY = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Names in versions 2 and 1: the limit, what is used, and what the kernel gives up of that before it kills anybody."""


def available_bytes() -> int:
    """Memory that is available without swapping."""
    lines = _lines(_ROOT / "proc/meminfo")
    machine = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not machine:
        machine = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    return max(0, min([*machine, *_left_in_groups()]))


def num_cores() -> int:
    """Cores that can be busy all the time; at least 1."""
    return max(1, int(min([len(os.sched_getaffinity(0)), *_cores_of_groups()])))


def _left_in_groups() -> Iterator[int]:
    for group in _groups("memory"):
        for limit_name, used_name, cached in _MEMORY:
            limit, used = _lines(group / limit_name), _lines(group / used_name)
            if limit and used and limit[0].isdecimal():
                stat = dict(line.split() for line in _lines(group / "memory.stat"))
                yield int(limit[0]) - int(used[0]) + sum(int(stat.get(name, 0)) for name in cached)


def _cores_of_groups() -> Iterator[float]:
    for group in _groups("cpu"):
        words = " ".join(_lines(group / "cpu.max")).split()  # version 2
        words = words or [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
        if len(words) == 2 and words[0].isdecimal():  # no limit is "max" or -1
            yield int(words[0]) / int(words[1])


def _groups(controller: str) -> Iterator[Path]:
    """The directories of this process's group and of all above it; some of them may not be visible."""
    for line in _lines(_ROOT / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):  # version 2 has one tree for all controllers
            top = _ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            names = path.strip("/").split("/")
            yield from (top.joinpath(*names[:depth]) for depth in range(len(names) + 1))


def _lines(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
