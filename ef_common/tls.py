"""TLS 1.3 between the processes of a job, with certificates for two identities.

A process is the ``coordinator`` (a coordinator, or an agent, which may host one) or a ``worker``. Whoever connects says
which of the two it expects, and both sides show a certificate of the job's authority. A worker's key therefore cannot
pose as the coordinator.

What TLS does not protect is the end of a connection. A process that is killed ends its connections without a word of
TLS, and its end must be noticed at once; so whoever can forge packets can still end a connection.
"""

from __future__ import annotations

import json
import os
import ssl
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from socket import socket
from typing import Any

from ef_common.errors import UsageError

COORDINATOR = "coordinator"
WORKER = "worker"
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process needs to prove its identity, and to check that of others.

    Args:
        authorities: Certificates of the authorities that are trusted (PEM).
        certificate: Certificate of this process, and those that lead from it to an authority (PEM).
        key: Its private key (PEM, without a passphrase).
    """

    authorities: str = field(repr=False)
    certificate: str = field(repr=False)
    key: str = field(repr=False)

    def dump(self) -> str:
        """Write them as one line of text, which holds the private key."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str, *, source: str) -> Credentials:
        """Inverse of :meth:`dump`.

        Raises:
            UsageError: The text is malformed; the message names `source`.
        """
        try:
            found = cls(**json.loads(text))
        except (TypeError, ValueError):
            found = cls("", "", "")
        if not all(isinstance(one, str) and one for one in asdict(found).values()):
            raise UsageError(f"{source} must hold what ElasticFlow's launcher has written. Received: something else")
        return found


class Tls:
    """The TLS settings of a process.

    Args:
        credentials: The identity of this process.

    Raises:
        UsageError: They cannot be read, or the key belongs to another certificate.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
        self._server.verify_mode = ssl.CERT_REQUIRED
        self._server.num_tickets = 0  # no session is resumed, so nothing is sent that nobody may read
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)

    def accepts(self) -> Channel:
        """The side that accepts a connection."""
        return Channel(self._server)

    def connects(self, to: str) -> Channel:
        """The side that connects to a process with the identity `to`."""
        return Channel(self._client, server_hostname=to)

    def wrap(self, connection: socket, *, connects_to: str | None = None) -> ssl.SSLSocket:
        """A socket that encrypts, for one thread at a time; its handshake is still to be done.

        Args:
            connection: The connected socket, which cannot be used any more afterwards.
            connects_to: The identity that the peer must have; None on the side that accepts.

        Raises:
            OSError: The connection has ended.
        """
        if connects_to is None:
            return self._server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return self._client.wrap_socket(connection, server_hostname=connects_to, do_handshake_on_connect=False)


class Channel:
    """One end of a TLS connection, without its socket. It is for one thread at a time.

    ::

        shaking → open     `receive`: the peer has proved its identity; what was to be said before is sent
        shaking → failed   likewise, and it has not, or does not speak TLS 1.3: nothing is sent any more
        open → failed      `receive`: what came was changed

    What it has for the peer, which :meth:`send` and :meth:`receive` add to, is taken by :meth:`take`.

    Attributes:
        is_open: The handshake is done, so the peer has proved its identity.
    """

    def __init__(self, context: ssl.SSLContext, *, server_hostname: str | None = None) -> None:
        self.is_open = False
        self._has_failed = False
        self._received, self._unsent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._early: list[bytes] = []  # what is to be said when the channel is open
        is_server = server_hostname is None
        self._tls = context.wrap_bio(self._received, self._unsent, is_server, server_hostname)
        if not is_server:
            with suppress(ssl.SSLWantReadError):
                self._shake_hands()

    @property
    def peer(self) -> str:
        """The identity of the peer."""
        names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return next((name for kind, name in names if kind == "DNS"), "")

    def receive(self, data: bytes) -> bytes:
        """Decrypt what has come; usually nothing is left over for the reader before the channel is open.

        Raises:
            ssl.SSLError: The peer does not speak TLS 1.3, has no certificate of the job, or what it sent was changed.
        """
        self._received.write(data)
        found = []
        try:
            if not self.is_open:
                self._shake_hands()
            while self.is_open:
                found.append(self._tls.read(_READ_BYTES))
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._has_failed = True
            raise
        return b"".join(found)

    def send(self, data: bytes) -> None:
        """Encrypt something, as soon as the channel is open; after a failure nothing is sent any more."""
        if self._has_failed or not data:
            return
        if self.is_open:
            self._tls.write(data)
        else:
            self._early.append(data)

    def take(self) -> bytes:
        """Remove what is to be sent to the peer."""
        return self._unsent.read()

    def _shake_hands(self) -> None:
        self._tls.do_handshake()
        self.is_open = True
        early, self._early = self._early, []
        for data in early:
            self._tls.write(data)


def explain(error: ssl.SSLError) -> str:
    """What has gone wrong in a handshake, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    words = (error.reason or str(error)).replace("_", " ").lower()
    return "it does not speak TLS" if words == "wrong version number" else words


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    file = os.memfd_create("elasticflow")  # ssl reads keys from files only, and this one is on no disk
    try:
        os.write(file, f"{credentials.key}\n{credentials.certificate}\n".encode())
        context.load_cert_chain(f"/proc/self/fd/{file}", password=_no_passphrase)
        context.load_verify_locations(cadata=credentials.authorities)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            "the TLS certificates cannot be used: expected PEM, and a key without a passphrase that belongs to the "
            f"certificate. Received: {error}"
        ) from None
    finally:
        os.close(file)
    return context


def _no_passphrase() -> str:
    raise ValueError("a key with a passphrase")
