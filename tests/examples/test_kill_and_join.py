import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "03-kill-and-join" / "demo.py"


@contextmanager
def running_demo(run_dir: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; end it by SIGTERM if the test does not wait for it, so that it ends what it started."""
    demo = subprocess.Popen(
        [sys.executable, DEMO, "--run-dir", run_dir, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that runs tests in the background has them ignore Ctrl-C, and so would the demo.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with demo:
        try:
            yield demo
        finally:
            demo.terminate()


def processes_of(run_dir: Path) -> list[str]:
    """Whoever has this run directory in its environment."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"ELASTICFLOW_RUN_DIR={run_dir}".encode() in environ.read_bytes():
                found.append(environ.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("framework", ["lightning", "keras"])
def test_demo_loses_and_gains_a_node_and_passes_its_audit(tmp_path: Path, framework: str) -> None:
    with running_demo(tmp_path, f"--framework={framework}", "--limit-seconds=800") as demo:
        output, _ = demo.communicate(timeout=850)
    assert demo.returncode == 0, output
    events = [event.strip() for event in re.findall(r"^ *[\d.]+ s  (.{30})", output, re.MULTILINE)]
    assert "lost node 3" in events, output
    assert "joined node 4" in events, output
    assert events.index("SIGKILL to node 3") < events.index("lost node 3")
    assert events[-1] == "finished"
    assert output.count("audit: holds") == 5, output
    assert processes_of(tmp_path) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_demo_interrupted_ends_all_that_it_started(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        assert demo.stdout is not None
        while "starting nodes" not in demo.stdout.readline():
            assert demo.poll() is None
        assert len(processes_of(tmp_path)) >= 3
        demo.send_signal(signal.SIGINT)
        demo.wait(timeout=200)
    assert demo.returncode == 130
    assert processes_of(tmp_path) == []
