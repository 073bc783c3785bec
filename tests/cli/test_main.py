"""The process of a command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

IN_A_CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--mount-proc")
IMPORTING = """
import os, time
import ef_common.cli.__main__ as module

def main():
    print(os.getpid(), flush=True)
    time.sleep(600)

module.main = main
module.command()
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*IN_A_CONTAINER, "true"], capture_output=True).returncode != 0,
    reason="needs the right to make a namespace of processes",
)
def test_first_process_of_a_container_ends_when_it_is_told_before_it_has_a_handler() -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [*IN_A_CONTAINER, sys.executable, "-c", IMPORTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as container:
        assert container.stdout is not None
        assert container.stdout.readline() == b"1\n"
        (first,) = psutil.Process(container.pid).children()
        try:
            first.send_signal(signal.SIGTERM)
            assert container.wait(60) == 128 + signal.SIGTERM
        finally:
            if first.is_running():
                first.kill()
