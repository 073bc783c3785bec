from __future__ import annotations

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ef_common.cli import doctor, main
from ef_common.cli.doctor import Finding
from ef_common.horovod import source
from ef_common.horovod.build import BuildError

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "lightning", "pytorch_lightning", "tensorflow", "jax", "keras", "horovod")
OURS = f"0.28.1+elasticflow.{source.REVISION}"


def _installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Have these distributions, and no others."""
    ours = {"elasticflow-training": "0.1.0", **versions}
    monkeypatch.setattr(
        doctor, "installed_version", lambda *names: next((ours[name] for name in names if name in ours), None)
    )


def _package(monkeypatch: pytest.MonkeyPatch, place: Path, name: str, files: dict[str, str]) -> None:
    """Put a package before those that are installed; unless it has an `__init__.py`, one that cannot be imported."""
    for path, text in {"__init__.py": "raise ImportError('imported')", **files}.items():
        file = place / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(place)  # type: ignore[no-untyped-call]
    monkeypatch.delitem(sys.modules, name, raising=False)


def _found(**options: bool) -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.examine(**options)}


# ---------------------------------------------------------------- the short form


def test_short_form_imports_none_of_the_packages() -> None:
    script = (
        "import subprocess, sys\n"
        "def refuse(*args, **kwargs): raise AssertionError(args)\n"
        "subprocess.Popen = refuse\n"
        "import shutil; shutil.which = lambda *args, **kwargs: None\n"  # no nvidia-smi
        "from ef_common.cli import main\n"
        "main(['doctor'], standalone_mode=False)\n"
        f"print(sorted({{*{FRAMEWORKS!r}, 'numpy'}} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
    assert "`elasticflow doctor --thorough` also imports them" in done.stdout


def test_report_names_versions_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"torch": torch.__version__, "horovod": "0.28.1"})
    found = _found()
    assert found["torch"].found.startswith(f"{torch.__version__}, for ")
    assert found["keras"] == Finding("keras", "not installed", "pip install 'elasticflow-training[keras]'")
    assert found["jax"] == Finding("jax", "not installed", "pip install 'elasticflow-training[jax]'")
    assert "keras: backend" not in found
    assert "not built by this elasticflow" in found["horovod"].found
    build = "pip install 'elasticflow-training[horovod]' && elasticflow horovod build"
    assert found["horovod"].remedy == build


def test_report_says_which_launcher_this_is_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    launcher = _found()["launcher"]
    assert launcher.found.startswith("task 2 of 4 of a Slurm step: each task would run a training of its own")
    assert launcher.remedy == "elasticflow run --rdzv-endpoint=file:///shared/folder train.py"


@pytest.mark.parametrize(
    ("built", "frameworks", "text", "right"),
    [
        (("torch",), ("torch",), "for torch", True),
        (("torch", "tensorflow"), ("torch", "tensorflow"), "for torch and tensorflow", True),
        (("torch",), ("torch", "tensorflow"), "for torch", False),
        (("torch", "tensorflow"), ("torch",), "for torch and tensorflow", True),
    ],
)
def test_horovod_is_known_by_the_frameworks_that_it_was_built_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: tuple[str, ...],
    frameworks: tuple[str, ...],
    text: str,
    right: bool,
) -> None:
    files = {"torch": "torch/mpi_lib_v2.cpython-311.so", "tensorflow": "tensorflow/mpi_lib.cpython-311.so"}
    _package(monkeypatch, tmp_path, "horovod", {files[name]: "" for name in built})
    _installed(monkeypatch, {"horovod": OURS, **dict.fromkeys(frameworks, "1.0")})
    found = _found()["horovod"]
    assert found.found == f"{OURS}, {text}"
    assert (found.remedy == "") == right


TORCH = "from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
TENSORFLOW = "build_info = collections.OrderedDict([('cuda_version', '12.5.1'), ('is_cuda_build', {cuda})])\n"


@pytest.mark.parametrize(
    ("name", "file", "record", "text"),
    [
        ("torch", "version.py", TORCH.format(cuda="None"), "for the CPU"),
        ("torch", "version.py", TORCH.format(cuda="'13.0'"), "for CUDA 13.0"),
        ("tensorflow", "python/platform/build_info.py", TENSORFLOW.format(cuda=False), "for the CPU"),
        ("tensorflow", "python/platform/build_info.py", TENSORFLOW.format(cuda=True), "for CUDA"),
    ],
)
def test_accelerator_is_the_one_of_the_packages_own_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, record: str, text: str
) -> None:
    _package(monkeypatch, tmp_path, name, {file: record})
    installed = {name: "2.13.0"}
    assert doctor._package(name, installed, gpu=False) == Finding(name, f"2.13.0, {text}")
    assert (doctor._package(name, installed, gpu=True).remedy == "") == (text != "for the CPU")


def test_records_of_the_installed_packages_are_those_that_are_read() -> None:
    assert doctor._accelerator("torch") == (f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU")
    if find_spec("tensorflow"):
        assert doctor._accelerator("tensorflow") in ("the CPU", "CUDA", "ROCm")


def test_package_without_a_record_is_shown_with_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(monkeypatch, tmp_path, "torch", {})
    assert doctor._package("torch", {"torch": "9.0"}, gpu=True) == Finding("torch", "9.0")


def test_gpus_are_those_of_the_driver_if_this_container_has_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert doctor._gpus(tmp_path) == []
    for number, name in enumerate(["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"]):
        directory = tmp_path / f"proc/driver/nvidia/gpus/0000:{number}b:00.0"
        directory.mkdir(parents=True)
        (directory / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 37\nGPU UUID: \t GPU-1\n")
    assert doctor._gpus(tmp_path) == []  # the machine's, not this container's
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert doctor._gpus(tmp_path) == ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"]


@pytest.mark.parametrize(
    ("script", "names"),
    [("echo 'NVIDIA H100'\necho 'NVIDIA H100'", ["NVIDIA H100", "NVIDIA H100"]), ("echo 'No devices'; exit 6", [])],
)
def test_gpus_are_asked_of_nvidia_smi_where_proc_shows_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, names: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_DRIVER_TIMEOUT_S", 60.0)
    assert doctor._gpus(tmp_path) == names


# ---------------------------------------------------------------- Keras's backend


@pytest.mark.parametrize(
    ("variable", "file", "text", "remedy"),
    [
        ("torch", {"backend": "tensorflow"}, "torch (KERAS_BACKEND)", ""),
        ("", {"backend": "torch"}, "torch ({file})", ""),
        ("", {"backend": "tensorflow"}, "tensorflow ({file}), not installed", "export KERAS_BACKEND=torch"),
        ("", None, "tensorflow (the default), not installed", "export KERAS_BACKEND=torch"),
        ("jax", None, "jax (KERAS_BACKEND), not installed", "pip install 'elasticflow-training[jax]'"),
        ("numpy", None, "numpy (KERAS_BACKEND), not supported", "export KERAS_BACKEND=torch"),
    ],
)
def test_keras_backend_is_the_one_that_keras_would_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    file: dict[str, str] | None,
    text: str,
    remedy: str,
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", variable)
    if file is not None:
        (tmp_path / "keras.json").write_text(json.dumps(file))
    _installed(monkeypatch, {"torch": "2.13.0+cpu", "keras": "3.15"})
    found = _found()["keras: backend"]
    assert found == Finding("keras: backend", text.format(file=tmp_path / "keras.json"), remedy)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("keras") is None, reason="needs Keras")
def test_keras_itself_takes_that_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    done = subprocess.run(
        [sys.executable, "-c", "import keras; print(keras.config.backend())"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == doctor._keras_choice()[0] == "torch"


# ---------------------------------------------------------------- remedies


def test_torch_is_installed_for_the_device_that_is_there() -> None:
    assert doctor._installation("torch", gpu=True) == "pip install torch"
    cpu = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    assert doctor._installation("torch", gpu=False) == cpu


def test_extra_that_needs_torch_does_not_bring_cuda_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {})
    extra = "pip install 'elasticflow-training[lightning]'"
    cpu = doctor._installation("torch", gpu=False)
    assert doctor._installation("lightning", gpu=False) == f"{cpu} && {extra}"
    assert doctor._installation("lightning", gpu=True) == extra
    _installed(monkeypatch, {"torch": "2.13.0+cpu"})
    assert doctor._installation("lightning", gpu=False) == extra


def test_checkout_that_is_not_installed_is_what_pip_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda *names: None)
    command = shlex.split(doctor._installation("keras", gpu=False))
    assert command == ["pip", "install", f"{ROOT}[keras]"]


@pytest.mark.parametrize(
    ("version", "command"),
    [
        (
            "2.13.0+cpu",
            "pip uninstall -y torch && pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu",
        ),
        ("2.13.0", "pip uninstall -y torch && pip install torch==2.13.0"),
    ],
)
def test_package_is_installed_again_from_where_it_came(
    monkeypatch: pytest.MonkeyPatch, version: str, command: str
) -> None:
    _installed(monkeypatch, {"torch": version})
    assert doctor._again("torch", version) == command


def test_build_for_the_cpu_beside_a_gpu_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"tensorflow-cpu": "2.21.0"})
    command = "pip uninstall -y tensorflow-cpu && pip install 'tensorflow[and-cuda]==2.21.0'"
    assert doctor._for_gpu("tensorflow", "2.21.0") == command


# ---------------------------------------------------------------- the thorough form


def test_thorough_form_imports_torch_and_lists_its_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"torch": torch.__version__})
    assert "torch: engines" not in _found()
    assert "gloo" in _found(thorough=True)["torch: engines"].found


def test_broken_package_is_a_line_of_the_thorough_report_and_so_is_what_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _package(monkeypatch, tmp_path, "torch", {"__init__.py": "raise ImportError('libgomp.so.1 is missing')"})
    _package(monkeypatch, tmp_path, "lightning", {"__init__.py": "", "pytorch/__init__.py": "import torch"})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    _installed(monkeypatch, {"torch": "2.13.0", "lightning": "2.6"})
    assert _found()["torch"].remedy == ""
    found = _found(thorough=True)
    assert found["torch: import"] == Finding(
        "torch: import",
        "fails: ImportError: libgomp.so.1 is missing",
        "pip uninstall -y torch && pip install torch==2.13.0",
    )
    assert found["lightning: import"] == Finding("lightning: import", found["torch: import"].found)


def test_imports_are_made_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each goes on once the other has begun; one after the other, the first would wait until it is given up.
    wait = (
        "import pathlib, time\n"
        f"here = pathlib.Path({str(tmp_path)!r})\n"
        "(here / '{mine}').touch()\n"
        "while not (here / '{other}').exists(): time.sleep(0.01)\n"
    )
    one, other = wait.format(mine="a", other="b"), wait.format(mine="b", other="a")
    _package(monkeypatch, tmp_path, "lightning", {"__init__.py": "", "pytorch/__init__.py": one})
    _package(monkeypatch, tmp_path, "keras", {"__init__.py": other})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    _installed(monkeypatch, {"torch": torch.__version__, "lightning": "2.6", "keras": "3.15"})
    found = _found(thorough=True)
    assert found["lightning: import"].found == found["keras: import"].found == "succeeds"


# ---------------------------------------------------------------- the command


def test_command_prints_markup_and_commands_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"pip install '/{'a' * 100}[keras]'"
    monkeypatch.setattr(doctor, "examine", lambda **_: [Finding("keras", "not [bold]", long)])
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "not [bold]" in result.output
    assert f"  keras  {long}\n" in result.output


def test_command_as_json_prints_each_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def examine(*, thorough: bool) -> list[Finding]:
        asked.append(thorough)
        return [Finding("keras", "not installed", "pip install 'a[keras]'"), Finding("torch", "2.13.0")]

    monkeypatch.setattr(doctor, "examine", examine)
    result = CliRunner().invoke(main, ["doctor", "--json", "--thorough"])
    assert result.exit_code == 0
    assert asked == [True]
    assert json.loads(result.stdout) == [
        {"subject": "keras", "found": "not installed", "remedy": "pip install 'a[keras]'"},
        {"subject": "torch", "found": "2.13.0", "remedy": ""},
    ]


def test_build_that_cannot_be_done_says_why_and_exits_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**kwargs: object) -> None:
        raise BuildError("Missing: a C++ compiler")

    monkeypatch.setattr("ef_common.horovod.build.build", refuse)
    result = CliRunner().invoke(main, ["horovod", "build"])
    assert result.exit_code == 1
    assert "elasticflow horovod build: Missing: a C++ compiler" in result.output
