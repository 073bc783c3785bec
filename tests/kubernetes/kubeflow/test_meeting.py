"""What `elasticflow run` makes of what Kubeflow's operators tell the pods of the examples."""

from __future__ import annotations

from typing import Any

import pytest

from ef_common.errors import UsageError
from ef_common.kubernetes.resource import Json
from ef_common.launch.surroundings import MeetingPlace, meeting_in
from tests.kubernetes.kubeflow.examples import NAMES, example
from tests.kubernetes.kubeflow.operators import Made, of_mpijob, of_pytorchjob, of_tfjob, of_trainjob

SECRET = {"name": "digits-token", "key": "token"}


def variables(pod: Json) -> dict[str, str]:
    """Of the first container; a secret is another word."""
    (container,) = pod["spec"]["containers"]
    secret = {"ELASTICFLOW_TOKEN": "secret"}
    texts = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return texts | (secret if any("valueFrom" in one for one in container["env"]) else {})


def meetings(made: Made) -> list[MeetingPlace | None]:
    return [meeting_in({**variables(pod), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}) for pod in made[1]]


def pods_of_trainjob() -> Made:
    objects = example("trainjob")
    return of_trainjob(objects["TrainJob"], objects["TrainingRuntime"])


def test_pods_of_a_trainjob_meet_at_all_of_them() -> None:
    found = meetings(pods_of_trainjob())
    endpoint = ",".join(f"digits-node-0-{index}.digits:29500" for index in range(4))
    assert found == [MeetingPlace("a pod of Kubeflow", endpoint)] * 4


def test_pods_of_a_tfjob_meet_at_all_of_them() -> None:
    found = meetings(of_tfjob(example("tfjob")["TFJob"]))
    endpoint = ",".join(f"digits-worker-{index}.default.svc:2222" for index in range(4))
    assert found == [MeetingPlace(f"worker {index} of TF_CONFIG", endpoint, num_nodes=4) for index in range(4)]


def test_pods_of_a_pytorchjob_with_a_master_meet_at_all_of_them() -> None:
    found = meetings(of_pytorchjob(pytorchjob(Master=1, Worker=2)))
    endpoint = "digits-master-0:23456,digits-worker-0:23456,digits-worker-1:23456"
    assert found == [MeetingPlace("a pod of Kubeflow", endpoint)] * 3


def test_pods_of_a_pytorchjob_that_says_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="elasticPolicy with `rdzvBackend: elasticflow`"):
        meetings(of_pytorchjob(pytorchjob(Worker=2)))


def pytorchjob(**replicas: int) -> Json:
    """The example with such pods, and without its elastic policy."""
    job = example("pytorchjob")["PyTorchJob"]
    role = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    job["spec"] = {"pytorchReplicaSpecs": {name: {**role, "replicas": number} for name, number in replicas.items()}}
    return job


def test_pods_of_an_elastic_pytorchjob_have_the_name_of_the_service() -> None:
    objects = example("pytorchjob")
    _, pods = of_pytorchjob(objects["PyTorchJob"])
    for pod in pods:
        found = variables(pod)
        assert found["PET_RDZV_ENDPOINT"] == f"{objects['Service']['metadata']['name']}:29400"
        assert (found["PET_RDZV_BACKEND"], found["PET_RDZV_CONF"]) == ("elasticflow", "is_group=1")
        assert objects["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()


def test_launcher_of_an_mpijob_is_alone_until_its_ranks_are_asked() -> None:
    assert meetings(of_mpijob(example("mpijob")["MPIJob"])) == [None] * 5


@pytest.mark.parametrize("name", NAMES)
def test_example_names_the_secret_as_its_readme_makes_it(name: str) -> None:
    def secrets(thing: Any) -> list[Json]:
        if isinstance(thing, list):
            return [found for one in thing for found in secrets(one)]
        if not isinstance(thing, dict):
            return []
        here = [thing["secretKeyRef"]] if "secretKeyRef" in thing else []
        return here + [found for one in thing.values() for found in secrets(one)]

    found = secrets(list(example(name).values()))
    assert found == ([] if name == "mpijob" else [SECRET])
