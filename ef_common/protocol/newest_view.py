"""The newest view that a worker has received, and what its members publish to build their groups."""

from __future__ import annotations

from ef_common.core.view import View
from ef_common.errors import GroupBroken, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.view_patch import NO_VIEW


class NewestView:
    """Holds a view, and the values of its members until the next one comes.

    Attributes:
        view: The view; None before the first.
        published: What this worker has published to its members. It may be lost with a link, and is told again then.
    """

    def __init__(self) -> None:
        self.view: View | None = None
        self.published: list[wire.Relay] = []
        self._values: dict[str, bytes] = {}

    @property
    def generation(self) -> int:
        """Its generation, 0 before the first."""
        return 0 if self.view is None else self.view.generation

    def patched(self, message: wire.NewView) -> View:
        """The view that differs so from this one.

        Raises:
            ProtocolError: It differs so from another one, or there is none.
        """
        known, generation = self.view or NO_VIEW, message.patch.rest.generation
        if message.before not in (0, known.generation):
            raise ProtocolError(f"view {generation} changes view {message.before}, and not view {known.generation}")
        return message.patch.onto(known if message.before else NO_VIEW)

    def replace(self, view: View) -> None:
        """There is a newer one.

        Raises:
            ProtocolError: It is not newer.
        """
        if view.generation <= self.generation:
            raise ProtocolError(f"view {view.generation} came after view {self.generation}")
        self.view, self.published, self._values = view, [], {}

    def publish(self, message: wire.Relay) -> None:
        """This worker publishes a value to the members of a view."""
        if message.generation == self.generation:
            self._values[message.key] = message.value
            self.published.append(message)

    def hear(self, message: wire.Relayed) -> None:
        """Members of a view have published values."""
        if message.generation == self.generation:
            self._values.update(message.values)

    def value(self, generation: int, key: str) -> bytes | None:
        """A value that a member of the view of `generation` has published; None if it has not come.

        Raises:
            GroupBroken: The view has been replaced.
        """
        if self.generation != generation:
            raise GroupBroken(f"view {generation} has been replaced")
        return self._values.get(key)
