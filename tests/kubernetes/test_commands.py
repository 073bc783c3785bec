"""`elasticflow kubernetes`, as far as no cluster is needed; and what it would install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ef_common.cli import main
from ef_common.cli.common import name_for
from ef_common.cli.kubernetes import _progress
from ef_common.core.cluster import SharePolicy
from ef_common.errors import UsageError
from ef_common.kubernetes.installation import cluster_rules, job_rules, manifests
from ef_common.kubernetes.resource import CONTROLLER, MAX_NAME, PLURAL, definition, problem
from ef_common.kubernetes.submission import Submission, pairs, row
from ef_common.kubernetes.writing import network_policy_of
from tests.kubernetes.objects import job

ROOT = Path(__file__).parents[2]


def elasticflow(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kubernetes", *arguments])


def submitted(*arguments: str) -> dict[str, Any]:
    result = elasticflow("submit", "--dry-run", "--image=digits", *arguments)
    assert result.exit_code == 0, result.output
    job: dict[str, Any] = yaml.safe_load(result.stdout)
    return job


def test_submission_is_an_elastic_job_that_makes_sense() -> None:
    job = submitted(
        "--workers=2:4",
        "--resource=nvidia.com/gpu=1",
        "--env=A=b=c",
        "--checkpoint=s3://b/x",
        "--priority-class=low",
        "--nproc-per-node=gpu",
        "--max-restarts=1",
        "train_it.py",
        "--epochs=3",
    )
    assert problem(job) == ""
    assert job["metadata"] == {"name": "train-it"}
    spec = job["spec"]
    assert (spec["minWorkers"], spec["maxWorkers"], spec["nprocPerNode"]) == (2, 4, "gpu")
    assert (spec["checkpoint"], spec["priorityClassName"]) == ("s3://b/x", "low")
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["elasticflow", "run", "--run-dir=/run/elasticflow", "--max-restarts=1"]
    assert container["args"] == ["train_it.py", "--epochs=3"]
    assert container["env"] == [{"name": "A", "value": "b=c"}]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}


def test_how_a_job_chooses_its_size_is_a_field_of_it() -> None:
    job = submitted("--workers=2:4", "--spares=1", "--autoscale=policy=goodput,threshold=0.5", "train.py")
    assert problem(job) == ""
    assert (job["spec"]["autoscale"], job["spec"]["spares"]) == ({"policy": "goodput", "threshold": 0.5}, 1)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "--run-dir=/run/elasticflow"
    assert {"autoscale", "spares"}.isdisjoint(submitted("--autoscale=off", "train.py")["spec"])


def test_volumes_are_mounted_and_may_have_the_run_directory() -> None:
    job = submitted("--volume=runs=/runs", "--volume=data.v2=/data", "--run-dir=/runs/digits", "train.py")
    assert problem(job) == ""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["elasticflow", "run", "--run-dir=/runs/digits"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {
        mounts[volume["name"]]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert claims == {"/runs": "runs", "/data": "data.v2"}
    assert pod["securityContext"]["fsGroup"] == 1000


def test_submitted_pods_are_restricted() -> None:
    pod = submitted("train.py")["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert writable == {"/run/elasticflow", "/tmp", "/dev/shm"}


def test_submitted_pods_have_shared_memory_for_loaders_with_processes() -> None:
    """The default is 64 MiB, of which images in the processes of a `DataLoader` need more."""
    pod = submitted("train.py")["spec"]["template"]["spec"]
    (name,) = [one["name"] for one in pod["containers"][0]["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    assert {"name": name, "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_volume_of_the_users_takes_the_place_of_one_of_ours() -> None:
    pod = submitted("--volume=runs=/dev/shm/", "train.py")["spec"]["template"]["spec"]
    places = [one["mountPath"].rstrip("/") for one in pod["containers"][0]["volumeMounts"]]
    assert sorted(places) == ["/dev/shm", "/run/elasticflow", "/tmp"]
    assert len(pod["volumes"]) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--workers=4:2", "train.py"), "expected MIN:MAX"),
        (("--workers=1:2",), "Received: no script"),
        (("--resource=gpu", "train.py"), "expected NAME=VALUE. Received: --resource=gpu"),
        (("--volume=/runs", "train.py"), "expected NAME=VALUE. Received: --volume=/runs"),
        (("--autoscale=max=4", "train.py"), "between those of --workers. Received: --autoscale=max=4"),
        (("--autoscale=policy=best", "train.py"), "policy is one of"),
        (("--name=Big_Job", "train.py"), "Received: Big_Job"),
        ((f"--name={'a' * 53}", "train.py"), "at most 52"),
    ],
)
def test_submission_that_is_wrong_is_refused_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    result = elasticflow("submit", "--dry-run", "--image=digits", *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("/app/train.py", "train"),
        ("My_Script.v2.py", "my-script-v2"),
        ("01-digits.py", "job-01-digits"),
        ("_.py", "job"),
    ],
)
def test_job_is_named_like_its_script(script: str, name: str) -> None:
    assert name_for(script, max_chars=MAX_NAME) == name
    assert Submission(name, "", 1, 2, "i", (script,)).job()["metadata"]["name"] == name


def test_value_may_be_anything_but_must_be_there() -> None:
    assert pairs(["A=1=2", "B="], option="--env") == {"A": "1=2", "B": ""}
    with pytest.raises(UsageError, match="Received: --env==x"):
        pairs(["=x"], option="--env")


def test_row_of_a_job_that_nobody_has_looked_at_yet() -> None:
    job = {"metadata": {"name": "a", "namespace": "b"}, "spec": {"minWorkers": 1, "maxWorkers": 4, "workers": 2}}
    assert (row(job)["phase"], row(job)["max"], row(job)["running"]) == ("Pending", 2, 0)


def test_progress_is_shown_as_far_as_it_is_known() -> None:
    said = {"training": 1, "step": 40, "samplesPerSecond": 51.5}
    job = {"metadata": {"name": "a", "namespace": "b"}, "spec": {"maxWorkers": 4}}
    assert _progress(row(job)) == ""
    assert _progress(row({**job, "status": {"training": 0, "step": 9}})) == ""
    assert _progress(row({**job, "status": said})) == "; 1 worker trains, at step 40, 51.5 samples/s"
    saved = row({**job, "status": {**said, "checkpointStep": 30}})
    assert _progress(saved) == "; 1 worker trains, at step 40 (saved: 30), 51.5 samples/s"
    asks = row({**job, "status": {**said, "training": 3, "asked": 2}})
    assert _progress(asks) == "; 3 workers train, at step 40, 51.5 samples/s, and it asks for 2 pods"


# ---------------------------------------------------------------- the installation


def test_installation_is_printed_as_kubectl_reads_it() -> None:
    result = elasticflow("install", "--dry-run", "--image=here/controller", "--replicas=3")
    things = list(yaml.safe_load_all(result.stdout))
    assert things == manifests(image="here/controller", replicas=3)
    deployment = things[-1]
    assert deployment["spec"]["replicas"] == 3
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "here/controller"
    assert container["command"][:3] == ["elasticflow", "kubernetes", "controller"]
    assert CliRunner().invoke(main, [*container["command"][1:3], "--help"]).exit_code == 0
    assert deployment["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("policy", [one.value for one in SharePolicy])
def test_installed_controller_has_the_policy_that_was_chosen(policy: str) -> None:
    result = elasticflow("install", "--dry-run", f"--policy={policy}")
    (deployment,) = (one for one in yaml.safe_load_all(result.stdout) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"--policy={policy}" in container["command"]
    command = main.commands["kubernetes"].commands["controller"]  # type: ignore[attr-defined]
    assert command.make_context("controller", container["command"][3:]).params["policy"] == policy


def test_policy_of_an_installation_that_there_is_not_is_refused() -> None:
    result = elasticflow("install", "--dry-run", "--policy=best")
    assert result.exit_code == 2
    assert "'fair', 'priority', 'gang'" in result.stderr


def test_controllers_are_kept_apart_and_drained_one_after_the_other() -> None:
    things = {thing["kind"]: thing for thing in manifests(image="i")}
    template = things["Deployment"]["spec"]["template"]
    (rule,) = template["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    budget = things["PodDisruptionBudget"]
    for selector in (rule["podAffinityTerm"]["labelSelector"], budget["spec"]["selector"]):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert rule["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert (budget["spec"]["maxUnavailable"], budget["metadata"]["namespace"]) == (1, "elasticflow")


def test_namespace_of_the_controller_has_the_label_by_which_network_policies_choose_it() -> None:
    (namespace,) = (thing for thing in manifests(image="i", namespace="there") if thing["kind"] == "Namespace")
    policy = network_policy_of(job(), "there")
    (controllers,) = policy["spec"]["ingress"][1]["from"]
    assert controllers["namespaceSelector"]["matchLabels"].items() <= namespace["metadata"]["labels"].items()


def test_controller_has_no_right_that_lets_it_read_secrets_or_change_others() -> None:
    rules = [*job_rules(), *cluster_rules()]
    rights = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert {verb for resource, verb in rights if resource == "secrets"} == {"create"}
    pods = {verb for resource, verb in rights if resource == "pods"}
    assert pods == {"get", "list", "watch", "create", "patch", "delete"}
    assert {one for one in rights if one[1] in ("*", "patch", "escalate", "impersonate", "bind")} == {
        ("pods", "patch"),
        ("poddisruptionbudgets", "patch"),
    }
    assert {resource for resource, verb in rights if verb == "update"} == {f"{PLURAL}/status", f"{PLURAL}/finalizers"}
    assert not [rule for rule in rules if "*" in (*rule["apiGroups"], *rule["resources"])]


@pytest.mark.parametrize("namespaced", [False, True])
def test_roles_are_bound_to_the_account_of_the_controller(namespaced: bool) -> None:
    things = manifests(image="i", namespace="there", namespaced=namespaced)
    roles = {(thing["kind"], thing["metadata"]["name"]) for thing in things if thing["kind"].endswith("Role")}
    bindings = [thing for thing in things if thing["kind"].endswith("Binding")]
    assert len(bindings) == 2
    for binding in bindings:
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": "there"}]
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in roles
        assert binding["kind"] == f"{binding['roleRef']['kind']}Binding"


def test_namespaced_controller_only_looks_at_nodes_and_priority_classes_outside_its_namespace() -> None:
    result = elasticflow("install", "--dry-run", "--namespaced", "--namespace=team")
    things = {(thing["kind"], thing["metadata"]["name"]): thing for thing in yaml.safe_load_all(result.stdout)}
    assert things["ClusterRole", f"{CONTROLLER}-team"]["rules"] == cluster_rules()
    assert {one for rule in cluster_rules() for one in rule["resources"]} == {"nodes", "priorityclasses"}
    assert {verb for rule in cluster_rules() for verb in rule["verbs"]} == {"get", "list", "watch"}
    role = things["Role", CONTROLLER]
    assert role["metadata"]["namespace"] == "team"
    assert all(rule in role["rules"] for rule in job_rules())
    assert not [kind for kind, _ in things if kind == "Namespace"]
    (container,) = things["Deployment", CONTROLLER]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "--namespaced"
    assert "--namespaced" not in str(manifests(image="i"))


def test_namespaced_controllers_of_two_namespaces_share_nothing_but_the_resource() -> None:
    one, other = (manifests(image="i", namespace=where, namespaced=True) for where in ("a", "b"))
    names = [
        {(thing["kind"], thing["metadata"]["name"], thing["metadata"].get("namespace")) for thing in things}
        for things in (one, other)
    ]
    assert names[0] & names[1] == {("CustomResourceDefinition", "elasticjobs.elasticflow.dev", None)}


def structural(schema: dict[str, Any], path: str = "") -> None:
    """What API servers demand of each schema."""
    assert schema.get("type") or schema.get("x-kubernetes-preserve-unknown-fields"), path
    assert "$ref" not in schema
    for name, one in (schema.get("properties") or {}).items():
        structural(one, f"{path}.{name}")
    if schema.get("type") == "array":
        structural(schema["items"], f"{path}[]")


def test_definition_is_structural_and_has_what_kubectl_shows() -> None:
    (version,) = definition()["spec"]["versions"]
    structural(version["schema"]["openAPIV3Schema"])
    assert set(version["subresources"]) == {"status", "scale"}
    assert definition()["spec"]["names"]["shortNames"] == ["ej"]


def test_example_makes_sense() -> None:
    job = yaml.safe_load((ROOT / "examples/15-kubernetes/job.yaml").read_text())
    assert problem(job) == ""
    known = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert set(job["spec"]) <= set(known)
    pod = job["spec"]["template"]["spec"]
    ours = Submission("a", "here", 1, 8, "i", ("train.py",)).job()["spec"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"] == ours["containers"][0]["securityContext"]
    assert ours["securityContext"].items() <= pod["securityContext"].items()
    assert all(volume in pod["volumes"] for volume in ours["volumes"])
    assert all(mount in pod["containers"][0]["volumeMounts"] for mount in ours["containers"][0]["volumeMounts"])
    assert ours["containers"][0]["command"][:3] == pod["containers"][0]["command"][:3]
    things = list(yaml.safe_load_all((ROOT / "examples/15-kubernetes/serving.yaml").read_text()))
    assert things[1]["spec"]["template"]["spec"]["priorityClassName"] == things[0]["metadata"]["name"]


def test_guide_shows_the_columns_that_kubectl_prints_and_a_job_that_makes_sense() -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    (version,) = definition()["spec"]["versions"]
    columns = [one["name"].upper() for one in version["additionalPrinterColumns"] if not one.get("priority")]
    assert [line.split() for line in guide.splitlines() if line.startswith("NAME ")] == [["NAME", *columns]]
    (shown,) = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", guide, re.DOTALL | re.MULTILINE))
    job = yaml.safe_load((ROOT / "examples/15-kubernetes/job.yaml").read_text())
    assert problem({**job, "spec": {**job["spec"], **shown["spec"]}}) == ""


def test_commands_without_a_client_say_how_to_get_one(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['lightkube'] = None; sys.modules['httpx2'] = None\n"
        "from ef_common.cli import main; main(['kubernetes', 'status'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "pip install 'elasticflow-training[kubernetes]'" in done.stderr


def test_commands_import_neither_numpy_nor_torch() -> None:
    program = (
        "import sys; from ef_common.cli import main\n"
        "try: main(['kubernetes', 'submit', '--dry-run', '--image=i', 'train.py'])\n"
        "finally: print(sorted({'numpy', 'torch'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip() == "[]", done.stderr
