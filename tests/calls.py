"""How many functions a piece of code calls: what it costs, on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable


def calls_of(act: Callable[[], object]) -> int:
    """How many functions are called while this runs, those of C among them."""
    calls: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]
