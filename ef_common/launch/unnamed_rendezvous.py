"""``torchrun --nnodes=1:8 train.py`` with a range of nodes and no rendezvous is an elastic job of ours.

torchrun's default is its static rendezvous, which knows no ranges: it waits for as many nodes as the range allows.
torchrun reads the defaults of its options from variables (``PET_RDZV_BACKEND``) when it builds its parser, and asks for
rendezvous handlers before. So the handler can set such a default, without a private part of torch. It does so only if

* the program is torchrun, or ``python -m torch.distributed.run``;
* the number of nodes is a range (``--nnodes=1:8``, or ``PET_NNODES``), not one number;
* nothing names a rendezvous: no backend, no ``--standalone``, and none of the options of the static one
  (``--master-addr``, ``--master-port``, ``--node-rank``).

Without an endpoint, the job is one of this machine alone; or of several pods or tasks, if the variables of
Kubeflow or of Slurm say where all of them meet (:mod:`ef_common.launch.surroundings`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ef_common.errors import UsageError
from ef_common.launch.nnodes import nodes_of
from ef_common.launch.rendezvous_options import BACKEND, GivenParameters, Parameters, names_token
from ef_common.launch.surroundings import meeting_in

FLAGS = ("-h", "--help", "-m", "--module", "--no-python", "--run-path", "--standalone", "--virtual-local-rank")
"""torchrun's options without a value."""
HERE = "localhost:0"
"""The endpoint of a job on this machine, as ``torchrun --standalone`` has it: any port that is free."""
_MODULE = "torch.distributed.run"
_NAMES = ("--rdzv-backend", "--standalone", "--master-addr", "--master-port", "--node-rank")
_NNODES, _STANDALONE = "PET_NNODES", "PET_STANDALONE"
_RDZV_BACKEND, _RDZV_ENDPOINT = "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A command line that asks for a range of nodes, and names no rendezvous.

    Args:
        variables: What was set, so that torchrun takes it as its defaults.
    """

    variables: Mapping[str, str]

    def take_back(self, environ: MutableMapping[str, str]) -> None:
        """Remove the variables again when torchrun has read them: they are not for its workers."""
        for name in self.variables:
            environ.pop(name, None)

    def complete(self, params: Parameters, environ: Mapping[str, str]) -> Parameters:
        """The parameters with the endpoint that it was not given.

        Raises:
            UsageError: The nodes cannot find each other.
        """
        if _RDZV_ENDPOINT not in self.variables:
            return params
        nodes = f"{params.min_nodes}:{params.max_nodes}"
        meeting = meeting_in({**environ, _NNODES: nodes}, has_token=names_token(params.config))
        if meeting is not None:
            is_host = {} if meeting.is_host is None else {"is_host": meeting.is_host}
            return GivenParameters(meeting.endpoint, params.min_nodes, params.max_nodes, {**is_host, **params.config})
        if params.min_nodes > 1:
            raise UsageError(
                f"a job of at least {params.min_nodes} nodes needs a place where they meet: add "
                f"--rdzv-endpoint=HOST:PORT, or start it with --nnodes=1:{params.max_nodes} on this machine. "
                f"Received: --nnodes={nodes}"
            )
        return GivenParameters(HERE, params.min_nodes, params.max_nodes, params.config)


def is_torchrun() -> bool:
    """Whether this process is torchrun; a worker, or another program that uses its modules, is not."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name == _MODULE if spec is not None else Path(sys.argv[0]).name == "torchrun"


def unnamed_rendezvous(arguments: Sequence[str], environ: Mapping[str, str]) -> Unnamed | None:
    """What torchrun is to take as its defaults; None if it is to do what it does by itself.

    Args:
        arguments: torchrun's.
        environ: Its variables.
    """
    options = _options(arguments)
    if any(name in options for name in _NAMES):
        return None
    if _RDZV_BACKEND in environ or environ.get(_STANDALONE, "0") != "0":
        return None
    try:
        low, high = nodes_of(options.get("--nnodes", environ.get(_NNODES, "1")))
    except UsageError:
        return None
    if low == high:
        return None
    endpoint = options.get("--rdzv-endpoint", environ.get(_RDZV_ENDPOINT, ""))
    return Unnamed({_RDZV_BACKEND: BACKEND, **({} if endpoint else {_RDZV_ENDPOINT: HERE})})


def take_unnamed_rendezvous() -> Unnamed | None:
    """Have torchrun use our rendezvous, if this process is torchrun and its command line leaves that open."""
    unnamed = unnamed_rendezvous(sys.argv[1:], os.environ) if is_torchrun() else None
    if unnamed is not None:
        os.environ.update(unnamed.variables)
    return unnamed


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """The options before the script; names may be abbreviated, and those that are ambiguous are refused by torchrun."""
    found: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        name, given, value = argument.partition("=")
        name = name.replace("_", "-")
        is_flag = any(flag.startswith(name) for flag in FLAGS)
        has_value = given or (len(name) > 2 and not name.startswith("--"))  # -r3
        if not is_flag and not has_value:
            value = next(rest, "")
        found.update((option, value) for option in (*_NAMES, "--nnodes", "--rdzv-endpoint") if option.startswith(name))
    return found
