"""The Python of the documentation runs, each page in a process of its own; see `tests.pages.rows`."""

from __future__ import annotations

import json
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ef_common.testing.harness import Job
from tests.horovod_built import is_built
from tests.pages import running
from tests.pages.blocks import all_blocks, programs
from tests.pages.rows import PROGRAMS

pytestmark = pytest.mark.timeout(300)

BLOCKS = programs()
NAMES = [block.name for block in BLOCKS]
WARM = ("tests.pages.preambles", "tests.pages.uses", "tests.pages.running", "tensorflow", "torch.utils.tensorboard")
"""What the process has imported from which all others are forked: both frameworks, so it is one for this file."""


def of_page(page: str, **fields: Any) -> list[str]:
    """Its blocks whose rows are such."""
    rows = [(name, PROGRAMS[name]) for name in NAMES if name.startswith(f"{page}: ") and name in PROGRAMS]
    return [name for name, row in rows if all(getattr(row, field) == value for field, value in fields.items())]


def pages(**fields: Any) -> list[str]:
    return [page for page in dict.fromkeys(block.page for block in BLOCKS) if of_page(page, **fields)]


@pytest.fixture(scope="module")
def server() -> None:
    """Keeps the tests of this file in one process of pytest, which has one warm process for them."""


def test_every_program_has_a_row_and_every_row_a_program() -> None:
    missing = [name for name in NAMES if name not in PROGRAMS]
    assert not missing, (
        f"PROGRAMS in tests/pages/rows.py does not say how to run these blocks: {missing}. Add a row for each"
    )
    assert set(PROGRAMS) <= set(NAMES), "PROGRAMS in tests/pages/rows.py has rows of blocks that are gone"


@pytest.mark.turns
@pytest.mark.parametrize("page", pages(workers=1, thorough=False, horovod=False, streams=False))
def test_programs_of_a_page_run(page: str, tmp_path: Path, server: None) -> None:
    run_alone(of_page(page, workers=1, thorough=False, horovod=False, streams=False), tmp_path)


def test_examples_with_prompts_in_docstrings_print_what_they_show(tmp_path: Path, server: None) -> None:
    with Job(tmp_path / "run", preload=WARM) as job:
        found = job.start(running.run_doctests, str(tmp_path)).result()
    assert [name for name, (failed, _) in found.items() if failed] == []
    assert sum(attempted for _, attempted in found.values()) > 50


@pytest.mark.skipif(not is_built("tensorflow"), reason="Horovod is not built: elasticflow horovod build")
@pytest.mark.parametrize("page", pages(horovod=True))
def test_programs_with_horovod_run(page: str, tmp_path: Path, server: None) -> None:
    run_alone(of_page(page, horovod=True), tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(
    not all(map(find_spec, ("datasets", "pyarrow"))), reason="datasets is not installed: pip install -e '.[streams]'"
)
@pytest.mark.parametrize("page", pages(streams=True))
def test_programs_on_data_of_other_libraries_run(page: str, tmp_path: Path, server: None) -> None:
    run_alone(of_page(page, streams=True), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("page", pages(workers=1, thorough=True))
def test_programs_of_a_page_that_start_a_job_run(page: str, tmp_path: Path, server: None) -> None:
    run_alone(of_page(page, workers=1, thorough=True), tmp_path)


def run_alone(names: list[str], folder: Path) -> None:
    with Job(folder / "run", preload=WARM) as job:
        worker = job.start(running.run_alone, names, str(folder))
        assert worker.result() == len(names)


@pytest.mark.processes
def test_programs_about_several_workers_run_in_two_of_which_one_is_lost(tmp_path: Path, server: None) -> None:
    """The lines in which they tell of it are as they are shown, too."""
    names = [name for page in pages(workers=2) for name in of_page(page, workers=2)]
    for name, log_format in zip(names, ("text", "json"), strict=True):
        folder = tmp_path / log_format
        with Job(folder, preload=WARM) as job:
            workers = job.start_world(2, running.run_in_job, name, str(folder), log_format)
            assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0], job.tails()
            printed = "".join(worker.output.read_text() for worker in workers)
            job.audit()
        if log_format == "text":
            assert "2 → 1 worker: " in printed
        else:
            (shown,) = (json.loads(block.code) for block in all_blocks("json"))
            told = [json.loads(line) for line in printed.splitlines() if line.startswith('{"time"')]
            (change,) = (line for line in told if line.get("event") == shown["event"])
            assert list(change) == list(shown)
