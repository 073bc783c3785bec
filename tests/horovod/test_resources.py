"""Cores and memory within the limits of control groups, which stand in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common.horovod import build, resources

GIB = 1 << 30


class Machine:
    """A machine with 256 GiB and 64 cores.

    Args:
        root: Where its files are.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {256 << 20} kB")

    def write(self, path: str, text: object) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def group(self, path: str, **files: object) -> None:
        """Write files of a control group."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(resources, "_ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    return Machine(tmp_path)


def test_machine_without_limits_has_all_its_memory_and_cores(machine: Machine) -> None:
    assert (resources.available_bytes(), resources.num_cores()) == (256 * GIB, 64)
    machine.write("proc/self/cgroup", "0::/")
    machine.group("pod", memory__max="max", memory__current=GIB, cpu__max="max 100000")
    machine.write("proc/self/cgroup", "0::/pod")
    assert (resources.available_bytes(), resources.num_cores()) == (256 * GIB, 64)
    assert build.num_jobs() == 64


def test_pod_has_what_its_group_leaves(machine: Machine) -> None:
    """In a container, the path of the own group is the top. Cached files make room when there is need."""
    machine.write("proc/self/cgroup", "0::/")
    machine.group("", memory__max=12 * GIB, memory__current=6 * GIB, cpu__max="350000 100000")
    machine.group("", memory__stat=f"anon {4 * GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}")
    assert (resources.available_bytes(), resources.num_cores()) == (8 * GIB, 3)
    assert build.num_jobs() == 3


def test_group_of_version_1_counts_as_well(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "5:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a")
    machine.group("memory", memory__limit_in_bytes=8 * GIB, memory__usage_in_bytes=5 * GIB)
    machine.group("memory", memory__stat=f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0")
    machine.group("cpu", cpu__cfs_quota_us=50000, cpu__cfs_period_us=100000)
    assert (resources.available_bytes(), resources.num_cores()) == (4 * GIB, 1)
    machine.group("cpu", cpu__cfs_quota_us=-1)
    assert (resources.num_cores(), build.num_jobs()) == (64, 2)


@pytest.mark.parametrize("limited", ["slurm", "slurm/job_7", "slurm/job_7/step_0"])
def test_limit_of_any_group_above_holds(machine: Machine, limited: str) -> None:
    machine.write("proc/self/cgroup", "0::/slurm/job_7/step_0")
    for group in ("slurm", "slurm/job_7", "slurm/job_7/step_0"):
        machine.group(group, memory__max="max", memory__current=GIB, cpu__max="max 100000")
    machine.group(limited, memory__max=9 * GIB, cpu__max="600000 100000")
    assert (resources.available_bytes(), resources.num_cores()) == (8 * GIB, 6)


def test_group_that_uses_more_than_its_limit_has_nothing_left(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/")
    machine.group("", memory__max=4 * GIB, memory__current=5 * GIB)
    with pytest.raises(build.BuildError, match=r"Available: 0\.0 GiB"):
        build.num_jobs()


def test_no_more_cores_than_the_process_may_run_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {8, 9, 10, 11})
    assert build.num_jobs() == 4
