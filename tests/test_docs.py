"""The documentation holds: programs compile, commands and options exist, links resolve, and nothing is left out.

What can run is run by `tests.pages`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from ef_common import errors
from ef_common.cli import main
from ef_common.data import provisioners
from ef_common.launch import environment
from tests.benchmarks.__main__ import NAMES
from tests.kubernetes.kubeflow.definitions import PUBLISHED
from tests.pages.blocks import PAGES, ROOT, blocks

MPIRUN = {"--hostfile", "--host"}
SRUN = {"--ntasks-per-node"}
SBATCH = {"--partition", "--gpus-per-node", "--time"}
"""Options of sbatch in the documentation."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.M | re.S)


def words_of(command: str) -> list[str]:
    """A command without the variables that are set for it."""
    words = shlex.split(command)
    while words and (re.match(r"[A-Z_]+=", words[0]) or words[0] == "export"):
        words = words[1:]
    return words


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


# ------------------------------------------------------------------------------------------------------ programs


@pages
def test_programs_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block.code, filename=str(page))


# ------------------------------------------------------------------------------------------------------ commands


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    for words in (words_of(command) for block in blocks(page, "sh", "bash") for command in block.commands):
        try:
            check_command(words)
        except AssertionError as error:
            raise AssertionError(f"{page.relative_to(ROOT)}: {' '.join(words)}: {error}") from None


def check_command(words: list[str]) -> None:
    match words:
        case ["elasticflow", "run", *arguments]:
            check_launch(arguments, launch_options())
        case ["torchrun", *arguments]:
            check_launch(arguments, launch_options() - {"--checkpoint", "--run-dir"})
        case ["elasticflow", "slurm", "srun", *arguments]:
            start = arguments.index("elasticflow")
            assert set(options(arguments[:start])) <= {"--dry-run", *SRUN}, "unknown option"
            check_command(arguments[start:])
        case ["elasticflow", ("slurm" | "yarn") as launcher, "submit", *arguments]:
            end = next(number for number, word in enumerate(arguments) if word.endswith(".py"))
            assert set(options(arguments[:end])) <= submit_options(launcher) | SBATCH, "unknown option"
            check_script(arguments[end:])
        case ["elasticflow", "mpi", *arguments]:
            start = arguments.index("elasticflow")
            own = {name for parameter in main.commands["mpi"].params for name in parameter.opts}
            assert set(options(arguments[:start])) <= own | MPIRUN, "unknown option"
            check_command(arguments[start:])
        case ["elasticflow", "kubernetes", "submit", *arguments]:
            end = next(number for number, word in enumerate(arguments) if word.endswith(".py"))
            assert set(options(arguments[:end])) <= submit_options("kubernetes"), "unknown option"
        case ["elasticflow", *arguments]:
            check_click(main, arguments)
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), "no such target"
        case ["python", "-m", "tests.benchmarks", *arguments]:
            assert set(options(arguments)) <= {"--quick"}
        case ["python", script, *arguments] if script.startswith("examples/"):
            check_script([script, *arguments])
        case ["pip", "install", *packages]:
            check_packages(packages)


def check_click(command: click.Command, arguments: list[str]) -> None:
    while isinstance(command, click.Group) and arguments:
        found = command.commands.get(arguments[0])
        assert found is not None, f"no command {arguments[0]}"
        command, arguments = found, arguments[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    assert set(options(arguments)) <= known, "unknown option"


def submit_options(launcher: str) -> frozenset[str]:
    """Those of its command `submit`, and those of `elasticflow run`, which it takes as well."""
    group = main.commands[launcher]
    assert isinstance(group, click.Group)
    return launch_options() | {name for parameter in group.commands["submit"].params for name in parameter.opts}


@cache
def launch_options() -> frozenset[str]:
    pytest.importorskip("torch")
    from ef_common.launch.run import parser

    return frozenset(option for action in parser()._actions for option in action.option_strings)


def check_launch(arguments: list[str], known: frozenset[str] | set[str]) -> None:
    """Options of the launcher, keys of --rdzv-conf, and then the script with its own options."""
    scripts = [number for number, word in enumerate(arguments) if word.endswith(".py")]
    end = scripts[0] if scripts else len(arguments)
    assert set(options(arguments[:end])) <= known, f"unknown option: {set(options(arguments[:end])) - known}"
    if "--rdzv-conf" in arguments:
        key = arguments[arguments.index("--rdzv-conf") + 1].partition("=")[0]
        assert key in {name for name, _, _ in tables().rendezvous_keys()}, f"unknown key {key}"
    check_script(arguments[end:])


def check_script(arguments: list[str]) -> None:
    if arguments and arguments[0].startswith("examples/"):
        source = (ROOT / arguments[0]).read_text()
        assert all(f'"{option}"' in source for option in options(arguments)), "unknown option of the script"


def check_packages(packages: list[str]) -> None:
    assert not any(package.startswith("elasticflow") for package in packages), "on PyPI that is another project"
    for extra in re.findall(r"\.\[(.*?)\]", " ".join(packages)):
        assert set(extra.split(",")) <= set(project()["optional-dependencies"]), f"unknown extra in {extra}"


@cache
def project() -> dict[str, Any]:
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


@pages
def test_variables_and_examples_exist(page: Path) -> None:
    text = page.read_text()
    modules = (environment, provisioners)
    known = {value for module in modules for value in vars(module).values() if isinstance(value, str)}
    assert set(re.findall(r"\bELASTICFLOW_[A-Z_]+\b", text)) <= known | {PUBLISHED}  # which is of the tests
    for path in re.findall(r"\bexamples/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path


# --------------------------------------------------------------------------------------------------------- links


@pages
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.relative_to(ROOT)}: {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.relative_to(ROOT)}: {target}"


@cache
def anchors(page: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


# -------------------------------------------------------------------------------------------------- completeness


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_settings_are_all_in_the_table() -> None:
    """Arguments are not looked at here: the site is not built if one of them lacks a description."""
    variables = {value for value in vars(environment).values() if str(value).startswith("ELASTICFLOW_")}
    assert variables <= {name for name, _, _ in tables().variables()}
    options = (ROOT / "ef_common" / "launch" / "rendezvous_options.py").read_text()
    keys = re.findall(r'(?:config, |config\.get\()"(\w+)"', options)
    assert set(keys) - {"stands_in"} == {name for name, _, _ in tables().rendezvous_keys()}


def test_events_all_have_a_meaning() -> None:
    assert all(meaning for _, meaning, _ in tables().events())


def test_errors_all_have_a_remedy() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    tree = tables().error_tree()
    for name, error in vars(errors).items():
        if isinstance(error, type) and issubclass(error, errors.ElasticFlowError):
            assert name in tree
            assert f"| `{name}` |" in page or error is errors.ElasticFlowError


def test_benchmarks_are_all_described() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert all(f"| `{name}` |" in page for name in NAMES)


@cache
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "ext" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tables"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
