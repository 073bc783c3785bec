"""What a worker imports while the others wait for it: in the pause of a join, the first import of a module counts."""

from __future__ import annotations

import sys
from typing import Any

from ef_common.core.view import View
from ef_common.session import Session
from ef_common.session.recovery import Recovery
from tests.faults.hosts import HOSTS

IMPORTED = "imported"
"""Key in the result of a worker: to each generation after its first one, what was imported before its first step."""


class ImportRecord:
    """Notes the modules that are imported in each pause of the training: none of them was there before.

    ::

        a member   from the end of the last step in a view to the end of the first one in the next view
        a newcomer from the moment at which it is ready to the end of its first step with the others
    """

    def __init__(self) -> None:
        self.pauses: dict[int, list[str]] = {}
        self._names: list[str] = []
        self._begun = 0
        self._generation: int | None = None

    def install(self) -> None:
        """Begin to note, in this process and for good."""
        sys.addaudithook(self._hear)
        agree, run = Session.agree, Recovery.run
        record = self

        def agree_and_note(session: Session, num_flags: float, num_wishes: float = 0.0) -> None:
            agree(session, num_flags, num_wishes)
            if not (session.newcomer or session.entering):  # by itself, a newcomer makes a step to warm up
                record.end_step(session.completed_in)

        def run_when_ready(recovery: Recovery, *args: Any, **kwargs: Any) -> float:
            record.recover()
            return run(recovery, *args, **kwargs)

        Session.agree = agree_and_note  # type: ignore[method-assign]
        Recovery.run = run_when_ready  # type: ignore[method-assign]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import":
            self._names.append(str(args[0]))

    def recover(self) -> None:
        """A worker waits for its next view. One that has made no step yet says before that it is ready."""
        if self._generation is None:
            self._begun = len(self._names)

    def end_step(self, view: View) -> None:
        """A step of all members has been reduced."""
        if view.generation not in (1, self._generation):
            self.pauses[view.generation] = self._names[self._begun :]
        self._generation, self._begun = view.generation, len(self._names)


def train_and_note_imports(host: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train as this host does, and tell what was imported in the pauses."""
    record = ImportRecord()
    record.install()
    return {**HOSTS[host].train(options), IMPORTED: record.pauses}
