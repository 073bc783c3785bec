"""How many samples of a DataLoader Lightning's limits leave."""

from __future__ import annotations

import math

from ef_common.errors import UsageError


def limited(length: int, batch_size: int, limit: float) -> int:
    """Samples in a fraction of the batches, as one process without ElasticFlow counts them.

    >>> limited(100, 8, 0.5), limited(100, 8, 1.0), limited(100, 8, 3)  # a number of batches is no fraction
    (48, 100, 100)

    Raises:
        UsageError: That is no batch.
    """
    if isinstance(limit, int) or limit >= 1.0:
        return length
    return min(length, fraction_of(-(-length // batch_size), limit) * batch_size)


def fraction_of(num_batches: int, limit: float) -> int:
    """Whole batches in a fraction of them.

    >>> fraction_of(13, 0.5), fraction_of(13, 0.0)
    (6, 0)

    Raises:
        UsageError: There are none, though there would be some without the limit.
    """
    part = int(num_batches * limit)
    if num_batches and limit and not part:
        raise UsageError(
            f"the Trainer's limit leaves less than one of the {num_batches} batches of a loader. Give at least "
            f"{math.ceil(1e6 / num_batches) / 1e6:g}, or a number of batches. Received: {limit}"
        )
    return part


def before_limit(num_batches: int, limit: float) -> int:
    """The length of a loader of which Lightning's limit leaves this many batches.

    >>> before_limit(3, 0.3), before_limit(3, 1.0), before_limit(3, 5)
    (10, 3, 3)
    """
    if isinstance(limit, int) or limit in (0.0, 1.0):
        return num_batches
    length = math.ceil(num_batches / limit)
    while int(length * limit) < num_batches:  # rounding
        length += 1
    return length
