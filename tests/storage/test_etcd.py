"""Claims in a real etcd that fails: what it has not said is no answer, and what it has said stays."""

from __future__ import annotations

import datetime
import ipaddress
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ef_common.errors import NotFound, StorageFailed, UsageError
from ef_common.storage import etcd as module
from ef_common.storage.claims import Claims
from ef_common.storage.etcd import Etcd
from tests.storage.conftest import require_etcd
from tests.storage.etcd import PATIENCE_S, EtcdServers
from tests.storage.test_claims import CLAIM, RUN

A, B = ("a",), ("b",)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., EtcdServers]]:
    """Starts servers of one's own."""
    require_etcd()
    monkeypatch.setattr(module, "TIMEOUT_S", PATIENCE_S)
    for variable in ("http_proxy", "https_proxy", "REQUESTS_CA_BUNDLE"):  # none of them is for etcd
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(EtcdServers(tmp_path, *args, **kwargs))


@contextmanager
def impatient(seconds: float = 1.0) -> Iterator[None]:
    """Where no answer is to come, or where one is asked for again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "TIMEOUT_S", seconds)
        yield


def claims(url: str) -> Claims:
    return Claims(Etcd(url), RUN)


def in_the_end(asking: Claims, members: tuple[str, ...]) -> tuple[str, ...]:
    """What is said to one who tries again and again."""
    for _ in range(60):
        try:
            return asking.get(CLAIM, members)
        except StorageFailed:
            continue
    raise AssertionError("there was no answer")


def test_claim_outlives_a_kill_and_nobody_is_answered_meanwhile(make: Callable[..., EtcdServers]) -> None:
    server = make()
    url = server.url()
    assert claims(url).get(CLAIM, A) == A
    server.kill(0)
    check_silent(claims(url), "cannot be reached")
    server.start(0)
    assert in_the_end(claims(url), B) == A
    assert claims(url).get(CLAIM, A) == A
    server.signal(signal.SIGSTOP)
    with impatient(), pytest.raises(StorageFailed, match="did not answer in time"):
        claims(url).get(CLAIM, A)


def check_silent(asking: Claims, why: str) -> None:
    for operation in (
        lambda: asking.get(CLAIM, A),
        lambda: asking.get(CLAIM, B),
        lambda: asking.excludes("b", generation=3),
        asking.begin,
        asking.digest,
    ):
        with pytest.raises(StorageFailed, match=why):
            operation()


def test_claim_outlives_the_loss_of_a_member_but_not_of_most(make: Callable[..., EtcdServers]) -> None:
    servers = make(3)
    first, last = servers.url(order=(0, 1, 2)), servers.url(order=(2, 1, 0))
    assert claims(first).get(CLAIM, A) == A
    servers.kill(leader_of(servers))
    with impatient():
        assert in_the_end(claims(first), B) == A
        assert in_the_end(claims(last), A) == A
        servers.kill(next(iter(servers.running)))
        with pytest.raises(StorageFailed):
            claims(first).get(CLAIM, A)
        with pytest.raises(StorageFailed):
            claims(last).excludes("b", generation=3)


def leader_of(servers: EtcdServers) -> int:
    status = [ask(servers, index, "maintenance/status") for index in range(3)]
    (leader,) = (index for index, one in enumerate(status) if one["header"]["member_id"] == one["leader"])
    return leader


def ask(servers: EtcdServers, index: int, path: str, **request: Any) -> Any:
    with Etcd(servers.url(order=(index,)))._connected(*servers.address(index)) as client:
        return client.post(client.get_url(path), json=request)


def test_claim_whose_answer_was_lost_is_had_by_who_tries_again(
    make: Callable[..., EtcdServers], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = make().url()
    post = module_of_client().Etcd3Client.post
    with monkeypatch.context() as patch:

        def lose(self: Any, *args: Any, **kwargs: Any) -> Any:
            post(self, *args, **kwargs)
            raise ConnectionResetError

        patch.setattr(module_of_client().Etcd3Client, "post", lose)
        with pytest.raises(StorageFailed):
            claims(url).get(CLAIM, A)
    assert claims(url).get(CLAIM, B) == A
    assert claims(url).get(CLAIM, A) == A


def module_of_client() -> Any:
    import etcd3gw

    return etcd3gw


def test_request_that_creates_goes_to_one_endpoint(make: Callable[..., EtcdServers]) -> None:
    """Of endpoints that are no cluster, two would hold the same marker else, and one claim each."""
    servers = make(2, apart=True)
    servers.signal(signal.SIGSTOP, 0)
    with impatient(5.0):
        place = Etcd(servers.url(order=(0, 1)))
    with pytest.raises(StorageFailed):
        place.create("a", b"1")
    with pytest.raises(NotFound):
        Etcd(servers.url(order=(1,))).read("a")
    place.create("a", b"1")  # the next one is asked now
    assert place.read("a") == b"1"


def test_whatever_answers_that_is_no_etcd_has_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("etcd3gw")
    monkeypatch.setattr(module_of_client().Etcd3Client, "post", lambda *args, **kwargs: {})
    for operation in (lambda: claims("etcd://a").get(CLAIM, A), lambda: claims("etcd://a").excludes("a", generation=0)):
        with pytest.raises(StorageFailed):
            operation()


def test_password_and_certificates_are_used_and_not_shown(tmp_path: Path, make: Callable[..., EtcdServers]) -> None:
    cert, key = write_certificate(tmp_path)
    servers = make(options=[f"--cert-file={cert}", f"--key-file={key}", "--auth-token=simple"])
    trust = f"?ca={cert}"
    for path, request in (
        ("auth/user/add", {"name": "root", "password": "sec:ret@1"}),
        ("auth/role/add", {"name": "root"}),
        ("auth/user/grant", {"user": "root", "role": "root"}),
        ("auth/enable", {}),
    ):
        with Etcd(servers.url() + trust)._connected(*servers.address(0)) as client:
            client.post(client.get_url(path), json=request)
    url = servers.url(user="root:sec%3Aret%401@") + trust
    assert claims(url).get(CLAIM, A) == A
    assert "sec" not in f"{Etcd(url)}"
    for other, why in (
        (servers.url(user="root:sec-wrong@") + trust, "authentication failed"),
        (servers.url() + trust, "user name is empty"),
        (servers.url(user="root:sec%3Aret%401@"), "certificate"),
    ):
        with pytest.raises(StorageFailed, match=why) as raised:
            claims(other).get(CLAIM, A)
        assert "sec" not in str(raised.value)


def write_certificate(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "etcd")])
    now = datetime.datetime.now(datetime.timezone.utc)
    cert = (
        x509.CertificateBuilder(name, name, private.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(private, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return paths


@pytest.mark.parametrize(
    "url",
    [
        *("etcd://", "etcd:///prefix", "etcd://a:b/x", "etcd://a,,b/x", "etcd://a/x?token=secret"),
        *("etcd://u:secret@a:x/y", "etcd://u:x/secret@a/y", "etcd://u:@secret@a:x/y"),
    ],
)
def test_url_that_is_malformed_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="expected etcd://host:port") as raised:
        Etcd(url)
    assert "secret" not in str(raised.value)


def test_endpoints_are_those_of_the_url() -> None:
    pytest.importorskip("etcd3gw")
    url = "etcds://u:secret@a,b:1,[::1],[::2]:3/x?ca=/a@b"
    assert Etcd(url)._endpoints == [("a", 2379), ("b", 1), ("::1", 2379), ("::2", 3)]
    assert "secret" not in str(Etcd(url))


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw", None)
    with pytest.raises(UsageError, match=r"pip install 'elasticflow-training\[etcd\]'"):
        Etcd("etcd://a")
