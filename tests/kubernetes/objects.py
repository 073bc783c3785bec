"""Objects as an API server has them."""

from __future__ import annotations

from typing import Any

from ef_common.kubernetes.resource import API_VERSION, KIND, Json

GPU = "nvidia.com/gpu"


def job(name: str = "a", low: int = 1, high: int = 4, **spec: Any) -> Json:
    container = {"name": "worker", "image": "digits", "command": ["elasticflow", "run", "train.py"]}
    template = {"spec": {"containers": [{**container, "resources": {"limits": {GPU: "1"}}}]}}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name, "namespace": "here", "uid": f"uid-of-{name}", "generation": 1}
        | {"creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "1"},
        "spec": {"minWorkers": low, "maxWorkers": high, "template": template, **spec},
    }


def node(name: str = "n1", gpus: int = 4, **spec: Any) -> Json:
    return {
        "metadata": {"name": name, "labels": {"zone": "east"}},
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": "8", "memory": "8Gi", "pods": "10"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
