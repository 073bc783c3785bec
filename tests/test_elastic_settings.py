from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import elasticflow
from ef_common.core.autoscale import Autoscale
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.settings import ElasticSettings
from ef_common.errors import UsageError
from ef_common.storage.etcd import Etcd
from ef_lightning.strategy import ElasticMixin


def test_settings_from_what_a_user_writes_are_parsed() -> None:
    settings = ElasticSettings.of(compensation="sqrt", checkpoint="memory://run", claims="memory://claims")
    assert settings.compensation.rule == "sqrt"
    assert settings.checkpoint == Checkpointing("memory://run")
    assert "memory://claims" in str(settings.claims)


def test_settings_of_nothing_are_the_defaults() -> None:
    given = {"compensation": "auto", "checkpoint": None, "claims": None}
    assert ElasticSettings.of(**given) == ElasticSettings()


def test_settings_name_a_checkpoint_before_the_environment_does() -> None:
    assert ElasticSettings.of(checkpoint="memory://mine").checkpointing("memory://theirs") == Checkpointing(
        "memory://mine"
    )
    assert ElasticSettings().checkpointing("memory://theirs") == Checkpointing("memory://theirs")
    assert ElasticSettings().checkpointing(None) is None


@pytest.mark.parametrize("given", [Autoscale(max=4), {"max": 4}, "max=4"])
def test_settings_name_how_the_job_chooses_its_size_before_the_environment_does(given: Any) -> None:
    default = Autoscale(max=2)
    assert ElasticSettings.of(autoscale=given).autoscaling(default) == Autoscale(max=4)
    assert ElasticSettings().autoscaling(default) == default
    assert ElasticSettings().autoscaling(None) is None
    assert ElasticSettings.of(autoscale=False).autoscaling(default) is None
    assert ElasticSettings.of(autoscale="off").autoscaling(default) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("max=0", "max is a number"),
        ("min=3,max=2", "min is at most max"),
        ("threshold=1.5", "in [0, 1]"),
        ("policy=best", "policy is one of"),
        ({"size": 3}, "the settings of autoscale"),
        (3, "autoscale is given as"),
        (True, "autoscale is given as"),
    ],
)
def test_settings_refuse_what_autoscale_cannot_be(given: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=re.escape(expected)):
        ElasticSettings.of(autoscale=given)


def test_settings_refuse_a_batch_that_is_fixed_and_limited() -> None:
    limited = Autoscale(max_global_batch_size=1024)
    with pytest.raises(UsageError, match="global_batch_size=64, max_global_batch_size=1024"):
        ElasticSettings(global_batch_size=64).autoscaling(limited)
    assert ElasticSettings(global_batch_size=64).autoscaling(Autoscale()) == Autoscale()
    assert ElasticSettings().autoscaling(limited) == limited


def test_settings_claim_where_the_checkpoints_are_unless_a_place_is_named() -> None:
    settings = ElasticSettings()
    checkpoints = Checkpointing("memory://run")
    assert "memory://run" in str(settings.place(None, checkpoints=checkpoints, elastic=True))
    assert isinstance(settings.place("etcd://127.0.0.1:2379/x", checkpoints=checkpoints, elastic=True), Etcd)
    assert settings.place(None, checkpoints=checkpoints, elastic=False) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"checkpoint": 3}, "checkpoint=3"),
        ({"claims": " "}, "claims="),
        ({"compensation": "cubic"}, "cubic"),
    ],
)
def test_settings_that_are_none_are_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ElasticSettings.of(**given)


def _front_doors() -> list[Callable[..., Any]]:
    keras = pytest.importorskip("ef_keras.callbacks")
    return [ElasticMixin.__init__, keras.callbacks, elasticflow.train]


def test_front_doors_take_every_setting_with_the_same_default() -> None:
    defaults = {"compensation": "auto"}
    for door in _front_doors():
        parameters = inspect.signature(door).parameters
        for field in fields(ElasticSettings):
            expected = defaults.get(field.name, field.default)
            assert parameters[field.name].default == expected, (door, field.name)
