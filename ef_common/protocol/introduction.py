"""The handshake of a worker, a launcher or another coordinator with a coordinator, from the side that connects."""

from __future__ import annotations

from ef_common.core.view import Member
from ef_common.errors import AuthenticationError, ProtocolError
from ef_common.protocol import wire
from ef_common.protocol.addresses import Address, format_address
from ef_common.protocol.auth import Token, coordinator_proof, new_nonce, proves, worker_proof
from ef_common.protocol.lines import Lines

Answer = wire.Welcome | wire.Finished | wire.Redirect | wire.Aborted
"""What a coordinator may say to an introduction."""

HELP = (
    "Check that its host and port are right and reachable from here, and that the agent or the process which "
    "hosts the coordinator runs. Without a job token it listens on its own loopback interface only: set "
    "ELASTICFLOW_TOKEN, or token_file in --rdzv-conf, on all nodes. If it has TLS, all nodes need it."
)


class Introduction:
    """Introduces somebody to a coordinator, which must prove itself, too.

    ::

        connected → challenged           the coordinator's challenge is answered with a proof
        challenged → answered            the coordinator has proved itself
        connected → ProtocolError        it is no coordinator
        challenged → ProtocolError       likewise, or it has refused this member
        challenged → AuthenticationError the token is missing on one side, or they differ

    Args:
        member: Who is introduced. The address in its proof is the one that is sent, even if it is empty.
        token: The job token, or None.
        key: The member's own secret (:func:`~ef_common.protocol.auth.new_nonce`), the same whenever it connects.
        address: Where the coordinator is, for messages.
        returning: Whether the member has been in the job before.
        downlink: Whether it is connected already, and this connection is to be its downlink.

    Attributes:
        returning: The same.
        lines: What has come of the coordinator. Its lines may be long once it has proved itself.
        answer: What the coordinator has answered, once it has.
    """

    def __init__(
        self,
        member: Member,
        token: Token | None,
        *,
        key: str,
        address: Address,
        returning: bool = False,
        downlink: bool = False,
    ) -> None:
        self.answer: Answer | None = None
        self.returning = returning
        self._downlink = downlink
        self.lines = Lines(wire.MAX_STRANGER_BYTES)
        self._member = member
        self._token = token
        self._key = key
        self._where = format_address(address)
        self._nonce = new_nonce()
        self._challenge: wire.Challenge | None = None

    def take(self) -> bytes | None:
        """Take the next line of the coordinator.

        Returns:
            What is to be sent to it, maybe nothing; None if no line is complete.

        Raises:
            AuthenticationError: The token is missing on one side, or they differ.
            ProtocolError: The peer is no coordinator, or one of another version.
        """
        try:
            line = self.lines.next()
            if line is None:
                return None
            message = wire.decode_from_coordinator(line, max_bytes=self.lines.max_bytes)
        except ProtocolError as error:
            text = f"the peer at {self._where} does not speak ElasticFlow's protocol: {error}"
            raise ProtocolError(text) from None
        if self._challenge is None:
            if not isinstance(message, wire.Challenge):
                raise ProtocolError(f"{self._where} is no coordinator: it began with {type(message).__name__}")
            self._challenge = message
            proof = worker_proof(
                self._token,
                server_nonce=message.nonce,
                client_nonce=self._nonce,
                key=self._key,
                member=self._member,
            )
            return wire.encode(wire.Hello(self._member, self._nonce, self._key, proof, self.returning, self._downlink))
        self._check(message, self._challenge)
        return b""

    def _check(self, message: wire.FromCoordinator, challenge: wire.Challenge) -> None:
        if isinstance(message, wire.Error):
            kind = AuthenticationError if message.code == "authentication" else ProtocolError
            raise kind(f"the coordinator at {self._where} refused worker {self._member.id}: {message.reason}")
        if not isinstance(message, Answer):
            raise ProtocolError(f"{self._where} is no coordinator: it answered with {type(message).__name__}")
        expected = coordinator_proof(self._token, client_nonce=self._nonce, server_nonce=challenge.nonce)
        if not proves(expected, message.proof):
            raise AuthenticationError(
                f"the coordinator at {self._where} could not prove that it knows the job token: it is another job's, "
                "or an impostor. Use the same ELASTICFLOW_TOKEN (or token_file) everywhere."
            )
        self.answer = message
        self.lines.max_bytes = wire.MAX_LINE_BYTES
