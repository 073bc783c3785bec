"""Event logs of runs that never were: many workers, hours of steps, losses and joins, written in a moment."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

BEGAN = 1_790_000_000.0
BATCH = 8


@dataclass
class Generated:
    """Writes the log of a run, second by second.

    Args:
        run_dir: Its directory.
        step_s: Seconds of a step; each worker trains `BATCH` samples in it.
        length: Positions of an epoch.
        optional: Further fields of each event `step`.
    """

    run_dir: Path
    step_s: float = 1.0
    length: int = 1 << 40
    optional: dict[str, Any] = field(default_factory=dict)
    now: float = BEGAN
    generation: int = 0
    step: int = 0
    cursor: int = 0
    epoch: int = 0
    members: list[str] = field(default_factory=list)
    _lines: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _returned: list[list[int]] = field(default_factory=list)
    _num_started: int = 0

    def log(self, worker: str, kind: str, **fields: Any) -> None:
        record = {"v": 1, "time": round(self.now, 3), "worker": worker, "kind": kind, **fields}
        self._lines[worker].append(json.dumps(record, separators=(",", ":")))

    def start(self, number: int = 1) -> list[str]:
        """Processes that warm up."""
        workers = []
        for _ in range(number):
            worker = f"node{self._num_started // 8}-{4000 + self._num_started}-{self._num_started:04x}"
            self._num_started += 1
            self.log(worker, "start", pid=4000 + int(worker.split("-")[1]), host=worker.split("-")[0])
            workers.append(worker)
        return workers

    def view(self, members: list[str], reason: str, *, pause_s: float = 0.0, others: bool = True) -> None:
        before, self.members = set(self.members), list(members)
        self.generation += 1
        for rank, worker in enumerate(members):
            fields = {"rank": rank, "world_size": len(members), "reason": reason}
            paused = pause_s if worker in before else None
            self.log(worker, "view", generation=self.generation, members=members, pause_s=paused, **fields)
        size = BATCH * len(members)
        for worker in members:
            scale = {"rule": "linear", "reference_batch_size": 64, "ramp_steps": 0, "lr_scale": size / 64}
            self.log(worker, "compensation", step=self.step + 1, global_batch_size=size, **scale)

    def lose(self, worker: str, *, pause_s: float = 0.05, why: str = "its connection ended") -> None:
        rank = self.members.index(worker)
        self._returned = [[self.cursor + BATCH * rank, self.cursor + BATCH * (rank + 1)]]
        self.now += pause_s
        self.view([one for one in self.members if one != worker], f"{worker} gone ({why})", pause_s=pause_s)

    def join(self, workers: list[str], *, pause_s: float = 0.02) -> None:
        self.now += pause_s
        self.view([*self.members, *workers], f"planned: {len(workers)} join, 0 leave", pause_s=pause_s)
        for worker in workers:
            self.log(worker, "admitted", generation=self.generation, step=self.step, epoch=self.epoch)

    def leave(self, worker: str, *, pause_s: float = 0.02) -> None:
        self.log(worker, "notice", what="SIGTERM")
        self.now += pause_s
        self.view([one for one in self.members if one != worker], "planned: 0 join, 1 leave", pause_s=pause_s)

    def begin(self) -> None:
        for worker in self.members:
            self.log(worker, "epoch", epoch=self.epoch, length=self.length)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.now += self.step_s
            self.step += 1
            begin, self.cursor = self.cursor, self.cursor + BATCH * len(self.members)
            for rank, worker in enumerate(self.members):
                mine = [[begin + BATCH * rank, begin + BATCH * (rank + 1)]]
                self.log(
                    worker,
                    "step",
                    step=self.step,
                    epoch=self.epoch,
                    generation=self.generation,
                    world_size=len(self.members),
                    committed=[[begin, self.cursor]],
                    mine=mine,
                    returned=self._returned,
                    loss=round(2 * math.exp(-self.step / 2000) + 0.01 * rank, 6),
                    **self.optional,
                )
            self._returned = []

    def checkpoint(self) -> None:
        fields = {"id": f"e{self.epoch}-s{self.step}", "step": self.step, "seconds": 0.4, "bytes": 12_500_000}
        self.log(self.members[0], "checkpoint", **fields)

    def write(self) -> Path:
        """Append what has not been written yet."""
        folder = self.run_dir / "events"
        folder.mkdir(parents=True, exist_ok=True)
        for worker, lines in self._lines.items():
            with (folder / f"{quote(worker, safe='')}.jsonl").open("a") as file:
                file.write("".join(f"{line}\n" for line in lines))
        self._lines.clear()
        return self.run_dir


def small(run_dir: Path) -> Generated:
    """Three workers, a loss, a join and a leave."""
    run = Generated(run_dir, step_s=0.1)
    founders = run.start(3)
    run.now += 4.0
    run.view(founders, "3 workers start")
    run.begin()
    run.train(60)
    run.checkpoint()
    (newcomer,) = run.start()
    run.train(30)
    run.now += 0.06
    run.lose(founders[2])
    run.train(40)
    run.join([newcomer])
    run.train(30)
    run.log(founders[1], "straggler", slow=True, ratio=0.41, waiting=0.58)
    run.train(20)
    run.log(founders[1], "straggler", slow=False, ratio=0.97, waiting=0.01)
    run.checkpoint()
    run.train(20)
    run.leave(founders[1])
    run.train(20)
    run.write()
    return run


def large(run_dir: Path, *, num_workers: int = 256, hours: float = 6.0, step_s: float = 5.0) -> Generated:
    """Many workers for hours; one is lost and another one joins every few minutes."""
    run = Generated(run_dir, step_s=step_s)
    members = run.start(num_workers)
    run.now += 30.0
    run.view(members, f"{num_workers} workers start")
    run.begin()
    for number in range(int(hours * 3600 / (60 * step_s))):
        run.train(20)
        run.lose(run.members[(37 * number) % num_workers])
        newcomers = run.start()
        run.train(20)
        run.join(newcomers)
        run.checkpoint()
        run.train(20)
        run.write()
    return run
