"""Workers whose data sets differ are told so before their first update."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    random_split,
)

from ef_common.data.identity import DataComparison, Identity, identity_of
from ef_common.data.torch_order import data_of
from ef_common.errors import UsageError
from ef_common.session import Session
from tests.collectives.cluster import Cluster

ROWS = torch.arange(100)


def split(seed: int) -> Subset[Any]:
    return random_split(TensorDataset(ROWS), [90, 10], torch.Generator().manual_seed(seed))[0]


class Files(Dataset[str]):
    def __init__(self, names: list[Any]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)


class Around(Dataset[str]):
    def __init__(self, dataset: Any, indices: Any) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return 3


class Unwilling(Dataset[str]):
    def __init__(self) -> None:
        self.tensors, self.file, self.info = (object(),), open, torch.finfo()

    def __len__(self) -> int:
        raise RuntimeError("it is closed")


@pytest.mark.parametrize(
    ("this", "other", "differs_in"),
    [
        (split(1), split(1), set()),
        (split(1), split(2), {"indices"}),
        (Subset(split(1), range(9)), Subset(split(2), range(9)), {"indices"}),
        (ConcatDataset([split(1), split(3)]), ConcatDataset([split(1), split(2)]), {"indices"}),
        (TensorDataset(ROWS), TensorDataset(ROWS[:-1]), {"lengths", "rows"}),
        (TensorDataset(ROWS), TensorDataset(ROWS + 1), {"rows"}),
        (np.zeros((3, 2)), np.zeros((3, 2)), set()),
        (np.zeros((3, 2)), np.ones((3, 2)), {"rows"}),
        (Files(["/a/x", "/a/y"]), Files([Path("/b/x"), Path("/b/y")]), set()),
        (Files(["/a/x", "/a/y"]), Files(["/a/y", "/a/x"]), {"rows"}),
        ([1, 2], [2, 1], set()),  # nobody knows what these are
        (Around(Files(["a"]), [[0, 1], [2]]), Around(Files(["a"]), [[0], [1, 2]]), set()),
        (Around(Files(["a"]), [object()]), Around(Files(["a"]), [object()]), set()),
        (Around(Files(["a"]), [0.5]), Around(Files(["a"]), [1.5]), set()),  # weights, say
        (Around(Files(["a"]), range(10**12)), Around(Files(["a"]), range(10**12 - 1)), {"indices"}),
        (Around("/node1/scratch", [1]), Around("/node12/scratch", [1]), set()),
        (Around(None, [1]), Around(Files(["a"]), [1]), {"rows"}),  # it was opened in one of them only
        (np.array([object()]), np.array([object()]), set()),
        (Unwilling(), Unwilling(), set()),
    ],
)
def test_what_tells_data_apart(this: Any, other: Any, differs_in: set[str]) -> None:
    first, second = identity_of([this]), identity_of([other])
    assert {what for what in first if first[what] != second[what]} == differs_in


def test_sampler_that_draws_a_part_without_a_seed_makes_other_data_of_them() -> None:
    """The split of many tutorials: a random permutation, and a sampler for each of its parts."""

    def part(seed: int, kind: type[Sampler[int]] = SubsetRandomSampler) -> Identity:
        indices = np.random.default_rng(seed).permutation(100)[:80].tolist()
        return identity_of(data_of(DataLoader(TensorDataset(ROWS), 4, sampler=kind(indices))))  # type: ignore[call-arg]

    first, second, again = part(1), part(2), part(1)
    assert first == again
    assert {what for what in first if first[what] != second[what]} == {"indices"}

    class Drawing(SubsetRandomSampler):
        """Its indices may be those that it has drawn last."""

    assert part(1, Drawing) == part(2, Drawing) == identity_of([TensorDataset(ROWS)])


def test_data_set_that_stands_in_itself_is_looked_at_once() -> None:
    data = Files(["a"])
    data.dataset = data  # type: ignore[attr-defined]
    assert identity_of([data])["lengths"] == [1]


def test_data_set_of_hugging_face_that_is_split_without_a_seed_is_another_one() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install -e '.[streams]'")
    data = datasets.Dataset.from_dict({"x": list(range(100))})
    first, second, again = (identity_of([data.train_test_split(0.1, seed=seed)["train"]]) for seed in (1, 2, 1))
    assert first == again
    assert first["indices"] != second["indices"]


def found_by(*data: Any) -> list[Any]:
    """What the members have raised whose data these are, over real sessions."""
    together = threading.Barrier(len(data))

    def member(session: Session, rank: int) -> str:
        together.wait()
        comparison = DataComparison(session, lambda: identity_of([data[rank]]))
        assert comparison.is_due
        try:
            comparison.follow()
        except UsageError as error:
            return str(error)
        assert not comparison.is_due
        return ""

    return Cluster(len(data)).run(member)


def test_another_split_in_one_worker_is_an_error_in_all() -> None:
    first, second, third = found_by(split(1), split(1), split(2))
    assert first == second == third
    assert "Pass a seed" in first
    assert found_by(split(1), split(1)) == ["", ""]
    assert found_by(split(1)) == [""]


def test_other_rows_are_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert found_by(np.zeros(3), np.zeros(3), np.ones(3), np.ones(3)) == [""] * 4
    assert [record.message.partition(",")[0] for record in caplog.records] == ["the workers have different data"]


def test_data_of_a_worker_that_is_alone_are_those_of_its_first_step() -> None:
    data = split(1)

    def member(session: Session, rank: int) -> bool:
        alone = DataComparison(session, lambda: identity_of([data]))
        alone.follow()
        data.indices = data.indices[::-1]  # in each epoch, say
        return alone.state()["indices"] == identity_of([split(1)])["indices"]

    assert Cluster(1).run(member) == [True]


def comparison(data: Any) -> DataComparison:
    return DataComparison(None, lambda: identity_of([data]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mine", "saved", "what"),
    [
        (split(1), False, ""),
        (split(2), False, "error"),
        (split(2), True, "warning"),
        (ConcatDataset([split(1), TensorDataset(ROWS)]), False, ""),  # it has grown since
    ],
)
def test_newcomers_and_new_starts_compare_with_what_there_was(
    caplog: pytest.LogCaptureFixture, mine: Any, saved: bool, what: str
) -> None:
    state = comparison(ConcatDataset([split(1)]) if isinstance(mine, ConcatDataset) else split(1)).state()
    newcomer = comparison(mine)
    with caplog.at_level(logging.WARNING):
        if what == "error":
            with pytest.raises(UsageError, match="different data"):
                newcomer.load_state(state, saved=saved)
        else:
            newcomer.load_state({**state, "due": False}, saved=saved)
            assert newcomer.is_due == saved
    assert bool(caplog.records) == (what == "warning")


def test_newcomer_whose_data_are_of_another_epoch_compares_nothing() -> None:
    newcomer = comparison(split(2))
    newcomer.load_state({**comparison(split(1)).state(), "due": False}, saved=False, compares=False)
    assert not newcomer.is_due


def test_checkpoint_from_before_says_nothing() -> None:
    newcomer = comparison(split(2))
    newcomer.load_state(None, saved=True)
    assert newcomer.is_due


def test_data_that_are_compared_otherwise_are_never_due() -> None:
    unknown = DataComparison(None, None)  # type: ignore[arg-type]
    assert not unknown.is_due
    unknown.load_state(unknown.state(), saved=False)
    identity: Identity = {"lengths": [1], "indices": [], "rows": []}
    DataComparison(None, lambda: identity).load_state(unknown.state(), saved=False)  # type: ignore[arg-type]
