"""Claims: files created only once, through which some members of a view continue without the others.

::

    markers/3c….json                       the marker of a run, whose content distinguishes a place from all others
    claims/run-3c…-000000003-9f….json      the claim of view 3 in that run: its members

The files are small and rare, and stay. Runs have random names, so any number of jobs can use one place.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

from ef_common.errors import AlreadyExists, InvalidCheckpoint, NotFound, StorageFailed, UsageError
from ef_common.storage import manifest as manifests
from ef_common.storage.etcd import SCHEMES, Etcd
from ef_common.storage.failures import redact
from ef_common.storage.store import Entry, Store

FOLDER = "claims"
MARKERS = "markers"
_KIND = "claim"


class ClaimPlace(Protocol):
    """A place for claims: a `Store` or `Etcd`. Its text is its URL without secrets.

    Raises:
        StorageFailed: By all operations. It has not said; what was to be created may be there, or not.
    """

    def create(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Write a small file, unless one of this name exists; a file with the same bytes counts as ours.

        Args:
            name: Relative, with slashes.
            data: The content of the file.
            keep: If that fails, leave what may be there.

        Raises:
            AlreadyExists: With other contents.
        """

    def read(self, name: str) -> bytes:
        """All bytes of a file.

        Raises:
            NotFound: There is no such file.
        """
        ...

    def entries(self, folder: str) -> list[Entry]:
        """The entries of a folder; empty if there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; it is no error if it is gone already."""


def place_for(url: Any) -> ClaimPlace:
    """The place for claims at this URL.

    Args:
        url: ``etcd://host:2379,host:2379/prefix`` (see `Etcd`), or a URL or path as a `Store` takes it.

    Raises:
        UsageError: The URL is invalid, or the package for it is missing.
    """
    if not isinstance(url, str | Path) or not str(url).strip():
        raise UsageError(f"expected a URL for claims. Received: claims={redact(repr(url))}")
    text = str(url)
    return Etcd(text) if text.partition("://")[0] in SCHEMES else Store(text)


class Claims:
    """The claims of a run.

    Args:
        place: Where they are.
        run: Name of the run, which no other one has.

    Raises:
        StorageFailed: By all operations. The place has not said.

    Example:
        >>> claims = Claims(Store("memory://doctest-claims"), "3c")
        >>> claims.get("000000003-9f", ("a",)), claims.get("000000003-9f", ("b",))
        (('a',), ('a',))
        >>> claims.excludes("b", generation=3), claims.excludes("a", generation=3), claims.excludes("b", generation=4)
        (True, False, False)
    """

    def __init__(self, place: ClaimPlace, run: str) -> None:
        self._place = place
        self._prefix = f"run-{run}-"
        self._marker = f"{MARKERS}/{run}.json"

    def begin(self) -> bool:
        """Leave the marker; only one worker does so.

        Returns:
            Whether the place creates exclusively. Some take that condition, and ignore it.
        """
        marker = {"run": self._marker}
        self._place.create(self._marker, manifests.sealed(marker, "marker"))
        try:
            self._place.create(self._marker, manifests.sealed({**marker, "again": True}, "marker"))
        except AlreadyExists:
            return True
        return False

    def digest(self) -> str | None:
        """Digest of the marker as read here, the same for all workers with this place; None without a marker."""
        try:
            return hashlib.blake2b(self._place.read(self._marker), digest_size=16).hexdigest()
        except NotFound:
            return None

    def get(self, claim: str, members: tuple[str, ...]) -> tuple[str, ...]:
        """Ids of the members that a claim names: these members, if nobody had it."""
        name = f"{self._prefix}{claim}.json"
        data = manifests.sealed({"winner": list(members)}, _KIND)
        try:
            # Never removed again: another one of the same members may have seen it.
            self._place.create(f"{FOLDER}/{name}", data, keep=True)
        except AlreadyExists:
            return self._winner(name)
        return members

    def excludes(self, worker: str, *, generation: int) -> bool:
        """Whether workers other than this one have a claim of a view with this generation or a newer one."""
        names = (entry.name for entry in self._place.entries(FOLDER) if entry.name.startswith(self._prefix))
        newer = (name for name in names if _generation(name.removeprefix(self._prefix)) >= generation)
        return any(worker not in self._winner(name) for name in newer)

    def _winner(self, name: str) -> tuple[str, ...]:
        try:
            winner = manifests.opened(self._place.read(f"{FOLDER}/{name}"), name, _KIND)["winner"]
        except (InvalidCheckpoint, NotFound, KeyError) as error:
            raise StorageFailed(f"{self._place}: nobody can say who has the claim {name}: {error}") from None
        return tuple(str(worker) for worker in winner)


def _generation(claim: str) -> int:
    digits = claim.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
