"""How to try again when a store fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import tenacity

from ef_common.errors import StorageFailed


@dataclass(frozen=True, slots=True)
class Retries:
    """How to try again when a store fails.

    Args:
        first: Wait after the first failure; it doubles after each, with jitter.
        longest: No single wait is longer.
        total: Time after which it gives up. One attempt may last longer, because it is never cut short.
    """

    first: timedelta = timedelta(seconds=1)
    longest: timedelta = timedelta(minutes=1)
    total: timedelta = timedelta(minutes=15)

    def attempts(self, **settings: Any) -> tenacity.Retrying:
        """Calls a function until the store succeeds; other settings are those of `tenacity.Retrying`."""
        wait = tenacity.wait_random_exponential(self.first.total_seconds(), self.longest.total_seconds())
        stop = tenacity.stop_after_delay(self.total.total_seconds())
        retry = tenacity.retry_if_exception_type(StorageFailed)
        return tenacity.Retrying(retry=retry, wait=wait, stop=stop, reraise=True, **settings)

    def warning(self, logger: logging.Logger) -> tenacity.Retrying:
        """The same retries, with a warning for each failure except the last."""
        return self.attempts(before_sleep=tenacity.before_sleep_log(logger, logging.WARNING))
