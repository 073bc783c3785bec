from __future__ import annotations

import pytest

from ef_common.errors import UsageError
from ef_common.launch.kubeflow import KubeflowPod, pod_in

TRAIN_JOB = {"PET_MASTER_ADDR": "a-node-0-0.a", "PET_MASTER_PORT": "29500", "PET_NNODES": "3", "PET_NODE_RANK": "0"}
PYTORCH_JOB = {"PET_MASTER_ADDR": "a-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "3", "PET_NODE_RANK": "2"}


@pytest.mark.parametrize(
    ("environ", "hosts", "port", "is_first"),
    [
        (TRAIN_JOB, ("a-node-0-0.a", "a-node-0-1.a", "a-node-0-2.a"), 29500, True),
        (TRAIN_JOB | {"PET_NNODES": "1:2"}, ("a-node-0-0.a", "a-node-0-1.a"), 29500, True),
        (TRAIN_JOB | {"PET_MASTER_ADDR": "a-node-0-0.b"}, ("a-node-0-0.b",), 29500, True),
        (TRAIN_JOB | {"PET_MASTER_ADDR": "a-node-0-1.a"}, ("a-node-0-1.a",), 29500, True),
        (PYTORCH_JOB, ("a-master-0", "a-worker-0", "a-worker-1"), 23456, False),
        (PYTORCH_JOB | {"PET_MASTER_ADDR": "10.0.0.1"}, ("10.0.0.1",), 23456, False),
        ({"PET_MASTER_ADDR": "h", "PET_NNODES": "3"}, ("h",), 29400, None),
    ],
)
def test_names_of_all_pods_follow_from_that_of_the_first_one(
    environ: dict[str, str], hosts: tuple[str, ...], port: int, is_first: bool | None
) -> None:
    assert pod_in(environ) == KubeflowPod(tuple((host, port) for host in hosts), is_first=is_first)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TRAIN_JOB | {"PET_NNODES": "1"},
        TRAIN_JOB | {"PET_NNODES": ""},
        TRAIN_JOB | {"PET_MASTER_ADDR": "127.0.0.1"},
        TRAIN_JOB | {"PET_MASTER_ADDR": " "},
        {"PET_NNODES": "1:4", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    ],
)
def test_pod_that_is_the_only_one_is_none_of_several(environ: dict[str, str]) -> None:
    assert pod_in(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TRAIN_JOB | {"PET_NNODES": "many"}, "expected MIN:MAX.* Received: PET_NNODES=many"),
        (TRAIN_JOB | {"PET_MASTER_PORT": "http"}, "PET_MASTER_ADDR must be HOST:PORT"),
        ({"PET_NNODES": "2:4", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, r"several pods \(PET_NNODES=2:4\), and each of"),
    ],
)
def test_pod_that_cannot_find_the_others_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        pod_in(environ)
