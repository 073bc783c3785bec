"""Releases that have moved a private part, or changed it: made by taking the part away from where it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

from ef_common.parts import Package, Part

Change = Callable[[pytest.MonkeyPatch], None]


def changes(part: Part, roots: Mapping[str, Any]) -> Iterator[Change]:
    """What a release may have done to a part: moved it, changed how it is called, or its value."""
    first, *names = part.owner.split(".")
    owner = roots[first]
    for name in names:
        owner = getattr(owner, name)
    yield partial(_move, owner=owner, name=part.name)
    if part.takes is not None:
        for signature in _others(part):
            yield partial(_call_otherwise, owner=owner, name=part.name, signature=signature)
    if part.equals is not None:
        yield partial(_set, owner=owner, name=part.name, value="another")


def assert_one_sentence(message: str, package: Package, part: Part) -> None:
    """Which release lacks what, and what to use."""
    assert message.startswith(f"{package.name} {package.version} has "), message
    assert part.name in message.partition("which ElasticFlow relies on")[0], message
    oldest, tried = package.oldest, package.tried
    assert message.endswith(f"relies on: use {package.name} {oldest} to {tried}, or a newer ElasticFlow"), message
    assert ". " not in message
    assert "\n" not in message


# ---------------------------------------------------------------- moved


def _move(patch: pytest.MonkeyPatch, *, owner: Any, name: str) -> None:
    """The part has another name, also in the methods of its class if the class is what tells of it."""
    if isinstance(owner, (FunctionType, MethodType)):
        _rename(patch, inspect.unwrap(owner), name)
        return
    if not isinstance(owner, type):
        if name in vars(owner):
            patch.delattr(owner, name)
        if isinstance(owner, ModuleType):
            return
    for base in (owner if isinstance(owner, type) else type(owner)).__mro__[:-1]:
        members = vars(base)
        if isinstance(owner, type):
            for member in members.values():
                function = getattr(member, "fget", member)
                if isinstance(function, FunctionType):
                    _rename(patch, inspect.unwrap(function), name)
        if name in members:
            patch.delattr(base, name)


def _rename(patch: pytest.MonkeyPatch, function: Any, name: str) -> None:
    patch.setattr(function, "__code__", _renamed(function.__code__, name))


def _renamed(code: CodeType, name: str) -> CodeType:
    def other(names: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(f"{name}_moved" if isinstance(one, str) and one == name else one for one in names)

    return code.replace(
        co_names=other(code.co_names), co_varnames=other(code.co_varnames), co_consts=other(code.co_consts)
    )


# ---------------------------------------------------------------- changed


def _others(part: Part) -> Iterator[inspect.Signature]:
    """Signatures that do not fit: a further argument, and for each argument by name, none of this name."""
    wanted = [argument.strip() for argument in str(part.takes).split(",") if argument.strip()]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [f"argument_{i}" if w in ("_", "...") else w.rstrip("=") for i, w in enumerate(wanted)]
    if part.replaced and wanted[-1:] != ["..."]:  # others may hand on more than what stands in its place takes
        yield _signature([*names, "more"], optional="more")
    if not part.replaced:
        yield inspect.Signature(
            [*(inspect.Parameter(n, kind) for n in names), inspect.Parameter("more", inspect.Parameter.KEYWORD_ONLY)]
        )
    if wanted and wanted != ["..."]:
        yield _signature([n for n, w in zip(names, wanted, strict=True) if w != "..."][:-1])
    for index, argument in enumerate(wanted):
        if argument.endswith("=") or (part.replaced and argument not in ("_", "...")):
            yield _signature([*names[:index], "renamed", *names[index + 1 :]])


def _signature(names: list[str], optional: str | None = None) -> inspect.Signature:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    empty = inspect.Parameter.empty
    return inspect.Signature([inspect.Parameter(n, kind, default=None if n == optional else empty) for n in names])


def _call_otherwise(patch: pytest.MonkeyPatch, *, owner: Any, name: str, signature: inspect.Signature) -> None:
    cls = owner if isinstance(owner, (type, ModuleType)) else type(owner)
    static = inspect.getattr_static(cls, name)
    if isinstance(static, type):
        patch.setattr(static, "__signature__", signature, raising=False)
        return

    def other(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    parameters = list(signature.parameters.values())
    is_method = isinstance(static, FunctionType) and isinstance(cls, type)
    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)] if is_method else []
    other.__signature__ = signature.replace(parameters=[*own, *parameters])  # type: ignore[attr-defined]
    patch.setattr(cls, name, staticmethod(other) if isinstance(static, staticmethod) else other)


def _set(patch: pytest.MonkeyPatch, *, owner: Any, name: str, value: Any) -> None:
    patch.setattr(owner if isinstance(owner, type) else type(owner), name, value)
