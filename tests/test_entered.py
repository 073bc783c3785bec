from __future__ import annotations

import pytest

from tests.entered import Entered


class Counted(Entered):
    """Starts things until one of them fails.

    Args:
        fails_at: The number of that one; 0 for none.
        error: With what it fails.
    """

    def __init__(self, fails_at: int = 0, error: BaseException | None = None) -> None:
        self.running: list[int] = []
        self._fails_at, self._error = fails_at, error

    def __exit__(self, *_: object) -> None:
        self.running.clear()

    def _start(self) -> None:
        for number in range(1, 4):
            if number == self._fails_at and self._error is not None:
                raise self._error
            self.running.append(number)


def test_what_is_entered_runs_until_it_is_left() -> None:
    with Counted() as entered:
        assert entered.running == [1, 2, 3]
    assert entered.running == []


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
def test_what_cannot_be_entered_whole_leaves_nothing_behind(error: BaseException) -> None:
    entered = Counted(3, error)
    with pytest.raises(type(error)), entered:
        pytest.fail("it was entered")
    assert entered.running == []
