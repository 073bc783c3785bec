from __future__ import annotations

import json
from typing import Any

import pytest

from ef_common.errors import UsageError
from ef_common.launch.tf_config import Task, task_in

WORKERS = ["worker-0:2222", "worker-1:2222"]
CHIEF = ["chief-0:2222"]
TWO = (("worker-0", 2222), ("worker-1", 2222))
ALL = (("chief-0", 2222), *TWO)


def config(role: str = "worker", index: int = 1, **cluster: Any) -> dict[str, str]:
    """As Kubeflow's operator writes it."""
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (config(worker=WORKERS), Task("worker", 1, TWO)),
        (config(worker=WORKERS, chief=CHIEF), Task("worker", 1, ALL)),
        (config("chief", 0, worker=WORKERS, chief=CHIEF), Task("chief", 0, ALL)),
        (config("master", 0, worker=WORKERS, master=CHIEF), Task("master", 0, ALL)),
        (config(worker=WORKERS, evaluator=["e:1"], ps=["p:1"]), Task("worker", 1, TWO)),
        (config(worker=["[fd00::1]:1", "b:2"]), Task("worker", 1, (("fd00::1", 1), ("b", 2)))),
        (config("worker", 0, worker=WORKERS[:1]), None),
        (config("worker", 0, worker=WORKERS[:1], ps=["p:1"]), None),
        (config(), None),
        ({"TF_CONFIG": "{}"}, None),
        ({"TF_CONFIG": " "}, None),
        ({}, None),
    ],
)
def test_task_is_what_the_variable_says(environ: dict[str, str], expected: Task | None) -> None:
    assert task_in(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            config("ps", 0, worker=WORKERS, ps=["p:1"]),
            "this is ps 0 of TF_CONFIG.* leave out all replicas but chief and",
        ),
        (config("evaluator", 0, worker=WORKERS, evaluator=["e:1"]), "this is evaluator 0 of TF_CONFIG"),
        (
            config(worker={"1": WORKERS[1]}, ps=[]),
            "does not name the other workers .enableDynamicWorker.: pass --rdzv-",
        ),
        (config(worker=["a", "b:1"]), "each address in TF_CONFIG must be HOST:PORT.*Received: 'a'"),
        ({"TF_CONFIG": "worker"}, "TF_CONFIG must be JSON.*Received: worker"),
        ({"TF_CONFIG": "[]"}, "TF_CONFIG must be JSON"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "TF_CONFIG must be JSON"),
        ({"TF_CONFIG": '{"cluster": [1], "task": {"type": "worker", "index": 0}}'}, "TF_CONFIG must be JSON"),
    ],
)
def test_task_that_cannot_train_with_the_others_is_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task_in(environ)
