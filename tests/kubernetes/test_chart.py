"""An installation by Helm or kustomize is the same as one by `elasticflow kubernetes install`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from ef_common.cli import main
from ef_common.kubernetes import chart
from ef_common.kubernetes.chart import Values, files
from ef_common.kubernetes.installation import RESOURCES, manifests
from ef_common.kubernetes.resource import CONTROLLER, Json
from tests.kubernetes import tools

EXAMPLE = Path(__file__).parents[2] / "examples" / "15-kubernetes"
IMAGE = "here/controller:1"
VALUES = Values(image=IMAGE, replicas=2, namespaced=False, policy="fair")


def by_name(things: Iterable[Json]) -> dict[str, Json]:
    """Objects of which nothing depends on their order."""
    return {f"{thing['kind']} {thing['metadata']['name']}": thing for thing in things if thing}


def without(things: Iterable[Json], *kinds: str) -> list[Json]:
    return [thing for thing in things if thing["kind"] not in kinds]


def test_chart_says_what_a_release_takes_by_default() -> None:
    found = files(Values(image='a"b', replicas=3, namespaced=True, policy="gang"))
    values = yaml.safe_load(found["values.yaml"])
    chosen = {name: values.pop(name) for name in ("image", "replicas", "namespaced", "policy")}
    assert chosen == {"image": 'a"b', "replicas": 3, "namespaced": True, "policy": "gang"}
    assert values.pop("resources") == RESOURCES
    assert not any(values.values())
    assert set(values) == {"imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName"}
    assert yaml.safe_load(found["crds/elasticjobs.elasticflow.dev.yaml"]) == manifests(image="i")[0]


@pytest.mark.parametrize(("version", "semantic"), [("1.2.3", "1.2.3"), ("0.2rc1", "0.2.1"), ("0+unknown", "0.0.0")])
def test_version_of_a_chart_has_three_numbers(version: str, semantic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chart, "__version__", version)
    about = yaml.safe_load(files(VALUES)["Chart.yaml"])
    assert (about["version"], about["appVersion"]) == (semantic, version)


def test_template_has_the_values_of_the_chart_and_no_others() -> None:
    found = files(VALUES)
    template = found["templates/controller.yaml"]
    assert set(re.findall(r"\.Values\.(\w+)", template)) == set(yaml.safe_load(found["values.yaml"]))
    assert "replicas: {{ .Values.replicas }}\n" in template
    assert "resources: {{ toJson .Values.resources }}\n" in template
    assert "WITH" not in template


@pytest.mark.thorough
@pytest.mark.skipif(tools.why_not("helm") is not None, reason=str(tools.why_not("helm")))
@pytest.mark.parametrize("namespaced", [False, True])
def test_helm_makes_what_install_prints(tmp_path: Path, namespaced: bool) -> None:
    result = CliRunner().invoke(main, ["kubernetes", "install", f"--helm-chart={tmp_path}/chart", "--image=other"])
    assert result.exit_code == 0, result.output
    assert "0 chart(s) failed" in tools.run("helm", "lint", "--strict", "chart", cwd=tmp_path)
    values = (f"image={IMAGE}", "replicas=3", f"namespaced={json.dumps(namespaced)}", "policy=gang")
    options = [word for value in values for word in ("--set", value)]
    text = tools.run("helm", "template", "r", "chart", "--include-crds", "--namespace=there", *options, cwd=tmp_path)
    expected = manifests(image=IMAGE, namespace="there", replicas=3, namespaced=namespaced, policy="gang")
    assert by_name(yaml.safe_load_all(text)) == by_name(without(expected, "Namespace"))


@pytest.mark.thorough
@pytest.mark.skipif(tools.why_not("helm") is not None, reason=str(tools.why_not("helm")))
def test_pods_of_the_controller_have_what_the_values_of_the_chart_say(tmp_path: Path) -> None:
    for path, text in files(VALUES).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    values: Json = {
        "imagePullSecrets": [{"name": "registry"}],
        "nodeSelector": {"pool": "system"},
        "tolerations": [{"key": "system", "operator": "Exists"}],
        "priorityClassName": "system-cluster-critical",
        "resources": {"limits": {"memory": "2Gi"}},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    options = ("--values=mine.yaml", "--set=resources.requests=null")
    found = by_name(yaml.safe_load_all(tools.run("helm", "template", "r", ".", *options, cwd=tmp_path)))
    pod = found[f"Deployment {CONTROLLER}"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == values.pop("resources")
    assert {name: pod[name] for name in values} == values


@pytest.mark.thorough
@pytest.mark.skipif(tools.why_not("kubectl") is not None, reason=str(tools.why_not("kubectl")))
def test_kustomize_makes_what_install_prints(tmp_path: Path) -> None:
    text = (EXAMPLE / "kustomization.yaml").read_text()
    (options,) = re.findall(r"^# elasticflow kubernetes install --dry-run (.+) > elasticflow.yaml$", text, re.MULTILINE)
    (tmp_path / "kustomization.yaml").write_text(text)
    (tmp_path / "elasticflow.yaml").write_text(
        CliRunner().invoke(main, ["kubernetes", "install", "--dry-run", *options.split()]).stdout
    )
    found = by_name(yaml.safe_load_all(tools.run("kubectl", "kustomize", ".", cwd=tmp_path)))
    image = "REGISTRY/elasticflow-controller:0.1"
    assert found == by_name(manifests(image=image, namespace="training", replicas=3, policy="priority"))
    assert found[f"Deployment {CONTROLLER}"]["spec"]["replicas"] == 3
