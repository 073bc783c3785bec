"""`elasticflow horovod build`: builds a wheel of Horovod for the installed torch and TensorFlow.

The source comes from the package index that pip uses, is verified, changed (see `source`) and compiled. Wheels are
kept by the versions that they were built for, so the next environment with the same ones installs in seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from ef_common.errors import ElasticFlowError
from ef_common.horovod import resources, source

TESTED = {"torch": ("2.13",), "tensorflow": ("2.21",)}
"""Versions with which the changes have been tried."""

DISTRIBUTIONS = {"torch": ("torch",), "tensorflow": ("tensorflow", "tensorflow-cpu")}
_BUILD_TOOLS = ("setuptools", "packaging", "cffi", "cloudpickle", "psutil", "PyYAML")
_COMPILER_BYTES = 2 << 30  # one compiler, at worst, on torch's headers
_CMAKE = (3, 13)
_TAIL_LINES = 40

Say = Callable[[str], None]


class BuildError(ElasticFlowError):
    """Horovod cannot be built here; the message says why, and what to do."""


def installed_version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def frameworks() -> dict[str, str]:
    """Installed frameworks that Horovod can serve: name → version."""
    found = {name: installed_version(*distributions) for name, distributions in DISTRIBUTIONS.items()}
    return {name: version for name, version in found.items() if version is not None}


def untested(versions: Mapping[str, str]) -> list[str]:
    """Installed versions with which the patches have not been tried."""
    return [
        f"{name} {version}"
        for name, version in versions.items()
        if not any(version == tried or version.startswith(f"{tried}.") for tried in TESTED[name])
    ]


def wheel_directory(versions: Mapping[str, str], options: Mapping[str, str]) -> Path:
    """Where the wheel for these versions and build options is kept.

    Raises:
        BuildError: The user has no home directory, and XDG_CACHE_HOME is not set.
    """
    parts = [
        f"{source.VERSION}-{source.fingerprint()}",
        sysconfig.get_platform(),
        f"cp{sys.version_info[0]}{sys.version_info[1]}",
    ]
    parts += [f"{name}-{version}" for name, version in sorted(versions.items())]
    parts += [f"{name}-{value}" for name, value in sorted(options.items())]
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(
            f"the wheel has no place to be kept: {error} Set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return cache / "elasticflow" / "horovod" / "_".join(part.replace(os.sep, "-") for part in parts)


def build(*, say: Say, force: bool = False) -> Path:
    """Build the wheel, or find the one that was built before.

    Args:
        say: Told what goes on.
        force: Build even if there is a wheel already.

    Returns:
        The wheel: in the cache, or in a temporary directory where the cache cannot be written.

    Raises:
        BuildError: Something is missing, or the compilation failed.
    """
    versions = frameworks()
    if not versions:
        raise BuildError("there is neither torch nor TensorFlow to build Horovod for. Install one of them first")
    options = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_GPU")}
    directory = wheel_directory(versions, options)
    wheels: list[Path] = []
    with contextlib.suppress(OSError):  # somebody else's home, say
        wheels = sorted(directory.glob("*.whl"))
    if wheels and not force:
        say(f"found {wheels[0]}")
        return wheels[0]
    check_tools()
    jobs = num_jobs()
    for name in untested(versions):
        say(f"nobody has tried {name} with Horovod yet; this may fail. Tried: {TESTED}")
    with tempfile.TemporaryDirectory(prefix="elasticflow-horovod-") as temporary:
        root = download(Path(temporary), say=say)
        source.apply(root)
        named = " and ".join(f"{name} {version}" for name, version in versions.items())
        say(f"compiling Horovod {source.VERSION} for {named} with {jobs} processes; this takes minutes")
        return _keep(_compile(root, Path(temporary) / "wheel", versions, jobs), directory, say=say)


def _keep(wheel: Path, directory: Path, *, say: Say) -> Path:
    """Move the wheel into this directory of the cache, or, if that is impossible, into one of its own."""
    partial = directory / f".{wheel.name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, partial)
        return partial.rename(directory / wheel.name)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        kept = Path(tempfile.mkdtemp(prefix="elasticflow-horovod-")) / wheel.name
        wheel.rename(kept)
        say(
            f"the next environment will not find this wheel ({error}). Set XDG_CACHE_HOME to a directory that can be "
            f"written, or install it there: pip install --no-deps {kept}"
        )
        return kept


def install(wheel: Path, *, say: Say) -> None:
    """Install the wheel into this environment."""
    say(f"installing {wheel.name}")
    _run([*_pip("install"), "--force-reinstall", "--no-deps", str(wheel)], "install the wheel")


# ---------------------------------------------------------------- what is needed


def check_tools() -> None:
    """Check that all tools for a build are there.

    Raises:
        BuildError: Something is missing; the message lists everything that is.
    """
    missing = []
    if platform.system() != "Linux":
        missing.append(f"Linux. Found: {platform.system()}")
    if _compiler() is None:
        missing.append("a C++ compiler (Debian, Ubuntu: apt-get install g++)")
    cmake = _cmake_version()
    if cmake is None or cmake < _CMAKE:
        needed = ".".join(map(str, _CMAKE))
        missing.append(f"cmake {needed} or newer (pip install cmake). Found: {_dotted(cmake)}")
    if shutil.which("make") is None:
        missing.append("make (Debian, Ubuntu: apt-get install make)")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("the headers of Python (Debian, Ubuntu: apt-get install python3-dev)")
    packages = [name for name in _BUILD_TOOLS if installed_version(name) is None]
    if packages:
        missing.append(f"Python packages (pip install {' '.join(packages)})")
    if missing:
        raise BuildError("Horovod cannot be compiled here. Missing: " + "; ".join(missing))


def num_jobs() -> int:
    """How many compilers fit into the memory and on the cores that this process may use.

    Raises:
        BuildError: Not even one fits.
    """
    available = resources.available_bytes()
    if available < _COMPILER_BYTES:
        raise BuildError(
            f"too little memory to compile Horovod. Needed: {_COMPILER_BYTES / 2**30:.1f} GiB. "
            f"Available: {available / 2**30:.1f} GiB. Build the wheel on a larger machine with the same versions, "
            "and copy the cache of elasticflow from there"
        )
    return min(resources.num_cores(), available // _COMPILER_BYTES)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "").split(" ")[0] or "c++") or shutil.which("g++")


def _cmake_version() -> tuple[int, ...] | None:
    cmake = _cmake()
    if cmake is None:
        return None
    output = subprocess.run([cmake, "--version"], capture_output=True, text=True, check=False).stdout
    words = output.split()
    return tuple(int(part) for part in words[2].split(".")[:2] if part.isdecimal()) if len(words) > 2 else None


def _cmake() -> str | None:
    return os.environ.get("HOROVOD_CMAKE") or shutil.which("cmake", path=search_path())


def search_path() -> str:
    """The search path with this environment's programs first, even if it is not active."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "none"


# ---------------------------------------------------------------- download and compile


def download(directory: Path, *, say: Say) -> Path:
    """Fetch, verify and unpack the source. Returns its root.

    Raises:
        BuildError: The source is unavailable, or differs from what was expected.
    """
    say(f"fetching the source of Horovod {source.VERSION}")
    command = [*_pip("download"), "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    command += ["--dest", str(directory), f"horovod=={source.VERSION}"]
    _run(command, "fetch the source", environment={"HOROVOD_SKIP_COMPILE": "1"})
    archive = directory / f"horovod-{source.VERSION}.tar.gz"
    if not archive.exists():
        raise BuildError(f"pip has brought no {archive.name}")
    received = hashlib.sha256(archive.read_bytes()).hexdigest()
    if received != source.SHA256:
        raise BuildError(
            f"{archive.name} is not the one expected. Expected sha256: {source.SHA256}. Received: {received}"
        )
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    return directory / f"horovod-{source.VERSION}"


def _compile(root: Path, target: Path, versions: Mapping[str, str], jobs: int) -> Path:
    with_framework = {
        "HOROVOD_WITH_PYTORCH" if "torch" in versions else "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITH_TENSORFLOW" if "tensorflow" in versions else "HOROVOD_WITHOUT_TENSORFLOW": "1",
    }
    environment = {
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_LOCAL_VERSION": f"elasticflow.{source.REVISION}",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "MAKEFLAGS": f"-j{jobs}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **with_framework,
    }
    command = [*_pip("wheel"), "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(root)]
    _run(command, "compile Horovod", environment=environment)
    return next(target.glob("*.whl"))


def _pip(action: str) -> list[str]:
    return [sys.executable, "-m", "pip", action, "--quiet", "--disable-pip-version-check", "--no-input"]


def _run(command: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a command; its output is shown only if it fails.

    Raises:
        BuildError: The command failed; the message has the end of its output.
    """
    everything = {**os.environ, **(environment or {}), "PATH": search_path()}
    found = subprocess.run(
        command, env=everything, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if found.returncode:
        tail = "\n".join(found.stdout.splitlines()[-_TAIL_LINES:])
        raise BuildError(f"could not {what} (exit status {found.returncode}). The end of its output:\n{tail}")
