"""What the reference pages show, read from the code: settings, options, events, errors and terms.

It needs no Sphinx, so that the tests can hold it against the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Setting:
    """A thing that can be set, and all the places where it can be."""

    meaning: str
    default: str
    places: list[str] = field(default_factory=list)


def settings() -> list[Setting]:
    """All settings, each once. One that can be set in several ways is named for the first."""
    found: dict[str, Setting] = {}
    for name, default, meaning in arguments():
        found[name] = Setting(meaning, default, [f"argument ``{name}=``"])
    for name, default, meaning in variables():
        key = name.removeprefix("ELASTICFLOW_").lower()
        found.setdefault(key, Setting(meaning, default)).places.append(f"environment ``{name}``")
    for name, default, meaning in rendezvous_keys():
        found.setdefault(name, Setting(meaning, default)).places.append(f"``--rdzv-conf {name}=…``")
    for option, meaning in run_options():
        key = option.split()[0].removeprefix("--").replace("-", "_")
        found.setdefault(key, Setting(meaning, "none")).places.append(f"``elasticflow run {option}``")
    return list(found.values())


def arguments() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of the arguments of the front doors; those of Keras alone come last."""
    import ef_keras
    from ef_common.data.settings import ElasticSettings
    from ef_lightning.strategy import ElasticMixin

    meanings = args_of(ElasticMixin.__doc__ or "") | args_of(ElasticSettings.__doc__ or "")
    of_keras = inspect.signature(ef_keras.callbacks).parameters
    for name, parameter in inspect.signature(ElasticMixin.__init__).parameters.items():
        if name in ("self", "kwargs"):
            continue
        default = f"``{parameter.default!r}``"
        if name in of_keras and of_keras[name].default != parameter.default:
            default += f"; Keras: ``{of_keras[name].default!r}``"
        yield name, default, meanings[name]
    own = args_of(ef_keras.callbacks.__doc__ or "")
    for name in sorted(of_keras.keys() - inspect.signature(ElasticMixin.__init__).parameters.keys()):
        yield name, f"Keras only: ``{of_keras[name].default!r}``", own[name]


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


def rendezvous_keys() -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each key of ``--rdzv-conf``."""
    from ef_common.launch import rendezvous_options

    yield from simple_table(rendezvous_options.__doc__ or "")


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


def run_options() -> Iterator[tuple[str, str]]:
    """The options that `elasticflow run` adds to those of torchrun, and what they mean."""
    from ef_common.launch.run import parser

    groups = [group for group in parser()._action_groups if (group.title or "").startswith("ElasticFlow")]
    for action in (action for group in groups for action in group._group_actions):
        yield f"{action.option_strings[0]} {action.metavar}", action.help or ""


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
    "_checksums": "list of integers or nulls",
    "_shares": "object: worker id → list of [start, stop)",
}


def events() -> Iterator[tuple[str, str, str]]:
    """Each kind of event, its meaning, and its fields with their types; then the names of those that any may have."""
    from ef_common import events as log

    comments = dict(_comments(inspect.getsource(log)))
    for kind, fields in log._FIELDS.items():
        typed = ", ".join(f"``{name}`` ({_TYPES[check.__name__]})" for name, check in fields.items())
        yield f"``{kind}``", comments[kind], typed
    yield "any", "These fields may be there, too.", ", ".join(f"``{name}``" for name in log._OPTIONAL_FIELDS)


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


def error_tree() -> str:
    """The errors that users may see, as a tree."""
    from ef_common import errors

    return (errors.__doc__ or "").partition("::\n")[2].partition("    GroupBroken")[0].rstrip()


def glossary() -> Iterator[tuple[str, str]]:
    """Terms and their meanings."""
    import ef_common

    body = inspect.cleandoc(ef_common.__doc__ or "").partition("Glossary\n")[2]
    term, meaning = "", ""
    for line in body.splitlines():
        if match := re.match(r"    (\S.*?)  +(.*)", line):
            if term:
                yield term, meaning
            term, meaning = match[1], match[2]
        else:
            meaning += " " + line.strip()
    yield term, meaning
