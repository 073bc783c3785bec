"""A real API server judges jobs by their definition: it refuses those with which the controller would fail."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lightkube")

from ef_common.errors import ClusterFailed, ClusterRefused
from ef_common.kubernetes.api import Api
from ef_common.kubernetes.applying import apply_all
from ef_common.kubernetes.kinds import JOBS
from ef_common.kubernetes.resource import GROUP, PLURAL, Json, definition, problem
from tests.kubernetes import definitions, judged, tools
from tests.kubernetes.control_plane import DEFINITIONS
from tests.kubernetes.objects import job

pytestmark = [
    pytest.mark.processes,
    pytest.mark.thorough,
    pytest.mark.skipif(definitions.why_not() is not None, reason=str(definitions.why_not())),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "15-kubernetes" / "job.yaml"
_GUARD_S = 60.0


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    with definitions.api_server() as path:
        yield path


@pytest.fixture(scope="module")
def api(kubeconfig: Path) -> Iterator[Api]:
    with contextlib.closing(Api(str(kubeconfig))) as api:
        assert list(apply_all(api, [definition()])) == [
            f"CustomResourceDefinition {PLURAL}.{GROUP} is applied"  # with its rules
        ]
        deadline = time.monotonic() + _GUARD_S
        while not _is_served(api):
            assert time.monotonic() < deadline, api.get(DEFINITIONS, None, f"{PLURAL}.{GROUP}")
            time.sleep(0.1)
        yield api


def _is_served(api: Api) -> bool:
    with contextlib.suppress(ClusterFailed):
        refused(api, job())
        return True
    return False


def refused(api: Api, thing: Json) -> str:
    """Why the API server would not take a job; "" if it would. It does not take fields that it does not know."""
    meta = {"name": thing["metadata"]["name"], "namespace": "default"}
    params = {"dryRun": "All", "fieldValidation": "Strict"}
    try:
        api._ask("POST", JOBS.path("default"), body={**thing, "metadata": meta}, params=params)
    except ClusterRefused as error:
        return str(error)
    return ""


def test_jobs_are_refused_that_the_controller_fails_with_the_same_sentence(api: Api) -> None:
    for thing in judged.JOBS:
        wrong, said = problem(thing), refused(api, thing)
        assert bool(said) == bool(wrong), (thing["spec"], said, wrong)
        assert wrong.partition(". Received: ")[0] in said


def test_values_are_refused_that_the_controller_fails(api: Api) -> None:
    for thing in judged.VALUES:
        wrong, said = problem(thing), refused(api, thing)
        assert bool(said) == bool(wrong), (thing["spec"], said, wrong)


@pytest.mark.parametrize("phase", ["", "Running", "Suspended"])
def test_what_pods_are_made_of_is_changed_only_while_there_are_none(api: Api, phase: str) -> None:
    for before, after, may in judged.CHANGES:
        meta = {"name": "changed", "namespace": "default"}
        made = api.create(JOBS, {**before, "metadata": meta})
        if phase:
            made = api.replace(JOBS, {**made, "status": {"phase": phase}}, sub="status")
        changed = {**made, "spec": after["spec"]}
        if may or phase == "Suspended":
            api.replace(JOBS, changed)
        else:
            with pytest.raises(ClusterRefused, match="can be changed only while the job is suspended"):
                api.replace(JOBS, changed)
        api.delete(JOBS, "default", "changed")


def test_field_that_no_job_has_is_refused(api: Api) -> None:
    assert 'unknown field "spec.maxWorker"' in refused(api, job(maxWorker=8))
    assert 'unknown field "spec.autoscale.everyStep"' in refused(api, job(autoscale={"everyStep": 10}))


def test_definition_is_kept_as_it_is_and_nothing_is_wrong_with_it(api: Api) -> None:
    def missing(wanted: Any, found: Any, place: str = "") -> Iterator[str]:
        if isinstance(wanted, dict) and isinstance(found, dict):
            for name, one in wanted.items():
                yield from missing(one, found.get(name), f"{place}.{name}")
        elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
            for number, one in enumerate(wanted):
                yield from missing(one, found[number], f"{place}[{number}]")
        elif wanted != found:
            yield f"{place}: {wanted} became {found}"

    found = api.get(DEFINITIONS, None, f"{PLURAL}.{GROUP}")
    assert not list(missing(definition()["spec"], found["spec"]))
    assert {one["type"] for one in found["status"]["conditions"] if one["status"] == "True"} == {
        "NamesAccepted",
        "Established",
    }


@pytest.mark.skipif(not definitions.is_in_plane(), reason="kubectl needs a whole control plane, which knows rules")
@pytest.mark.skipif(tools.why_not("kubectl") is not None, reason=str(tools.why_not("kubectl")))
def test_kubectl_tells_what_is_wrong_with_a_job(api: Api, kubeconfig: Path, tmp_path: Path) -> None:
    def apply(thing: Json) -> str:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(thing))
        return tools.run("kubectl", f"--kubeconfig={kubeconfig}", "apply", "-f", path, cwd=tmp_path)

    thing = yaml.safe_load(EXAMPLE.read_text())
    assert "created" in apply(thing)
    with pytest.raises(AssertionError, match="minWorkers must not be greater than maxWorkers"):
        apply({**thing, "spec": {**thing["spec"], "minWorkers": 9, "maxWorkers": 8}})
