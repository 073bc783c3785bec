"""Code of users that asks `torch.distributed`, in the hooks of a training."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchmetrics import SumMetric

from ef_common.collectives import operations
from ef_common.collectives.torch_default_group import DefaultGroup
from ef_common.errors import UnsupportedError
from ef_common.session import Session
from ef_common.testing.harness import Job
from ef_lightning.collectives import CollectivesMixin
from ef_lightning.default_group import Workers
from tests.collectives.cluster import Cluster, Died
from tests.lightning import training
from tests.lightning.conftest import HOSTS


def ask(host: str) -> dict[str, Any]:
    pl = importlib.import_module(host)

    class Asking(training.regression(pl)):  # type: ignore[misc]
        def setup(self, stage: str) -> None:
            self.in_setup = [dist.is_initialized(), dist.get_rank(), dist.get_world_size()]
            self.seen: list[int] = []
            self.metric = [SumMetric()]  # Lightning does not know it

        def train_dataloader(self) -> Any:
            return training.loader(16)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            total = torch.tensor([float(dist.get_rank() + 1)])
            dist.all_reduce(total)
            self.total = float(total)
            self.seen += batch[0].tolist()
            self.metric[0].update(float(len(batch[0])))
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self) -> None:
            names: list[Any] = [f"rank {dist.get_rank()}"]
            dist.broadcast_object_list(names, src=1)
            self.name = names[0]
            self.samples = float(self.metric[0].compute())

    module = Asking()
    trainer = training.trainer(pl, max_epochs=1)
    trainer.fit(module)
    return {
        "in_setup": module.in_setup,
        "total": module.total,
        "seen": module.seen,
        "name": module.name,
        "samples": module.samples,
        "after": dist.is_initialized(),
        "weights": training.weights(module),
    }


@pytest.mark.processes
@pytest.mark.parametrize("host", HOSTS)
def test_code_of_users_finds_a_default_group(job: Job, host: str) -> None:
    first, second = [worker.result() for worker in job.start_world(2, ask, host)]
    job.audit()
    assert sorted([first["in_setup"], second["in_setup"]]) == [[True, 0, 2], [True, 1, 2]]
    assert sorted(first["seen"] + second["seen"]) == list(range(16))
    for result in (first, second):
        assert (result["total"], result["name"], result["samples"], result["after"]) == (3.0, "rank 1", 16.0, False)
    assert first["weights"] == second["weights"]


class Strategy(CollectivesMixin):
    """A strategy in one member of a cluster."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._worker = SimpleNamespace(elastic=True)  # type: ignore[assignment]

    @property
    def session(self) -> Session:
        return self._session


def options(kind: Any, rank: int) -> Any:
    found = kind()
    found.rootRank = rank
    return found


def test_ranks_stay_those_of_the_members_before_a_loss_as_long_as_only_the_group_is_asked() -> None:
    together = threading.Barrier(3)

    def member(session: Session, rank: int) -> Any:
        together.wait()
        group = DefaultGroup(Workers(Strategy(session)), name="world")
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor.clone()])
        if rank == 0:
            raise Died
        sent = [tensor.clone() for _ in range(2)]
        for one in sent:
            group.broadcast([one], options(dist.BroadcastOptions, 1))
        reduced = tensor.clone()
        group.reduce([reduced], options(dist.ReduceOptions, 1))
        places = [torch.zeros(1) for _ in range(3)]
        group.allgather([places], [tensor])
        with pytest.raises(UnsupportedError, match="rank 0"):
            group.broadcast([tensor], options(dist.BroadcastOptions, 0))
        ranks = [(group.rank(), group.size())]
        operations.gather(session, rank)  # a step, say
        ranks.append((group.rank(), group.size()))
        group.broadcast([tensor], options(dist.BroadcastOptions, 0))
        return [*map(float, sent), float(reduced), *map(float, places), ranks, float(tensor)]

    found = Cluster(3).run(member)
    assert found[1] == [1.0, 1.0, 3.0, 1.0, 1.0, 2.0, [(1, 3), (0, 2)], 1.0]
    assert found[2] == [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, [(2, 3), (1, 2)], 1.0]


def test_ranks_follow_the_members_when_a_step_begins() -> None:
    together = threading.Barrier(2)

    def member(session: Session, rank: int) -> Any:
        together.wait()
        workers = Workers(Strategy(session))
        group = DefaultGroup(workers, name="world")
        if rank == 0:
            raise Died
        group.allreduce([torch.zeros(1)])  # in a hook after the reduction, say
        before = (group.rank(), group.size())
        workers.follow()
        return [before, (group.rank(), group.size())]

    assert Cluster(2).run(member) == [None, [(1, 2), (0, 1)]]


def test_strategy_broadcasts_the_value_of_the_rank_that_was_meant() -> None:
    together = threading.Barrier(3)

    def member(session: Session, rank: int) -> Any:
        together.wait()
        if rank == 0:
            raise Died
        return Strategy(session).broadcast(rank, src=1)

    assert Cluster(3).run(member) == [None, 1, 1]


def lose_the_sender(host: str) -> dict[str, Any]:
    pl = importlib.import_module(host)

    class Losing(training.regression(pl)):  # type: ignore[misc]
        def on_train_epoch_end(self) -> None:
            rank = dist.get_rank()
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.objects: list[Any] = [f"rank {rank}"]
            with pytest.raises(UnsupportedError, match="rank 0"):
                dist.broadcast_object_list(self.objects, src=0)
            dist.broadcast_object_list(self.objects, src=1)
            self.all: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(self.all, f"of {rank}")

    module = Losing()
    training.trainer(pl, max_epochs=1).fit(module, training.loader(24))
    return {"objects": module.objects, "all": module.all}


@pytest.mark.processes
@pytest.mark.parametrize("host", HOSTS)
def test_objects_of_a_worker_that_is_killed_in_a_hook_raise_in_all_others(job: Job, host: str) -> None:
    workers = job.start_world(3, lose_the_sender, host)
    assert sorted(worker.wait() for worker in workers) == [-signal.SIGKILL, 0, 0]
    found = [worker.result() for worker in workers if worker.wait() == 0]
    assert found == [{"objects": ["rank 1"], "all": ["of 1", "of 1", "of 2"]}] * 2
