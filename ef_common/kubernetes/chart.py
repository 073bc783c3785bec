"""The installation as a Helm chart: what `manifests` has, with the values of a release in place of its arguments.

An object that is the same in a namespaced installation and in one for the whole cluster is in the template once. Of the
others, the template has both forms, and the value `namespaced` chooses between them.
"""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path

from ef_common import __version__
from ef_common.core.cluster import SharePolicy
from ef_common.kubernetes.installation import RESOURCES, manifests
from ef_common.kubernetes.kinds import BUDGETS, OLD_BUDGETS
from ef_common.kubernetes.resource import Json, definition
from ef_common.kubernetes.texts import as_yaml, document

NAME = "elasticflow"
_NAMESPACE, _IMAGE, _POLICY = "{{ .Release.Namespace }}", "{{ .Values.image }}", "{{ .Values.policy }}"
_REPLICAS, _RESOURCES = "{{ .Values.replicas }}", "{{ toJson .Values.resources }}"
_OF_PODS = ("imagePullSecrets", "nodeSelector", "tolerations", "priorityClassName")
"""Values that the pods of the controller have as they are, if there are any."""
_NEW, _OLD = BUDGETS.api_version, OLD_BUDGETS.api_version
_BUDGETS = f'{{{{ if .Capabilities.APIVersions.Has "{_NEW}" }}}}{_NEW}{{{{ else }}}}{_OLD}{{{{ end }}}}'


@dataclass(frozen=True, slots=True)
class Values:
    """The default values of the chart.

    Args:
        image: Image of the controller.
        replicas: How many controllers there are.
        namespaced: They look at the jobs of their own namespace only.
        policy: How they divide pods among the jobs.
    """

    image: str
    replicas: int
    namespaced: bool
    policy: str


def write(folder: Path, values: Values) -> None:
    """Write the chart into a folder, which is made if it is not there."""
    for path, text in files(values).items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def files(values: Values) -> dict[str, str]:
    """The files of the chart, by their paths."""
    about = {
        "apiVersion": "v2",
        "name": NAME,
        "description": "The controller of elastic trainings (ElasticJob)",
        "type": "application",
        "version": _semantic(__version__),
        "appVersion": __version__,
        "kubeVersion": ">=1.20.0-0",
    }
    return {
        "Chart.yaml": document(about),
        "values.yaml": _values(values),
        f"crds/{definition()['metadata']['name']}.yaml": document(definition()),
        "templates/controller.yaml": _template(),
    }


def _values(values: Values) -> str:
    policies = ", ".join(one.value for one in SharePolicy)
    return (
        f"# Image of the controller.\nimage: {json.dumps(values.image)}\n\n"
        f"# Number of controllers: one acts, and another one takes over if it is lost.\nreplicas: {values.replicas}\n\n"
        f"# true: it looks at the jobs of its own namespace only.\nnamespaced: {json.dumps(values.namespaced)}\n\n"
        f"# How pods are divided among the jobs: {policies}.\npolicy: {values.policy}\n\n"
        "# Secrets with which the image is pulled: [{name: NAME}].\nimagePullSecrets: []\n\n"
        "# On which nodes the pods of the controller run.\nnodeSelector: {}\ntolerations: []\n\n"
        '# Priority class of these pods.\npriorityClassName: ""\n\n'
        f"# What each of these pods asks for.\n{document({'resources': RESOURCES})}"
    )


def _template() -> str:
    here, everywhere = _things(namespaced=True), _things(namespaced=False)
    text = (
        as_yaml(thing for thing in here if thing in everywhere)
        + "{{- if .Values.namespaced }}\n"
        + as_yaml(thing for thing in here if thing not in everywhere)
        + "{{- else }}\n"
        + as_yaml(thing for thing in everywhere if thing not in here)
        + "{{- end }}\n"
    )
    for value in (_REPLICAS, _RESOURCES):  # they are no texts
        text = text.replace(f"'{value}'", value)
    text = text.replace(f"apiVersion: {_NEW}\n", f"apiVersion: {_BUDGETS}\n")
    return re.sub(r"( *)(\w+): WITH\n", r"\1{{- with .Values.\2 }}\n\1\2: {{ toJson . }}\n\1{{- end }}\n", text)


def _things(*, namespaced: bool) -> list[Json]:
    """The objects of the template. Helm makes the namespace, and takes the resource from the folder `crds`."""
    things = manifests(image=_IMAGE, namespace=_NAMESPACE, namespaced=namespaced, policy=_POLICY)
    return [_placed(thing) for thing in things if thing["kind"] not in ("CustomResourceDefinition", "Namespace")]


def _placed(thing: Json) -> Json:
    if thing["kind"] != "Deployment":
        return thing
    made = copy.deepcopy(thing)
    made["spec"]["replicas"] = _REPLICAS
    pod = made["spec"]["template"]["spec"]
    pod["containers"][0]["resources"] = _RESOURCES
    pod.update(dict.fromkeys(_OF_PODS, "WITH"))
    return made


def _semantic(version: str) -> str:
    """A version in the form that Helm requires: three numbers."""
    numbers = re.findall(r"\d+", version)[:3]
    return ".".join([*numbers, "0", "0", "0"][:3])
