"""Small files in etcd, which creates a key only once; see `ef_common.storage.claims.ClaimPlace`.

Requests use its JSON gateway (``/v3``: etcd 3.4 and newer). A creating request goes to one endpoint only: if its answer
is lost and the endpoints are not one cluster, the next endpoint would create the same key again, and the workers would
take two places for one. A retry goes to the next endpoint.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from ef_common.errors import AlreadyExists, NotFound, StorageFailed, UsageError
from ef_common.storage.failures import describe, redact
from ef_common.storage.store import Entry

SCHEMES = {"etcd": "http", "etcds": "https"}
TIMEOUT_S = 3.0
"""For a connection, and for an answer."""

_PORT = 2379
_FILES = {"ca": "ca_cert", "cert": "cert_cert", "key": "cert_key"}

_T = TypeVar("_T")


class Etcd:
    """A folder in etcd. Nothing is contacted before the first operation; any thread may call them.

    Args:
        url: ``etcd://host:2379,host:2379/prefix``: members of a cluster, any of which is asked, and how all keys begin
            (``/prefix/``). ``etcds://`` is TLS. ``user:password@`` may precede the hosts, and
            ``?ca=FILE&cert=FILE&key=FILE`` follow: whom to trust (default: public authorities), and who this is.

    Raises:
        UsageError: The URL is malformed, or the package for etcd is missing.
        StorageFailed: By all operations, with whatever error: it may be done, or not.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self._shown = redact(f"{scheme}://***@{rest.rpartition('@')[2]}" if "@" in rest else url)
        try:
            parts = urlsplit(url)
            self._endpoints = _endpoints(parts)
            files = {_FILES[name]: value for name, value in parse_qsl(parts.query, strict_parsing=bool(parts.query))}
        except (KeyError, ValueError):
            raise UsageError(
                "expected etcd://host:port,host:port/prefix, with user:password@ before the hosts and ca=, cert= and "
                f"key= after a question mark if need be. Received: {self._shown}"
            ) from None
        self._prefix = parts.path.rstrip("/")
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        self._user, self._password = unquote(user), unquote(password)
        self._settings = {**files, "protocol": SCHEMES[parts.scheme], "timeout": TIMEOUT_S, "api_path": "/v3/"}
        self._client = _client_class(self._shown)

    def __str__(self) -> str:
        """The URL, without secrets."""
        return self._shown

    def create(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """See `Place`. Whatever fails, nothing is removed."""
        key, value = self._key(name), _encoded(data)
        transaction = {
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}],
            "success": [{"request_put": {"key": key, "value": value}}],
            "failure": [{"request_range": {"key": key}}],
        }

        def existing(answer: Any) -> str:
            if answer.get("succeeded"):
                return value
            return str(answer["responses"][0]["response_range"]["kvs"][0]["value"])

        if self._ask(f"create {name}", "kv/txn", transaction, existing, self._endpoints[:1]) != value:
            raise AlreadyExists(f"cannot create {name} in {self}: it exists already")

    def read(self, name: str) -> bytes:
        """See `Place`."""
        found = self._range(f"read {name}", {"key": self._key(name)})
        if not found:
            raise NotFound(f"cannot read {name} in {self}: it does not exist")
        return found[0][1]

    def entries(self, folder: str) -> list[Entry]:
        """See `Place`."""
        behind = chr(ord("/") + 1)
        found = self._range(f"list {folder}", {"key": self._key(f"{folder}/"), "range_end": self._key(folder + behind)})
        return [Entry(key.decode().rpartition("/")[2], len(value)) for key, value in found]

    def delete(self, name: str) -> None:
        """See `Place`."""
        self._ask(
            f"delete {name}",
            "kv/deleterange",
            {"key": self._key(name)},
            lambda answer: answer["header"],
            self._endpoints,
        )

    # ------------------------------------------------------------ requests

    def _key(self, name: str) -> str:
        return _encoded(f"{self._prefix}/{name}".encode())

    def _range(self, what: str, keys: dict[str, str]) -> list[tuple[bytes, bytes]]:
        def pairs(answer: Any) -> list[tuple[bytes, bytes]]:
            _ = answer["header"]  # else it is not etcd that has nothing
            return [(base64.b64decode(one["key"]), base64.b64decode(one["value"])) for one in answer.get("kvs", ())]

        return self._ask(what, "kv/range", keys, pairs, self._endpoints)

    def _ask(
        self, what: str, path: str, request: Any, parse: Callable[[Any], _T], endpoints: list[tuple[str, int]]
    ) -> _T:
        """Send a request to these endpoints until one answers; later requests ask the failing ones last."""
        errors: list[str] = []
        for host, port in endpoints:
            try:
                with self._connected(host, port) as client:
                    return parse(client.post(client.get_url(path), json=request))
            except Exception as error:
                errors.append(f"{host}:{port}: {_text_of(error)}")
                self._endpoints = [*(other for other in self._endpoints if other != (host, port)), (host, port)]
        raise StorageFailed(f"cannot {what} in {self}: {'; '.join(errors)}")

    @contextmanager
    def _connected(self, host: str, port: int) -> Iterator[Any]:
        """A client for a single request: requests are rare, and tokens expire."""
        client = self._client(host=host, port=port, **self._settings)
        with client.session:
            client.session.trust_env = False  # neither proxies, nor certificates and passwords for something else
            if self._user:
                login = {"name": self._user, "password": self._password}
                answer = client.post(client.get_url("auth/authenticate"), json=login)
                client.session.headers["Authorization"] = answer["token"]
            yield client


def _client_class(shown: str) -> Callable[..., Any]:
    try:
        from etcd3gw import Etcd3Client
    except ImportError:
        raise UsageError(
            f"The package for etcd:// is missing. Received: {shown}. Install it with "
            "pip install 'elasticflow-training[etcd]'"
        ) from None
    return cast(Callable[..., Any], Etcd3Client)


def _endpoints(parts: SplitResult) -> list[tuple[str, int]]:
    found = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname or one.path:
            raise ValueError(host)
        found.append((one.hostname, one.port or _PORT))
    return found


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _text_of(error: Exception) -> str:
    detail = getattr(error, "detail_text", None)  # where etcd3gw puts what etcd has said
    if detail:
        error.args = (detail,)
    return describe(error)
