"""What Lightning announces before it knows its rank waits until it does."""

from __future__ import annotations

import atexit
import importlib
import logging
from collections.abc import Iterator

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only

from ef_lightning import announcements, registry
from ef_lightning.announcements import Announcements
from ef_lightning.host import HOSTS as HOSTS_BY_NAME
from tests.lightning.conftest import HOSTS

PACKAGES = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
NAMES = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed")


def found() -> list[Announcements]:
    filters = [one.filters for one in map(logging.getLogger, NAMES)]
    return [one for several in filters for one in several if isinstance(one, Announcements)]


@pytest.fixture
def in_a_job(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """As in a worker of a job that is about to import ElasticFlow."""
    monkeypatch.setenv("ELASTICFLOW_COORDINATOR", "127.0.0.1:1")
    monkeypatch.setattr(atexit, "register", lambda function: function)
    for package in PACKAGES:
        monkeypatch.setattr(logging.getLogger(package), "propagate", True)
    caplog.set_level(logging.INFO)
    yield
    for one in found():
        for package in PACKAGES:
            for source in announcements._SOURCES:
                logging.getLogger(f"{package}.{source}").removeFilter(one)


def announce(*messages: str) -> None:
    for name, message in zip(NAMES, messages, strict=True):
        logging.getLogger(name).info(message)


def test_announcements_wait_for_the_rank_and_are_told_by_rank_0(
    in_a_job: None, caplog: pytest.LogCaptureFixture
) -> None:
    announcements.hold(PACKAGES)
    announcements.hold(PACKAGES)
    assert len({id(one) for one in found()}) == 1
    announce("GPU available: False", "Seed set to 5")
    logging.getLogger(NAMES[0]).warning("at once")
    assert caplog.messages == ["at once"]
    announcements.settle(PACKAGES[0], 0)
    announce("a second Trainer", "Seed set to 6")
    announcements.settle(PACKAGES[0], 0)  # another view
    assert caplog.messages[1:] == ["GPU available: False", "Seed set to 5", "a second Trainer", "Seed set to 6"]


def test_announcements_of_other_ranks_are_never_told_but_those_of_a_later_rank_0_are(
    in_a_job: None, caplog: pytest.LogCaptureFixture
) -> None:
    announcements.hold(PACKAGES)
    announce("GPU available: False", "Seed set to 5")
    announcements.settle(PACKAGES[0], 2)
    announce("a second Trainer", "Seed set to 6")
    announcements.settle(PACKAGES[0], 0)
    assert caplog.messages == []
    announce("a third Trainer", "Seed set to 7")
    assert caplog.messages == ["a third Trainer", "Seed set to 7"]


@pytest.mark.parametrize("host", HOSTS)
def test_what_lightning_announces_before_it_knows_its_rank_waits(
    host: str, in_a_job: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module(host)
    monkeypatch.setattr(rank_zero_only, "rank", 0, raising=False)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # which is undone
    registry.register()
    pl.seed_everything(5)
    pl.Trainer(accelerator="cpu", devices=1, logger=False)
    assert caplog.messages == []
    HOSTS_BY_NAME[host].set_rank(0)
    assert "Seed set to 5" in caplog.text
    assert "GPU available: " in caplog.text


@pytest.mark.parametrize("rank", [None, 1])
def test_announcements_of_a_program_without_a_training_are_told_at_its_end(
    rank: int | None, in_a_job: None, caplog: pytest.LogCaptureFixture
) -> None:
    announcements.hold(PACKAGES)
    announce("GPU available: False", "Seed set to 5")
    if rank is not None:
        announcements.settle(PACKAGES[0], rank)
    found()[0].end()
    assert len(caplog.messages) == (2 if rank is None else 0)


def test_announcements_of_a_newcomer_that_comes_too_late_are_not_told(
    in_a_job: None, caplog: pytest.LogCaptureFixture
) -> None:
    announcements.hold(PACKAGES)
    announce("GPU available: False", "Seed set to 5")
    announcements.begin(PACKAGES[0])
    found()[0].end()
    assert caplog.messages == []


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"ELASTICFLOW_COORDINATOR": "nowhere"},
        {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
    ],
)
def test_announcements_do_not_wait_where_no_worker_of_a_job_is_or_lightning_knows_the_ranks(
    environ: dict[str, str], in_a_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTICFLOW_COORDINATOR")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    announcements.hold(PACKAGES)
    assert found() == []
