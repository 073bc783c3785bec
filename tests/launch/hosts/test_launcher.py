"""The launcher of a job on a list of hosts, without hosts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ef_common.core.hosts import Host
from ef_common.launch import run_directory
from ef_common.launch.hosts.launcher import HostsLauncher
from ef_common.launch.hosts.list import HostList


@pytest.fixture
def hosts() -> HostList:
    found = HostList(lambda: "", slots=1, source="hosts.txt", say=lambda text: None)
    found.hosts = (Host("a", 1), Host("b", 2))
    return found


@pytest.fixture
def launcher(hosts: HostList, tmp_path: Path) -> HostsLauncher:
    nobody: Any = None
    settings: dict[str, Any] = {"signals": [], "failure": lambda: "", "patience_s": 60.0}
    made = HostsLauncher(hosts, nobody, run_directory.create("x.py", tmp_path / "run"), ["x.py"], **settings)
    made._follow_list()
    made._tell()
    return made


def test_wish_for_a_host_that_has_just_been_added_ends_no_job(launcher: HostsLauncher, hosts: HostList) -> None:
    hosts.hosts = (*hosts.hosts, Host("c", 4))  # which the directory does not say yet
    launcher._order_nodes(3)
    assert launcher._hosts._most == 7


def test_job_is_scaled_by_itself_without_its_directory(launcher: HostsLauncher, tmp_path: Path) -> None:
    launcher._order_nodes(2)
    launcher._follow_order()
    assert launcher._hosts._most == 3
    shutil.rmtree(tmp_path / "run")
    launcher._order_nodes(1)
    launcher._follow_order()
    launcher._tell(state="stopping")
    assert launcher._hosts._most == 1
