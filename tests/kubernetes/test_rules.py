"""The rules in the definition of `ElasticJob`, evaluated without an API server, agree with the controller's checks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ef_common.kubernetes.resource import definition, problem
from tests.kubernetes.judged import COSTS, JOBS

cel = pytest.importorskip("cel_expr_python.cel")

(VERSION,) = definition()["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
ENVIRONMENT = cel.NewEnv(variables={"self": cel.Type.DYN})


@functools.cache
def compiled(rule: str) -> Any:
    return ENVIRONMENT.compile(rule)


def with_defaults(schema: Mapping[str, Any], value: Any) -> Any:
    """As the API server completes an object before it looks at the rules."""
    if not isinstance(value, dict):
        return value
    fields = schema.get("properties") or {}
    defaults = {name: one["default"] for name, one in fields.items() if "default" in one}
    return {name: with_defaults(fields.get(name) or {}, one) for name, one in {**defaults, **value}.items()}


def refusals(schema: Mapping[str, Any], value: Any) -> Iterator[str]:
    """What the rules say of an object, and of what is in it."""
    for rule in schema.get("x-kubernetes-validations") or ():
        holds = compiled(rule["rule"]).eval(data={"self": value}).value()
        assert isinstance(holds, bool), f"{rule['rule']}: {holds}"
        if not holds:
            yield rule["message"]
    for name, one in (schema.get("properties") or {}).items():
        if name in value and one.get("type") == "object":
            yield from refusals(one, value[name])


def rules_in(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations") or ())
    for one in (schema.get("properties") or {}).values():
        yield from rules_in(one)


def test_rules_refuse_the_jobs_that_the_controller_fails_with_the_same_sentence() -> None:
    seen = set()
    for thing in JOBS:
        refused, wrong = list(refusals(SCHEMA, with_defaults(SCHEMA, thing))), problem(thing)
        assert bool(refused) == bool(wrong), (thing["spec"], refused, wrong)
        assert not wrong or wrong.partition(". Received: ")[0] in refused
        seen.update(refused)
    assert seen == set(rules_in(SCHEMA)), "a rule was never broken"
    assert any(not problem(thing) for thing in COSTS if "autoscale" in thing["spec"])
