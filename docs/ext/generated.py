"""Reference pages that are made of the code when the site is built, so that they cannot differ from it.

``{settings}``, ``{run-options}``, ``{events}``, ``{error-tree}`` and ``{glossary-of-code}`` are directives without
arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Generated(SphinxDirective):
    """A directive whose content is reStructuredText that the code gives."""

    def lines(self) -> Iterator[str]:
        """The lines of that text."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        content = StringList("\n".join(self.lines()).splitlines(), source=self.get_source_info()[0])
        return _parse(self, content)


def _parse(directive: SphinxDirective, content: StringList) -> list[nodes.Node]:
    """Parse reStructuredText, also from a page in Markdown."""
    from docutils.frontend import get_default_settings
    from docutils.parsers.rst import Parser
    from docutils.utils import new_document

    settings = get_default_settings(Parser)
    settings.env = directive.env
    document = new_document(content.source(0) or "", settings)
    Parser().parse("\n".join([".. default-role:: code", "", *content]), document)
    return list(document.children)


def list_table(header: Sequence[str], rows: Sequence[Sequence[str]], widths: str) -> Iterator[str]:
    """A table, in reStructuredText."""
    yield from (".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", "")
    for row in (header, *rows):
        for number, cell in enumerate(row):
            first, *others = cell.splitlines() or [""]
            yield f"   {'*' if number == 0 else ' '} - {first}".rstrip()
            yield from (f"       {line}" for line in others)
    yield ""


# ------------------------------------------------------------------------------------------------------- settings


@dataclass
class Setting:
    """A thing that can be set, and all the places where it can be."""

    meaning: str
    default: str
    places: list[str] = field(default_factory=list)


class SettingsTable(Generated):
    """All settings: arguments of the front doors, environment variables, keys of --rdzv-conf, options of `run`."""

    def lines(self) -> Iterator[str]:
        rows = [("\n| ".join(["| " + one.places[0], *one.places[1:]]), one.default, one.meaning) for one in settings()]
        yield from list_table(("Where it is set", "Default", "Meaning"), rows, "34 14 52")


def settings() -> list[Setting]:
    """All settings, each once. One that can be set in several ways is named for the first."""
    found: dict[str, Setting] = {}
    for name, default, meaning in arguments():
        found[name] = Setting(meaning, default, [f"argument ``{name}=``"])
    for name, default, meaning in variables():
        key = name.removeprefix("ELASTICFLOW_").lower()
        found.setdefault(key, Setting(meaning, default)).places.append(f"environment ``{name}``")
    for name, default, meaning in keys():
        found.setdefault(name, Setting(meaning, default)).places.append(f"``--rdzv-conf {name}=…``")
    for names, _, meaning in run_options():
        key = names.split()[0].removeprefix("--").replace("-", "_")
        found.setdefault(key, Setting(meaning, "none")).places.append(f"``elasticflow run {names}``")
    return list(found.values())


def arguments() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of the arguments of the front doors. Keras has no others than Lightning."""
    import ef_keras
    from ef_lightning.strategy import ElasticMixin

    meanings = args_of(ElasticMixin.__doc__ or "")
    of_keras = inspect.signature(ef_keras.callbacks).parameters
    for name, parameter in inspect.signature(ElasticMixin.__init__).parameters.items():
        if name in ("self", "kwargs"):
            continue
        default = f"``{parameter.default!r}``"
        if name in of_keras and of_keras[name].default != parameter.default:
            default += f"; Keras: ``{of_keras[name].default!r}``"
        yield name, default, meanings[name]


def args_of(docstring: str) -> dict[str, str]:
    """The section "Args" of a docstring: a text for each name."""
    body = inspect.cleandoc(docstring).partition("Args:\n")[2]
    found: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        if line and not line.startswith(" "):
            break
        if match := re.match(r"    \**(\w+): (.*)", line):
            name, found[match[1]] = match[1], match[2]
        elif name and line.strip():
            found[name] += " " + line.strip()
    return {name: re.sub(r":\w+:`~?([^`]*)`", lambda match: f"`{match[1]}`", text) for name, text in found.items()}


def variables() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each environment variable."""
    from ef_common.launch import environment

    yield from simple_table(environment.__doc__ or "")


def keys() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each key of ``--rdzv-conf``."""
    from ef_common.launch import torchrun_handler

    yield from simple_table(torchrun_handler.__doc__ or "")


def simple_table(docstring: str) -> Iterator[tuple[str, str, str]]:
    """The rows of the table of three columns in a docstring."""
    lines = docstring.splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"=+ +=+ +=+", line)]
    starts = [match.start() for match in re.finditer(r"=+", lines[rules[0]])]
    row = ["", "", ""]
    for line in lines[rules[0] + 1 : rules[1]]:
        cells = [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]
        if cells[0]:
            if row[0]:
                yield row[0], row[1], row[2]
            row = cells
        else:
            row = [f"{old} {new}".strip() for old, new in zip(row, cells, strict=True)]
    yield row[0], row[1], row[2]


class RunOptions(Generated):
    """The options that `elasticflow run` adds to those of torchrun."""

    def lines(self) -> Iterator[str]:
        rows = [(f"``{names}``", meaning) for names, _, meaning in run_options()]
        yield from list_table(("Option", "Meaning"), rows, "30 70")


def run_options() -> Iterator[tuple[str, str, str]]:
    """Names, default and meaning of these options."""
    from ef_common.launch.run import parser

    (group,) = [group for group in parser()._action_groups if group.title == "ElasticFlow"]
    for action in group._group_actions:
        yield f"{action.option_strings[0]} {action.metavar}", str(action.default), action.help or ""


# --------------------------------------------------------------------------------------------------------- events

_TYPES = {
    "_text": "text",
    "_flag": "true or false",
    "_count": "integer ≥ 0",
    "_training": "integer ≥ 1",
    "_integer": "integer",
    "_number": "number",
    "_text_or_null": "text or null",
    "_number_or_null": "number or null",
    "_ids": "list of texts",
    "_spans": "list of [start, stop)",
    "_shares": "object: worker id → list of [start, stop)",
}


class Events(Generated):
    """Each kind of event with its fields."""

    def lines(self) -> Iterator[str]:
        from ef_common import events

        comments = dict(_comments(inspect.getsource(events)))
        rows = []
        for kind, fields in events._FIELDS.items():
            typed = ", ".join(f"``{name}`` ({_TYPES[check.__name__]})" for name, check in fields.items())
            rows.append((f"``{kind}``", comments[kind], typed))
        yield from list_table(("Kind", "Meaning", "Fields"), rows, "16 44 40")


def _comments(source: str) -> Iterator[tuple[str, str]]:
    """The comment above each kind."""
    table = source.partition("_FIELDS: dict[str, dict[str, Check]] = {\n")[2]
    comment: list[str] = []
    for line in table.splitlines():
        if match := re.match(r"    # (.*)", line):
            comment.append(match[1])
        elif match := re.match(r'    "(\w+)": ', line):
            yield match[1], " ".join(comment)
            comment = []


# ------------------------------------------------------------------------------------------- errors and glossary


class ErrorTree(Generated):
    """The tree that stands at the top of ef_common/errors.py."""

    def lines(self) -> Iterator[str]:
        from ef_common import errors

        tree = (errors.__doc__ or "").partition("::\n")[2].partition("GroupBroken")[0]
        yield from ("::", "", tree.rstrip())


class Glossary(Generated):
    """The terms that ef_common/__init__.py defines."""

    def lines(self) -> Iterator[str]:
        import ef_common

        body = inspect.cleandoc(ef_common.__doc__ or "").partition("Glossary\n")[2]
        for term, meaning in glossary(body):
            yield from (term, f"   {meaning}", "")


def glossary(body: str) -> Iterator[tuple[str, str]]:
    """Terms and meanings, of lines "    term   meaning" with continuation lines."""
    term, meaning = "", ""
    for line in body.splitlines():
        if match := re.match(r"    (\S.*?)  +(.*)", line):
            if term:
                yield term, meaning
            term, meaning = match[1], match[2]
        else:
            meaning += " " + line.strip()
    yield term, meaning


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("settings", SettingsTable)
    app.add_directive("run-options", RunOptions)
    app.add_directive("events", Events)
    app.add_directive("error-tree", ErrorTree)
    app.add_directive("glossary-of-code", Glossary)
    return {"parallel_read_safe": True}
