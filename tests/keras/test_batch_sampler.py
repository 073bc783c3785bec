"""A batch sampler of the user's may make another number of batches in each epoch: each of them is trained once."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ef_common.collectives.codec import ARRAYS
from ef_common.core.epochs import Epochs
from ef_common.core.view import Member, View
from ef_common.events import EventLog
from ef_common.session.crash_record import CrashRecord
from ef_common.session.stats import Stats

keras = pytest.importorskip("keras")
data = pytest.importorskip("torch.utils.data")

from ef_common.errors import UsageError  # noqa: E402
from ef_keras.hooks import Loader  # noqa: E402
from ef_keras.loader import LoaderSource  # noqa: E402
from ef_keras.training_data import TrainingData  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # TensorFlow's tensors, with NumPy 2


class Buckets:
    """Makes these numbers of batches of two samples, one number for each time that it is iterated over."""

    def __init__(self, *lengths: int) -> None:
        self._lengths, self._num_begun = lengths, 0

    def __len__(self) -> int:
        return self._lengths[min(self._num_begun, len(self._lengths) - 1)]

    def __iter__(self) -> Any:
        length = len(self)
        self._num_begun += 1
        for number in range(length):
            yield [2 * number, 2 * number + 1]


class Numbers(data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return np.asarray([index], np.float32)


class Session(SimpleNamespace):
    """A session of "a" or "b". "b" hears what "a" has said in its time."""

    def __init__(self, name: str, said: dict[str, list[bytes]]) -> None:
        super().__init__(worker=Member(name, name, ""), rank="ab".index(name), newcomer=False, is_alone=False)
        self.stats, self.crash_record = Stats(), CrashRecord()
        self.completed_in = self.view = View(1, tuple(Member(one, one, "") for one in "ab"))
        self.begin_step = lambda num_samples: None
        self.boundary = lambda: False
        self.when_confirmed = lambda act: act()
        self._said, self._heard = said, Counter[str]()

    def run(self, operation: Any) -> View:
        mine, call = operation._payload, operation.call
        if self.rank == 0:
            self._said[call].append(mine)
        first = self._said[call][self._heard[call]]
        self._heard[call] += 1
        operation.parts = [first, mine]
        return self.view


def training(session: Any, *lengths: int, limit: int | None = None) -> TrainingData:
    loader: Any = data.DataLoader(Numbers(), batch_sampler=Buckets(lengths[0], *lengths))
    source = LoaderSource(Loader(SimpleNamespace(_dataloader=loader)))
    source.epochs = Epochs(source.length, limit)
    assert source.first() is not None
    return TrainingData(source, session, log=EventLog(None, "a"), full_batch=2)


def trained(found: TrainingData, epoch: int, *, num_steps: int | None = None) -> list[int]:
    """The batches that a worker trains on in an epoch, or in some steps of it."""
    found.epoch, batches = epoch, []
    for step, _, some in found.batches():
        (batch,) = some
        if not found.padding:
            batches.append(int(np.asarray(batch).min()) // 2)
        found.dealer.commit(found._session.completed_in)
        if step + 1 == num_steps:
            break
    return batches


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(None, [10, 8, 10]), (6, [6, 4, 6, 2, 6, 4])],
    ids=["passes", "steps_per_epoch"],
)
def test_epoch_is_as_long_as_what_the_first_worker_draws_and_at_most_as_the_first_one(
    limit: int | None, expected: list[int]
) -> None:
    said = defaultdict[str, list[bytes]](list)
    workers = [
        training(Session(name, said), *lengths, limit=limit)
        for name, lengths in (("a", (10, 8, 12)), ("b", (10, 9, 9)))
    ]
    for epoch, length in enumerate(expected):
        found = sorted(number for worker in workers for number in trained(worker, epoch))
        start = 0 if limit is None else 6 * (epoch % 2)
        assert found == list(range(start, start + length))


def test_new_start_goes_on_in_an_epoch_that_is_shorter_than_the_first() -> None:
    member = training(Session("a", defaultdict(list)), 10, 8)
    trained(member, 0)
    trained(member, 1, num_steps=2)
    state = ARRAYS.loads(ARRAYS.dumps(member.state()))
    again = training(Session("a", defaultdict(list)), 10, 8)
    again.load_state(state, saved=True)
    assert again.dealer.num_steps() == 4
    assert trained(again, 1) == [4, 6]


def test_epoch_for_which_nothing_is_left_is_refused() -> None:
    member = training(Session("a", defaultdict(list)), 10, 5, limit=6)
    for epoch in range(3):
        trained(member, epoch)
    with pytest.raises(UsageError, match=r"draws less than its `__len__` says.*Expected: 10. Received: 5"):
        trained(member, 3)
