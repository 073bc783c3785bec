"""Draws docs/images/kill-and-join.svg from the event log of a run of `make demo`.

Usage: python docs/draw_kill_and_join.py [RUN_DIR]     (default: build/demo)
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

IMAGE = Path(__file__).parent / "images" / "kill-and-join.svg"
WIDTH, LEFT, RIGHT = 860, 86, 20
TOP, LANE, GAP, LOSS = 58, 24, 12, 96
AFTER_JOIN_S = 3.0  # the picture ends some seconds after the newcomer is in
COLORS = ("#2563eb", "#0d9488", "#9333ea", "#d97706")


def main(run_dir: Path) -> None:
    """Read the log, and write the picture."""
    logs = [[json.loads(line) for line in file.open()] for file in sorted((run_dir / "events").glob("*.jsonl"))]
    story = Story([record for log in logs for record in log])
    IMAGE.parent.mkdir(exist_ok=True)
    IMAGE.write_text(story.draw())


class Story:
    """What happened: who trained when, at which loss, and how long each change of the view took."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.steps: dict[str, list[float]] = defaultdict(list)
        losses: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.pauses: dict[int, float] = {}
        self.views: dict[int, list[str]] = {}
        for record in sorted(records, key=lambda record: record["time"]):
            if record["kind"] == "step":
                self.steps[record["worker"]].append(record["time"])
                losses[record["step"]].append((record["time"], record["loss"]))
            elif record["kind"] == "view":
                self._note_view(record)
        self.start = min(times[0] for times in self.steps.values())
        self.end = max(self.steps[self.views[3][-1]][0] + AFTER_JOIN_S, self.start + 1)
        means = ((max(time for time, _ in of), sum(loss for _, loss in of) / len(of)) for of in losses.values())
        self.losses = [(time, loss) for time, loss in sorted(means) if time <= self.end]

    def _note_view(self, record: dict[str, Any]) -> None:
        generation, before = record["generation"], self.views.get(record["generation"] - 1, [])
        self.views.setdefault(generation, record["members"])
        if record["worker"] in before and record["pause_s"] is not None:  # what a newcomer waits for is no pause
            self.pauses[generation] = max(self.pauses.get(generation, 0.0), record["pause_s"])

    def draw(self) -> str:
        """The picture, as SVG."""
        (lost,) = set(self.views[1]) - set(self.views[2])
        newcomer = self.views[3][-1]
        workers = [*(worker for worker in self.views[1] if worker != lost), lost, newcomer]
        height = TOP + len(workers) * (LANE + GAP) + LOSS + 64
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img">',
            "<title>One worker is killed, the others go on within milliseconds, and a new one joins</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        ]
        for row, worker in enumerate(workers):
            parts += self._lane(row, worker, label=f"worker {row + 1}")
        bottom = TOP + len(workers) * (LANE + GAP)
        killed, joined = self.steps[lost][-1], self.steps[newcomer][0]
        parts += self._mark(killed, bottom, f"SIGKILL: the others pause {1000 * self.pauses[2]:.0f} ms", "#dc2626")
        parts += self._mark(joined, bottom, f"a new worker joins: {1000 * self.pauses[3]:.0f} ms", "#15803d")
        parts += self._loss(bottom + 14)
        return "\n".join([*parts, "</svg>", ""])

    def _x(self, time: float) -> float:
        return LEFT + (time - self.start) / (self.end - self.start) * (WIDTH - LEFT - RIGHT)

    def _lane(self, row: int, worker: str, *, label: str) -> list[str]:
        y, color = TOP + row * (LANE + GAP), COLORS[row % len(COLORS)]
        times = [time for time in self.steps[worker] if time <= self.end]
        first, last = self._x(times[0]), self._x(times[-1])
        ticks = "".join(f"M{self._x(time):.1f} {y + 5}v{LANE - 10}" for time in times)
        return [
            f'<text x="{LEFT - 10}" y="{y + 16}" text-anchor="end" fill="#334155">{escape(label)}</text>',
            f'<rect x="{first:.1f}" y="{y}" width="{last - first:.1f}" height="{LANE}" rx="4" fill="{color}" '
            'fill-opacity="0.16"/>',
            f'<path d="{ticks}" stroke="{color}" stroke-width="1.5" fill="none"/>',
        ]

    def _mark(self, time: float, bottom: int, text: str, color: str) -> list[str]:
        x = self._x(time)
        anchor = "end" if x > WIDTH - 120 else "middle"
        return [
            f'<path d="M{x:.1f} {TOP - 14}V{bottom + LOSS + 14}" stroke="{color}" stroke-dasharray="4 3"/>',
            f'<text x="{x:.1f}" y="{TOP - 22}" text-anchor="{anchor}" fill="{color}" font-weight="600">'
            f"{escape(text)}</text>",
        ]

    def _loss(self, top: int) -> list[str]:
        largest = max(loss for _, loss in self.losses)
        points = " ".join(f"{self._x(time):.1f},{top + LOSS * (1 - loss / largest):.1f}" for time, loss in self.losses)
        base = top + LOSS
        seconds = range(0, int(self.end - self.start) + 1, 2)
        labels = (
            f'<text x="{self._x(self.start + second):.1f}" y="{base + 18}" text-anchor="middle" fill="#64748b">'
            f"{second} s</text>"
            for second in seconds
        )
        return [
            f'<text x="{LEFT - 10}" y="{top + LOSS / 2:.0f}" text-anchor="end" fill="#334155">loss</text>',
            f'<path d="M{LEFT} {base}H{WIDTH - RIGHT}" stroke="#cbd5e1"/>',
            f'<polyline points="{points}" fill="none" stroke="#0f172a" stroke-width="1.5"/>',
            *labels,
            f'<text x="{LEFT}" y="{base + 38}" fill="#64748b">One tick is one training step. Drawn from the event log '
            "of “make demo”, on two cores.</text>",
        ]


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo"))
