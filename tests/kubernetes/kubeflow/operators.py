"""What Kubeflow's operators make of a job: services, pods, and the variables by which these are told of each other.

Names, labels and variables are those of Training Operator 1.9, Trainer 2.3 and MPI Operator 0.8. What else they do
(webhooks, gang scheduling, restarts, status) is not here.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence

from ef_common.kubernetes.resource import Json

OPERATOR = "training.kubeflow.org"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
Made = tuple[list[Json], list[Json]]
"""Services and pods."""


def of_pytorchjob(job: Json) -> Made:
    """The pods of a PyTorchJob, with or without an elastic policy, and with or without a master."""
    name, spec = job["metadata"]["name"], job["spec"]
    roles = spec["pytorchReplicaSpecs"]
    number = sum(role.get("replicas", 1) for role in roles.values())
    shared = {"PYTHONUNBUFFERED": "1"}
    if "Master" in roles:
        shared |= {"PET_MASTER_ADDR": f"{name}-master-0", "PET_MASTER_PORT": "23456"}
    if "nprocPerNode" in spec:
        shared["PET_NPROC_PER_NODE"] = spec["nprocPerNode"]
    policy = spec.get("elasticPolicy")
    shared |= {"PET_NNODES": str(number)} if policy is None else _elastic(name, policy)

    def variables(role: str, index: int) -> dict[str, str]:
        rank = index + (role == "Worker")
        return {**shared, **({"PET_NODE_RANK": str(rank), "RANK": str(rank)} if "Master" in roles else {})}

    replicas = [(role, index) for role in roles for index in range(roles[role].get("replicas", 1))]
    return _of_training_operator(job, roles, {one: variables(*one) for one in replicas})


def _elastic(name: str, policy: Json) -> dict[str, str]:
    host, port = policy.get("rdzvHost", f"{name}-worker-0"), policy.get("rdzvPort", 23456)
    variables = {
        "PET_RDZV_ENDPOINT": f"{host}:{port}",
        "PET_RDZV_BACKEND": policy.get("rdzvBackend", "c10d"),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
    }
    if "maxRestarts" in policy:
        variables["PET_MAX_RESTARTS"] = str(policy["maxRestarts"])
    if "rdzvConf" in policy:
        variables["PET_RDZV_CONF"] = ",".join(f"{one['key']}={one['value']}" for one in policy["rdzvConf"])
    return variables


def of_tfjob(job: Json) -> Made:
    """The pods of a TFJob."""
    meta, roles = job["metadata"], job["spec"]["tfReplicaSpecs"]
    replicas = [(role, index) for role in roles for index in range(roles[role].get("replicas", 1))]
    cluster: dict[str, list[str]] = {role.lower(): [] for role in roles}
    for role, index in replicas:
        host = f"{meta['name']}-{role.lower()}-{index}.{meta['namespace']}.svc"
        cluster[role.lower()].append(f"{host}:2222")

    def config(role: str, index: int) -> str:
        task = {"type": role.lower(), "index": index}
        return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})

    return _of_training_operator(job, roles, {one: {"TF_CONFIG": config(*one)} for one in replicas})


def _of_training_operator(job: Json, roles: Json, variables: Mapping[tuple[str, int], dict[str, str]]) -> Made:
    """A pod and a service of its own for each replica."""
    services, pods = [], []
    for (role, index), environ in variables.items():
        name = f"{job['metadata']['name']}-{role.lower()}-{index}"
        labels = {
            f"{OPERATOR}/job-name": job["metadata"]["name"],
            f"{OPERATOR}/replica-type": role.lower(),
            f"{OPERATOR}/replica-index": str(index),
        }
        services.append(_service(job, name, labels))
        pods.append(_pod(job, name, roles[role]["template"], labels=labels, environ=environ))
    return services, pods


def of_trainjob(job: Json, runtime: Json) -> Made:
    """The pods that a TrainJob has by way of a JobSet, with the plugin `torch`."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = copy.deepcopy(replicated["template"]["spec"]["template"])
    (container,) = template["spec"]["containers"]
    container |= {field: trainer[field] for field in ("image", "command", "args", "env") if field in trainer}
    container["resources"] = trainer.get("resourcesPerNode", {})
    number = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    labels = {JOBSET: name}
    pods = []
    for index in range(number):
        environ = {
            "PET_NNODES": str(number),
            "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", 1)),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
            "PET_MASTER_PORT": "29500",
        }
        host = f"{name}-node-0-{index}"
        pods.append(_pod(job, host, template, labels=labels, environ=environ, subdomain=name))
    service = _service(job, name, labels)
    service["spec"]["publishNotReadyAddresses"] = True
    return [service], pods


def of_mpijob(job: Json) -> Made:
    """The pods of an MPIJob; the last one is that of the launcher, whose files are not made here."""
    name, spec = job["metadata"]["name"], job["spec"]
    labels = {f"{OPERATOR}/job-name": name}
    roles = spec["mpiReplicaSpecs"]
    workers = [
        _pod(
            *(job, f"{name}-worker-{index}", roles["Worker"]["template"]),
            labels=labels,
            environ={"K_MPI_JOB_ROLE": "worker"},
            subdomain=name,
        )
        for index in range(roles["Worker"]["replicas"])
    ]
    environ = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_MCA_orte_set_default_slots": str(spec.get("slotsPerWorker", 1)),
    }
    template = roles["Launcher"]["template"]
    launcher = _pod(job, f"{name}-launcher", template, labels=labels, environ=environ, subdomain=name)
    return [_service(job, name, labels)], [*workers, launcher]


def hostfile_of(job: Json) -> str:
    """The file that says to mpirun where the workers are."""
    meta, spec = job["metadata"], job["spec"]
    hosts = [
        f"{meta['name']}-worker-{index}.{meta['name']}.{meta['namespace']}.svc"
        for index in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    ]
    return "".join(f"{host} slots={spec.get('slotsPerWorker', 1)}\n" for host in hosts)


def _service(job: Json, name: str, selector: Mapping[str, str]) -> Json:
    spec = {"clusterIP": "None", "selector": dict(selector)}
    meta = {"name": name, "namespace": job["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec}


def _pod(
    job: Json, name: str, template: Json, *, labels: Mapping[str, str], environ: Mapping[str, str], subdomain: str = ""
) -> Json:
    pod = copy.deepcopy(template)
    container = pod["spec"]["containers"][0]
    container["env"] = [*_others(container.get("env", ()), environ), *_as_env(environ)]
    pod["spec"] |= {"restartPolicy": "Never", "hostname": name}
    if subdomain:
        pod["spec"]["subdomain"] = subdomain
    given = pod.get("metadata", {}).get("labels", {})
    meta = {"name": name, "namespace": job["metadata"]["namespace"], "labels": {**given, **labels}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod["spec"]}


def _others(given: Sequence[Json], environ: Mapping[str, str]) -> list[Json]:
    return [one for one in given if one["name"] not in environ]


def _as_env(environ: Mapping[str, str]) -> list[Json]:
    return [{"name": name, "value": value} for name, value in environ.items()]
