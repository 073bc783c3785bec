"""Parts of shards that cannot be read are logged by all workers, and rank 0 warns of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ef_common.core.streams.pieces import OPEN, Piece
from ef_common.data.bad_shards import note_bad_shard


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("stop", "fields", "reach"), [(OPEN, {}, "sample 2 on,"), (8, {"stop": 8}, "sample 2 up to sample 8,")]
)
def test_all_workers_log_what_is_left_out_and_the_first_one_warns(
    caplog: pytest.LogCaptureFixture, rank: int, stop: int, fields: dict[str, int], reach: str
) -> None:
    records: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(write=lambda kind, **record: records.append({"kind": kind, **record}))
    session: Any = SimpleNamespace(rank=rank)

    note_bad_shard(session, log, epoch=3, rest=Piece(1, 2, stop), name="b.txt", reason="bad sector")

    expected = {"kind": "bad_shard", "epoch": 3, "shard": 1, "name": "b.txt", "offset": 2, "reason": "bad sector"}
    assert records == [expected | fields]
    assert [reach in record.getMessage() for record in caplog.records] == [True] * (rank == 0)
