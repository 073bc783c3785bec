"""The findings of an audit: a property holds, or this is where it first fails."""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.terminal import mark

__all__ = ["Property", "Report", "Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """The first place where a property fails; fields are None where they do not apply."""

    message: str
    worker: str | None = None
    epoch: int | None = None
    step: int | None = None
    position: int | None = None

    def __str__(self) -> str:
        places = {name: getattr(self, name) for name in ("worker", "epoch", "step", "position")}
        where = ", ".join(f"{name} {value}" for name, value in places.items() if value is not None)
        return f"{self.message} ({where})" if where else self.message


@dataclass(frozen=True, slots=True)
class Property:
    """One property of a run.

    Attributes:
        name: Name of the property.
        detail: The extent of the proof, or the violation in words.
        violation: Where it first fails, None if it holds.
        checked: There was something to check: else nothing is known of it.
    """

    name: str
    detail: str
    violation: Violation | None = None
    checked: bool = True

    @property
    def ok(self) -> bool:
        """Whether the property does not fail."""
        return self.violation is None

    def __str__(self) -> str:
        return f"{mark(self.ok, checked=self.checked)} {self.name}: {self.detail}"

    @classmethod
    def not_recorded(cls, name: str, detail: str) -> Property:
        """Return a property that the log does not cover, and why."""
        return cls(name, detail, checked=False)

    @classmethod
    def failed(cls, name: str, violation: Violation) -> Property:
        """Return the property with its first violation."""
        return cls(name, str(violation), violation)


@dataclass(frozen=True, slots=True)
class Report:
    """All properties of one run."""

    properties: tuple[Property, ...]

    @property
    def ok(self) -> bool:
        """Whether no property fails."""
        return all(found.ok for found in self.properties)

    def __str__(self) -> str:
        return "\n".join(map(str, self.properties))

    def __getitem__(self, name: str) -> Property:
        """Return the property of this name."""
        return {found.name: found for found in self.properties}[name]
