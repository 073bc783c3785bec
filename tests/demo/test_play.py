"""`elasticflow demo`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.demo import play


@contextmanager
def running_demo(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; end it by SIGTERM if the test does not wait for it, so that it ends what it started."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "ef_common.cli", "demo", "--run-dir", run_dir, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        # A shell that runs tests in the background has them ignore Ctrl-C, and so would the demo.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with demo:
        try:
            yield demo
        finally:
            demo.terminate()


def processes_of(run_dir: Path) -> list[str]:
    """All that have this run directory on their command line or in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            known = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if int(process.name) != os.getpid() and str(run_dir).encode() in known:
            found.append(process.name)
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["lightning", "keras"])
def test_demo_loses_and_gains_a_worker_and_passes_its_audit(tmp_path: Path, framework: str) -> None:
    place = tmp_path / "run"
    with running_demo(place, f"--framework={framework}", "--limit-s=800") as demo:
        output, _ = demo.communicate(timeout=850)
    assert demo.returncode == 0, output
    events = [event.strip() for event in re.findall(r"^ *[\d.]+ s  (.{1,36})", output, re.MULTILINE)]
    assert events.index("SIGKILL to worker 3") < events.index("lost worker 3") < events.index("joined worker 4")
    assert "finished" in events
    assert len(re.findall(r"^✓ (?:samples|updates|weights|views|evaluation): ", output, re.MULTILINE)) == 5, output
    assert re.search(r"^worker 3 .*█✗$", output, re.MULTILINE), output
    assert re.search(r"^ *[\d.]+ s  worker 3 killed: the others pause \d+ ms$", output, re.MULTILINE), output
    assert "joins: " in ElementTree.parse(place / "kill-and-join.svg").getroot()[0].text  # type: ignore[operator]
    assert processes_of(place) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["starting 3 workers", pytest.param("started: ", marks=pytest.mark.thorough)])
def test_demo_interrupted_ends_all_that_it_started(tmp_path: Path, moment: str) -> None:
    place = tmp_path / "run"
    with running_demo(place) as demo:
        assert demo.stdout is not None
        while moment not in demo.stdout.readline():
            assert demo.poll() is None
        assert len(processes_of(place)) >= 2
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=200)
    assert demo.returncode == 130
    assert processes_of(place) == []


def test_demo_names_missing_packages_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(play, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 2
    assert result.output == (
        "elasticflow demo: --framework=lightning needs packages that are not installed. Install them: "
        "pip install torch lightning\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_demo_keeps_the_log_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").touch()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    result = CliRunner().invoke(main, ["demo", f"--run-dir={tmp_path}"])
    assert result.exit_code == 2
    assert "holds the event log of another run" in result.output
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers
