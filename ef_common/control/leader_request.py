"""Short conversations with a coordinator, of those who are no workers: launchers, and other coordinators."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

from ef_common.control.control_connection import ControlConnection
from ef_common.core.doors import DoorAnswer
from ef_common.core.membership import Failed
from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address, format_address, named_by
from ef_common.protocol.auth import Token, new_nonce
from ef_common.protocol.introduction import Answer, Introduction
from ef_common.tls import Tls

logger = logging.getLogger(__name__)

ANSWER_S = 2.0
_KEY = new_nonce()  # of all who speak in this process: each has an id that is nobody else's
_ANSWERS = (wire.Aborted, wire.Redirect, wire.Eviction, wire.Alive, DoorAnswer)


class Conversation:
    """A connection to a coordinator, for a few messages.

    Args:
        address: Where the coordinator is.
        member: Who speaks; nobody else may have its id.
        token: The job token, or None.
        timeout_s: How long each step may take.
        tls: The identity of the speaker, if connections are encrypted.

    Raises:
        AuthenticationError: The token is missing on one side, or they differ; or a side has not proved its identity.
        OSError: Nobody answers in time.
        ProtocolError: The peer is no coordinator, or one of another version.

    Attributes:
        answer: What the coordinator has said to the introduction.
    """

    def __init__(
        self,
        address: Address,
        member: Member,
        token: Token | None,
        *,
        timeout_s: float = ANSWER_S,
        tls: Tls | None = None,
    ) -> None:
        self._connection = ControlConnection.connect(address, timeout_s, timeout_s, tls=tls)
        introduction = Introduction(member, token, key=_KEY, address=address, returning=True)
        self._lines = introduction.lines
        try:
            self.answer = self._introduce(introduction)
        except BaseException:
            self._connection.close()
            raise

    def _introduce(self, introduction: Introduction) -> Answer:
        while introduction.answer is None:
            reply = introduction.take()
            if reply is not None:
                self._say(reply)
            elif not self._listen():
                raise ConnectionResetError("it closed the connection")
        return introduction.answer

    def _say(self, data: bytes) -> None:
        self._connection.queue(data)
        self._connection.flush()

    def _listen(self) -> bool:
        """Wait for bytes; False at the end of the connection."""
        data = self._connection.read()
        self._lines.feed(data)
        return bool(data)

    def send(self, message: wire.FromWorker) -> None:
        """Say something."""
        self._say(wire.encode(message))

    def receive(self) -> wire.FromCoordinator | None:
        """Wait for something; None at the end of the connection.

        Raises:
            ProtocolError: The peer does not speak our protocol.
            TimeoutError: Nothing came in time.
        """
        while (line := self._lines.next()) is None:
            if not self._listen():
                return None
        return wire.decode_from_coordinator(line)

    def close(self) -> None:
        """End it."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class LeaderRequests:
    """What somebody who is no worker asks coordinators; each step with each of them takes at most `ANSWER_S`.

    A standby at one of the addresses may name another one.

    Args:
        member: Who asks; nobody else may have an id that begins with this one's. All that one process asks is of the
            same node.
        token: The job token, or None.
        tls: The identity of the one that asks, if connections are encrypted.
    """

    member: Member
    token: Token | None
    tls: Tls | None = None

    def report_failure(self, addresses: Sequence[Address], why: str, *, fatal: bool) -> str | None:
        """Report to the leading coordinator that the job has failed.

        Args:
            addresses: Where the coordinator may be.
            why: One line.
            fatal: It ends the job. Else only if the job has not begun yet.

        Returns:
            Why the job has failed, as the coordinator has it; "" if it goes on; None if nobody was reached who knows.
        """
        _, answer = self._talk_to_leader(addresses, Failed(self.member.id, why, fatal))
        if isinstance(answer, wire.Aborted):
            return answer.abort.why
        return "" if isinstance(answer, wire.Eviction) else None

    def inquire(self, addresses: Sequence[Address], worker: str) -> str | None:
        """Ask the leading coordinator whether a worker is out.

        Args:
            addresses: Where the coordinator may be.
            worker: Id of the worker.

        Returns:
            Why it is out; "" if it is not, or that is not decided; None if nobody was reached who knows.
        """
        _, answer = self._talk_to_leader(addresses, wire.Inquire(worker))
        if isinstance(answer, (wire.Eviction, wire.Aborted)):
            return answer.reason if isinstance(answer, wire.Eviction) else answer.abort.why
        return "" if isinstance(answer, wire.Alive) else None

    def find_leader(self, addresses: Sequence[Address]) -> Address | None:
        """Find the leading coordinator.

        The first address is asked first, and then all others at the same time: most of their machines may be gone.

        Args:
            addresses: Where a coordinator may be, the likeliest one first.

        Returns:
            Where it is; None if nobody was reached, or nobody leads.

        Raises:
            AuthenticationError: Somebody was reached whose token is another one, and nobody leads.
            ProtocolError: Somebody was reached who is no coordinator, or one of another version, and nobody leads.
        """
        refusal: AuthenticationError | ProtocolError | None = None
        for some in filter(None, (addresses[:1], addresses[1:])):
            pool = ThreadPoolExecutor(len(some), thread_name_prefix="elasticflow-ask")
            try:
                for answer in as_completed([pool.submit(self._leader_by, address) for address in some]):
                    try:
                        leader = answer.result()
                    except (AuthenticationError, ProtocolError) as error:
                        refusal = refusal or error
                        continue
                    if leader is not None:
                        return leader
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        if refusal is not None:
            raise refusal
        return None

    def seek(self, address: Address, *, door: str, wish: str, job: str = "") -> DoorAnswer | None:
        """Ask a coordinator who leads.

        Args:
            address: Where it is.
            door: Where the coordinator of the one that asks listens; "" for nowhere.
            wish: Whose support it wants; see :mod:`ef_common.core.doors`.
            job: Name of the job that it looks for; "" for any.

        Returns:
            What it knows; None if nobody answers.

        Raises:
            AuthenticationError: Somebody is there whose token is another one, or who is of another job.
            ProtocolError: Somebody is there who is no coordinator, or one of another version.
        """
        try:
            answer = self._ask(address, wire.Seek(door, wish, job))
        except OSError as error:
            logger.debug("no coordinator at %s: %s", format_address(address), error)
            return None
        return answer if isinstance(answer, DoorAnswer) else None

    def _leader_by(self, address: Address) -> Address | None:
        """The leader, as the coordinator there knows it."""
        name = f"{self.member.id}-{format_address(address)}"  # the leader may hear of several
        asker = replace(self, member=replace(self.member, id=name))
        return asker._talk_to_leader([address], wire.Inquire(name), raises=True)[0]

    def _talk_to_leader(
        self, addresses: Sequence[Address], message: Failed | wire.Inquire, *, raises: bool = False
    ) -> tuple[Address | None, wire.FromCoordinator | None]:
        """Where the leading coordinator is, and its answer; None for both if nobody was reached, or nobody leads."""
        todo = list(addresses)
        asked: set[Address] = set()
        refusal: AuthenticationError | ProtocolError | None = None
        while todo:
            address = todo.pop(0)
            if address in asked:
                continue
            asked.add(address)
            try:
                answer = self._ask(address, message)
            except (OSError, ProtocolError, AuthenticationError) as error:
                logger.debug("no coordinator at %s: %s", format_address(address), error)
                refusal = refusal if isinstance(error, OSError) else error
                continue
            if not isinstance(answer, wire.Redirect):
                if answer is not None:
                    return address, answer
            elif answer.address:
                todo.insert(0, named_by(address, answer.address))
        if refusal is not None and raises:
            raise refusal
        return None, None

    def _ask(self, address: Address, message: Failed | wire.Inquire | wire.Seek) -> wire.FromCoordinator | None:
        conversation = Conversation(address, self.member, self.token, tls=self.tls)
        try:
            if not isinstance(conversation.answer, wire.Welcome):
                return conversation.answer
            conversation.send(message)
            deadline = time.monotonic() + ANSWER_S
            while time.monotonic() < deadline:
                answer = conversation.receive()
                if isinstance(answer, wire.Error) and answer.code == "job":
                    raise AuthenticationError(
                        f"the coordinator at {format_address(address)} is another job's: {answer.reason}. Give each "
                        "job an endpoint of its own, and all nodes of a job the same --rdzv-id"
                    )
                if answer is None or isinstance(answer, _ANSWERS):
                    return answer
            return None
        finally:
            conversation.close()
