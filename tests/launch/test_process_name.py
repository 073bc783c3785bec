"""Names of processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ef_common.launch import process_name as names
from ef_common.launch.process_name import process_name


def test_process_keeps_its_name_when_the_clock_is_set(set_clock: Callable[[], None]) -> None:
    before, began = process_name(os.getpid()), psutil.Process().create_time()
    set_clock()
    assert process_name(os.getpid()) == before != ""
    assert psutil.Process().create_time() != began  # as which process_name does not do


def test_process_whose_program_has_brackets_in_its_name_has_one(tmp_path: Path) -> None:
    program = tmp_path / "a) Z 1 2 ("
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "600"])
    try:
        while Path(f"/proc/{process.pid}/comm").read_text().strip() != program.name:
            time.sleep(0.01)
        name = process_name(process.pid)
        assert name.partition("/")[2].isdecimal()
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_name(process.pid) == ""  # it is not reaped yet
        process.wait()
    assert process_name(process.pid) == ""


def test_process_has_a_name_where_the_start_of_the_system_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_BOOT", tmp_path / "hidden")
    assert process_name(os.getpid()).startswith("/")
