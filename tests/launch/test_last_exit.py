from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time

class Held:
    def __del__(self):
        sys.stderr.write("let go of, ")

def work():
    time.sleep(0.2)
    sys.stderr.write("worked, ")

def end():
    sys.stderr.write("ended, ")

held = Held()
atexit.register(end)
threading.Thread(target=work).start()
sys.stdout.write("all of it")
"""
AT_ONCE = "from ef_common.launch.last_exit import end_at_once; end_at_once(3)"
COMMAND = """
import sys
from unittest.mock import patch
from ef_common.cli.__main__ import command

sys.argv[1:] = ["run", "train.py"]
with patch("ef_common.launch.command.main", lambda arguments: 3):
    command()
"""


def outcome(*parts: str) -> tuple[int, str, str]:
    ended = subprocess.run([sys.executable, "-c", "\n".join(parts)], capture_output=True, text=True)
    return ended.returncode, ended.stdout, ended.stderr


def test_end_at_once_waits_and_calls_as_the_interpreter_does_and_lets_go_of_nothing() -> None:
    assert outcome(PROGRAM, AT_ONCE) == (3, "all of it", "worked, ended, ")
    assert outcome(PROGRAM, "sys.exit(3)") == (3, "all of it", "worked, ended, let go of, ")


def test_end_at_once_needs_no_output() -> None:
    assert outcome(PROGRAM, "sys.stdout = None", AT_ONCE) == (3, "", "worked, ended, ")
    assert outcome(PROGRAM, "sys.stdout.close()", AT_ONCE)[0] == 3


def test_command_that_has_run_a_job_ends_at_once() -> None:
    assert outcome(PROGRAM, COMMAND) == (3, "all of it", "worked, ended, ")
