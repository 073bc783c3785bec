"""What a launcher says in the directory of its run, and what is ordered of it there.

The job needs none of that: it outlives the directory, whether its disk is full, its mount is lost, or it was removed.
"""

from __future__ import annotations

from pathlib import Path

from ef_common.launch import run_directory
from ef_common.launch.run_directory import Launcher, ScaleOrder
from ef_common.terminal import say


class LauncherFile:
    """The file of one launcher. What cannot be written or read is said once, and again if it could be meanwhile.

    Args:
        run_dir: Directory of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._said: set[str] = set()

    def write(self, launcher: Launcher) -> None:
        """Tell the state, if that is possible now."""
        try:
            run_directory.write_launcher(self._run_dir, launcher)
            self._said.clear()
        except OSError as error:
            self._say(f"cannot be written ({error.strerror}): the job goes on, but `elasticflow status` cannot see it")

    def order(self) -> ScaleOrder | None:
        """The newest order that can be read."""
        try:
            return run_directory.read_order(self._run_dir)
        except (OSError, TypeError, ValueError) as error:
            self._say(f"cannot be read ({error}): the job goes on, but it cannot be scaled")
            return None

    def _say(self, problem: str) -> None:
        if problem not in self._said:
            self._said.add(problem)
            say(f"the run directory {self._run_dir} {problem}", color="yellow", event="run_directory_lost")
