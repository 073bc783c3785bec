"""Amounts of resources, as Kubernetes writes them: `500m`, `2`, `1.5Gi`, `1e3`."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_FORM = re.compile(r"([+-]?[0-9]*\.?[0-9]+|[+-]?[0-9]+\.)([eE][+-]?[0-9]{1,3}|[numkMGTPE]|[KMGTPE]i)?")
_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_MAX = 2**63 - 1
"""Kubernetes takes what is more for this."""
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}


def thousandths(text: str | float) -> int:
    """An amount in thousandths, rounded up as Kubernetes does.

    Raises:
        ValueError: It is none, or negative.

    Example:
        >>> thousandths("250m"), thousandths("1.5Ki"), thousandths(2)
        (250, 1536000, 2000)
    """
    found = _FORM.fullmatch(str(text).strip())
    if found is None:
        raise ValueError(f"an amount of a resource is a number with a suffix, such as 500m or 2Gi. Received: {text}")
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix in _BINARY:
        number *= 1024 ** _BINARY[suffix]
    elif suffix[:1] in ("e", "E") and len(suffix) > 1:
        number *= Decimal(10) ** int(suffix[1:])
    elif suffix:
        number *= Decimal(10) ** _POWERS[suffix]
    if number < 0:
        raise ValueError(f"an amount of a resource is not negative. Received: {text}")
    return int((min(number, Decimal(_MAX)) * 1000).to_integral_value(rounding=ROUND_CEILING))
