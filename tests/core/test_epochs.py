"""Which part of the data each epoch has is what Keras makes of `steps_per_epoch`."""

from __future__ import annotations

import pytest

from ef_common.core.epochs import ENDLESS, Epochs


def keras_steps(length: int, limit: int | None, num_epochs: int) -> list[int]:
    """Steps of each epoch, told as Keras's `EpochIterator` counts them."""
    found, seen = [], 0
    for _ in range(num_epochs):
        steps = 0
        if limit is None:
            seen = 0
        while steps < (limit or length) and seen < length:
            steps, seen = steps + 1, seen + 1
        if seen >= length:
            seen = 0
        found.append(steps)
    return found


@pytest.mark.parametrize("limit", [None, 1, 3, 5, 9, 10, 11, 25])
@pytest.mark.parametrize("first", [0, 4])
def test_epochs_have_the_lengths_of_keras_and_passes_have_everything_once(limit: int | None, first: int) -> None:
    epochs = Epochs(10, limit, first)
    numbers = range(first, first + 13)
    assert [epochs.length_of(epoch) for epoch in numbers] == keras_steps(10, limit, 13)
    passes: dict[int, list[int]] = {}
    for epoch in numbers:
        number, part = epochs.part(epoch)
        passes.setdefault(number, []).extend(part)
        assert epochs.begin_of_pass(epoch) == min(e for e in numbers if epochs.part(e)[0] == number)
    assert list(passes) == list(range(first, first + len(passes)))
    *whole, _ = passes.values()
    assert all(positions == list(range(10)) for positions in whole)


def test_data_without_an_end_are_one_pass() -> None:
    epochs = Epochs(ENDLESS, 7, 2)
    assert [epochs.part(epoch) for epoch in (2, 5)] == [(2, range(7)), (2, range(21, 28))]
