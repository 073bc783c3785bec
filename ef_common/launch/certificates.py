"""Who may be what in a job with TLS: the certificates of its coordinators and workers.

They come from files, or follow from the job token: whoever has it derives the same authority, and issues certificates
with it. They do not expire, because the token does not, and because no clock of a job's machines need be right; a new
token ends them (:class:`~ef_common.protocol.auth.Token`).

=====================  ================================================================================================
`ca.crt`               Certificates of the authorities that are trusted.
`coordinator.crt`      Certificate of an agent and of the coordinator that it hosts, for the DNS name ``coordinator``.
`coordinator.key`      Its key.
`worker.crt`           Certificate of a worker, for the DNS name ``worker``.
`worker.key`           Its key.
=====================  ================================================================================================

All are PEM. Both certificates are for servers and for clients (``serverAuth`` and ``clientAuth``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ef_common.errors import UsageError
from ef_common.protocol.auth import Token
from ef_common.tls import COORDINATOR, WORKER, Credentials

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

OFF = ("", "0")
DERIVED = "1"
_BEGIN = datetime(2000, 1, 1, tzinfo=timezone.utc)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)  # RFC 5280: no expiration


@dataclass(frozen=True, slots=True)
class Trust:
    """What the processes of a job prove to each other that they belong to it.

    Args:
        token: The secret for the greeting, or None. With TLS it follows from the job token and not the other way
            round, so that a worker which has it cannot issue certificates.
        coordinator: Credentials of agents and coordinators; None without TLS.
        worker: Credentials of workers; None without TLS.
    """

    token: Token | None
    coordinator: Credentials | None = None
    worker: Credentials | None = None


def trust_of(token: Token | None, tls: str) -> Trust:
    """Derive or read the certificates of a job.

    Args:
        token: The job token, or None.
        tls: ``""`` or ``"0"`` for no TLS, ``"1"`` to derive certificates from the token, else a directory of files.

    Raises:
        UsageError: There is no token to derive them from, a file cannot be read, or the extra ``tls`` is missing.
    """
    if tls in OFF:
        return Trust(token)
    greeting = None if token is None else token.for_workers()
    if tls != DERIVED:
        return Trust(greeting, _read(Path(tls), COORDINATOR), _read(Path(tls), WORKER))
    if token is None:
        raise UsageError(
            "TLS needs a job token, from which the certificates are derived: set ELASTICFLOW_TOKEN, or token_file in "
            "--rdzv-conf, to the same secret on all nodes. Received: tls=1 and no token"
        )
    try:
        authorities = [_Authority(one) for one in token.accepted]
    except ImportError:
        raise UsageError(
            "deriving certificates needs the package cryptography: pip install 'elasticflow-training[tls]'. "
            "Received: tls=1"
        ) from None
    trusted = "".join(authority.certificate for authority in authorities)
    return Trust(greeting, *(authorities[0].issue(name, trusted) for name in (COORDINATOR, WORKER)))


def _read(directory: Path, name: str) -> Credentials:
    try:
        texts = [(directory / file).read_text("ascii") for file in ("ca.crt", f"{name}.crt", f"{name}.key")]
    except (OSError, ValueError) as error:
        raise UsageError(
            "a file of TLS cannot be read. Expected ca.crt, coordinator.crt, coordinator.key, worker.crt and "
            f"worker.key in one directory, all of them PEM. Received: tls={directory} ({error})"
        ) from None
    return Credentials(*texts)


class _Authority:
    """The authority that follows from a token: everybody who has the token makes the same one."""

    def __init__(self, token: Token) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(token.derive("certificate authority"))
        public = self._key.public_key()
        self._id = public.public_bytes_raw().hex()[:16]
        self.certificate = _pem(self._sign(self._id, public, name=None))

    def issue(self, name: str, trusted: str) -> Credentials:
        """Issue a certificate for a DNS name, with a key of its own."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        plain = serialization.NoEncryption()
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        return Credentials(trusted, _pem(self._sign(name, key.public_key(), name=name)), pem.decode())

    def _sign(self, subject: str, key: Ed25519PublicKey, *, name: str | None) -> x509.Certificate:
        """Sign a certificate for a DNS name; without a name it is the authority's own, the same each time."""
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"ElasticFlow {text}")])

        is_authority = name is None
        usage = x509.KeyUsage(
            digital_signature=not is_authority,
            key_cert_sign=is_authority,
            **dict.fromkeys(
                (
                    "content_commitment",
                    "key_encipherment",
                    "data_encipherment",
                    "key_agreement",
                    "crl_sign",
                    "encipher_only",
                    "decipher_only",
                ),
                False,
            ),
        )
        made = (
            x509.CertificateBuilder(named(self._id), named(subject), key)
            .serial_number(1 if is_authority else x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .add_extension(
                x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
            )
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if name is not None:
            purposes = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
            made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            made = made.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        return made.sign(self._key, algorithm=None)


def _pem(certificate: x509.Certificate) -> str:
    from cryptography.hazmat.primitives import serialization

    return certificate.public_bytes(serialization.Encoding.PEM).decode()
