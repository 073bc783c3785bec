"""`elasticflow doctor`: what is installed, what it can do, and what is missing.

Nothing is imported into this process: a broken package is a line of the report, not the end of it.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ef_common.horovod import source
from ef_common.horovod.build import DISTRIBUTIONS, installed_version, search_path

_TIMEOUT_S = 180.0

_VERSIONS = (
    ("torch", DISTRIBUTIONS["torch"], "pip install torch"),
    ("lightning", ("lightning", "pytorch-lightning"), "pip install 'elasticflow-training[lightning]'"),
    ("tensorflow", DISTRIBUTIONS["tensorflow"], "pip install tensorflow"),
    ("keras", ("keras",), "pip install 'elasticflow-training[keras]'"),
    ("horovod", ("horovod",), "elasticflow horovod build"),
)

# Each prints one JSON object: what it knows of engines and devices.
_PROBES = {
    "torch": """
import torch, torch.distributed as d
print(json.dumps({
    "gloo": d.is_available() and d.is_gloo_available(),
    "nccl": d.is_available() and d.is_nccl_available(),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))""",
    "tensorflow": """
import tensorflow as tf
print(json.dumps({"devices": [d.name for d in tf.config.list_physical_devices("GPU")]}))""",
    "horovod.torch": """
import horovod.torch as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}))""",
    "horovod.tensorflow": """
import horovod.tensorflow as hvd
print(json.dumps({"gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}))""",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: Package, engine or device.
        found: What there is.
        remedy: What to do if it is wanted and missing; empty if all is well.
    """

    subject: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at this environment."""
    findings = [
        Finding("elasticflow", installed_version("elasticflow-training") or "from a checkout"),
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    findings += [_package(name, distributions, remedy) for name, distributions, remedy in _VERSIONS]
    installed = {finding.subject for finding in findings if not finding.remedy}
    for name, probe in _PROBES.items():
        if set(name.split(".")) <= installed:
            findings += _probe(name, probe)
    return [*findings, _torchrun(), _cores()]


def _package(name: str, distributions: Sequence[str], remedy: str) -> Finding:
    version = installed_version(*distributions)
    if version is None:
        return Finding(name, "not installed", remedy)
    if name == "horovod" and f"+elasticflow.{source.REVISION}" not in version:
        return Finding(name, f"{version}, not built by elasticflow: a lost worker may take others with it", remedy)
    return Finding(name, version)


def _probe(name: str, code: str) -> list[Finding]:
    command = [sys.executable, "-c", f"import json{code}"]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        known = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no output"])[-1]
        remedy = "elasticflow horovod build --force" if name.startswith("horovod") else f"install {name} again"
        return [Finding(name, f"cannot be imported: {last}", remedy)]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return [Finding(name, f"cannot be examined: {error}", f"try: {sys.executable} -c 'import {name}'")]
    findings = []
    engines = [engine for engine in ("gloo", "nccl") if known.get(engine)]
    if "gloo" in known:
        findings.append(Finding(f"{name}: engines", ", ".join(engines) or "none"))
    if "devices" in known:
        findings.append(Finding(f"{name}: GPUs", ", ".join(known["devices"]) or "none"))
    return findings


def _torchrun() -> Finding:
    found = shutil.which("torchrun", path=search_path())
    return Finding("torchrun", found) if found else Finding("torchrun", "not found", "pip install torch")


def _cores() -> Finding:
    return Finding("CPU cores", str(len(os.sched_getaffinity(0))))
