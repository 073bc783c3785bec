"""Claims in a store: files that can be created but once, by which some of a view's members go on without the others.

::

    claims/run-000002-000000003-9f….json       of view 3 in the second run: who has it

They are small, and rare, and stay.
"""

from __future__ import annotations

import hashlib

from ef_common.errors import AlreadyExists, InvalidCheckpoint, NotFound, StorageFailed
from ef_common.storage import manifest as manifests
from ef_common.storage.store import Store

FOLDER = "claims"
_KIND = "claim"


def digest_of(marker: bytes) -> str:
    """What tells one marker, and so one store, from another."""
    return hashlib.blake2b(marker, digest_size=16).hexdigest()


class Claims:
    """The claims of a run.

    Args:
        store: Where they are.
        run: Number of the run.

    Raises:
        StorageFailed: By all operations. The store has not said.

    Example:
        >>> claims = Claims(Store("memory://doctest-claims"), run=1)
        >>> claims.get("000000003-9f", ("a",)), claims.get("000000003-9f", ("b",))
        (('a',), ('a',))
        >>> claims.excludes("b", generation=3), claims.excludes("a", generation=3), claims.excludes("b", generation=4)
        (True, False, False)
    """

    def __init__(self, store: Store, run: int) -> None:
        self._store = store
        self._prefix = f"run-{run:06d}-"

    def get(self, claim: str, members: tuple[str, ...]) -> tuple[str, ...]:
        """Ids of those whom a claim names: these members, if nobody had it."""
        name = f"{self._prefix}{claim}.json"
        data = manifests.sealed({"winner": list(members)}, _KIND)
        try:
            # Never removed again: another one of the same members may have seen it.
            self._store.create(f"{FOLDER}/{name}", data, keep=True)
        except AlreadyExists:
            return self._winner(name)
        return members

    def excludes(self, worker: str, *, generation: int) -> bool:
        """Whether a claim of a view with this generation, or a newer one, is of others than this worker."""
        names = (entry.name for entry in self._store.entries(FOLDER) if entry.name.startswith(self._prefix))
        newer = (name for name in names if _generation(name.removeprefix(self._prefix)) >= generation)
        return any(worker not in self._winner(name) for name in newer)

    def _winner(self, name: str) -> tuple[str, ...]:
        try:
            winner = manifests.opened(self._store.read(f"{FOLDER}/{name}"), name, _KIND)["winner"]
        except (InvalidCheckpoint, NotFound, KeyError) as error:
            raise StorageFailed(f"{self._store}: nobody can say who has the claim {name}: {error}") from None
        return tuple(str(worker) for worker in winner)


def _generation(claim: str) -> int:
    digits = claim.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0
