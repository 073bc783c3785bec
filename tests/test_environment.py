from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.environment import clean
from tests.sources import ROOT


def test_clean_environment_keeps_where_things_are_and_drops_what_a_scheduler_has_set() -> None:
    kept = {"HOME": "/root", "PATH": "/bin", "PIP_INDEX_URL": "x", "CUDA_VISIBLE_DEVICES": "0"}
    dropped = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PET_NNODES", "RANK", "TF_CONFIG", "KERAS_BACKEND", "http_proxy")
    environ = {**kept, **dict.fromkeys(dropped, "1"), "OMP_NUM_THREADS": "16"}
    clean(environ)
    assert {name: environ[name] for name in kept} == kept
    assert environ["OMP_NUM_THREADS"] == "1"
    assert not environ.keys() & set(dropped)


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "workers"])
def test_what_a_test_leaves_among_temporary_files_goes_with_the_tests(options: tuple[str, ...], tmp_path: Path) -> None:
    test = tmp_path / "test_leaves.py"
    test.write_text(
        "import tempfile\nfrom multiprocessing.util import get_temp_dir\n\n\n"
        "def test_leaves(tmp_path):\n"
        f"    with open({str(tmp_path / 'found')!r}, 'w') as found:\n"
        "        print(tempfile.mkdtemp(), tmp_path, sep='\\n', file=found)\n"
        "    assert get_temp_dir().startswith(tempfile.gettempdir())\n"
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", f"--rootdir={tmp_path}", *options)
    done = subprocess.run([*command, str(test)], cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    left, kept = map(Path, (tmp_path / "found").read_text().splitlines())
    assert left.parent.name.startswith("ef-")
    assert left.parent.parent == Path(tempfile.gettempdir())
    assert not left.parent.exists()
    assert kept.exists()
