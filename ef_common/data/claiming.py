"""The members' common place for claims, with which some continue without others; see :mod:`ef_common.core.quorum`.

By default it is where the checkpoints are.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ef_common import threads
from ef_common.collectives import operations
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import StorageError, StorageFailed, UsageError
from ef_common.session import Session
from ef_common.storage.claims import ClaimPlace, Claims, place_for
from ef_common.storage.retries import Retries
from ef_common.storage.store import Store

logger = logging.getLogger(__name__)

_START = Retries(total=timedelta(minutes=1)).warning(logger)
"""Others wait meanwhile, and can train without a place as well."""


class Claiming:
    """The claims of a training. The first training of this process counts, as a worker reports its place once.

    Args:
        place: Where they are kept; None if there is no place for them, which is told as well.
        session: The worker's session.

    Example:
        >>> from ef_common.core.view import SOLO
        >>> claiming = Claiming(Store("memory://doctest-claiming"), Session(SOLO.members[0], channel=None, groups=None))
        >>> claiming.begin()
        >>> claiming.excluded(1), sorted(claiming.state())
        (False, ['digest', 'run'])
    """

    def __init__(self, place: ClaimPlace | None, session: Session) -> None:
        self._place = place
        self._session = session
        self._run = ""
        self._digest: str | None = None
        self._skipped = False

    @property
    def _one(self) -> Claiming:
        """The claiming that counts."""
        return self._session.trainings.first_claiming or self

    def _is_first(self) -> bool:
        if self._session.trainings.first_claiming is None:
            self._session.trainings.first_claiming = self
            return True
        if str(self._one._place) != str(self._place):
            logger.info("claims stay in %s, as in the first training of this process", self._one._place)
        return False

    # ------------------------------------------------------------ start

    def begin(self) -> None:
        """Find out whether all have one place. All members of a first view call this together, even without a place.

        Raises:
            UsageError: The place is of no known kind, or its package is missing.
        """
        if not self._is_first():
            return
        found: list[str] = []
        while not found:  # else rank 0 was lost meanwhile
            mine = None
            if self._session.rank == 0:
                mine = "" if self._place is None else self._mark(self._place)
            runs, _ = operations.gather(self._session, mine, what="name of a run")
            found = [run for run in runs if run is not None]
        self._run = max(found)
        digest = "" if self._place is None else self._read()
        digests, _ = operations.gather(self._session, digest, what="digest of a place for claims")
        if set(digests) == {""}:
            self._session.job.use_store("")
        elif "" in digests:
            logger.warning(
                "some workers have no place for claims, so none breaks ties. Set the same for all (claims=, "
                "checkpoint= or ELASTICFLOW_CLAIMS). Received: %s",
                self._place,
            )
        elif len(set(digests)) == 1:
            self._use(digests[0])
        else:
            logger.warning("%s is not one place for all workers, so it breaks no ties", self._place)

    def begin_again(self) -> None:
        """Like `begin`, in one worker that then hands everything on, because all who had a state are lost."""
        if self._one._skipped:
            self._one._skipped = False
        elif not self._is_first():
            return
        self._one._begin_again()

    def _begin_again(self) -> None:
        if self._place is None:
            self._session.job.use_store("")
        else:
            self._run = self._mark(self._place)
            self._use(self._read())

    def _mark(self, place: ClaimPlace) -> str:
        """Leave a marker. Returns the run's name, or "" if there is none."""

        def mark() -> str:
            run = uuid.uuid4().hex  # another one each time: a marker that was reported as failed may be anywhere
            if Claims(place, run).begin():
                return run
            logger.warning("%s does not create exclusively, so it breaks no ties", place)
            return ""

        return self._unless_it_fails(mark) or ""

    def _read(self) -> str | None:
        claims = self._claims
        return None if claims is None else self._unless_it_fails(claims.digest)

    def _unless_it_fails(self, operation: Callable[[], str | None]) -> str | None:
        try:
            return _START(operation)
        except StorageError as error:
            logger.warning("%s will break no ties: %s", self._place, error)
            return None

    # ------------------------------------------------------------ claims

    @property
    def _claims(self) -> Claims | None:
        return Claims(self._place, self._run) if self._place is not None and self._run else None

    def _use(self, digest: str | None) -> None:
        """Report the place to the others, and claim there for them from now on."""
        claims = self._claims
        if digest is None or claims is None:
            return
        self._digest = digest

        def claim(name: str, members: tuple[str, ...]) -> tuple[str, ...]:
            named = claims.get(name, members)
            if claims.digest() != digest:  # nothing is mounted there any more, or another etcd answers
                raise StorageFailed(f"{self._place} is not the place that the workers have agreed on")
            return named

        self._session.job.use_store(digest, claim)

    def excluded(self, generation: int) -> bool:
        """Whether workers other than this one have the claim of a view with this generation or a newer one.

        Raises:
            StorageFailed: The store does not say.
        """
        claims = self._one._claims
        return claims is not None and claims.excludes(self._session.worker.id, generation=generation)

    # ------------------------------------------------------------ newcomers

    def state(self) -> dict[str, Any] | None:
        """The state for newcomers, as plain values; None if there is no place."""
        one = self._one
        return None if one._place is None else {"run": one._run, "digest": one._digest}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Join the others' run, or report that nobody has a place."""
        if self._one._skipped:
            self._one._skipped = False
        elif not self._is_first():
            return
        self._one._take(state)

    def skip(self) -> None:
        """A newcomer skips this training; it learns the place of the claims when it joins in a later one."""
        self._skipped = self._is_first()

    def _take(self, state: dict[str, Any] | None) -> None:
        if self._place is None:
            if state is None:
                self._session.job.use_store("")
        elif state is not None:
            self._run = state["run"]
            if state["digest"] is not None:  # in a thread of its own, as the others wait
                threads.start(lambda: self._find(state["digest"]), name="ef-claims", job="finds the place for claims")

    def _find(self, expected: str) -> None:
        """Report the others' place if it is the same as the one here."""
        try:
            found = self._read()
        except UsageError as error:
            logger.warning("%s will break no ties: %s", self._place, error)
            return
        if found == expected:
            self._use(expected)
        else:
            logger.warning("%s is another place here than where the others are", self._place)


def place_of(
    claims: ClaimPlace | None, default: str | None, *, checkpoints: Checkpointing | None, elastic: bool
) -> ClaimPlace | None:
    """Where the claims of a training are kept.

    Args:
        claims: The place that the user has named.
        default: The URL that the environment names.
        checkpoints: Where they are kept if nobody has named a place.
        elastic: There can be others.

    Raises:
        UsageError: The environment names no place, or one whose package is missing.
    """
    if not elastic:
        return None
    if claims is None and default is not None:
        return place_for(default)
    if claims is None and checkpoints is not None:
        return Store(checkpoints.url, checkpoints.storage_options)
    return claims
