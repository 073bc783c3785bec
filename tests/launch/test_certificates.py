from __future__ import annotations

import json
import ssl
import sys
from pathlib import Path

import pytest
from cryptography import x509

from ef_common.errors import UsageError
from ef_common.launch.certificates import Trust, trust_of
from ef_common.protocol.auth import Token
from ef_common.tls import Channel, Credentials, Tls, explain

TOKEN = Token("hunter2")


def write(trust: Trust, directory: Path) -> str:
    """The files that somebody with an authority of their own would have."""
    for name in ("coordinator", "worker"):
        found = getattr(trust, name)
        (directory / f"{name}.crt").write_text(found.certificate)
        (directory / f"{name}.key").write_text(found.key)
        (directory / "ca.crt").write_text(found.authorities)
    return str(directory)


def shake_hands(server: Credentials, client: Credentials, *, to: str) -> tuple[Channel, Channel]:
    ends = accepted, connected = Tls(server).accepts(), Tls(client).connects(to)
    while not (accepted.is_open and connected.is_open):
        assert accepted.receive(connected.take()) == b""
        assert connected.receive(accepted.take()) == b""
    return ends


@pytest.mark.parametrize("tls", ["", "0"])
def test_without_tls_the_token_is_the_secret_of_the_greeting(tls: str) -> None:
    assert trust_of(TOKEN, tls) == Trust(TOKEN)
    assert trust_of(None, tls) == Trust(None)


def test_all_who_have_the_token_have_one_authority() -> None:
    one, another = trust_of(TOKEN, "1"), trust_of(Token(" hunter2\n"), "1")
    assert one.coordinator.authorities == another.coordinator.authorities == another.worker.authorities
    assert one.token == another.token
    assert one.worker.key != another.worker.key
    shake_hands(one.coordinator, another.worker, to="coordinator")
    shake_hands(another.worker, one.worker, to="worker")


def test_worker_gets_nothing_from_which_the_token_or_the_authority_follows() -> None:
    trust = trust_of(TOKEN, "1")
    given = f"{trust.token.text} {trust.worker.dump()}"
    assert TOKEN.secret not in given
    assert TOKEN.derive("certificate authority").hex() not in given
    assert trust.worker.key.count("PRIVATE KEY") == 2  # one begin, and one end
    certificate = x509.load_pem_x509_certificate(trust.worker.certificate.encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert trust_of(trust.token, "1").worker.authorities != trust.worker.authorities


def test_secrets_are_in_no_text_of_them() -> None:
    trust = trust_of(TOKEN, "1")
    assert "PRIVATE" not in repr(trust)
    assert trust.token.secret not in repr(trust)


def test_certificate_of_a_worker_issues_none() -> None:
    """An authority is one of the job's, and no certificate that it has issued."""
    worker, others = trust_of(TOKEN, "1").worker, trust_of(Token("other"), "1")
    forged = Credentials(
        worker.authorities, others.coordinator.certificate + worker.certificate, others.coordinator.key
    )
    with pytest.raises(OSError, match="certificate verify failed"):
        shake_hands(forged, worker, to="coordinator")


def test_peer_is_known_by_its_name() -> None:
    trust = trust_of(TOKEN, "1")
    accepted, connected = shake_hands(trust.coordinator, trust.worker, to="coordinator")
    assert (accepted.peer, connected.peer) == ("worker", "coordinator")
    accepted.send(b"x" * 100_000)
    assert connected.receive(accepted.take()) == b"x" * 100_000


def test_failure_is_said_in_words() -> None:
    trust = trust_of(TOKEN, "1")
    with pytest.raises(ssl.SSLError) as caught:
        shake_hands(trust.worker, trust.worker, to="coordinator")
    assert explain(caught.value).startswith("its certificate is not accepted: Hostname mismatch")


def test_certificates_may_be_files(tmp_path: Path) -> None:
    directory = write(trust_of(TOKEN, "1"), tmp_path)
    trust = trust_of(TOKEN, directory)
    shake_hands(trust.coordinator, trust.worker, to="coordinator")
    assert trust.token == TOKEN.for_workers()


@pytest.mark.parametrize("name", ["ca.crt", "coordinator.crt", "coordinator.key", "worker.crt", "worker.key"])
def test_missing_file_is_a_usage_error(tmp_path: Path, name: str) -> None:
    directory = write(trust_of(TOKEN, "1"), tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(UsageError, match=rf"No such file.*{name}"):
        trust_of(TOKEN, directory)


@pytest.mark.parametrize("change", [{"key": "no key"}, {"certificate": "none"}, {"authorities": "none"}])
def test_certificates_that_cannot_be_used_are_a_usage_error(change: dict[str, str]) -> None:
    found = json.loads(trust_of(TOKEN, "1").worker.dump())
    with pytest.raises(UsageError, match="the TLS certificates cannot be used"):
        Tls(Credentials(**{**found, **change}))


def test_key_of_another_certificate_or_with_a_passphrase_is_a_usage_error() -> None:
    from cryptography.hazmat.primitives import serialization

    trust = trust_of(TOKEN, "1")
    key = serialization.load_pem_private_key(trust.worker.key.encode(), None)
    secret = serialization.BestAvailableEncryption(b"passphrase")
    locked = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret).decode()
    for one in (trust.coordinator.key, locked):
        with pytest.raises(UsageError, match="a key without a passphrase that belongs to the certificate"):
            Tls(Credentials(trust.worker.authorities, trust.worker.certificate, one))


def test_no_token_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"set ELASTICFLOW_TOKEN.*Received: tls=1 and no token"):
        trust_of(None, "1")


def test_missing_package_is_a_usage_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    directory = write(trust_of(TOKEN, "1"), tmp_path)
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"pip install 'elasticflow-training\[tls\]'"):
        trust_of(TOKEN, "1")
    assert trust_of(TOKEN, directory).worker is not None  # files need none


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"key": "k"}', '{"authorities": "", "certificate": "c", "key": "k"}']
)
def test_credentials_that_are_malformed_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="ELASTICFLOW_CREDENTIALS must hold"):
        Credentials.load(text, source="ELASTICFLOW_CREDENTIALS")
