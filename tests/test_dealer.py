"""The dealer records what a worker works on, and hands on what is left to deal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ef_common import events
from ef_common.core.epochs import ENDLESS
from ef_common.core.sharding import GlobalBatch
from ef_common.core.view import SOLO, Member, View
from ef_common.data.dealer import Dealer, Rest
from ef_common.events import EventLog
from ef_common.launch.environment import CRASH_RECORDS, read_environment
from ef_common.session import Session
from ef_common.session.crash_record import Crash, CrashRecord, path_of, read


def make(directory: Path, **settings: object) -> tuple[Dealer, Session]:
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    session.crash_record = CrashRecord(directory)
    return Dealer(session, log=EventLog(None, "w"), batch_size=4, **settings), session  # type: ignore[arg-type]


def noted(directory: Path) -> Crash:
    found = read(path_of(directory, 0))
    assert found is not None
    return found


def test_dealer_notes_its_share_of_each_step_and_its_end(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    other = Member("other", "n", "")
    dealer.begin(2, 20)
    session.collectives.completed_in = View(1, (other, *SOLO.members))
    dealer.deal()
    found = noted(tmp_path)
    assert (found.epoch, found.step, found.in_step, found.ranges, found.num_positions) == (2, 1, True, ((4, 8),), 4)
    dealer.commit(session.completed_in)
    assert not noted(tmp_path).in_step
    session.collectives.completed_in = SOLO
    dealer.deal()
    assert (noted(tmp_path).step, noted(tmp_path).ranges) == (2, ((8, 12),))


def test_limited_batch_is_shared_by_the_members(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    dealer.max_batch = 6
    dealer.begin(0, 21)
    session.collectives.completed_in = View(1, (*SOLO.members, Member("b", "n", ""), Member("c", "n", "")))
    assert dealer.num_steps() == 4
    windows = []
    while dealer.progress.remaining:
        windows.append(dealer.deal())
        dealer.commit(session.completed_in)
    assert [window.stop - window.start for window in windows] == [6, 6, 6, 3]
    assert windows[0].shares() == {member.id: 2 for member in session.completed_in.members}
    dealer.max_batch = 4  # two members have their own batches, and three have two positions at least
    assert [dealer.local_batch(size) for size in (1, 2, 3)] == [4, 2, 2]


def test_chosen_batch_counts_only_below_a_limit(tmp_path: Path) -> None:
    dealer, _ = make(tmp_path)
    dealer.chosen_batch = 2
    assert dealer.local_batch(1) == 4  # of a checkpoint; whoever goes on does not choose
    dealer.max_batch = 3
    assert dealer.local_batch(1) == 2
    dealer.chosen_batch = 8
    assert dealer.local_batch(1) == 3


def test_dealer_notes_all_batches_of_an_accumulation(tmp_path: Path) -> None:
    dealer, _ = make(tmp_path)
    dealer.begin(0, 20)
    dealer.deal()
    dealer.deal()
    assert noted(tmp_path).ranges == ((0, 4), (4, 8))


def test_weights_of_a_batch_leave_out_the_others_of_its_accumulation(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    dealer.begin(0, 10)
    session.collectives.completed_in = view = View(1, (*SOLO.members, Member("b", "n", "")))
    dealer.deal()
    dealer.deal()
    assert dealer.weights(view) == [6 / 10, 8 / 10]
    assert dealer.weights(view, of_batch=True) == [1.0, 0.0]
    assert (dealer.select(-2).start, dealer.weights(view, of_batch=True)) == (0, [0.5, 0.5])
    assert (dealer.select(-1).start, dealer.weights(view, of_batch=True)) == (8, [1.0, 0.0])
    dealer.commit(view)
    assert dealer.weights(view, of_batch=True) == [1.0, 0.0]


def test_dealer_notes_the_whole_of_a_global_batch(tmp_path: Path) -> None:
    dealer, session = make(tmp_path, global_batch=GlobalBatch(10, 1))
    dealer.begin(0, 20)
    session.collectives.completed_in = View(1, (*SOLO.members, Member("other", "n", "")))
    dealer.deal()
    assert noted(tmp_path).ranges == ((0, 10),)


def test_dealer_notes_positions_that_have_come_back(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    dealer.begin(0, 4)
    session.collectives.completed_in = View(1, (*SOLO.members, Member("other", "n", "")))
    dealer.deal()
    dealer.commit(SOLO)  # the other one's are dealt again
    session.collectives.completed_in = SOLO
    dealer.deal()
    assert noted(tmp_path).ranges == ((2, 3), (3, 4))


def test_dealer_that_goes_on_from_a_state_deals_what_a_lost_worker_had(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    dealer.begin(0, 16)
    session.collectives.completed_in = View(1, (*SOLO.members, Member("other", "n", "")))
    dealer.deal()
    dealer.commit(SOLO)  # 4 to 7 were the other one's
    resumed, _ = make(tmp_path)
    resumed.load_state(dealer.state())
    dealt: list[list[int]] = []
    while resumed.progress.remaining:
        dealt.append(resumed.mine(resumed.deal()))
        resumed.commit(SOLO)
    assert dealt == [[8, 9, 10, 11], [12, 13, 14, 15], [4, 5, 6, 7]]


def test_directory_of_crash_records_comes_from_the_environment(tmp_path: Path) -> None:
    assert read_environment({CRASH_RECORDS: str(tmp_path)}).crash_records == tmp_path
    assert read_environment({}).crash_records is None


def test_batch_that_is_taken_back_was_never_dealt(tmp_path: Path) -> None:
    dealer, _ = make(tmp_path)
    dealer.begin(0, 20)
    dealer.deal()
    before = dealer.progress
    dealer.deal()
    dealer.take_back()
    assert dealer.progress == before
    assert not noted(tmp_path).in_step


@pytest.mark.parametrize("min_share", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 12, 13, 14])
def test_dealer_of_a_process_alone_deals_and_commits_as_one_whose_world_may_change(
    length: int, min_share: int, tmp_path: Path
) -> None:
    accounts = []
    for log in (EventLog(None, "w"), EventLog(tmp_path, "w")):  # what is logged takes the general way
        session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
        dealer = Dealer(session, log=log, batch_size=4, min_share=min_share)
        dealer.begin(0, length)
        account = []
        while dealer.progress.remaining:
            window = dealer.deal()
            account += [window, dealer.progress]
            if len(account) % 3:
                dealer.commit(session.completed_in)
            account += [dealer.progress, dealer.num_updates]
        accounts.append(account)
    assert accounts[0] == accounts[1]


def test_dealer_tells_of_each_update_and_of_what_is_left(tmp_path: Path) -> None:
    dealer, session = make(tmp_path)
    told: list[tuple[int, float, int]] = []
    dealer.on_committed = lambda view, num_samples, step: told.append((view.world_size, num_samples, step))
    dealer.samples_per_position = 2.0
    dealer.begin(0, 20)
    session.collectives.completed_in = View(1, (*SOLO.members, Member("other", "n", "")))
    for _ in range(2):
        dealer.deal()
        dealer.commit(session.completed_in)
    assert told == [(2, 16.0, 1), (2, 16.0, 2)]
    assert dealer.rest() is None  # nobody knows how many epochs there are
    dealer.num_epochs = lambda: 3
    assert dealer.rest() == Rest(2.0 * (4 + 2 * 20))
    dealer.begin(1, ENDLESS)
    assert dealer.rest() is None


def test_step_says_how_many_samples_a_position_is_unless_it_is_one(tmp_path: Path) -> None:
    session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
    dealer = Dealer(session, log=EventLog(tmp_path, "w"), batch_size=1)
    dealer.begin(0, 3)
    for number in (1.0, 32, 2.5):
        dealer.samples_per_position = number
        dealer.deal()
        dealer.commit(session.completed_in)
    steps = [record for record in events.read(tmp_path) if record["kind"] == "step"]
    assert [step.get("samples_per_position") for step in steps] == [None, 32, 2.5]
    assert [events.num_samples(step, "mine") for step in steps] == [1, 32, 2.5]
    assert session.stats.num_samples_trained == sum(events.num_samples(step, "committed") for step in steps)


def logged(log: EventLog, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What is logged of weights from now on."""
    found: list[dict[str, object]] = []

    def write(kind: str, **record: object) -> None:
        if kind == "weights":
            found.append(record)

    monkeypatch.setattr(log, "write", write)
    return found


@pytest.mark.parametrize(("num_steps", "steps"), [(1, [1, 2]), (2, [3])])
def test_newcomer_logs_no_hash_of_an_update_after_which_an_epoch_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int, steps: list[int]
) -> None:
    """Hooks may have changed weights since the others have logged theirs."""
    member, session = make(tmp_path)
    member.begin(0, 8)
    for _ in range(num_steps):
        member.deal()
        member.commit(session.completed_in)
    if not member.progress.remaining:
        member.begin(1, 8)
    newcomer, session = make(tmp_path)
    found = logged(newcomer._log, monkeypatch)
    newcomer.load_state(member.state())
    newcomer.log_admission()
    newcomer.log_weights([b"weights"])
    newcomer.deal()
    newcomer.commit(session.completed_in)
    newcomer.log_weights([b"others"])
    assert [record["step"] for record in found] == steps


def test_worker_that_goes_on_from_a_checkpoint_logs_the_hash_of_what_it_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, session = make(tmp_path)
    member.begin(0, 4)
    member.deal()
    member.commit(session.completed_in)
    loaded, _ = make(tmp_path)
    found = logged(loaded._log, monkeypatch)
    loaded.load_state(member.state())
    loaded.log_rollback(epoch=1)
    loaded.log_weights([b"weights"])
    assert [record["step"] for record in found] == [1]
