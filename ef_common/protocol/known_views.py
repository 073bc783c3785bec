"""The views whose content a coordinator knows, by the digests with which workers name them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ef_common.core.quorum import ChainLink
from ef_common.core.view import View
from ef_common.errors import ProtocolError
from ef_common.protocol.fields import digest_of_view
from ef_common.protocol.view_patch import ViewName


class KnownViews:
    """Views by digest."""

    def __init__(self) -> None:
        self._views: dict[str, View] = {}
        self._digests: dict[int, str] = {}  # by the identity of the views above
        self._chains: dict[tuple[ViewName, ...], tuple[ChainLink, ...]] = {}

    def add(self, views: Iterable[View]) -> None:
        """Learn these views."""
        for view in views:
            if id(view) not in self._digests:
                digest = digest_of_view(view)
                kept = self._views.setdefault(digest, view)
                self._digests[id(kept)] = digest

    def missing(self, names: Sequence[ViewName]) -> tuple[str, ...]:
        """Digests of those that are not known."""
        return () if names in self._chains else tuple(name.digest for name in names if name.digest not in self._views)

    def chain(self, names: tuple[ViewName, ...]) -> tuple[ChainLink, ...]:
        """What a worker knows that names these views: the same object for all that name the same.

        Raises:
            KeyError: One is not known.
            ProtocolError: One has another generation.
        """
        if names not in self._chains:
            for name in names:
                generation = self._views[name.digest].generation
                if generation != name.generation:
                    raise ProtocolError(f"view {generation} is named as view {name.generation}")
            self._chains[names] = tuple(
                ChainLink(self._views[name.digest], over=name.over, agreed=name.agreed) for name in names
            )
        return self._chains[names]

    def keep(self, views: Iterable[View]) -> None:
        """Forget all but these."""
        kept = {id(view) for view in views}
        self._views = {digest: view for digest, view in self._views.items() if id(view) in kept}
        self._digests = {id(view): digest for digest, view in self._views.items()}
        self._chains = {}
