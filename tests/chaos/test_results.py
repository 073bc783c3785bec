"""Results of the grid, which is done in parts."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import cells, results
from tests.chaos.cells import Cell
from tests.chaos.grid import chosen_cells
from tests.chaos.results import Result

FIRST = Cell("lightning", "SIGKILL", "first", "forward")
SECOND = Cell("keras-torch", "SIGTERM", "last", "forward", deterministic=True)


def test_results_are_added_and_the_newest_of_a_cell_counts(tmp_path: Path) -> None:
    path = tmp_path / "build" / "grid.jsonl"
    assert results.read(path) == {}
    before, other, after = Result(FIRST, "boom", 3.0, "a"), Result(SECOND, "", 5.0, "a"), Result(FIRST, "", 4.0, "b")
    for result in (before, other, after):
        results.append(path, result)
    assert results.read(path) == {FIRST: after, SECOND: other}


def test_line_that_is_torn_and_a_cell_that_is_no_more_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "grid.jsonl"
    results.append(path, Result(FIRST, "", 3.0, "a"))
    results.append(path, Result(Cell("lightning", "flood", "first", "forward"), "", 3.0, "a"))
    whole = path.read_text()
    path.write_text(whole + "[]\n" + whole.splitlines()[0][:40])
    results.append(path, Result(SECOND, "", 3.0, "a"))
    assert list(results.read(path)) == [FIRST, SECOND]


def test_table_counts_trials_and_those_that_failed() -> None:
    text = results.table([Result(FIRST, "boom", 3.0, "abc"), Result(SECOND, "", 5.0, "def")])
    assert "2 trials with real processes, 1 failed; 4.0 s each" in text
    assert "Commits: abc, def." in text
    parts = {part.partition("\n")[0]: part for part in text.split("## ")[1:]}
    assert list(parts) == ["keras-torch", "lightning"]
    assert "| SIGKILL: dies | not run | **1 of 1 failed** | not run |" in parts["lightning"]
    assert "| exception: ends the job | not run | not run | – |" in parts["lightning"]
    assert "| SIGTERM: leaves | not run | 1 | not run |" in parts["keras-torch"]


def test_cells_are_chosen_by_host_fault_and_moment_without_those_that_are_done() -> None:
    wanted = chosen_cells(["keras-torch", "lightning"], ["SIGKILL", "exception"], ["forward", "reduction"])
    assert len(wanted) == 2 * 2 * 3 * 3  # plain and deterministic, no exception in a reduction
    assert [cell.host for cell in wanted] == ["keras-torch"] * 18 + ["lightning"] * 18
    rest = chosen_cells(
        ["keras-torch", "lightning"], ["SIGKILL", "exception"], ["forward", "reduction"], without={FIRST}
    )
    assert set(wanted) - set(rest) == {FIRST}
    assert {cell.fault for cell in chosen_cells(["lightning"], cells.FATES, cells.MOMENTS)} <= set(cells.FATES)


def test_host_that_refuses_the_deterministic_mode_is_tried_plainly_alone() -> None:
    both, plain = (list(cells.cells([host], deterministic=True)) for host in ("keras-torch", "keras-jax"))
    assert all(cell.deterministic for cell in both)
    assert plain == []
    assert list(cells.cells(["keras-jax"]))


def test_commit_is_a_short_hash() -> None:
    assert results.commit() == "" or set(results.commit()) <= set("0123456789abcdef+")
