"""The rules in the definition of `ElasticJob`, evaluated without an API server, agree with the controller's checks."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from ef_common.kubernetes.resource import definition, problem
from tests.kubernetes.judged import CHANGES, COSTS, JOBS, RIGHT, WRONG

cel = pytest.importorskip("cel_expr_python.cel")

(VERSION,) = definition()["spec"]["versions"]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]
ENVIRONMENT = cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN})


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


def refusals(schema: Mapping[str, Any], value: Any, before: Any = None) -> Iterator[str]:
    """What the rules say of an object, and of what is in it.

    Args:
        schema: The rules.
        value: The object.
        before: What it was before a change; None if it is new, so that rules for changes do not count.
    """
    for rule in schema.get("x-kubernetes-validations") or ():
        if before is None and "oldSelf" in rule["rule"]:
            continue
        holds = compiled(rule["rule"]).eval(data={"self": value, "oldSelf": before}).value()
        assert isinstance(holds, bool), f"{rule['rule']}: {holds}"
        if not holds:
            yield rule["message"]
    for name, one in (schema.get("properties") or {}).items():
        if name in value and one.get("type") == "object":
            yield from refusals(one, value[name], (before or {}).get(name))


def rules_in(schema: Mapping[str, Any]) -> Iterator[str]:
    yield from (rule["message"] for rule in schema.get("x-kubernetes-validations") or ())
    for one in (schema.get("properties") or {}).values():
        yield from rules_in(one)


SUSPENDED = next(message for message in rules_in(SCHEMA) if "only while the job is suspended" in message)


def test_what_pods_are_made_of_is_changed_only_while_there_are_none() -> None:
    for before, after, may in CHANGES:
        for phase in (None, "Pending", "Running", "Suspended", "Failed"):
            status = {} if phase is None else {"status": {"phase": phase}}
            old, new = (with_defaults(SCHEMA, {**thing, **status}) for thing in (before, after))
            expected = [] if may or phase == "Suspended" else [SUSPENDED]
            assert list(refusals(SCHEMA, new, old)) == expected, (before["spec"], after["spec"], phase)
            assert not problem(after)


def test_rules_refuse_the_jobs_that_the_controller_fails_with_the_same_sentence() -> None:
    seen = set()
    for thing in JOBS:
        refused, wrong = list(refusals(SCHEMA, with_defaults(SCHEMA, thing))), problem(thing)
        assert bool(refused) == bool(wrong), (thing["spec"], refused, wrong)
        assert not wrong or wrong.partition(". Received: ")[0] in refused
        seen.update(refused)
    assert seen | {SUSPENDED} == set(rules_in(SCHEMA)), "a rule was never broken"
    assert [thing["spec"] for thing in RIGHT if problem(thing)] == []
    assert [thing["spec"] for thing in WRONG if not problem(thing)] == []
    assert any(not problem(thing) for thing in COSTS if "autoscale" in thing["spec"])
