from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ef_common.core.lineage import CheckpointId, RunClaim, fence, lineage, next_run

ids = st.builds(CheckpointId, st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
DAMAGED = RunClaim(None, readable=False)


def id_(run: int, step: int, generation: int = 1) -> CheckpointId:
    return CheckpointId(run, generation, step)


@given(st.builds(CheckpointId, *(st.integers(0, 10**12) for _ in range(3))))
def test_name_parsed_gives_the_id_back(id: CheckpointId) -> None:
    assert CheckpointId.parse(id.name) == id


@given(st.tuples(ids, ids))
def test_names_sort_as_ids_do(pair: tuple[CheckpointId, CheckpointId]) -> None:
    first, second = pair
    assert (first < second) == (first.name < second.name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "last.ckpt",
        "run-2-generation-5-step-123",
        "run-000002-generation-000005-step-000000123.tmp",
        "old-run-000002-generation-000005-step-000000123",
        "run-0000002-generation-000005-step-000000123",
        "run-000002-generation-000005-step-000000123\n",
        "run-00000²-generation-000005-step-000000123",
    ],
)
def test_parse_foreign_name_is_none(name: str) -> None:
    assert CheckpointId.parse(name) is None


@pytest.mark.parametrize(
    ("checkpoints", "claims", "expected"),
    [
        pytest.param([], {}, [], id="nothing there"),
        pytest.param([], {1: RunClaim(None)}, [], id="nothing saved yet"),
        pytest.param([id_(1, 10), id_(1, 20)], {1: RunClaim(None)}, [id_(1, 20), id_(1, 10)], id="one run"),
        pytest.param(
            [id_(1, 20, generation=1), id_(1, 15, generation=2)],
            {1: RunClaim(None)},
            [id_(1, 15, generation=2), id_(1, 20, generation=1)],
            id="the generation counts before the step",
        ),
        pytest.param(
            [id_(1, 10), id_(1, 20), id_(2, 12)],
            {1: RunClaim(None), 2: RunClaim(id_(1, 10))},
            [id_(2, 12), id_(1, 10)],
            id="rolled back",
        ),
        pytest.param(
            [id_(1, 10), id_(1, 20)],
            {1: RunClaim(None), 2: RunClaim(id_(1, 10))},
            [id_(1, 10)],
            id="rolled back by a run that has saved nothing",
        ),
        pytest.param([id_(1, 10)], {1: RunClaim(None), 2: RunClaim(None)}, [], id="started from nothing"),
        pytest.param(
            [id_(1, 5), id_(1, 20)],
            {1: RunClaim(None), 2: RunClaim(id_(1, 10))},
            [id_(1, 20), id_(1, 5)],
            id="the parent was removed while it was claimed",
        ),
        pytest.param(
            [id_(1, 10), id_(2, 20), id_(3, 12)],
            {1: RunClaim(None), 2: RunClaim(id_(1, 10)), 3: RunClaim(id_(1, 10))},
            [id_(3, 12), id_(1, 10)],
            id="a whole run is passed over",
        ),
        pytest.param(
            [id_(1, 10), id_(2, 20)],
            {1: RunClaim(None), 2: RunClaim(None), 3: RunClaim(id_(1, 10))},
            [id_(1, 10)],
            id="a whole run that started from nothing is passed over",
        ),
        pytest.param(
            [id_(1, 10), id_(1, 20), id_(3, 30)],
            {1: RunClaim(None), 2: RunClaim(id_(1, 10)), 3: RunClaim(id_(2, 15))},
            [id_(3, 30), id_(1, 10)],
            id="the parent has been removed",
        ),
        pytest.param(
            [id_(1, 10), id_(2, 20)], {1: RunClaim(None), 2: DAMAGED}, [id_(2, 20), id_(1, 10)], id="a damaged claim"
        ),
        pytest.param([id_(3, 10), id_(5, 20)], {}, [id_(5, 20), id_(3, 10)], id="claims are lost"),
        pytest.param([id_(1, 10)], {1: RunClaim(id_(7, 5))}, [id_(1, 10)], id="a parent that cannot be"),
    ],
)
def test_lineage_takes(
    checkpoints: list[CheckpointId], claims: dict[int, RunClaim], expected: list[CheckpointId]
) -> None:
    assert lineage(checkpoints, claims) == expected


@given(
    st.sets(ids),
    st.dictionaries(st.integers(1, 4), st.builds(RunClaim, st.none() | ids, readable=st.booleans())),
)
def test_lineage_of_anything_is_descending_and_ends(
    checkpoints: set[CheckpointId], claims: dict[int, RunClaim]
) -> None:
    chain = lineage(checkpoints, claims)
    assert chain == sorted(set(chain), reverse=True)
    assert set(chain) <= checkpoints
    newest = max({one.run for one in checkpoints} | set(claims), default=0)
    assert {one for one in checkpoints if one.run == newest} <= set(chain)


@pytest.mark.parametrize(
    ("writer", "checkpoints", "claims", "final"),
    [
        (id_(1, 10), [], {1: RunClaim(None)}, None),
        (id_(1, 10), [id_(1, 20)], {1: RunClaim(None)}, None),
        (id_(1, 10), [], {1: RunClaim(None), 2: RunClaim(None)}, True),
        (id_(1, 10), [], {1: RunClaim(None), 2: DAMAGED}, True),
        (id_(1, 10), [id_(2, 5)], {1: RunClaim(None)}, True),
        (id_(1, 30, generation=1), [id_(1, 20, generation=2)], {1: RunClaim(None)}, False),
        (id_(1, 30, generation=3), [id_(1, 20, generation=2)], {1: RunClaim(None)}, None),
    ],
)
def test_fence_holds_back_older_runs_and_generations(
    writer: CheckpointId, checkpoints: list[CheckpointId], claims: dict[int, RunClaim], final: bool | None
) -> None:
    found = fence(writer, checkpoints, claims)
    assert (None if found is None else found.final) == final


@given(st.sets(ids), ids)
def test_fence_lets_only_the_newest_generation_pass(checkpoints: set[CheckpointId], writer: CheckpointId) -> None:
    """Whatever passes is of the newest run and generation, so that nothing of older writers sorts before it."""
    if fence(writer, checkpoints, {}) is None:
        assert all(one[:2] <= writer[:2] for one in checkpoints)


@given(st.sets(ids), st.dictionaries(st.integers(1, 9), st.just(RunClaim(None))))
def test_next_run_is_above_all_traces(checkpoints: set[CheckpointId], claims: dict[int, RunClaim]) -> None:
    run = next_run(checkpoints, claims)
    assert all(one.run < run for one in checkpoints)
    assert all(one < run for one in claims)
