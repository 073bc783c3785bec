from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from ef_common.launch.leaving import exit_cleanly

class Holder:
    def __init__(self, path):
        self.file = open(path, "w")
        self.itself = self

holder = Holder(sys.argv[1])
holder.file.write("all of it")
open(sys.argv[1] + ".closed", "w").close()
exit_cleanly("told to go")
"""


def test_worker_that_leaves_loses_nothing_that_is_in_an_open_file_of_a_cycle(tmp_path: Path) -> None:
    path = tmp_path / "file"
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert path.read_text() == "all of it"


COLLECTING = """
import atexit, gc, sys

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        sys.stderr.write("collected")

cycle = Cycle()
if sys.argv[1] == "soon":
    from ef_common.launch.ending import end_soon
    atexit.register(end_soon)
"""


def test_end_collects_no_garbage() -> None:
    ends = [
        subprocess.run([sys.executable, "-c", COLLECTING, how], capture_output=True, text=True).stderr
        for how in ("soon", "plain")
    ]
    assert ends == ["", "collected"]
