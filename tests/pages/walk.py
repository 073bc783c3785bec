"""Follows the commands of a page, in its order, in a folder of its own, as a reader does in several shells."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ef_common.events import Record
from ef_common.launch import environment
from ef_common.testing.harness_run import GUARD_S, HEARTBEAT_TIMEOUT_S, HarnessError, Run
from ef_common.testing.ports import reserve_port
from tests.pages.blocks import ROOT, Block, all_blocks
from tests.pages.rows import AN_EPOCH, PROGRAMS, followed

_SOURCES = {"train.py": "README.md: Lightning", "notebook.py": "docs/get-started/notebook.md: In a notebook"}
"""The programs of which pages tell are those that they show."""
_ENOUGH = 100_000  # samples: a training that does not end before somebody ends it
_STEPS = 20
_POLL_S = 0.1


class _Started(Run):
    """A job that a command has started."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], output: Path) -> None:
        super().__init__(directory)
        self.process = process
        self._output = output

    def check(self) -> None:
        if self.process.poll() is not None:
            raise HarnessError(f"the command has ended ({self.process.returncode})\n{self.tails()}")

    def tails(self) -> str:
        return self._output.read_text(errors="replace")


class Walk:
    """A reader of a page.

    Args:
        folder: Where the reader works; empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = reserve_port()
        self._exports: list[str] = []
        self._job: _Started | None = None
        self._outputs: list[Path] = []
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "job-token").write_text("a secret of the tests of the pages\n")
        blocks = {block.name: block for block in all_blocks("python")}
        for name, source in _SOURCES.items():
            taken = (
                f"from tests.pages import preambles\n\nglobals().update(preambles.{PROGRAMS[source].preamble}())\n\n"
            )
            (folder / name).write_text(taken + blocks[source].code + "\n")

    @property
    def printed(self) -> str:
        """All that the commands have printed."""
        return "".join(path.read_text(errors="replace") for path in self._outputs)

    def follow(self, given: Sequence[str], blocks: Sequence[Block]) -> None:
        """Give the commands that go before, and those of the blocks which are to be followed."""
        with self._ended():
            for command in given:
                if command == AN_EPOCH:
                    self._started().wait_for("epoch_end")
                else:
                    self._step(followed(command) or "start", command)
            for block in blocks:
                self._exports.clear()
                for command in block.commands:
                    if step := followed(command):
                        self._step(step, command)
            self.interrupt()

    def _step(self, name: str, command: str) -> None:
        getattr(self, name)(self._here(command))

    # ------------------------------------------------------------ steps

    def start(self, command: str) -> None:
        """Start a job in a shell of its own, and wait until it trains."""
        self.interrupt()
        before = set(self._runs())
        named = [] if "elasticflow run" in command or "notebook" in command else [f"runs/{len(self._outputs)}"]
        exports = [f"export {environment.RUN_DIR}={place}" for place in named] + self._exports
        process = self._open("\n".join([*exports, f"exec {command}" if command[0].islower() else command]))
        output = self._outputs[-1]
        found = re.findall(rf"{environment.RUN_DIR}=(\S+)", "\n".join(exports))
        while not found:
            time.sleep(_POLL_S)
            found = [str(path) for path in self._runs() if path not in before and (path / "launcher.json").exists()]
            if not found and process.poll() is not None:
                raise HarnessError(f"{command} has ended ({process.returncode})\n{output.read_text()}")
        self._job = _Started(self._folder / found[-1], process, output)
        self._job.wait_for_step(_STEPS)

    def kill(self, command: str) -> None:
        """Kill the newest worker of the job. The others go on, and it is replaced."""
        job = self._started()
        view = max(job.events("view"), key=lambda event: int(event["generation"]))
        pid = next(event["pid"] for event in job.events("start") if event["worker"] == view["members"][-1])
        self.call(command.replace("PID", str(pid)))
        left = self._view(view["world_size"] - 1, after=view["generation"])
        self._view(view["world_size"], after=left)

    def _view(self, world_size: int, *, after: int) -> int:
        """Wait for a view of this size. Returns its generation."""

        def newer(events: list[Record]) -> list[int]:
            views = [event for event in events if event["kind"] == "view" and event["world_size"] == world_size]
            return [event["generation"] for event in views if event["generation"] > after]

        return min(self._started().wait_until(newer, f"a view of {world_size} after generation {after}"))

    def scale(self, command: str) -> None:
        """Returns when the job has so many workers, and the audit says whether that was so."""
        self.call(command)
        wanted = int(command.split()[-1])
        self._started().wait_for("view", world_size=wanted)

    def stop(self, command: str) -> None:
        job = self._started()
        self.call(command)
        job.process.wait(GUARD_S)

    def audit(self, command: str) -> None:
        """Pages say Ctrl-C before it."""
        self.interrupt()
        self.call(command)

    def export(self, command: str) -> None:
        """Holds for the commands of the same block."""
        self._exports.append(command)
        self.call(command)

    def call(self, command: str) -> None:
        """Give a command that ends by itself, and without an error."""
        process = self._open("\n".join(["set -e", *self._exports, command]))
        if process.wait(GUARD_S) != 0:
            job = "" if self._job is None else self._job.tails()
            raise HarnessError(f"{command}: {process.returncode}\n{self._outputs[-1].read_text()}\n--- the job\n{job}")

    def interrupt(self) -> None:
        """Press Ctrl-C in the shell of the job, if it has not ended."""
        if self._job is not None and self._job.process.poll() is None:
            os.killpg(self._job.process.pid, signal.SIGINT)
            self._job.process.wait(GUARD_S)

    # ------------------------------------------------------------ shells

    def _here(self, command: str) -> str:
        """The command with what stands for something in it: a host, a folder, a run."""
        port = self._port.getsockname()[1]
        for general, particular in {
            "HOST:29400": f"localhost:{port}",
            "localhost:29400": f"localhost:{port}",
            "/mnt/shared": str(self._folder),
            "/run/secrets": str(self._folder),
        }.items():
            command = command.replace(general, particular)
        if self._job is not None and environment.RUN_DIR not in "\n".join([*self._exports, command]):
            command = re.sub(r"elasticflow-runs/train-…|(?<= )runs/1\b", str(self._job.directory), command)
        return command

    def _started(self) -> _Started:
        if self._job is None:
            raise HarnessError("no job has been started yet")
        return self._job

    def _runs(self) -> list[Path]:
        return sorted((self._folder / "elasticflow-runs").glob("*"), key=lambda path: path.stat().st_mtime)

    def _open(self, script: str) -> subprocess.Popen[bytes]:
        self._outputs.append(self._folder / f"output-{len(self._outputs)}.txt")
        variables = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "PYTHONWARNINGS": "ignore",
            "COLUMNS": "200",
            "CUDA_VISIBLE_DEVICES": "",
            "SAMPLES": str(_ENOUGH),
            "STEP_SECONDS": "0.05",
            environment.HEARTBEAT_TIMEOUT: str(HEARTBEAT_TIMEOUT_S),
        }
        with self._outputs[-1].open("wb") as output:
            return subprocess.Popen(
                ["bash", "--norc", "-c", script],
                cwd=self._folder,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """Whatever happens, no process is left."""
        try:
            yield
        finally:
            self._port.close()
            if self._job is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._job.process.pid, signal.SIGTERM)
                    self._job.process.wait(GUARD_S)
