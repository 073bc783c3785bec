from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ef_common.launch.hung import end_if_hung

_PROGRAM = """
import threading, time
from ef_common.launch.hung import end_if_hung

inside = threading.Event()

def wait_for_nothing():
    inside.set()
    time.sleep(600)

def end():
    inside.wait()
    end_if_hung("w1 hung", threading.Event(), grace_s=0.1)

threading.Thread(target=end).start()
wait_for_nothing()
"""


def test_process_whose_main_thread_hangs_tells_where_and_ends() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    first, *stacks = done.stderr.splitlines()
    assert first == "elasticflow: this worker keeps the others waiting: w1 hung. What it does:"
    assert any("in wait_for_nothing" in line for line in stacks)


def test_process_whose_main_thread_comes_back_goes_on() -> None:
    heard = threading.Event()
    threading.Timer(0.05, heard.set).start()
    began = time.monotonic()
    end_if_hung("w1 hung", heard, grace_s=60.0)
    assert time.monotonic() - began < 30.0  # and this process is still there


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_process_ends_whatever_keeps_it_from_telling_where(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    ended: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process, number: ended.append((process, number)))
    monkeypatch.setattr(faulthandler, "dump_traceback", fail)
    with contextlib.suppress(SystemExit):
        end_if_hung("w1 hung", threading.Event(), grace_s=0.01)
    assert ended == [(os.getpid(), signal.SIGKILL)]
