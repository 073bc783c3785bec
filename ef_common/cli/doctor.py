"""`elasticflow doctor`: shows what is installed, what it supports, and what is missing.

Nothing is imported into this process: a broken package is a line of the report, not the end of it. The short form
reads what packages and the driver have written down, which takes a moment. The thorough form also imports the
packages, each in a process of its own, all at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ef_common.horovod import source
from ef_common.horovod.build import DISTRIBUTIONS, installed_version, search_path
from ef_common.launch.surroundings import place_in

_TIMEOUT_S = 180.0
_DRIVER_TIMEOUT_S = 2.0

_DISTRIBUTIONS = {
    "torch": DISTRIBUTIONS["torch"],
    "lightning": ("lightning", "pytorch-lightning"),
    "tensorflow": DISTRIBUTIONS["tensorflow"],
    "jax": ("jax",),
    "keras": ("keras",),
    "horovod": ("horovod",),
}
_WHEELS = "https://download.pytorch.org/whl"  # for the CPU, and for versions of CUDA other than PyPI's
_PLATFORMS = {"cuda": "CUDA", "hip": "ROCm", "rocm": "ROCm"}
_KERAS_BACKENDS = ("torch", "tensorflow", "jax")

# Each prints one JSON object: what it knows of engines and devices.
_PROBES = {
    "torch": """
import torch, torch.distributed as d
print(json.dumps({
    "gloo": d.is_available() and d.is_gloo_available(),
    "nccl": d.is_available() and d.is_nccl_available(),
    "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
}))""",
    "lightning": """
import importlib.util
if importlib.util.find_spec("lightning"):
    import lightning.pytorch
else:
    import pytorch_lightning
print(json.dumps({"imported": True}))""",
    "tensorflow": """
import tensorflow as tf
print(json.dumps({"devices": [d.name for d in tf.config.list_physical_devices("GPU")]}))""",
    "jax": """
import jax
print(json.dumps({"devices": [d.device_kind for d in jax.local_devices() if d.platform != "cpu"]}))""",
    "keras": """
import keras
print(json.dumps({"imported": True}))""",
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
        found: What was found.
        remedy: The command to run if it is wanted and missing; empty if all is well.
    """

    subject: str
    found: str
    remedy: str = ""


def examine(*, thorough: bool = False) -> list[Finding]:
    """Look at this environment.

    Args:
        thorough: Import the packages, too.
    """
    versions = {name: installed_version(*distributions) for name, distributions in _DISTRIBUTIONS.items()}
    installed = {name: version for name, version in versions.items() if version is not None}
    gpus = _gpus()
    findings = [
        Finding("elasticflow", installed_version("elasticflow-training") or "from a checkout"),
        Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("CPU cores", str(len(os.sched_getaffinity(0)))),
        Finding("GPUs", ", ".join(gpus) or "none"),
        _launcher(),
    ]
    findings += [_package(name, installed, gpu=bool(gpus)) for name in _DISTRIBUTIONS]
    findings.append(_torchrun(installed, gpu=bool(gpus)))
    if "keras" in installed:
        findings.append(_keras_backend(installed, gpu=bool(gpus)))
    if thorough:
        findings += _probe_all(installed)
    return findings


# ---------------------------------------------------------------- without an import


def _package(name: str, installed: Mapping[str, str], *, gpu: bool) -> Finding:
    version = installed.get(name)
    if version is None:
        return Finding(name, "not installed", _installation(name, gpu=gpu))
    if name == "horovod":
        return _horovod(version, installed)
    accelerator = _accelerator(name)
    if accelerator is None:
        return Finding(name, version)
    unused = gpu and accelerator == "the CPU"
    return Finding(name, f"{version}, for {accelerator}", _for_gpu(name, version) if unused else "")


def _horovod(version: str, installed: Mapping[str, str]) -> Finding:
    remedy = _installation("horovod", gpu=False)
    if f"+elasticflow.{source.REVISION}" not in version:
        return Finding(
            "horovod", f"{version}, not built by this elasticflow: a lost worker may take others with it", remedy
        )
    built = [name for name in DISTRIBUTIONS if _horovod_has(name)]
    missing = [name for name in DISTRIBUTIONS if name in installed and name not in built]
    return Finding("horovod", f"{version}, for {' and '.join(built) or 'no framework'}", remedy if missing else "")


def _horovod_has(framework: str) -> bool:
    return any((_directory("horovod") / framework).glob("mpi_lib*.so"))


def _accelerator(name: str) -> str | None:
    """The accelerator that a package was built for, according to the package; None if it names none."""
    if name == "torch":
        text = _text(_directory(name) / "version.py")
        found = re.search(r"^(cuda|hip)\b.*= *'([^']+)'", text, re.MULTILINE)
        return f"{_PLATFORMS[found[1]]} {found[2]}" if found else "the CPU" if text else None
    if name == "tensorflow":
        text = _text(_directory(name) / "python" / "platform" / "build_info.py")
        on = re.search(r"'is_(cuda|rocm)_build', True", text)
        return _PLATFORMS[on[1]] if on else "the CPU" if text else None
    return None


def _directory(package: str) -> Path:
    spec = find_spec(package)  # does not import a package that is not within another one
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path(os.devnull)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _gpus(root: Path = Path("/")) -> list[str]:
    """Names of the GPUs that NVIDIA's driver reports here."""
    if any(root.glob("dev/nvidia[0-9]*")):  # in a container without GPUs, /proc shows those of the machine
        texts = [_text(file) for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
        names = [found[1] for text in texts if (found := re.search(r"^Model:\s*(.*\S)", text, re.MULTILINE))]
        if names:
            return names
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)
        return done.stdout.splitlines()
    return []


def _launcher() -> Finding:
    place = place_in(os.environ)
    return Finding("launcher", f"{place.name}: {place.start}", place.missing)


def _torchrun(installed: Mapping[str, str], *, gpu: bool) -> Finding:
    found = shutil.which("torchrun", path=search_path())
    if found or "torch" not in installed:
        return Finding("torchrun", found or "not found", "" if found else _installation("torch", gpu=gpu))
    return Finding("torchrun", "not on the path; `python -m torch.distributed.run` does the same")


def _keras_backend(installed: Mapping[str, str], *, gpu: bool) -> Finding:
    backend, origin = _keras_choice()
    known = backend in _KERAS_BACKENDS
    if known and backend in installed:
        return Finding("keras: backend", f"{backend} ({origin})")
    others = [name for name in _KERAS_BACKENDS if name in installed]
    # Keras writes the file itself, so what stands there need not be anybody's choice.
    chosen = known and (origin == "KERAS_BACKEND" or not others)
    remedy = _installation(backend, gpu=gpu) if chosen else f"export KERAS_BACKEND={[*others, 'torch'][0]}"
    return Finding("keras: backend", f"{backend} ({origin}), {'not installed' if known else 'not supported'}", remedy)


def _keras_choice() -> tuple[str, str]:
    """The backend that Keras will use and what decides that, as in `keras/src/backend/config.py`."""
    backend = os.environ.get("KERAS_BACKEND", "")
    if backend:
        return backend, "KERAS_BACKEND"
    home = os.path.expanduser("~")
    directory = os.environ.get("KERAS_HOME", os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras"))
    file = Path(os.path.expanduser(directory), "keras.json")
    try:
        return str(json.loads(file.read_text())["backend"]), str(file)
    except (OSError, ValueError, LookupError, TypeError):
        return "tensorflow", "the default"


# ---------------------------------------------------------------- commands that fix something


def _installation(name: str, *, gpu: bool) -> str:
    """The command that installs a missing package."""
    if name == "torch":
        return "pip install torch" if gpu else f"pip install torch --index-url {_WHEELS}/cpu"
    if name == "tensorflow":
        return "pip install 'tensorflow[and-cuda]'" if gpu else "pip install tensorflow"
    ours = "elasticflow-training"
    if installed_version(ours) is None:  # a checkout on the path
        ours = str(Path(__file__).resolve().parents[2])
    command = f"pip install {shlex.quote(f'{ours}[{name}]')}"
    if name == "horovod":
        return f"{command} && elasticflow horovod build"
    if name in ("lightning", "jax") and not gpu and installed_version("torch") is None:
        return f"{_installation('torch', gpu=False)} && {command}"  # else the extra would bring torch's CUDA build
    return command


def _for_gpu(name: str, version: str) -> str:
    """The command that replaces a CPU build."""
    new = {"torch": "torch", "tensorflow": "tensorflow[and-cuda]"}[name]
    return f"pip uninstall -y {_distribution(name)} && pip install '{new}=={version.partition('+')[0]}'"


def _again(name: str, version: str) -> str:
    """The command that reinstalls a package with its missing requirements, and leaves others alone."""
    if name.startswith("horovod"):
        return "elasticflow horovod build --force"
    public, _, build = version.partition("+")
    index = f" --index-url {_WHEELS}/{build}" if name == "torch" and re.fullmatch(r"cpu|cu\d+", build) else ""
    distribution = _distribution(name)
    return f"pip uninstall -y {distribution} && pip install {distribution}=={public}{index}"


def _distribution(name: str) -> str:
    return next(one for one in _DISTRIBUTIONS[name] if installed_version(one) is not None)


# ---------------------------------------------------------------- with imports


def _probe_all(installed: Mapping[str, str]) -> list[Finding]:
    names = [name for name in _PROBES if _can_probe(name, installed)]
    with ThreadPoolExecutor(len(_PROBES), thread_name_prefix="elasticflow-probe") as threads:
        found = dict(zip(names, threads.map(lambda name: _probe(name, _PROBES[name], installed), names), strict=True))
    broken = {name for name, (first, *_) in found.items() if first.remedy}
    needs = {"lightning": "torch", "horovod.torch": "torch", "horovod.tensorflow": "tensorflow"}
    needs["keras"] = _keras_choice()[0]
    for name in names:
        if needs.get(name) in broken:  # what it needs is to be repaired, and then looked at again
            found[name] = [replace(finding, remedy="") for finding in found[name]]
    return [finding for name in names for finding in found[name]]


def _can_probe(name: str, installed: Mapping[str, str]) -> bool:
    package, _, framework = name.partition(".")
    if package not in installed or framework not in ("", *installed):
        return False
    if name == "keras":
        return not _keras_backend(installed, gpu=False).remedy
    return not framework or _horovod_has(framework)


def _probe(name: str, code: str, installed: Mapping[str, str]) -> list[Finding]:
    command = [sys.executable, "-c", f"import json{code}"]
    # JAX would take most of the memory of the GPUs at once.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        known = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        remedy = _again(name, installed[name.partition(".")[0]])
        return [Finding(f"{name}: import", f"fails: {last}", remedy)]
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        late = isinstance(error, subprocess.TimeoutExpired)
        text = f"not done within {_TIMEOUT_S:.0f} s" if late else f"cannot be examined: {error}"
        return [Finding(f"{name}: import", text, f"{sys.executable} -c 'import {name}'")]
    findings = []
    engines = [engine for engine in ("gloo", "nccl") if known.get(engine)]
    if "gloo" in known:
        findings.append(Finding(f"{name}: engines", ", ".join(engines) or "none"))
    if "devices" in known:
        findings.append(Finding(f"{name}: GPUs", ", ".join(known["devices"]) or "none"))
    return findings or [Finding(f"{name}: import", "succeeds")]
