"""The picture of a run, of a few records."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import click
import pytest

from ef_common.demo import picture
from ef_common.demo.picture import Picture
from ef_common.events import EventLogError

SVG = "{http://www.w3.org/2000/svg}"


def step(worker: str, tenth: int) -> dict[str, Any]:
    """One every tenth of a second; the loss falls from 1 to 0."""
    return {"kind": "step", "worker": worker, "time": 10 + tenth / 10, "step": tenth, "loss": 1 - tenth / 50}


def view(worker: str, time: float, generation: int, members: list[str], pause_s: float | None) -> dict[str, Any]:
    record = {"kind": "view", "worker": worker, "time": time, "generation": generation, "members": members}
    return {**record, "pause_s": pause_s, "reason": "lost: b" if generation == 2 else "news"}


def records() -> list[dict[str, Any]]:
    """b trains for a second of five, and c joins after three; it started after two."""
    made: list[dict[str, Any]] = [{"kind": "start", "worker": worker, "time": 0.0} for worker in "ab"]
    made += [view(worker, 0.5, 1, ["a", "b"], None) for worker in "ab"]
    made += [step("a", tenth) for tenth in range(51)]
    made += [step("b", tenth) for tenth in range(11)]
    made += [view("a", 11.02, 2, ["a"], 0.014), {"kind": "start", "worker": "c", "time": 12.0}]
    made += [view("a", 13.0, 3, ["a", "c"], 0.02), view("c", 13.0, 3, ["a", "c"], 7.0)]
    made += [step("c", tenth) for tenth in range(31, 51)]
    return sorted(made, key=lambda record: record["time"])


def test_picture_in_characters_tells_who_trained_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_print", lambda text: True)
    first, second, third, loss, axis, *changes = click.unstyle(Picture(records()).text(62)).splitlines()
    assert first == "worker 1  " + 50 * "█"
    assert second == "worker 2  " + 11 * "█" + "✗"
    assert third == "worker 3  " + 20 * " " + 11 * "·" + 19 * "█"
    assert loss[10::7] == "█▇▆▅▄▃▂▁"
    assert axis.split() == ["0", "s", "2", "s", "4", "s"]
    assert changes == [
        "   1.0 s  worker 2 killed: the others pause 14 ms",
        "   3.1 s  worker 3 joins: 20 ms",  # its own wait is no pause
    ]


def test_picture_on_a_terminal_without_blocks_is_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "can_print", lambda text: False)
    assert click.unstyle(Picture(records()).text(62)).isascii()


def test_picture_as_svg_has_a_lane_for_each_worker_and_a_mark_for_each_change() -> None:
    root = ElementTree.fromstring(Picture(records()).svg())
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[:3] == ["worker 1", "worker 2", "worker 3"]
    assert "worker 2 killed: the others pause 14 ms" in texts
    assert "worker 3 joins: 20 ms" in texts
    killed, joined = (path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray"))
    width = picture.WIDTH - picture.LEFT - picture.RIGHT
    assert killed.startswith(f"M{picture.LEFT + width / 5:.1f} ")
    assert joined.startswith(f"M{picture.LEFT + width * 3.1 / 5:.1f} ")


def test_picture_of_a_run_without_steps_is_refused() -> None:
    with pytest.raises(EventLogError, match="no worker has completed a step"):
        Picture([{"kind": "start", "worker": "a", "time": 0.0}])
