"""Every setting takes what it says, and has one clear error for all else: before anything is begun, or lost."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning.pytorch  # noqa: F401  # else a strategy does not know whose it is
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous import RendezvousParameters

import ef_keras
from ef_common.core.cadence import Cadence
from ef_common.core.compensation import Compensation
from ef_common.core.retention import Retention
from ef_common.data.checkpointer import Checkpointing
from ef_common.errors import UsageError
from ef_common.launch import environment
from ef_common.launch.environment import read_environment
from ef_common.launch.rendezvous_options import RendezvousOptions
from ef_common.protocol.auth import Token
from ef_lightning import ElasticFlowStrategy

TEXTS = st.one_of(
    st.text(max_size=200),
    st.sampled_from(["", " ", "0", "1", "-1", "1.5", "1e9", "1e999", "nan", "inf", "-inf", "0x10", "١", "true", "yes"]),
    st.sampled_from(
        [
            "localhost",
            "localhost:1",
            "[::1]:80",
            ":80",
            "a:99999",
            "http://a",
            "file:///a",
            "file://",
            "etcd://",
            "etcd://a:b",
        ]
    ),
)
NUMBERS = st.one_of(st.integers(), st.floats(), st.booleans())
THINGS = st.one_of(
    NUMBERS, TEXTS, st.none(), st.binary(max_size=9), st.timedeltas(), st.just(timedelta(0)), st.lists(st.integers())
)
VARIABLES = [
    value
    for name, value in vars(environment).items()
    if name.isupper() and isinstance(value, str) and value.startswith("ELASTICFLOW_")
] + ["LOCAL_RANK", "LOCAL_WORLD_SIZE"]
OPTIONS = ["heartbeat_timeout", "hang_timeout", "last_call_timeout", "on_minority", "is_host", "stands_in"]


def taken_or_refused(make: Callable[[], Any]) -> None:
    """It is taken, or there is the error that tells what was expected, and what was received."""
    said = "Received"
    try:
        make()
    except UsageError as error:
        said = str(error)
    assert "Received" in said or "must be" in said


@pytest.mark.parametrize("name", VARIABLES)
def test_variable(name: str) -> None:
    @given(TEXTS.filter(lambda text: "\0" not in text and text.isascii()) | TEXTS)
    def check(text: str) -> None:
        taken_or_refused(lambda: read_environment({name: text}))

    check()


@pytest.mark.parametrize("name", OPTIONS)
def test_option_of_the_rendezvous(name: str) -> None:
    @given(TEXTS)
    def check(text: str) -> None:
        params = RendezvousParameters("elasticflow", "localhost:0", "run", 1, 2, **{name: text})
        taken_or_refused(lambda: RendezvousOptions.parse(params))

    check()


@given(TEXTS)
def test_endpoint(text: str) -> None:
    taken_or_refused(lambda: RendezvousOptions.parse(RendezvousParameters("elasticflow", text, "run", 1, 2)))


_PLUGIN = ("backend", "compensation", "global_batch_size", "deterministic", "checkpoint", "claims")
CLASSES: list[tuple[Callable[..., Any], str]] = [
    *((Retention, name) for name in ("keep_last", "keep_every", "keep_best", "monitor", "mode")),
    *((Cadence, name) for name in ("every_steps", "every")),
    *((Checkpointing, name) for name in ("url", "every_steps", "every", "share_bytes")),
    *((Compensation, name) for name in ("rule", "reference_batch_size", "ramp_steps")),
    *((plugin, name) for plugin in (ElasticFlowStrategy, ef_keras.callbacks) for name in _PLUGIN),
]


@pytest.mark.parametrize(("make", "name"), [pytest.param(m, n, id=f"{m.__name__}-{n}") for m, n in CLASSES])
def test_argument(make: Callable[..., Any], name: str) -> None:
    others = {"url": "memory://a"} if make is Checkpointing and name != "url" else {}

    @given(TEXTS if name == "url" else THINGS)
    def check(value: Any) -> None:
        taken_or_refused(lambda: make(**{**others, name: value}))

    check()


@given(st.text(min_size=9).filter(lambda text: len(text.strip()) > 8))
def test_text_of_a_token_does_not_depend_on_the_secret(secret: str) -> None:
    token, other = Token(secret), Token("an entirely different one")
    assert f"{token} {token!r} {[token]}" == f"{other} {other!r} {[other]}"
