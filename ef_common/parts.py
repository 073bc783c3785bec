"""The private parts of other packages that a plugin touches, and whether an installed release still has them.

A plugin lists them once. Each is looked for when a training is set up, so that a release which has moved one gives one
clear sentence before anything is trained; and by the contract tests, which see the objects of a training, too.

What exists in a training only is looked for in its class: what its methods name counts as there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ef_common.errors import UnsupportedError

_MOST_TOLD = 3


@dataclass(frozen=True)
class Part:
    """A private part of another package.

    Args:
        owner: Path to what holds it, which begins with the name of a root. The owner may be an object, a class, a
            module, or a function, whose parts are the names in its code.
        name: Its name.
        user: The code that uses it, as names in the plugin's sources.
        kind: The type that it has in the middle of a training.
        since: The release that brought it; nobody needs it before.
        takes: If it is called, the arguments: "path, weights_only=" is one by position, and one by name.
        replaced: Something else stands in its place and takes these arguments, so it must have exactly these
            parameters; one of any name is "_", and "..." stands for those that are handed on.
        equals: If it is a constant, its value.
    """

    owner: str
    name: str
    user: str
    kind: type = object
    since: tuple[int, ...] = ()
    takes: str | None = None
    replaced: bool = False
    equals: Any = None

    @property
    def path(self) -> str:
        """The path of the part."""
        return f"{self.owner}.{self.name}"

    def look(self, roots: Mapping[str, Any], *, in_training: bool = False) -> str:
        """What a release has instead of the part; nothing if the part is there.

        Args:
            roots: Objects that paths begin with.
            in_training: All objects exist, and have their types. Else None is what is made later.
        """
        first, *names = self.owner.split(".")
        value, problem = roots[first], ""
        for name in names:
            if value is not None:
                value, problem = _step(value, name, may_be_field=not in_training)
        if value is None:
            return problem or (f"no `{first}`" if in_training else "")
        found, problem = _step(value, self.name, may_be_field=not in_training and self.takes is None)
        if problem:
            return problem
        if in_training and not isinstance(found, self.kind):
            return f"`{_name_of(value)}.{self.name}` of type {type(found).__name__}, not {self.kind.__name__}"
        if self.equals is not None and found != self.equals:
            return f"`{_name_of(value)}.{self.name}` = {found!r}, not {self.equals!r}"
        if self.takes is None:
            return ""
        received = _parameters(value, self.name, found)
        if received is None or _accepts(received, self.takes, replaced=self.replaced):
            return ""
        shown = inspect.Signature([parameter.replace(annotation=parameter.empty) for parameter in received])
        return f"`{_name_of(value)}.{self.name}{shown}` in place of `{self.name}({self.takes})`"


def listed(owner: str, names: str, user: str, kind: type = object, **more: Any) -> tuple[Part, ...]:
    """Parts of one owner: "_a _b(path, weights_only=)". The other arguments are those of :class:`Part`."""
    part = Part(owner, "", user, kind, **more)
    found = re.findall(r"(\w+)(\([^)]*\))?", names)
    return tuple(replace(part, name=name, takes=takes[1:-1] if takes else None) for name, takes in found)


# ---------------------------------------------------------------- looking


def _step(value: Any, name: str, *, may_be_field: bool) -> tuple[Any, str]:
    """A part of an object, and what is wrong with it; None and nothing if it can only be seen later.

    Args:
        value: The object.
        name: Name of the part.
        may_be_field: Whether it may be an attribute of the class's objects.
    """
    if isinstance(value, (FunctionType, MethodType)):
        code = inspect.unwrap(value).__code__
        known = {*code.co_names, *code.co_varnames, *code.co_cellvars}
        return None, "" if name in known else f"no `{name}` in `{_name_of(value)}`"
    try:
        return getattr(value, name), ""
    except AttributeError:
        if isinstance(value, type) and may_be_field and _is_field(value, name):
            return None, ""
        return None, f"no `{_name_of(value)}.{name}`"
    except RuntimeError:  # of a property that is for a training
        return None, ""


def _is_field(cls: type, name: str) -> bool:
    """Whether objects of a class have this attribute, as far as the class shows."""
    for base in cls.__mro__[:-1]:
        for member in vars(base).values():
            function = getattr(member, "fget", member)
            if isinstance(function, FunctionType):
                code = inspect.unwrap(function).__code__
                if name in code.co_names or name in code.co_consts:  # a text, by which a state of a metric is added
                    return True
    return False


def _name_of(value: Any) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (type, FunctionType, MethodType)):
        return value.__qualname__
    return type(value).__name__


def _parameters(owner: Any, name: str, found: Any) -> list[inspect.Parameter] | None:
    """Parameters of a function, or of a method without `self`; None if they are unknown.

    Of an object, its class is asked: its own method may have been replaced, by ElasticFlow in an earlier training.
    """
    cls = owner if isinstance(owner, type) else type(owner)
    static = None if isinstance(owner, ModuleType) else inspect.getattr_static(cls, name, None)
    method = static if isinstance(static, FunctionType) else found
    if not callable(method):
        return None
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):
        return None
    return parameters[1:] if method is static else parameters


def _accepts(parameters: list[inspect.Parameter], takes: str, *, replaced: bool) -> bool:
    wanted = [argument.strip() for argument in takes.split(",") if argument.strip()]
    if replaced:
        names = [parameter.name for parameter in parameters]
        if wanted[-1:] == ["..."]:
            wanted = wanted[:-1]
            names = names[: len(wanted)]
        return len(names) == len(wanted) and all(w in ("_", name) for w, name in zip(wanted, names, strict=True))
    by_name = {argument[:-1]: None for argument in wanted if argument.endswith("=")}
    try:
        inspect.Signature(parameters).bind(*[None] * (len(wanted) - len(by_name)), **by_name)
    except TypeError:
        return False
    return True


# ---------------------------------------------------------------- the sentence


@dataclass(frozen=True)
class Package:
    """A package and the parts of it that are touched.

    Args:
        name: As it is installed.
        version: The installed version.
        oldest: The oldest release that is supported.
        tried: The newest release that the tests were run with.
        parts: The parts that are touched.
        roots: Objects that paths begin with. None is a class that only the search needs, and has not found: a release
            that has merely moved the class is not refused.
    """

    name: str
    version: str
    oldest: str
    tried: str
    parts: Iterable[Part]
    roots: Mapping[str, Any]

    def here(self) -> list[Part]:
        """The parts that this release must have."""
        release = tuple(int(number) for number in re.findall(r"\d+", self.version)[:3])  # also of 2.7rc1
        return [part for part in self.parts if release >= part.since]

    def problems(self) -> list[str]:
        """What the release has in place of missing parts, each once."""
        return list(dict.fromkeys(problem for part in self.here() if (problem := part.look(self.roots))))


def check(packages: Iterable[Package]) -> None:
    """Refuse releases with other private parts.

    Costs about 20 microseconds for each part.

    Raises:
        UnsupportedError: Naming what has moved, and what to install.
    """
    for package in packages:
        if problems := package.problems():
            more = f" and {len(problems) - _MOST_TOLD} more differences" if len(problems) > _MOST_TOLD else ""
            raise UnsupportedError(
                f"{package.name} {package.version} has {', '.join(problems[:_MOST_TOLD])}{more}, which ElasticFlow "
                f"relies on: use {package.name} {package.oldest} to {package.tried}, or a newer ElasticFlow"
            )


def find(owner: Any, path: str) -> Any:
    """The object at a path from an object or an imported package; None if there is none."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner
