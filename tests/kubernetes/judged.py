"""Jobs, right ones and wrong ones, of which the rules of the resource and the controller must think the same."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from ef_common.kubernetes.resource import MAX_NAME, Json
from tests.kubernetes.objects import job

TEMPLATE = job()["spec"]["template"]["spec"]


def choices(**values: tuple[Any, ...]) -> list[Json]:
    """All combinations of fields with one of these values each, or without the field."""
    fields = ([{}, *({name: one} for one in some)] for name, some in values.items())
    return [functools.reduce(lambda one, more: {**one, **more}, given, {}) for given in itertools.product(*fields)]


SIZES = [job(low=low, high=high) for low, high in itertools.product((1, 2, 3), repeat=2)]
NAMES = [job("a" * length) for length in (1, MAX_NAME, MAX_NAME + 1)] + [job("llama-3.1-8b"), job("3d-unet"), job("a-")]
TEMPLATES = [
    job(template={"spec": {**TEMPLATE, **given}})
    for given in choices(restartPolicy=("Never", "Always", "OnFailure"), hostNetwork=(True, False))
]
COSTS = [
    job(autoscale=given)
    for given in choices(
        policy=("throughput", "cost", "goodput"),
        pricePerWorkerHour=(2.5,),
        valuePerHour=(0,),
        deadlineSeconds=(60,),
        budget=(100,),
    )
]
BATCHES = [job(autoscale=given) for given in choices(minGlobalBatchSize=(8, 16), maxGlobalBatchSize=(8, 16))]
RIGHT = [
    *(job(nprocPerNode=given) for given in ("1", "10", "gpu", "cpu", "auto")),
    *(job(checkpoint=given) for given in ("", "/checkpoints/a", "s3://bucket/run", "file:///a", "filecache::s3://b/a")),
]
WRONG = [
    *(job(nprocPerNode=given) for given in ("", "0", "01", "-1", "1.5", "x", "1 ", "gpus")),
    *(job(checkpoint=given) for given in ("x", "checkpoints/a", "./a", "s3:bucket", "s3://", "://a", " s3://b/a")),
]
"""How many workers there are in a pod, and where checkpoints are."""
JOBS = [*SIZES, *NAMES, *TEMPLATES, *COSTS, *BATCHES, *RIGHT, *WRONG]
"""Each field of them has a value that it may have."""

_OTHER = {"spec": {**TEMPLATE, "containers": [{**TEMPLATE["containers"][0], "image": "digits:2"}]}}
CHANGES: list[tuple[Json, Json, bool]] = [
    *(
        (job(nprocPerNode="1"), job(**{"nprocPerNode": "1", **more}), same)
        for more, same in (
            ({"spares": 1, "backoffLimit": 2, "suspend": True, "workers": 0}, True),
            ({"low": 2}, False),
            ({"high": 8}, False),
            ({"autoscale": {}}, False),
            ({"nprocPerNode": "2"}, False),
            ({"checkpoint": "/a"}, False),
            ({"checkpoint": ""}, True),
            ({"template": _OTHER}, False),
            ({"template": {"metadata": {"labels": {"a": "b"}}, **job()["spec"]["template"]}}, False),
            ({"template": {"spec": {**TEMPLATE, "nodeSelector": {"pool": "a"}}}}, False),
        )
    ),
    (job(checkpoint="/a"), job(), False),
    (job(checkpoint="/a"), job(checkpoint="/b"), False),
    (job(checkpoint="/a"), job(checkpoint="/a", suspend=True), True),
    (job(autoscale={}), job(), False),
    (job(autoscale={}), job(autoscale={"policy": "throughput"}, workers=2), True),
    (job(autoscale={"threshold": 0.5}), job(autoscale={"threshold": 0.7}), False),
    (job(autoscale={"threshold": 0.5}), job(autoscale={}), False),
]
"""A job before and after a change, and whether pods made before it are like those made after it. Both are right."""

VALUES = [
    job(nprocPerNode=2),
    job(low=0),
    job(low=0, high=0),
    job(high="4"),
    job(template={"spec": {}}),
    job(template={"spec": {"containers": []}}),
    *(
        job(autoscale=given)
        for given in (
            {"policy": "fast"},
            {"threshold": 0},
            {"threshold": 1.5},
            {"threshold": -0.5},
            {"everySteps": 9},
            {"everySteps": 10},
            {"retrySeconds": 0},
            {"policy": "cost", "deadlineSeconds": 0},
            {"policy": "cost", "budget": -1, "pricePerWorkerHour": 1},
            {"policy": "cost", "budget": 1, "pricePerWorkerHour": 0},
            {"policy": "cost", "valuePerHour": -1, "pricePerWorkerHour": 1},
            {"minGlobalBatchSize": 0, "maxGlobalBatchSize": 8},
            {"maxGlobalBatchSize": 0},
        )
    ),
]
"""Values of single fields, at their limits and beyond them."""
