"""The cuts of the simulated network."""

from __future__ import annotations

from dataclasses import dataclass, field

Cut = tuple[frozenset[str], frozenset[str], float]
"""From any of some places to any of others, and until when."""


@dataclass(slots=True)
class Cuts:
    """Where the network is cut.

    Args:
        cuts: All cuts. What sets out waits until they are over.
        rejecting: Those at which a firewall answers in place of whoever is behind it: it refuses new connections, and
            resets those on which something is sent.
    """

    cuts: list[Cut] = field(default_factory=list)
    rejecting: list[Cut] = field(default_factory=list)

    def add(self, cut: Cut, *, rejects: bool) -> None:
        """One more cut."""
        self.cuts.append(cut)
        if rejects:
            self.rejecting.append(cut)

    def heal(self, now: float) -> None:
        """Forget the cuts that are over."""
        self.cuts = [cut for cut in self.cuts if cut[2] > now]
        self.rejecting = [cut for cut in self.rejecting if cut[2] > now]

    def until(self, source: str, target: str) -> float:
        """When messages from one place to another will get through again; 0 if they do."""
        return max((end for sources, targets, end in self.cuts if source in sources and target in targets), default=0.0)

    def rejects(self, source: str, target: str) -> bool:
        """Whether a firewall answers what one place sends to another."""
        return any(source in sources and target in targets for sources, targets, _ in self.rejecting)

    def among(self, places: tuple[str, ...]) -> float:
        """When all of these will reach each other."""
        return max((self.until(one, other) for one in places for other in places), default=0.0) if self.cuts else 0.0
