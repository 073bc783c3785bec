"""Coordinators as processes of their own, which need no torch: they are light, so there can be many."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.waiting import poll_until

GUARD_S = 120.0


class Alone:
    """A process of `elasticflow coordinator`."""

    def __init__(self, output: Path, site: Path, *options: str, prefix: Sequence[str] = ()) -> None:
        self._output = output
        path = os.pathsep.join([str(site), *filter(None, sys.path)])
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "ELASTICFLOW_"))}
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "ef_common.cli", "coordinator", *options],
                env={**environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def said(self, words: str) -> bool:
        """Whether it has said that; it has not ended without saying it."""
        text = self._output.read_text()
        assert self.process.poll() is None or words in text, text
        return words in text

    def wait_for(self, words: str) -> None:
        """Wait until it says that."""
        poll_until(lambda: self.said(words), guard_s=GUARD_S)

    def end(self) -> int:
        """Tell it to end; its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GUARD_S)


@contextlib.contextmanager
def coordinators(directory: Path) -> Iterator[Callable[..., Alone]]:
    """Starts them, with an endpoint and options, where torch cannot be imported; ends them."""
    site = directory / "site"
    site.mkdir()
    (site / "torch.py").write_text("raise ImportError('a coordinator needs no torch')")
    started: list[Alone] = []

    def start(endpoint: str, *options: str, conf: str = "", prefix: Sequence[str] = ()) -> Alone:
        output = directory / f"coordinator{len(started)}.txt"
        conf = f"--rdzv-conf=last_call_timeout=10,heartbeat_timeout=10{conf}"
        started.append(Alone(output, site, f"--rdzv-endpoint={endpoint}", conf, *options, prefix=prefix))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def wait_for_one_leader(some: Sequence[Alone]) -> None:
    """Wait until each of them leads or stands by: one leads."""
    for one in some:
        one.wait_for("the coordinator at")
    assert sum(one.said("leads the job") for one in some) == 1
