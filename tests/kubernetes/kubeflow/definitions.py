"""Kubeflow's resources, with the published names, types, defaults and limits of those fields that the examples use.

Where `ELASTICFLOW_KUBEFLOW_CRDS` names a folder with the published definitions (of Training Operator 1.9, Trainer 2.3
and MPI Operator 0.8), these are used: they have all fields, and half a megabyte each.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from ef_common.kubernetes.kinds import Kind
from ef_common.kubernetes.resource import Json

DEFINITIONS = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", namespaced=False)
PYTORCH_JOBS = Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs")
TF_JOBS = Kind("kubeflow.org/v1", "TFJob", "tfjobs")
MPI_JOBS = Kind("kubeflow.org/v2beta1", "MPIJob", "mpijobs")
TRAIN_JOBS = Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs")
RUNTIMES = Kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes")
KINDS = {kind.kind: kind for kind in (PYTORCH_JOBS, TF_JOBS, MPI_JOBS, TRAIN_JOBS, RUNTIMES)}
PUBLISHED = "ELASTICFLOW_KUBEFLOW_CRDS"


def _object(*required: str, **fields: Json) -> Json:
    return {"type": "object", "properties": fields, **({"required": list(required)} if required else {})}


def _text(**more: Any) -> Json:
    return {"type": "string", **more}


def _list(of: Json, **more: Any) -> Json:
    return {"type": "array", "items": of, **more}


_ANY: Json = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}  # a pod: its fields are Kubernetes's own
_NUMBER: Json = {"type": "integer", "format": "int32"}
_LONG: Json = {"type": "integer", "format": "int64"}
_NO: Json = {"type": "boolean", "default": False}
_ROLES: Json = {
    "type": "object",
    "additionalProperties": _object(replicas=_NUMBER, restartPolicy=_text(), template=_ANY),
}
_POLICY = _object(
    activeDeadlineSeconds=_LONG,
    backoffLimit=_NUMBER,
    cleanPodPolicy=_text(),
    managedBy=_text(),
    schedulingPolicy=_ANY,
    suspend=_NO,
    ttlSecondsAfterFinished=_NUMBER,
)
_SPECS = {
    "PyTorchJob": _object(
        "pytorchReplicaSpecs",
        elasticPolicy=_object(
            maxReplicas=_NUMBER,
            maxRestarts=_NUMBER,
            minReplicas=_NUMBER,
            nProcPerNode=_NUMBER,
            rdzvBackend=_text(),
            rdzvConf=_list(_object(key=_text(), value=_text())),
            rdzvHost=_text(),
            rdzvId=_text(),
            rdzvPort=_NUMBER,
            standalone={"type": "boolean"},
        ),
        nprocPerNode=_text(),
        pytorchReplicaSpecs=_ROLES,
        runPolicy=_POLICY,
    ),
    "TFJob": _object(
        "tfReplicaSpecs",
        enableDynamicWorker={"type": "boolean"},
        runPolicy=_POLICY,
        successPolicy=_text(),
        tfReplicaSpecs=_ROLES,
    ),
    "MPIJob": _object(
        "mpiReplicaSpecs",
        launcherCreationPolicy=_text(default="AtStartup"),
        mpiImplementation=_text(default="OpenMPI", enum=["OpenMPI", "Intel", "MPICH"]),
        mpiReplicaSpecs=_ROLES,
        runLauncherAsWorker=_NO,
        runPolicy=_POLICY,
        slotsPerWorker={**_NUMBER, "default": 1},
        sshAuthMountPath=_text(default="/root/.ssh"),
    ),
    "TrainJob": _object(
        "runtimeRef",
        managedBy=_text(default="trainer.kubeflow.org/trainjob-controller", maxLength=253),
        runtimeRef=_object(
            "name",
            apiGroup=_text(default="trainer.kubeflow.org", maxLength=253),
            kind=_text(default="ClusterTrainingRuntime", maxLength=253),
            name=_text(maxLength=253),
        ),
        suspend=_NO,
        trainer=_object(
            args=_list(_text()),
            command=_list(_text()),
            env=_list(_ANY),
            image=_text(maxLength=500),
            numNodes=_NUMBER,
            numProcPerNode=_NUMBER,
            resourcesPerNode=_ANY,
        ),
    ),
    "TrainingRuntime": _object(
        mlPolicy=_object(numNodes=_NUMBER, torch=_object()),
        template=_object(
            spec=_object(replicatedJobs=_list(_object("name", "template", name=_text(), template=_ANY))),
        ),
    ),
}


def definitions() -> list[Json]:
    """All of them."""
    folder = os.environ.get(PUBLISHED)
    if folder is None:
        return [_definition(kind) for kind in KINDS.values()]
    found = [yaml.safe_load(path.read_text()) for path in sorted(Path(folder).glob("*.yaml"))]
    published = {one["spec"]["names"]["kind"]: one for one in found}
    return [published[kind] for kind in KINDS]


def _definition(kind: Kind) -> Json:
    group, _, version = kind.api_version.partition("/")
    scale = {
        "specReplicasPath": ".spec.pytorchReplicaSpecs.Worker.replicas",
        "statusReplicasPath": ".status.replicaStatuses.Worker.active",
    }
    schema = _object(metadata={"type": "object"}, spec=_SPECS[kind.kind], status=_ANY)
    return {
        "apiVersion": DEFINITIONS.api_version,
        "kind": DEFINITIONS.kind,
        "metadata": {"name": f"{kind.plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "kind": kind.kind,
                "listKind": f"{kind.kind}List",
                "plural": kind.plural,
                "singular": kind.kind.lower(),
            },
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": {"status": {}, **({"scale": scale} if kind is PYTORCH_JOBS else {})},
                }
            ],
        },
    }
