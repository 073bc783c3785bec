"""How many nodes a job has, as ``--nnodes`` says it: ``MIN:MAX``."""

from __future__ import annotations

import re

from ef_common.errors import UsageError

DEFAULT_NNODES = "1:8"
_NUMBER = re.compile(r"[0-9]{1,9}")


def nodes_of(text: str, *, option: str = "--nnodes") -> tuple[int, int]:
    """Parse ``--nnodes``, or another option for the same: ``MIN:MAX``, or one number for both.

    Raises:
        UsageError: It is malformed.

    Example:
        >>> nodes_of("2:8"), nodes_of("4")
        ((2, 8), (4, 4))
    """
    low, _, high = text.partition(":")
    high = high or low
    if not (_NUMBER.fullmatch(low) and _NUMBER.fullmatch(high) and 1 <= int(low) <= int(high)):
        raise UsageError(f"expected MIN:MAX, with at least one node. Received: {option}={text}")
    return int(low), int(high)
