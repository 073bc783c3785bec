"""The class of `ElasticFlowStrategy`, and how `Trainer(strategy="elasticflow")` finds it."""

from __future__ import annotations

import functools
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ef_common.errors import UsageError
from ef_lightning import announcements
from ef_lightning import host as hosts
from ef_lightning.strategy import ElasticMixin

STRATEGY_NAME = ElasticMixin.strategy_name


@functools.cache
def strategy_for(host_name: str) -> type[ElasticMixin]:
    """The strategy class for `"lightning.pytorch"` or `"pytorch_lightning"`.

    Raises:
        UsageError: Any other name.
    """
    if host_name not in hosts.HOSTS:
        raise UsageError(f"unknown Lightning. Expected one of {hosts.NAMES}. Received: {host_name!r}")
    host = hosts.HOSTS[host_name]
    base = host.get("strategies.parallel", "ParallelStrategy")
    namespace = {
        "host": host,
        "__doc__": ElasticMixin.__doc__,
        "__module__": "ef_lightning",  # where `pickle` finds it by its name
        "__reduce__": lambda self: (_new_strategy, (host_name,), self.__getstate__()),
    }
    strategy = type("ElasticFlowStrategy", (ElasticMixin, base), namespace)
    # Lightning takes a compiled module only with strategies that it knows to run the module as it is, on one
    # device. So does this one.
    host.get("strategies", "SingleDeviceStrategy").register(strategy)
    return strategy


def _new_strategy(host_name: str) -> Any:
    """Make a strategy for a copy, which then gets its attributes, because its class is not found by a name."""
    return object.__new__(strategy_for(host_name))


class ElasticFlowStrategy:
    """Makes the strategy for the Lightning that the program has imported at that time."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make the strategy."""
        host = hosts.detect()
        if host is None:
            raise UsageError("import `lightning.pytorch` or `pytorch_lightning` before you make a strategy")
        return strategy_for(host.name)(*args, **kwargs)


def strategy_class() -> Any:
    """The class behind `ef_lightning.ElasticFlowStrategy`. Looking it up never raises; creating one may."""
    try:
        host = hosts.detect()
    except UsageError:
        host = None
    return ElasticFlowStrategy if host is None else strategy_for(host.name)


# ---------------------------------------------------------------- Trainer(strategy="elasticflow")


def register() -> None:
    """Register the name in the imported Lightning, or in one that is imported later.

    And have it announce itself once in a job.
    """
    announcements.hold(package for host in hosts.HOSTS.values() for package in (host.name, host.fabric))
    for name in hosts.NAMES:
        module = sys.modules.get(f"{name}.strategies")
        if module is not None and hasattr(module, "StrategyRegistry"):
            _register_in(name, module)
        elif not any(isinstance(finder, _Registrar) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Registrar(name))


def _register_in(name: str, strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if STRATEGY_NAME not in registry:
        registry.register(
            STRATEGY_NAME,
            lambda **kwargs: strategy_for(name)(**kwargs),
            description="elastic data-parallel training that keeps its processes",
        )


class _Registrar:
    """An import hook that waits for one module, registers the strategy in it, and removes itself.

    Lightning has no entry point for strategies, and importing it here would be slow, and wrong where both
    `lightning` and `pytorch_lightning` are installed.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"{self.name}.strategies":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register_in(self.name, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
