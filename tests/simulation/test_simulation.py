"""Seeded schedules of faults: every invariant holds, and every rare case did happen. `make chaos` runs many more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ef_common.testing.simulation import __main__ as command
from ef_common.testing.simulation import simulate
from ef_common.testing.simulation.campaign import Summary, run_campaign
from ef_common.testing.simulation.schedule import FAMILIES
from tests.simulation.mutations import forget_the_replay

NUM_SCHEDULES = 20_000
PARTS = pytest.mark.parametrize(
    "part",
    [
        0.02,
        pytest.param(0.3, marks=[pytest.mark.thorough, pytest.mark.slow]),
        pytest.param(1.0, marks=[pytest.mark.exhaustive, pytest.mark.slow]),
    ],
)
"""`make test` runs a fiftieth of the schedules, and `make test-all` a third."""
ROOT = Path(__file__).parents[2]

# In how many of the schedules each rare case is to be seen, at least.
RARE = {
    "replayed": 300,  # a result was handed to one who lacked it
    "barrier replayed": 50,  # the same in the barrier after a change of the view
    "rerun": 5_000,  # a collective was run again without the lost
    "stale": 500,  # a copy lacked a part of a gradient: all reduced once more
    "two losses in one collective": 300,
    "loss gathered": 1_500,  # with others, before the view after the one before it had come about
    "boundary interrupted": 100,  # members were lost while others waited for a planned view
    "joiner lost half admitted": 200,
    "planned change": 3_000,
    "returned": 1_000,  # samples of the lost were dealt again
    "made up": 500,  # what the lost held of a global batch was computed by others, in the same step
    "restart": 300,  # all members were lost, and those that waited started over
    "all lost": 300,
    "suspicion": 200,  # a group broke with everybody alive
    "hold": 1_000,  # too few nodes
    "rescued": 300,  # held until a worker came
    "leave": 500,
    "drain": 2_000,
    "all left": 500,
    "handed over": 200,  # all wanted to leave, and newcomers were ready: they got the state first
    "freeze": 500,
    "slow": 500,
    "arrival after the end": 1_000,
    "raised": 400,  # an exception of the user's code
    "failed": 350,
    "refused: wrong token": 500,  # a stranger with another one, or one that repeats the greeting of a worker
    "refused: name of another": 200,
    "refused: slow reader": 60,
    "stall": 400,
    "vanish": 200,
}


def check(summary: Summary, rare: dict[str, int], part: float) -> None:
    """Nothing has failed, and what is rare has been seen often enough; in a part of the schedules, half as often."""
    assert summary.failures == {}
    wanted = {what: least if part == 1 else int(part * least / 2) for what, least in rare.items()}
    missed = {what: summary.seen[what] for what, least in wanted.items() if summary.seen[what] < least}
    assert missed == {}, f"of all cases seen: {summary.seen}"


@pytest.mark.timeout(2400)
@PARTS
def test_simulation_of_many_schedules_keeps_every_invariant(part: float) -> None:
    number = int(NUM_SCHEDULES * part)
    summary = run_campaign(number)

    assert summary.num_schedules == number
    check(summary, RARE, part)
    ends = {end for end, count in summary.ends.items() if count >= 100 * part}
    assert ends - {"lost the coordinator"} == {  # some that are dropped as they do not read; there may be few of them
        "finished",
        "crashed",
        "evicted",
        "frozen",
        "left",
        "told the end",
        "told the failure",
        "raised, and told",
    }


FAILOVER_RARE = {
    "coordinator": 500,  # the leading one died, at times in the middle of telling a decision
    "node": 300,  # with the worker of its node
    "cut": 500,
    "rejected": 500,  # by a firewall, which refuses and resets connections where the network is cut
    "takeover": 500,
    "held back": 300,  # no quorum
    "planned change": 200,
    "replayed": 30,
    "loss": 500,
    "loss gathered": 250,
    "failed": 300,  # by an exception of the user's code
    "halve": 500,
    "suspend": 300,
    "claim won": 200,
    "claim lost": 100,
    "halved, and goes on": 100,  # with nothing else that could keep it from that
    "store reached by none": 200,
}


HANDOVER_RARE = {
    "another leads": 500,
    "takeover": 250,
    "coordinator": 120,
    "cut": 150,
    "held back": 200,
    "planned change": 250,
    "loss": 250,
}


HANG_RARE = {
    "hang": 500,  # for long, or for less than the limit
    "evicted as hung": 250,
    "ended as hung": 120,  # its agent has started it anew
    "stuck": 40,  # all waited, and one of them hung in the collective
    "takeover": 5,
    "planned change": 200,
    "replacement came": 50,  # a spare, in the place of a straggler
    "replaced": 50,
}


TRAININGS_RARE = {
    "skipped": 400,  # a training was over in the others before a newcomer could join in it
    "planned change": 400,
    "loss": 200,
    "restart": 20,
    "takeover": 30,
}


SIZES_RARE = {
    "want": 1_000,
    "size judged": 700,  # nothing else had happened for a while, and there were as many nodes as were wanted
    "as many as wanted": 400,
    "asked to leave": 450,
    "asked to stay": 100,  # after all, as others were lost or more were wanted again
    "more wanted, and there": 60,  # spares were let in
    "replacement came": 50,
    "takeover": 100,
    "loss": 250,
    "planned change": 600,
}


STREAMS_RARE = {
    "ends exchanged": 500,
    "loss": 200,
    "planned change": 200,
    "restart": 20,
    "two losses in one collective": 20,
    "joiner lost half admitted": 10,
}


FOUNDING_RARE = {
    "begun anew": 5,
    "another leads": 10,
    "takeover": 40,
    "held back": 70,
    "planned change": 130,
    "failed": 20,
}


ENDPOINTS_RARE = {
    "returned": 300,  # the agent of an endpoint came back, and knew nothing
    "told who leads": 250,
    "another leads": 120,
    "takeover": 130,
    "held back": 150,
    "planned change": 200,
    "size judged": 120,
}


MANY_RARE = {
    "loss": 300,
    "loss gathered": 100,
    "planned change": 300,
    "two losses in one collective": 50,
    "takeover": 70,
    "replayed": 40,
    "held back": 40,
}


@pytest.mark.timeout(900)
@PARTS
@pytest.mark.parametrize(
    ("family", "most", "rare"),
    [
        ("failover", NUM_SCHEDULES // 4, FAILOVER_RARE),
        ("handovers", NUM_SCHEDULES // 16, HANDOVER_RARE),
        ("founding", 600, FOUNDING_RARE),
        ("endpoints", 600, ENDPOINTS_RARE),
        ("hangs", NUM_SCHEDULES // 16, HANG_RARE),
        ("trainings", NUM_SCHEDULES // 16, TRAININGS_RARE),
        ("sizes", NUM_SCHEDULES // 16, SIZES_RARE),
        ("streams", NUM_SCHEDULES // 16, STREAMS_RARE),
        ("workers=16", 600, MANY_RARE),
    ],
    ids=["failover", "handovers", "founding", "endpoints", "hangs", "trainings", "sizes", "streams", "many"],
)
def test_simulation_of_a_family_keeps_every_invariant(
    family: str, most: int, rare: dict[str, int], part: float
) -> None:
    number = int(most * part)
    summary = run_campaign(number, family=family)

    assert summary.num_schedules == number
    check(summary, rare, part)


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *(("", seed) for seed in (11344, 200_099, 771_772)),
        *(("failover", seed) for seed in (65, 1450, 1925, 2303, 3869, 103_442, 723_796, 729_385, 739_401)),
        *(("handovers", seed) for seed in (760_207, 762_282, 765_350, 766_047)),
        *(("founding", seed) for seed in (800_395, 815_117)),
        ("hangs", 760_477),
        ("sizes", 820_050),
        ("workers=16", 295),
    ],
)
def test_schedules_that_have_failed_once_keep_every_invariant(family: str, seed: int) -> None:
    assert simulate(FAMILIES[family](seed)).violation is None


def test_campaign_in_several_processes_finds_what_it_finds_in_one() -> None:
    one, two = (run_campaign(120, jobs=jobs) for jobs in (1, 2))
    assert (one.num_events, one.seen, one.ends) == (two.num_events, two.seen, two.ends)


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *(("", seed) for seed in (3, 14, 159, 2653)),
        ("failover", 1011),  # several connections of workers that are out end at the same time
    ],
)
def test_simulation_of_one_seed_twice_gives_the_same_trace(family: str, seed: int) -> None:
    first = simulate(FAMILIES[family](seed), trace=True)
    second = simulate(FAMILIES[family](seed), trace=True)

    assert first.trace == second.trace
    assert len(first.trace) > 10


def test_replay_of_a_seed_does_not_depend_on_the_hash_seed() -> None:
    outputs = set()
    for hash_seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-m", "ef_common.testing.simulation", "--seed", "15"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(ran.stdout)

    assert len(outputs) == 1
    assert "seed 15: everything holds" in outputs.pop()


def test_command_with_many_schedules_prints_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run_many(30, first_seed=100, jobs=1) == 0

    assert "30 schedules" in capsys.readouterr().out


def test_command_with_a_failure_names_the_first_failing_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_the_replay(monkeypatch)

    assert command.run_many(200, first_seed=0, jobs=1) == 1

    output = capsys.readouterr().out
    seed = int(output.rsplit("first failing seed: ", 1)[1].split(":")[0])
    assert command.replay(seed) == 1
