"""Runs blocks of Python, in a process of their own: the target of a worker."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ef_common.terminal import LOG_FORMAT
from tests.pages.blocks import ROOT, SOURCES, Block, programs
from tests.pages.rows import PROGRAMS

PLACES = ("s3://bucket", "gs://bucket", "/mnt/shared")
"""Where pages keep checkpoints; a folder stands in for them."""


def run_alone(names: Sequence[str], folder: str) -> int:
    """Run these blocks as a program that no launcher has started."""
    for name in [name for name in os.environ if name.startswith("ELASTICFLOW_")]:
        del os.environ[name]
    return run(names, folder)


def run_in_job(name: str, folder: str, log_format: str) -> int:
    """Run a block as a worker of a job, whose lines on the terminal have this format."""
    os.environ[LOG_FORMAT] = log_format
    return run([name], folder)


def run(names: Sequence[str], folder: str) -> int:
    """Run these blocks of a page, one after the other, in a namespace that they share. Returns how many there were."""
    from tests.pages import preambles, uses  # they import the frameworks, and choose the backend of Keras

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a model this small is for the CPU
    os.chdir(folder)
    found = {block.name: block for block in programs()}
    space: dict[str, Any] = {"__name__": "__main__"}
    for name in names:
        row = PROGRAMS[name]
        space.update(getattr(preambles, row.preamble)())
        uses.use(_execute(found[name], space))
        if row.use:
            getattr(uses, row.use)(space)
    return len(names)


def run_doctests(folder: str) -> dict[str, list[int]]:
    """Run the examples with prompts in docstrings of all modules. Returns how many have failed, and of how many."""
    os.chdir(folder)
    names = [file.relative_to(ROOT).with_suffix("").as_posix() for file in SOURCES if ">>> " in file.read_text()]
    modules = [importlib.import_module(name.replace("/", ".").removesuffix(".__init__")) for name in names]
    return {module.__name__: list(doctest.testmod(module)) for module in modules}


def _execute(block: Block, space: dict[str, Any]) -> list[Any]:
    """Run a block. Returns the values of its lines that are expressions, as a notebook shows them."""
    code = block.code
    for place in PLACES:
        code = code.replace(place, str(Path.cwd()))
    file = str(ROOT / block.page)  # so a traceback shows the line of the page
    values = []
    for statement in ast.parse("\n" * (block.line - 1) + code, filename=file).body:
        if isinstance(statement, ast.Expr):
            values.append(eval(compile(ast.Expression(statement.value), file, "eval"), space))
        else:
            exec(compile(ast.Module([statement], []), file, "exec"), space)
    return values
