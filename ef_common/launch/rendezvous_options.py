"""The options of our rendezvous, as ``--rdzv-endpoint``, ``--nnodes`` and ``--rdzv-conf`` give them.

Keys in ``--rdzv-conf``; others are ignored, as c10d does:

=================  ======================================  ===========================================================
token_file         none                                    File with the secret of the job. It takes precedence over
                                                           `ELASTICFLOW_TOKEN`.
tls                that of the environment                 As `ELASTICFLOW_TLS`, over which it takes precedence.
heartbeat_timeout  that of the environment                 As `ELASTICFLOW_HEARTBEAT_TIMEOUT`, over which it takes
                                                           precedence.
hang_timeout       that of the environment                 As `ELASTICFLOW_HANG_TIMEOUT`, over which it takes
                                                           precedence; 0 to 3600.
last_call_timeout  `1`; `10` in a local `elasticflow run`  Seconds that the first step waits for more nodes after the
                                                           last arrival.
join_timeout       `600`                                   Seconds that a node waits for the coordinator of an
                                                           endpoint HOST:PORT.
on_minority        `wait`                                  `wait` or `continue`: what workers do that have lost contact
                                                           with others and cannot be sure that those have stopped.
is_host            found from the endpoint                 Whether this agent hosts the coordinator (`1` or `0`).
is_group           found from the endpoint                 Whether the host of the endpoint is a name for all nodes
                                                           (`1`), although it may not have their addresses yet.
doors_file         none                                    File in which the controller of a cluster of Kubernetes tells
                                                           further addresses of nodes; for a name with `is_group=1`, and
                                                           with `--local-addr`.
join               `0`                                     Only join a job that runs (`1`), as `--join` does.
=================  ======================================  ===========================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ef_common.core.membership import Settings
from ef_common.errors import UsageError
from ef_common.launch import environment
from ef_common.launch.registry import registry_of
from ef_common.protocol.addresses import LOOPBACK, Address
from ef_common.protocol.auth import Token
from ef_common.storage.failures import redact

BACKEND = "elasticflow"
DEFAULT_PORT = 29400
JOIN_TIMEOUT_S = 600.0
"""As torchrun's own backends have it."""
_HOST = re.compile(r"[\w.:-]+")
_FLAGS = {**dict.fromkeys(("1", "true", "t", "yes", "y"), True), **dict.fromkeys(("0", "false", "f", "no", "n"), False)}


class Parameters(Protocol):
    """What a launcher was told; torchrun's ``RendezvousParameters`` are such."""

    endpoint: str
    min_nodes: int
    max_nodes: int
    config: dict[str, Any]


@dataclass(slots=True)
class GivenParameters:
    """Parameters that torchrun has not read.

    Args:
        endpoint: ``--rdzv-endpoint``.
        min_nodes: Nodes, without which the job waits.
        max_nodes: Nodes, of which it has no more.
        config: ``--rdzv-conf``.
    """

    endpoint: str
    min_nodes: int
    max_nodes: int
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RendezvousOptions:
    """Options of the rendezvous.

    Args:
        endpoint: Host and port of the coordinator, as all agents were told; the first one of a list.
        token: The job token, or None.
        is_host: Whether this agent hosts the coordinator; None to find out.
        heartbeat_timeout_s: A worker that is silent for longer is evicted.
        hang_timeout_s: So is one that keeps the others waiting for longer; None to learn it, 0 for no limit.
        settings: Settings of the membership.
        tls: Whether connections are encrypted, and where the certificates are; see `certificates.trust_of`.
        registry: URL at which the agents find each other, in place of the endpoint; "" for none.
        doors: All endpoints, if there are several: any of them may found the job, or not be there.
        is_group: The host of the endpoint is a name for all nodes, even if it has no address yet.
        doors_file: File with further addresses, beside those of that name; "" for none.
        stands_in: The coordinator was there before this agent: if nobody listens at the endpoint any more, its standby
            does, so that others find somebody there.
        join_timeout_s: How long this agent waits for the coordinator of an endpoint.
        joins: It neither founds a job nor waits long for one.
    """

    endpoint: Address
    token: Token | None
    is_host: bool | None
    heartbeat_timeout_s: float
    hang_timeout_s: float | None
    settings: Settings
    tls: str = ""
    is_group: bool = False
    doors_file: str = ""
    stands_in: bool = False
    registry: str = ""
    doors: tuple[Address, ...] = ()
    join_timeout_s: float = JOIN_TIMEOUT_S
    joins: bool = False

    @classmethod
    def parse(cls, params: Parameters) -> RendezvousOptions:
        """Read the options from torchrun's parameters, and the token from the environment.

        Raises:
            UsageError: An option is malformed; the message names it.
        """
        config = params.config
        doors = doors_of(params.endpoint)
        registry = "" if doors else registry_of(params.endpoint)
        if (registry or doors) and config.get("is_host") is not None:
            raise UsageError(
                f"is_host is for an endpoint HOST:PORT. Received: --rdzv-endpoint={redact(params.endpoint)}"
            )
        is_group = bool(_flag(config, "is_group"))
        if is_group and (registry or doors or config.get("is_host") is not None):
            raise UsageError(
                "is_group is for an endpoint HOST:PORT, and without is_host. "
                f"Received: --rdzv-endpoint={redact(params.endpoint)}"
            )
        doors_file = str(config.get("doors_file") or "")
        if doors_file and not is_group:
            raise UsageError(f"doors_file is for a name with is_group=1. Received: doors_file={doors_file}")
        endpoint = doors[0] if doors else (LOOPBACK, 0) if registry else endpoint_of(params.endpoint)
        token_file = config.get("token_file")
        variables = environment.read_environment()
        return cls(
            endpoint=endpoint,
            token=Token.from_file(token_file) if token_file else variables.token,
            is_host=_flag(config, "is_host"),
            heartbeat_timeout_s=_seconds(config, "heartbeat_timeout", default=variables.heartbeat_timeout_s, low=0.1),
            hang_timeout_s=_seconds(config, "hang_timeout", default=0.0, low=0.0)
            if config.get("hang_timeout") is not None
            else variables.hang_timeout_s,
            settings=Settings(
                min_nodes=params.min_nodes,
                max_nodes=params.max_nodes,
                last_call_s=_seconds(config, "last_call_timeout", default=1.0, low=0.0),
                on_minority=_choice(config, "on_minority", ("wait", "continue")),
            ),
            tls=str(config.get("tls", variables.tls)),
            is_group=is_group,
            doors_file=doors_file,
            stands_in=bool(_flag(config, "stands_in")),
            registry=registry,
            doors=doors,
            join_timeout_s=_seconds(config, "join_timeout", default=JOIN_TIMEOUT_S, low=0.0),
            joins=bool(_flag(config, "join")),
        )


def options_of_a_local_job(conf: str, *, min_nodes: int, max_nodes: int, last_call_s: float) -> RendezvousOptions:
    """Options of the coordinator of a job on this machine.

    Args:
        conf: torchrun's ``--rdzv-conf``.
        min_nodes: Nodes, without which the job waits.
        max_nodes: Nodes, of which it has no more.
        last_call_s: Default of ``last_call_timeout``.

    Raises:
        UsageError: An option is malformed; the message names it.
    """
    config = {"last_call_timeout": f"{last_call_s}", **config_of(conf)}
    return RendezvousOptions.parse(GivenParameters(f"{LOOPBACK}:0", min_nodes, max_nodes, config))


def endpoint_of(text: str) -> Address:
    """Parse ``HOST:PORT``, as torchrun does: both may be missing, and 0 stands for any port that is free.

    Raises:
        UsageError: It is malformed.
    """
    text = text.strip()
    if not text:
        return "localhost", DEFAULT_PORT
    host, colon, port = (text, "", "") if text[0] + text[-1] == "[]" else text.rpartition(":")
    if not colon:
        host, port = text, f"{DEFAULT_PORT}"
    if host[:1] + host[-1:] == "[]":
        host = host[1:-1]
    if not (re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 2**16 and _HOST.fullmatch(host)):
        raise UsageError(
            "an endpoint is HOST:PORT, with a name or an address and a port below 65536. "
            f"Received: --rdzv-endpoint={text}"
        )
    return host, int(port)


def doors_of(text: str) -> tuple[Address, ...]:
    """Parse a list ``HOST:PORT,HOST:PORT``; () if it is no list.

    Raises:
        UsageError: It is malformed.
    """
    head, _, _ = text.partition("://")
    if "," not in head:
        return ()
    received = f"Received: --rdzv-endpoint={redact(text)}"
    if "://" in text:
        raise UsageError(f"a list of endpoints has no URLs: name hosts HOST:PORT,HOST:PORT, or one URL. {received}")
    parts = [part.strip() for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"an endpoint is missing between two commas, or at an end of the list. {received}")
    doors = tuple(endpoint_of(part) for part in parts)
    if len(set(doors)) < len(doors):
        raise UsageError(f"an endpoint stands twice in the list. {received}")
    if not all(port for _, port in doors):
        raise UsageError(f"in a list, each endpoint needs a port of its own, which is not 0. {received}")
    return doors


def config_of(text: str) -> dict[str, str]:
    """Parse ``--rdzv-conf``: ``KEY=VALUE,KEY=VALUE``.

    Raises:
        UsageError: It is malformed.
    """
    config: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, value = map(str.strip, part.partition("=")[::2])
        if not key or not value:
            raise UsageError(f"expected KEY=VALUE, and a comma between two of them. Received: --rdzv-conf={text}")
        config[key] = value
    return config


def names_token(config: Mapping[str, Any]) -> bool:
    """Whether ``--rdzv-conf`` names a file with the secret of the job."""
    return bool(config.get("token_file"))


def joined_conf(*texts: str) -> str:
    """Texts of ``--rdzv-conf`` as one; some may be empty. Of a key that stands in several, the last one counts."""
    return ",".join(filter(None, texts))


def _seconds(config: Mapping[str, Any], key: str, *, default: float, low: float) -> float:
    text = config.get(key, default)
    try:
        value = float(text)
    except (TypeError, ValueError):
        value = -1.0
    if not low <= value <= 3600:
        raise UsageError(f"{key} in --rdzv-conf must be {low:g} to 3600 seconds. Received: {key}={text}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool | None:
    value = config.get(key)
    flag = None if value is None else _FLAGS.get(str(int(value) if isinstance(value, bool) else value).lower())
    if value is not None and flag is None:
        raise UsageError(f"{key} in --rdzv-conf must be 0 or 1. Received: {key}={value}")
    return flag


def _choice(config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    """The chosen one of these values; the first by default."""
    value = str(config.get(key, choices[0]))
    if value not in choices:
        raise UsageError(f"{key} in --rdzv-conf must be one of {', '.join(choices)}. Received: {key}={value}")
    return value
