"""What the workers of these tests do: a small Lightning training that can be configured, and can fail."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.imports import lean

with lean():
    import numpy as np
    import torch
    import torch.nn.functional as F  # noqa: N812
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.utilities import CombinedLoader
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, Dataset
    from torchmetrics import SumMetric

    from ef_common.collectives.torch_codec import as_bytes
    from ef_common.core.retention import Retention
    from ef_common.data.checkpointer import Checkpointing
    from ef_common.data.torch_stream import StreamDataset
    from ef_common.events import EventLog
    from ef_common.launch.environment import read_environment
    from ef_common.launch.process import this_worker
    from ef_lightning import ElasticFlowStrategy, hooks, module
    from tests.faults import throttles
    from tests.faults.faults import Fault, Striker, use_faulty_ports
    from tests.faults.holding import hold
    from tests.faults.saving import save_on_last_leave

SECOND_VAL_LENGTH = 29


@dataclass
class Options:
    """Options of the training."""

    length: int = 203
    batch_size: int = 8
    epochs: int = 2
    step_sleep_s: float = 0.01
    shared_per_s: float = 0.0  # steps per second of all workers together, as they share something
    shared_in: str = ""  # the folder where they take turns; the run directory
    throttled: bool = False  # a file may make a worker slow
    holds: dict[int, str] = field(default_factory=dict)  # from so many updates on, steps wait for this file
    num_workers: int = 0
    accumulate: int = 1
    val_length: int = 0
    # after the loader of the validation, a map-style one is evaluated, and then another one like the first
    several_val: bool = False
    # a second loader is evaluated beside the first one, in this mode of a CombinedLoader
    val_mode: str = ""
    checkpoints: bool = False
    wide: bool = False  # a larger module, with two buckets of gradients
    stop: str = ""  # a file in the run directory: the training ends when it is there
    limits: dict[str, Any] = field(default_factory=dict)  # further arguments of the Trainer
    backend: str = "gloo"
    accelerator: str = "cpu"
    data_worker_dies_at: int | None = None  # at the first reading of this sample
    global_batch: int | None = None
    checkpoint: str = ""  # URL
    checkpoint_steps: int = 2
    claims: str = ""  # URL
    checkpoint_options: dict[str, Any] = field(default_factory=dict)  # of its store
    share_bytes: int = 1 << 30
    keep_last: int = 3
    width: int = 0  # of the module, if neither of the two is wanted
    deterministic: bool = False
    random: bool = False  # dropout, and samples that are augmented
    saves: bool = False  # the last worker that leaves writes a file
    program: bool = False  # the module is one of a `forward`
    evict_stragglers: bool = False
    autoscale: dict[str, Any] | None = None
    evaluates: bool = False  # after the training: `validate`, `test` and `predict`
    second_length: int = 0  # of a second loader, which is read beside the first one
    second_is_stream: bool = False
    shards: int = 0  # the data are a stream of so many shards
    stream: dict[str, Any] = field(default_factory=dict)  # its settings
    knows_lengths: bool = False
    bad_sample: int | None = None  # cannot be read
    lacks_a_shard: bool = False


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images whose brighter half names the class; made from the index, so that every worker has the same."""

    def __init__(
        self, length: int, dies_at: int | None = None, *, random: bool = False, striker: Striker | None = None
    ) -> None:
        self._length, self._dies_at, self._random, self._striker = length, dies_at, random, striker

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self._dies_at and torch.utils.data.get_worker_info() is not None:
            self._die_once()
        if self._striker is not None:
            self._striker.at("data", step=self._striker.step)
        noise = torch.Generator().manual_seed(index)
        image, label = torch.rand(1, 8, 8, generator=noise), index % 2
        image[:, :, 4 * label : 4 * label + 4] += 0.5
        if self._random:
            image += 0.1 * torch.randn(1, 8, 8) + 0.1 * np.random.rand() + 0.1 * random.random()
        return image, torch.tensor(label)

    def _die_once(self) -> None:
        run_dir = read_environment().run_dir
        assert run_dir is not None
        try:
            (run_dir / "data-worker-died").touch(exist_ok=False)
        except FileExistsError:
            return
        EventLog(run_dir, f"data-worker-{os.getpid()}").write("fault", what="injected:data_worker")
        os.kill(os.getpid(), signal.SIGKILL)


class Shards:
    """The same images as a stream: a few long shards, short ones, and one without any."""

    def __init__(self, images: Images, num_shards: int, bad_sample: int | None = None) -> None:
        self._images, self._bad_sample = images, bad_sample
        cuts = sorted(random.Random(num_shards).sample(range(1, len(images)), num_shards - 2))
        edges = [0, *cuts, len(images), len(images)]
        self._shards = [f"{start}-{stop}" for start, stop in pairwise(edges)]

    def shards(self) -> list[str]:
        return self._shards

    def open(self, shard: str, offset: int) -> Iterator[tuple[Tensor, Tensor]]:
        start, stop = map(int, shard.split("-"))
        for index in range(start + offset, stop):
            if index == self._bad_sample:
                raise OSError("bad sector")
            yield self._images[index]


class KnownShards(Shards):
    """A stream that knows how long its shards are."""

    def length(self, shard: str) -> int:
        start, stop = map(int, shard.split("-"))
        return stop - start


class StrikingSGD(torch.optim.SGD):
    """Is struck between the reduction and the update."""

    striker: Striker

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.striker.at("optimizer", step=self.striker.step)
        super().step()
        return loss


class Net(LightningModule):
    """A net with the usual buffers, and no dropout."""

    def __init__(self, options: Options, striker: Striker) -> None:
        super().__init__()
        width = options.width or (
            5000 if options.wide else 16
        )  # 64 · 5000 parameters make it a module whose gradients are lent
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
        dropout = nn.Dropout(0.3) if options.random else nn.Identity()
        self.head = nn.Sequential(nn.Linear(64, width), nn.ReLU(), dropout, nn.Linear(width, 2))
        self.seen = SumMetric()
        self._options, self._striker = options, striker

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            batch = [torch.cat(parts) for parts in zip(*batch.values(), strict=True)]
        images, labels = batch
        striker = self._striker
        striker.begin_forward(self.trainer.global_step)
        striker.at("forward", step=striker.step, index=striker.num_forwards)
        if striker.num_forwards == 0:
            hold(self._options.holds, striker.step)
        if self._options.throttled:
            throttles.step(self._options.step_sleep_s, self._options.shared_per_s, Path(self._options.shared_in))
        else:
            time.sleep(self._options.step_sleep_s)
        hidden = self.features(images).flatten(1)
        hidden.register_hook(self._in_backward)  # the head's gradients are complete, those of the rest are not
        loss = F.cross_entropy(self.head(hidden), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        striker.begin_backward()
        return loss

    def setup(self, stage: str) -> None:
        self._striker.at("start")

    def on_fit_start(self) -> None:
        if self._options.saves:
            save_on_last_leave(this_worker(self._options.backend), lambda: self.trainer.global_step)

    def _in_backward(self, gradient: Tensor) -> None:
        self._striker.at("backward", step=self._striker.step)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if self._options.val_mode:
            batch = [torch.cat(parts) for parts in zip(*(part for part in batch if part is not None), strict=True)]
        images, labels = batch
        if self.trainer.state.fn == "fit":
            self._striker.at("validation", step=batch_idx, epoch=self.current_epoch, index=dataloader_idx)
        else:
            self._striker.at(self.trainer.state.fn.value, step=batch_idx)
        time.sleep(self._options.step_sleep_s)
        outputs = self(images)
        self.log("val_loss", F.cross_entropy(outputs, labels), sync_dist=True)
        self.log("val_accuracy", (outputs.argmax(1) == labels).float().mean(), sync_dist=True)
        self.log("val_samples", float(len(labels)), sync_dist=True, reduce_fx="sum")
        if dataloader_idx == 0:
            self.seen(float(len(labels)))
            self.log("val_seen", self.seen)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._striker.at("predict", step=batch_idx)
        return batch[0][:, 0, 0, 0]

    def configure_optimizers(self) -> Any:
        optimizer = StrikingSGD(self.parameters(), 0.05, momentum=0.9)
        optimizer.striker = self._striker
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return [optimizer], [scheduler]


def program(options: Options) -> LightningModule:
    """The same net and optimizer, but for the strikes, as a model and a `forward`."""

    def forward(images: Tensor, labels: Tensor, params: Any, training: bool) -> Any:
        time.sleep(options.step_sleep_s)
        outputs = params["head"](params["features"](images).flatten(1)) + params["bias"]
        accuracy = (outputs.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(outputs, labels), "accuracy": accuracy}

    model = {
        "features": nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        "head": nn.Linear(64, 2),
        "bias": torch.zeros(2, requires_grad=True),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.9),
    }
    return module(model, forward)  # type: ignore[no-any-return]


def train(options: dict[str, Any], fault: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, and tell how it ended.

    Args:
        options: Fields of `Options`.
        fault: Fields of the `Fault` of this process, if it has one.
    """
    chosen = Options(**options)
    striker = Striker(None if fault is None else Fault(**fault))
    use_faulty_ports(striker)
    _pass_the_end_of_validations(striker)
    # The start must be equal all the same; to compare runs, it is the same in all of them.
    torch.manual_seed(os.getpid() if chosen.global_batch is None else 0)
    trainer = _trainer(chosen)
    net = program(chosen) if chosen.program else Net(chosen, striker)
    validation = _validation(chosen)
    trainer.fit(net, _loader(chosen, striker), validation)
    evaluated = _evaluate(trainer, net, validation) if chosen.evaluates else {}
    worker = this_worker(chosen.backend)
    return {
        "pid": os.getpid(),
        "worker": worker.session.worker.id,
        "weights": _hash(net),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "world_size": worker.session.world_size,
        "metrics": {name: float(v) for name, v in trainer.callback_metrics.items() if name != "loss_step"},
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "compensation": trainer.strategy._saved.get("compensation"),
        **evaluated,
    }


def _validation(options: Options) -> Any:
    if not options.val_length:
        return None
    images: Any = Images(options.val_length)
    if options.shards:
        images = StreamDataset((KnownShards if options.knows_lengths else Shards)(images, min(5, options.val_length)))
    loader = DataLoader(images, options.batch_size, num_workers=options.num_workers if options.shards else 0)
    second = DataLoader(Images(SECOND_VAL_LENGTH), options.batch_size)
    if options.val_mode:
        return CombinedLoader([loader, second], options.val_mode)
    return [loader, second, copy.copy(loader)] if options.several_val else loader


def _evaluate(trainer: Any, net: LightningModule, loader: Any) -> dict[str, Any]:
    """What comes of a validation, a test and a prediction outside of `fit`."""
    found: dict[str, Any] = {
        name: getattr(trainer, name)(net, loader, verbose=False)[0] for name in ("validate", "test")
    }
    return {**found, "predicted": torch.cat(trainer.predict(net, loader)).tolist()}


def _pass_the_end_of_validations(striker: Striker) -> None:
    mark_done = hooks.mark_evaluation_done

    def pass_it(loop: Any) -> None:
        if striker.fault is not None and striker.fault.where == "validation_end":
            time.sleep(0.3)  # until the others have the last exchange of the pass, too
        striker.at("validation_end")
        mark_done(loop)

    hooks.mark_evaluation_done = pass_it


def _checkpointing(options: Options) -> Checkpointing | None:
    if not options.checkpoint:
        return None
    return Checkpointing(
        options.checkpoint,
        every_steps=options.checkpoint_steps,
        retention=Retention(keep_last=options.keep_last),
        storage_options=options.checkpoint_options,
        share_bytes=options.share_bytes,
    )


class StopWhenTold(Callback):
    """Ends the training of all workers when a file is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(self._path.exists(), all=False)


def _trainer(options: Options) -> Trainer:
    run_dir = read_environment().run_dir or Path()
    callbacks: list[Callback] = [StopWhenTold(run_dir / options.stop)] if options.stop else []
    if options.checkpoints:
        callbacks.append(ModelCheckpoint(run_dir / "checkpoints", save_last=True))
    return Trainer(
        strategy=ElasticFlowStrategy(
            backend=options.backend,
            compensation="linear",  # the optimizer has its own step
            global_batch_size=options.global_batch,
            deterministic=options.deterministic,
            checkpoint=_checkpointing(options),
            claims=options.claims or None,
            evict_stragglers=options.evict_stragglers,
            autoscale=options.autoscale,
        ),
        accelerator=options.accelerator,
        devices=1,
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=options.checkpoints,
        callbacks=callbacks,
        **options.limits,
    )


def _loader(options: Options, striker: Striker | None = None) -> Any:
    images = Images(options.length, options.data_worker_dies_at, random=options.random, striker=striker)
    if options.shards:
        kind = KnownShards if options.knows_lengths else Shards
        shards = kind(images, options.shards, options.bad_sample)
        if options.lacks_a_shard:
            del shards.shards()[3]
        stream = StreamDataset(shards, **{"shuffle": True, **options.stream})
        return DataLoader(stream, options.batch_size, num_workers=options.num_workers)
    loader = DataLoader(images, options.batch_size, shuffle=True, num_workers=options.num_workers)
    if options.second_length:
        samples = Images(options.second_length)
        second = DataLoader(samples, options.batch_size // 2, shuffle=True)
        if options.second_is_stream:
            second = DataLoader(StreamDataset(Shards(samples, 5)), options.batch_size // 2)
        return {"first": loader, "second": second}
    return loader


def _hash(net: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in net.state_dict().values():
        digest.update(as_bytes(tensor).numpy().tobytes())
    return digest.hexdigest()
