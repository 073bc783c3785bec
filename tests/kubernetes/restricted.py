"""The strictest of the Pod Security Standards, `restricted`: what is wrong with a pod where it is enforced."""

from __future__ import annotations

from collections.abc import Iterator

from ef_common.kubernetes.resource import Json

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
_SECCOMP = ("RuntimeDefault", "Localhost")


def problems(spec: Json) -> list[str]:
    """What is wrong with the spec of a pod; Windows, SELinux, AppArmor and sysctls are left out."""
    pod = spec.get("securityContext") or {}
    containers = [*spec["containers"], *(spec.get("initContainers") or ())]
    return [
        *(name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)),
        *(f"volume {one['name']}" for one in spec.get("volumes") or () if not set(one) - {"name"} <= _VOLUMES),
        *(f"{one['name']}: {problem}" for one in containers for problem in _of_container(one, pod)),
    ]


def _of_container(container: Json, pod: Json) -> Iterator[str]:
    own = container.get("securityContext") or {}
    both = {**pod, **own}
    if any("hostPort" in port for port in container.get("ports") or ()):
        yield "hostPort"
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    if "procMount" in own:
        yield "procMount"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if 0 in (pod.get("runAsUser"), own.get("runAsUser")):
        yield "runAsUser"
    if (both.get("seccompProfile") or {}).get("type") not in _SECCOMP:
        yield "seccompProfile"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or ()) or set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield "capabilities"
