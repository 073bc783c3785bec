"""A state on its way to a newcomer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ef_common.collectives.codec import ARRAYS
from ef_common.core.view import SOLO
from ef_common.data.checkpointer import Checkpointer, Checkpointing
from ef_common.data.claiming import Claiming
from ef_common.data.transfer import StateTransfer
from ef_common.errors import ElasticFlowError, UnsupportedError, UsageError
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.storage.store import Store


class Side:
    """A worker, with checkpoints or without."""

    def __init__(self, folder: Path, *, saves: bool = True) -> None:
        session = Session(SOLO.members[0], channel=None, groups=None)  # type: ignore[arg-type]
        self.claiming = Claiming(Store(str(folder / "claims")), session)
        source: Any = None  # of which nothing is saved here
        log = EventLog(None, "w0")
        self.job = Checkpointer(Checkpointing(str(folder / "store")), session, source, log=log) if saves else None
        self.transfer = StateTransfer(ARRAYS, self.claiming, lambda: self.job)


def sent(source: Side, target: Side, state: dict[str, Any]) -> dict[str, Any]:
    """What the target adopts."""
    header = source.transfer.describe(lambda: state)
    leaves = source.transfer.leaves(None)
    for room, leaf in zip(target.transfer.leaves(header), leaves, strict=True):
        room[...] = leaf
    adopted: list[dict[str, Any]] = []
    target.transfer.adopt(header, adopted.append)
    return adopted[0]


def test_newcomer_adopts_the_state_and_belongs_to_the_run_of_the_others(tmp_path: Path) -> None:
    source, target = Side(tmp_path), Side(tmp_path)
    source.claiming.begin()
    assert source.job is not None
    source.job.begin("model")
    found = sent(source, target, {"weights": np.arange(3.0), "step": 7})
    assert found["weights"].tolist() == [0.0, 1.0, 2.0]
    assert found["step"] == 7
    assert target.job is not None
    assert target.job.state() == source.job.state() == {"run": 1, "parent": None}
    theirs, mine = source.claiming.state(), target.claiming.state()
    assert theirs is not None
    assert mine is not None
    assert mine["run"] == theirs["run"] != ""


def test_state_is_adopted_if_nobody_takes_checkpoints(tmp_path: Path) -> None:
    source, target = Side(tmp_path, saves=False), Side(tmp_path, saves=False)
    assert sent(source, target, {"step": 7})["step"] == 7


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        (True, "the others take checkpoints, and this worker has no place for them"),
        (False, "this worker has a place for checkpoints, and the others take none"),
    ],
)
def test_newcomer_adopts_no_state_if_it_differs_in_whether_checkpoints_are_taken(
    tmp_path: Path, others: bool, problem: str
) -> None:
    source, target = Side(tmp_path, saves=others), Side(tmp_path, saves=not others)
    adopted: list[dict[str, Any]] = []
    header = source.transfer.describe(lambda: {"step": 7})
    target.transfer.leaves(header)
    with pytest.raises(UsageError, match=f"{problem}. Set checkpoint= or ELASTICFLOW_CHECKPOINT alike"):
        target.transfer.adopt(header, adopted.append)
    assert not adopted


def test_memory_that_is_prepared_is_used_once(tmp_path: Path) -> None:
    source, target = Side(tmp_path), Side(tmp_path)
    target.transfer.prepared = [room] = [np.zeros(3)]
    found = sent(source, target, {"weights": np.arange(3.0)})
    assert np.shares_memory(found["weights"], room)
    assert not target.transfer.prepared
    assert not source.transfer.leaves(None)


def test_what_cannot_be_sent_is_the_error_of_the_newcomer(tmp_path: Path) -> None:
    source, target = Side(tmp_path), Side(tmp_path)
    with pytest.raises(ElasticFlowError, match=r"the others cannot send their state: state\['what'\] cannot be sent"):
        sent(source, target, {"what": object()})

    def refuse() -> dict[str, Any]:
        raise UnsupportedError("not this one")

    header = source.transfer.describe(refuse)
    assert source.transfer.leaves(None) == []
    with pytest.raises(ElasticFlowError, match="not this one"):
        target.transfer.adopt(header, lambda state: None)
