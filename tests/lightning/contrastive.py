"""Trainings whose loss compares the samples of all workers, and one process that does the same."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.func import functional_call

from ef_common.launch.environment import read_environment
from ef_lightning import strategy_for
from tests.faults.faults import Fault, Striker, use_faulty_ports
from tests.lightning import training

LENGTH = 29
RATE = 0.1


def encoder(width: int = 8) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 4)).double()


def loss_of(first: Tensor, seconds: Tensor, rank: int) -> Tensor:
    """Each sample's second view is to be found among those of all workers."""
    labels = rank * len(first) + torch.arange(len(first))
    return F.cross_entropy(5.0 * F.normalize(first) @ F.normalize(seconds).T, labels)


class Tape:
    """Notes down what each forward pass of this process has used, in a file of its own."""

    def __init__(self) -> None:
        directory = read_environment().run_dir
        assert directory is not None
        self._path = Path(directory, f"tape-{os.getpid()}.jsonl")

    def write(self, **record: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def contrastive(pl: Any, striker: Striker, options: dict[str, Any]) -> Any:
    class Contrastive(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder(options.get("width", 8))
            self.tape = Tape()

        def gather(self, values: Tensor) -> Tensor:
            if options.get("default_group"):
                assert dist.get_world_size() == self.trainer.world_size
                return torch.cat(all_gather(values))
            return self.all_gather(values, sync_grads=True).flatten(0, 1)  # type: ignore[no-any-return]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            indices, features, _ = batch
            masks = torch.rand(2, *features.shape)
            session = self.trainer.strategy.session
            gathers = (self.global_step, batch_idx) >= tuple(options.get("gathers_from", (0, 0)))
            self.tape.write(
                step=self.global_step,
                batch=batch_idx,
                members=session.completed_in.ids,
                worker=session.worker.id,
                indices=indices.tolist(),
                masks=masks.tolist(),
                gathers=gathers,
                before=[float(self.encoder[1].running_mean[0]), int(self.encoder[1].num_batches_tracked)],
            )
            striker.begin_forward(self.global_step)
            place = {"step": self.global_step, "index": striker.num_forwards}
            striker.at("before_gather", **place)
            first, second = (self.encoder(features.double() * mask) for mask in masks)
            if gathers:
                seconds, rank = self.gather(second), session.completed_in.rank_of(session.worker.id)
            else:
                seconds, rank = second, 0
            striker.at("after_gather", **place)
            if session.completed_in.generation == session.view.generation:
                # Else this worker was given the result after a loss, and has another rank already than in this gather.
                striker.at("after_each_gather", step=self.global_step)
            loss = loss_of(first, seconds, rank)
            loss.register_hook(lambda gradient: striker.at("before_backward", **place))
            self.log("loss", loss.detach(), on_epoch=True, on_step=False, batch_size=len(indices))
            self.log("passes", 1.0, on_epoch=True, on_step=False, reduce_fx="sum")
            striker.begin_backward()
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), RATE)

    return Contrastive()


def train(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, with a fault of this process if it has one."""
    pl = importlib.import_module(options.get("host", "lightning.pytorch"))
    striker = Striker(None if fault is None else Fault(**fault))
    use_faulty_ports(striker)
    torch.manual_seed(os.getpid())
    module = contrastive(pl, striker, options)
    strategy = strategy_for(pl.__name__)(backend="gloo", compensation="none")
    least = options.get("expects", 0)  # workers, without which it does not end
    enough = training.holding(pl, lambda trainer: trainer.world_size < least and trainer.global_step >= 10)
    trainer = training.trainer(pl, strategy, callbacks=[enough], **options.get("trainer", {}))
    loader = training.loader(options.get("length", LENGTH), num_workers=options.get("num_workers", 0))
    trainer.fit(module, loader)
    return {
        "worker": strategy_worker(),
        "weights": training.weights(module),
        "step": trainer.global_step,
        "passes": float(trainer.callback_metrics["passes"]),
    }


def strategy_worker() -> str:
    from ef_common.launch.process import this_worker

    return this_worker("gloo").session.worker.id


# ---------------------------------------------------------------- the reference


def tapes(directory: Path) -> list[dict[str, Any]]:
    """Of all workers, in the order in which each of them has written."""
    paths = sorted(directory.glob("tape-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def attempts(records: Sequence[dict[str, Any]], worker: str, step: int, batch: int) -> list[dict[str, Any]]:
    """Forward passes of one worker for one batch."""
    return [r for r in records if (r["worker"], r["step"], r["batch"]) == (worker, step, batch)]


def parameters(**options: int) -> list[int]:
    """Where parameters stand in a list of weights."""
    net, places = encoder(options.get("width", 8)), iter(range(1 << 30))
    names = {name for name, _ in net.named_parameters()}
    numbered = {name: [next(places) for _ in range(value.numel())] for name, value in net.state_dict().items()}
    return [place for name, some in numbered.items() if name in names for place in some]


def shares_of(newest: Sequence[dict[str, Any]]) -> list[int]:
    """Samples of each worker's own in a step: what fills a batch up is another one's, or the same one again."""
    seen: set[int] = set()
    shares = []
    for record in newest:
        own = set(record["indices"]) - seen
        seen |= own
        shares.append(len(own))
    return shares


def reference(
    records: Sequence[dict[str, Any]], survivor: str, *, accumulate: int = 1, width: int = 8, length: int = LENGTH
) -> list[float]:
    """Weights after a training in one process, with what the newest attempt of each step has used.

    Args:
        records: The tapes.
        survivor: A worker that has made all steps.
        accumulate: Batches of an update.
        width: Of the encoder.
        length: Samples of an epoch.
    """
    net, data = encoder(width), training.data(length)
    for step in sorted({r["step"] for r in records}):
        own = [r for r in records if r["step"] == step and r["worker"] == survivor]
        order = own[-1]["members"]
        for batch in sorted({r["batch"] for r in own}):
            newest = {m: attempts(records, m, step, batch)[-1] for m in order}
            shares = shares_of(list(newest.values()))
            firsts, seconds, buffers = [], [], []
            for member in order:
                record = newest[member]
                features = torch.stack([data[index][1] for index in record["indices"]])
                kept = {name: value.clone() for name, value in net.named_buffers()}
                one, two = (
                    functional_call(net, {**dict(net.named_parameters()), **kept}, (features.double() * mask,))
                    for mask in torch.tensor(record["masks"])
                )
                firsts.append(one)
                seconds.append(two)
                buffers.append(kept)
            # What fills up the step of a worker without samples of its own has no gradient.
            seconds = [two if share else two.detach() for two, share in zip(seconds, shares, strict=True)]
            gathered = torch.cat(seconds)
            if newest[survivor]["gathers"]:
                losses = [loss_of(one, gathered, rank) for rank, one in enumerate(firsts)]
            else:
                losses = [loss_of(one, two, 0) for one, two in zip(firsts, seconds, strict=True)]
            weighed = [loss * share / sum(shares) for share, loss in zip(shares, losses, strict=True)]
            (torch.stack(weighed).sum() / accumulate).backward()  # type: ignore[no-untyped-call]
            for name, value in net.named_buffers():
                value.copy_(buffers[0][name])  # rank 0's are everybody's
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter -= RATE * parameter.grad
                    parameter.grad = None
    return training.weights(net)
