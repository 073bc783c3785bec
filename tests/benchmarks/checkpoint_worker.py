"""Trains 33 M parameters with AdamW (400 MB of state), takes checkpoints in several ways, and reports what they cost.

Arguments: folder, number of rounds, URL of an S3 bucket or nothing, and the endpoint of the server.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from ef_common.data.checkpointer import Checkpointer, Checkpointing
from ef_common.events import EventLog
from ef_common.storage.checkpoints import Checkpoints
from ef_common.storage.store import Store
from ef_lightning import ElasticFlowStrategy
from ef_lightning.plain_checkpoint import PlainCheckpoints
from ef_lightning.saved_tree import FILE
from tests.benchmarks.lightning_module import Module, trainer
from tests.benchmarks.models import loader
from tests.benchmarks.pair import report
from tests.benchmarks.processes import die_with_parent
from tests.storage.ceph import KEYS

_KEYS = {"aws_access_key_id": KEYS["key"], "aws_secret_access_key": KEYS["secret"]}


class Measure(Callback):
    """In the middle of a training: a checkpoint in each way, several times."""

    def __init__(self, folder: Path, num_rounds: int, s3: tuple[str, str] | None) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)
        self._folder = folder
        self._num_rounds = num_rounds
        self._s3 = s3
        self._writes: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        gc.freeze()  # or now and then all modules are collected through, for a second, in the time of whoever is next
        local = self._job(trainer, str(self._folder / "ours"))
        self._memory(local)
        state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for number in range(self._num_rounds):
            self._ours(local, 10 + number)
            self._lightning(trainer, number)
            self._async_io(trainer, number)
            self._dcp(state, number)
            self._sequential(number)
            self._resume(lambda: Store(str(self._folder / "ours")), lambda: io.BytesIO(self._path(0).read_bytes()))
        if self._s3 is not None:
            self._object_store(trainer, *self._s3)
        trainer.should_stop = True

    def _object_store(self, trainer: Any, url: str, endpoint: str) -> None:
        import boto3

        def connect() -> Any:  # as in another process
            return boto3.Session().client("s3", endpoint_url=endpoint, region_name="us-east-1", **_KEYS)

        def download() -> io.BytesIO:
            file = io.BytesIO()
            connect().download_fileobj(bucket, "sync", file)
            file.seek(0)
            return file

        client, bucket = connect(), url.removeprefix("s3://").split("/")[0]
        client.upload_file(str(self._path(0)), bucket, "sync")

        url, options = f"{url}/ours", {**KEYS, "endpoint_url": endpoint}
        remote = self._job(trainer, url, **options)
        for number in range(self._num_rounds):
            self._ours(remote, 10 + number, name="s3")
            self._boto3(client, bucket)
        for _ in range(self._num_rounds):
            self._resume(lambda: Store(url, options), download, name="s3_")

    def _job(self, trainer: Any, url: str, **options: Any) -> Checkpointer:
        session, checkpoints = trainer.strategy.session, trainer.strategy._fit.checkpoints
        settings = Checkpointing(url, storage_options=options)
        job = Checkpointer(settings, session, source=checkpoints, log=EventLog(None, "b"))
        job._saved = self._writes.append  # type: ignore[method-assign]
        job.begin("")
        return job

    def _ours(self, job: Checkpointer, step: int, *, name: str = "local") -> None:
        os.sync()
        begin = time.perf_counter()
        job.take(step)
        self.found[f"{name}_pause"].append(time.perf_counter() - begin)
        job._saver.flush()  # type: ignore[union-attr]
        self.found[f"{name}_write"].append(self._writes.pop())

    def _memory(self, job: Checkpointer) -> None:
        """Of the first one, for which the copy's memory is taken."""
        process, peak, done = psutil.Process(), 0, False
        before = process.memory_info().rss
        job.take(1)
        while not done:
            done = job._saver.flush(0.005)  # type: ignore[union-attr]
            peak = max(peak, process.memory_info().rss)
        self.found["extra_bytes"].append(peak - before)

    def _lightning(self, trainer: Any, number: int) -> None:
        path = self._path(number % 2)
        self._timed("sync", lambda: trainer.save_checkpoint(path))
        self.found["bytes"] = [path.stat().st_size]

    def _async_io(self, trainer: Any, number: int) -> None:
        plugin = AsyncCheckpointIO(TorchCheckpointIO())

        def save() -> None:
            state = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            plugin.save_checkpoint(state, self._folder / f"async{number % 2}.ckpt")

        self._timed("async_io", save)
        plugin.teardown()

    def _dcp(self, state: dict[str, Any], number: int) -> None:
        tensors = {"model": state["state_dict"], "optimizer": state["optimizer_states"][0]}
        futures: list[Any] = []
        path = self._folder / f"dcp{number % 2}"
        self._timed("dcp", lambda: futures.append(dcp.async_save(tensors, checkpoint_id=path)))
        futures[0].result()

    def _sequential(self, number: int) -> None:
        """The bytes of a checkpoint, written one after the other to the same disk."""
        data = np.random.default_rng(0).bytes(int(self.found["bytes"][0]))

        def write() -> None:
            with open(self._folder / f"sequential{number}", "wb") as file:
                for start in range(0, len(data), 8 << 20):
                    file.write(memoryview(data)[start : start + (8 << 20)])
                file.flush()
                os.fsync(file.fileno())

        self._timed("sequential", write)

    def _path(self, number: int) -> Path:
        return self._folder / f"sync{number}.ckpt"

    def _boto3(self, client: Any, bucket: str) -> None:
        data = np.random.default_rng(0).bytes(int(self.found["bytes"][0]))
        self._timed("boto3", lambda: client.upload_fileobj(io.BytesIO(data), bucket, "boto3"))

    def _resume(self, store: Callable[[], Store], read: Callable[[], io.BytesIO], *, name: str = "") -> None:
        """From the listing to a model and its tensors, against reading the bytes, and making the same."""

        def ours() -> None:
            checkpoints = Checkpoints(store())
            found = checkpoints.newest_valid(keep=True)
            with checkpoints.open(found, FILE) as file:  # type: ignore[arg-type]
                PlainCheckpoints(None).load(file)
            Module("33m")

        def plain() -> None:
            torch.load(read(), weights_only=True)
            Module("33m")

        pair = [(f"{name}resume", ours), (f"{name}read", plain)]
        for what, act in pair if len(self.found[f"{name}read"]) % 2 else reversed(pair):  # who comes first, in turns
            self._cache()
            self._timed(what, act)

    def _cache(self) -> None:
        """Have the system hold both files in memory, so that the disk's moods make no difference."""
        for path in (self._path(0), *(self._folder / "ours").rglob("*")):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(8 << 20):
                        pass

    def _timed(self, name: str, act: Callable[[], Any]) -> None:
        os.sync()  # what others have left to be written
        begin = time.perf_counter()
        act()
        self.found[name].append(time.perf_counter() - begin)


def main() -> None:
    """Measure."""
    die_with_parent()
    warnings.simplefilter("ignore")
    folder, num_rounds = Path(sys.argv[1]), int(sys.argv[2])
    s3 = (sys.argv[3], sys.argv[4]) if len(sys.argv) > 3 else None
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    measure = Measure(folder, num_rounds, s3)
    strategy = ElasticFlowStrategy(checkpoint=str(folder / "run"), compensation="none")
    module = Module("33m")
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 1e-4)  # type: ignore[method-assign]
    trainer(measure, strategy=strategy, max_steps=5).fit(module, loader(80))
    report(measure.found)


if __name__ == "__main__":
    main()
