"""The cuts of the simulated network."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Cuts:
    """Where the network is cut, and until when: from any of some places to any of others."""

    cuts: list[tuple[frozenset[str], frozenset[str], float]] = field(default_factory=list)

    def until(self, source: str, target: str) -> float:
        """When messages from one place to another will get through again; 0 if they do."""
        return max((end for sources, targets, end in self.cuts if source in sources and target in targets), default=0.0)

    def among(self, places: tuple[str, ...]) -> float:
        """When all of these will reach each other."""
        return max((self.until(one, other) for one in places for other in places), default=0.0) if self.cuts else 0.0
