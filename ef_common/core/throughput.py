"""The throughput of a job at each of its sizes, as it is measured while the job trains.

The throughput of a size is the number of samples per second of all workers together, over a *window* of training
steps. The first steps after each change of the view are left out, because kernels are compiled and caches are filled in
them, and so are pauses. A window consists of parts, whose standard deviation tells how much the throughput varies.

**Only neighbours in time are compared.** Other users of the machine, the network or the storage make the throughput of
all sizes drift by some ten per cent within minutes, so a throughput of today says little against one of an hour ago. A
change of size, however, is measured shortly before it and shortly after it. That pair is a *trial*, and the ratio of
its throughputs is free of the drift. What is known of a size is therefore the product of the ratios on the way from the
present size to it, times the present throughput (`History.curve`).

A history keeps the newest measure of each size and the newest trials, at most `MOST` of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from ef_common.core.checks import is_count

NUM_PARTS = 8
MOST = 64
"""Measures and trials that a history keeps; the oldest are forgotten."""
_WARM_UP_STEPS = 10
MOST_WINDOWS = 4  # a trial is the mean of this many windows; later ones have drifted
_NEIGHBOURS_S = 900.0  # a pause between two measures beyond this makes them incomparable
_SMOOTHING = 0.3  # weight of the newest value


@dataclass(frozen=True, slots=True)
class Measure:
    """What is known of one size.

    Args:
        size: Nodes.
        throughput: Samples per second of all workers together, mean over the window.
        spread: Standard deviation of the throughputs of the window's parts.
        seconds: How long it was measured, without pauses and warm-up.
        at: When the newest part ended (epoch seconds).
    """

    size: int
    throughput: float
    spread: float
    seconds: float
    at: float

    def __post_init__(self) -> None:
        _check(is_count(self.size, least=1), "a size is a number of nodes", size=self.size)
        _check(_is_amount(self.throughput) and self.throughput > 0, "a throughput is positive", value=self.throughput)
        for name in ("spread", "seconds", "at"):
            value = getattr(self, name)
            _check(_is_amount(value), f"{name} is a number, not negative", value=value)


@dataclass(frozen=True, slots=True)
class Trial:
    """A change of size, with the throughputs shortly before it and shortly after it.

    Args:
        before: The last measure of the old size.
        after: The mean of the first measures of the new one.
        windows: How many windows that mean has.
    """

    before: Measure
    after: Measure
    windows: int = 1

    def __post_init__(self) -> None:
        _check(self.before.size != self.after.size, "a trial has two sizes", size=self.after.size)
        _check(is_count(self.windows, least=1), "a trial has windows", windows=self.windows)

    @property
    def sizes(self) -> frozenset[int]:
        """The two sizes."""
        return frozenset((self.before.size, self.after.size))

    @property
    def at(self) -> float:
        """When it was measured last (epoch seconds)."""
        return self.after.at

    @property
    def error(self) -> float:
        """Standard error of the ratio of its throughputs, relative to the ratio."""
        before, after = self.before, self.after
        return math.hypot(
            before.spread / before.throughput / math.sqrt(NUM_PARTS),
            after.spread / after.throughput / math.sqrt(NUM_PARTS * self.windows),
        )


@dataclass(frozen=True, slots=True)
class SpeedHistory:
    """What a run has learned about its sizes: plain data for checkpoints and for newcomers.

    Args:
        measures: The newest measure of each size, the oldest first.
        trials: The newest trials, the oldest first.
        change_s: Smoothed pause of the training at a change of size; 0 if unknown.
        noise_scale: Smoothed noise scale in samples (see `noise_scale`); None if unknown.
        wanted: The number of nodes that the policy has asked for last; 0 if none.

    >>> history = SpeedHistory()
    >>> for measure in (Measure(1, 100.0, 0.0, 10.0, 10.0), Measure(2, 180.0, 0.0, 10.0, 30.0)):
    ...     history = history.with_measure(measure)
    >>> history.with_measure(Measure(2, 162.0, 0.0, 10.0, 9000.0)).curve(2)  # today the machine is slower by 10 %
    {1: 90.0, 2: 162.0}
    >>> SpeedHistory.from_plain(history.to_plain()) == history
    True
    """

    measures: tuple[Measure, ...] = ()
    trials: tuple[Trial, ...] = ()
    change_s: float = 0.0
    noise_scale: float | None = None
    wanted: int = 0

    def __post_init__(self) -> None:
        _check(is_count(self.wanted, least=0), "a wish is a number of nodes", wanted=self.wanted)
        _check(_is_amount(self.change_s), "a pause has a length in seconds", change_s=self.change_s)
        noise = self.noise_scale
        _check(noise is None or _is_amount(noise), "a noise scale is a number of samples", noise_scale=noise)

    # ------------------------------------------------------------ what is known

    def of(self, size: int) -> Measure | None:
        """The newest measure of a size."""
        return next((measure for measure in self.measures if measure.size == size), None)

    def trial(self, one: int, other: int) -> Trial | None:
        """The newest trial of these two sizes, in either direction."""
        return next((trial for trial in reversed(self.trials) if trial.sizes == {one, other}), None)

    @property
    def newest(self) -> Measure | None:
        """The newest measure of all."""
        return self.measures[-1] if self.measures else None

    def curve(self, size: int) -> dict[int, float]:
        """Throughputs by size as they would be now, if the present size is this one.

        The newest trials count first, so that old knowledge gives way to new knowledge. A size without a way of trials
        to this one is not in the result, because nothing comparable is known of it. Takes O(sizes · trials).
        """
        measure = self.of(size)
        if measure is None:
            return {}
        found = {size: measure.throughput}
        while True:
            for trial in reversed(self.trials):
                known, new = trial.before, trial.after
                if known.size not in found:
                    known, new = new, known
                if known.size in found and new.size not in found:
                    found[new.size] = found[known.size] * (new.throughput / known.throughput)
                    break
            else:
                return dict(sorted(found.items()))

    # ------------------------------------------------------------ what is learned

    def with_measure(self, measure: Measure) -> SpeedHistory:
        """The history with one more window."""
        measures = _newest((one for one in self.measures if one.size != measure.size), measure)
        before = self.newest
        if before is None or measure.at < before.at:
            return replace(self, measures=measures)
        if before.size == measure.size:
            return replace(self, measures=measures, trials=self._with_window(measure))
        if measure.at - measure.seconds - before.at > _NEIGHBOURS_S:
            return replace(self, measures=measures)
        return replace(self, measures=measures, trials=_newest(self.trials, Trial(before, measure)))

    def _with_window(self, measure: Measure) -> tuple[Trial, ...]:
        """The trials after one more window of the same size: the newest one becomes a mean of more windows."""
        if not self.trials or (newest := self.trials[-1]).after.size != measure.size:
            return self.trials
        if newest.windows >= MOST_WINDOWS or measure.at - newest.at - measure.seconds > _NEIGHBOURS_S:
            return self.trials
        part = 1 / (newest.windows + 1)
        mean = replace(
            measure,
            throughput=newest.after.throughput + part * (measure.throughput - newest.after.throughput),
            spread=newest.after.spread + part * (measure.spread - newest.after.spread),
            seconds=newest.after.seconds + measure.seconds,
        )
        return (*self.trials[:-1], replace(newest, after=mean, windows=newest.windows + 1))

    def with_change(self, pause_s: float) -> SpeedHistory:
        """The history after a change of size for which the training has paused for so long."""
        before = self.change_s
        return replace(self, change_s=pause_s if before == 0 else before + _SMOOTHING * (pause_s - before))

    def with_wanted(self, wanted: int) -> SpeedHistory:
        """The history after the policy has asked for so many nodes."""
        return replace(self, wanted=wanted)

    def with_noise_scale(self, noise_scale: float | None) -> SpeedHistory:
        """The history with a newer noise scale."""
        return self if noise_scale is None else replace(self, noise_scale=noise_scale)

    # ------------------------------------------------------------ plain data

    def to_plain(self) -> dict[str, Any]:
        """The history as plain data, for JSON."""
        return asdict(self) | {
            "measures": [asdict(measure) for measure in self.measures],
            "trials": [asdict(trial) for trial in self.trials],
        }

    @classmethod
    def from_plain(cls, value: object) -> SpeedHistory:
        """The history of plain data.

        Raises:
            ValueError: It is none. Unknown keys are ignored, since a newer version may have written them.
        """
        plain = _known(cls, value)
        plain["measures"] = _newest(_each(Measure, plain.get("measures", [])))
        plain["trials"] = _newest(
            _of(Trial, _known(Trial, trial) | {side: _of(Measure, _known(Trial, trial).get(side)) for side in _SIDES})
            for trial in _list(plain.get("trials", []))
        )
        return _of(cls, plain)


_SIDES = ("before", "after")
_T = TypeVar("_T")


class SpeedWindow:
    """Gathers the training steps of one size until they make a measure.

    After a change of the view, the first steps are left out. Warm-up and window together take no more than
    `every_steps` training steps; then the next window begins, without a warm-up. Takes O(1) memory.

    Args:
        every_steps: Training steps from a change to the measure; with fewer than 10 it takes 10.

    >>> window = SpeedWindow(every_steps=20)
    >>> measures = [window.note(step * 0.5, 2, 32) for step in range(1, 22)]
    >>> [measure for measure in measures if measure]
    [Measure(size=2, throughput=64.0, spread=0.0, seconds=4.0, at=7.0)]
    """

    def __init__(self, every_steps: int) -> None:
        self._warm_up = min(_WARM_UP_STEPS, every_steps // 4)
        self._part_steps = max(1, (every_steps - self._warm_up) // NUM_PARTS)
        self._size = 0
        self.restart()

    def restart(self) -> None:
        """The view has changed: begin anew, with the warm-up."""
        self._to_skip = self._warm_up + 1  # the first step has begun before the change
        self._last: float | None = None
        self._parts: list[tuple[int, float]] = []  # samples and seconds of each
        self._part = (0, 0.0, 0)  # samples, seconds and steps

    def note(self, now: float, size: int, num_samples: int, *, paused_s: float = 0.0) -> Measure | None:
        """Note a training step that has just been committed.

        Args:
            now: The time (epoch seconds).
            size: Nodes that have made the step.
            num_samples: Samples of the step, of all workers together.
            paused_s: For how long the training has paused since the last step: checkpoints, evaluations, callbacks.

        Returns:
            The measure, if the window is complete.
        """
        if size != self._size:
            self._size = size
            self.restart()
        took_s = 0.0 if self._last is None else now - self._last - paused_s
        self._last = now
        if self._to_skip > 0:
            self._to_skip -= 1
            return None
        if took_s <= 0:
            return None  # the clock was set back
        samples, seconds, steps = self._part
        self._part = (samples + num_samples, seconds + took_s, steps + 1)
        if steps + 1 < self._part_steps:
            return None
        self._parts.append(self._part[:2])
        self._part = (0, 0.0, 0)
        if len(self._parts) < NUM_PARTS:
            return None
        parts, self._parts = self._parts, []
        return _measured(parts, size, now)


def _measured(parts: Sequence[tuple[int, float]], size: int, now: float) -> Measure | None:
    num_samples, seconds = sum(part[0] for part in parts), sum(part[1] for part in parts)
    if num_samples <= 0:
        return None
    throughputs = [samples / took_s for samples, took_s in parts]
    mean = sum(throughputs) / len(parts)
    spread = math.sqrt(sum((one - mean) ** 2 for one in throughputs) / (len(parts) - 1))
    return Measure(size, num_samples / seconds, spread, seconds, now)


# ---------------------------------------------------------------- checks


def _newest(known: Iterable[_T], *newer: _T) -> tuple[_T, ...]:
    return (*known, *newer)[-MOST:]


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _check(holds: bool, expected: str, **received: object) -> None:
    if not holds:
        raise ValueError(f"{expected}. Received: {', '.join(f'{name}={value!r}' for name, value in received.items())}")


def _known(cls: type, value: object) -> dict[str, Any]:
    """The fields of a class in a mapping."""
    if not isinstance(value, Mapping):
        raise ValueError(f"a {cls.__name__} is a mapping. Received: {value!r}")
    return {field.name: value[field.name] for field in fields(cls) if field.name in value}


def _list(value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list. Received: {value!r}")
    return list(value)


def _of(cls: type[_T], value: object) -> _T:
    try:
        return cls(**_known(cls, value))
    except TypeError as error:
        raise ValueError(f"this is no {cls.__name__}: {error}. Received: {value!r}") from error


def _each(cls: type[_T], values: object) -> list[_T]:
    return [_of(cls, value) for value in _list(values)]
