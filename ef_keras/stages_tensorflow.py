"""Cuts a step that XLA compiles in TensorFlow into stages, so that Python can be called between them.

XLA cannot compile an operation that calls Python. A step is therefore traced once for each shape of its batch, into the
graph that TensorFlow would compile, and the graph is cut in the order in which the step was written: the operations
before a call of Python are one stage, those after it the next. Each stage is compiled by itself. Between two of them,
Python runs as it does between two steps, in its own thread, with no TensorFlow work in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import tensorflow as tf

from ef_common.errors import UnsupportedError

Act = Callable[[Sequence[Any]], Sequence[Any]]
"""What is called: takes tensors, and returns tensors of the shapes and types that were said."""

_TRACE = "elasticflow_trace"
_MAX_PROGRAMS = 16
"""Maximal number of compiled steps for batches of different shapes; the newest are kept."""


class NotCut(UnsupportedError):
    """The step cannot be cut: Python is called in a function, a condition or a loop, or a loop's state crosses."""


@dataclass
class _Call:
    """A call of Python: the number of earlier operations in the step, its inputs, and its outputs."""

    place: int
    act: Act
    takes: list[Any]
    gives: list[Any]


@dataclass
class _Trace:
    """A step that is being traced, and why it cannot be cut, because AutoGraph raises errors of its own."""

    graph: Any = None
    calls: list[_Call] = field(default_factory=list)
    error: NotCut | None = None


def is_staged() -> bool:
    """Whether this is the trace of a step that will be cut."""
    return bool(tf.compat.v1.get_default_graph().get_collection(_TRACE))


def call(act: Act, tensors: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Within such a trace: call Python, and continue with what it returns.

    Args:
        act: Called each time that a step reaches this point.
        tensors: Its arguments.
        like: Tensors of fixed shapes, of which its results have shape and type.

    Raises:
        NotCut: The step cannot be cut here.
    """
    graph = tf.compat.v1.get_default_graph()
    trace: _Trace = graph.get_collection(_TRACE)[0]
    if graph is not trace.graph:
        trace.error = NotCut(
            "the model's train_step makes its update within a function, a condition or a loop of TensorFlow's"
        )
        raise trace.error
    place = len(graph.get_operations())
    gives = [tf.compat.v1.placeholder(one.dtype, one.shape) for one in like]
    trace.calls.append(_Call(place, act, list(tensors), gives))
    return gives


class StagedStep:
    """A step that may call Python.

    Args:
        step: A function of a batch, which returns tensors in any structure.
    """

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self._step = step
        self._programs: dict[Any, _Program] = {}

    def __call__(self, batch: Any) -> Any:
        """Make the step and return its results.

        Raises:
            NotCut: The step cannot be cut; nothing has been done.
        """
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in _flat(batch)]
        key = (_names(batch), *(None if leaf is None else (leaf.dtype, *leaf.shape) for leaf in leaves))
        if key not in self._programs:
            if len(self._programs) >= _MAX_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[key] = _Program(self._step, batch, leaves)
        return self._programs[key].run(leaves)


@dataclass
class _Stage:
    """Operations between two calls.

    Attributes:
        reads: Names of what they need that the step has computed before, or was given.
        writes: Names of what others need of theirs.
        run: The compiled operations.
    """

    reads: list[str]
    writes: list[str]
    run: Callable[..., Sequence[Any]]


class _Program:
    """A step for batches of one shape. Objects in its graph are identified by name."""

    def __init__(self, step: Callable[[Any], Any], batch: Any, leaves: Sequence[Any]) -> None:
        trace = _Trace()

        def traced(*given: Any) -> Any:
            trace.graph, trace.calls = tf.compat.v1.get_default_graph(), []
            trace.graph.add_to_collection(_TRACE, trace)
            parts = iter(given)
            flat = [None if leaf is None else next(parts) for leaf in leaves]
            return step(tf.nest.pack_sequence_as(batch, flat, expand_composites=True))

        present = [leaf for leaf in leaves if leaf is not None]
        function = tf.function(traced, autograph=False, jit_compile=True)
        try:
            self._traced = function.get_concrete_function(*present)  # kept, as it keeps functions that the stages call
        except Exception:
            if trace.error is not None:
                raise trace.error from None
            raise
        self._calls = trace.calls
        names = [tensor.name for tensor in self._traced.inputs]
        self._inputs = names[: len(present)]
        self._captured = dict(zip(names[len(present) :], self._traced.captured_inputs, strict=True))
        self._stages = self._cut(trace.graph)

    def _cut(self, graph: Any) -> list[_Stage]:
        operations, definition = graph.get_operations(), graph.as_graph_def()
        given = {name.partition(":")[0] for name in (*self._inputs, *self._captured)}
        given.update(tensor.op.name for call in self._calls for tensor in call.gives)
        ends = [call.place for call in self._calls]
        wanted = {tensor.name for call in self._calls for tensor in call.takes}
        wanted.update(tensor.name for tensor in _flat(self._traced.structured_outputs) if tensor is not None)
        stages = []
        for start, end in reversed(list(zip([0, *ends], [*ends, len(operations)], strict=True))):
            part = [operation for operation in operations[start:end] if operation.name not in given]
            stage = self._stage(part, definition, wanted)
            wanted.update(stage.reads)
            stages.append(stage)
        return stages[::-1]

    def _stage(self, operations: Sequence[Any], definition: Any, wanted: set[str]) -> _Stage:
        made = [tensor.name for operation in operations for tensor in operation.outputs]
        needed = {tensor.name: tensor for operation in operations for tensor in operation.inputs}
        for name in made:
            needed.pop(name, None)
        captured = {name: self._captured[name] for name in needed if name in self._captured}
        reads = [name for name in needed if name not in captured]
        if any(needed[name].dtype == tf.variant for name in reads):
            raise NotCut("what a loop of the step keeps is needed after its gradients are reduced")
        writes = [name for name in made if name in wanted]
        part = _part_of(definition, {operation.name for operation in operations})

        def run(*values: Any) -> Any:
            known = dict(zip(reads, values, strict=True))
            known.update((name, tf.identity(tensor)) for name, tensor in captured.items())
            return tf.graph_util.import_graph_def(part, input_map=known, return_elements=writes, name="stage")

        specs = [tf.TensorSpec(needed[name].shape, needed[name].dtype) for name in reads]
        return _Stage(reads, writes, tf.function(run, autograph=False, jit_compile=True).get_concrete_function(*specs))

    def run(self, leaves: Iterable[Any]) -> Any:
        """Make the step and return its results."""
        known = {**self._captured, **dict(zip(self._inputs, (one for one in leaves if one is not None), strict=True))}
        for stage, call in zip_longest(self._stages, self._calls):
            known.update(zip(stage.writes, stage.run(*map(known.__getitem__, stage.reads)), strict=True))
            if call is not None:
                found = call.act([known[tensor.name] for tensor in call.takes])
                known.update((tensor.name, one) for tensor, one in zip(call.gives, found, strict=True))
        results = self._traced.structured_outputs
        flat = [None if tensor is None else known[tensor.name] for tensor in _flat(results)]
        return tf.nest.pack_sequence_as(results, flat, expand_composites=True)


def _part_of(definition: Any, names: set[str]) -> Any:
    """A part of a graph with these operations, which begins when its inputs are there."""
    part = tf.compat.v1.GraphDef(versions=definition.versions, library=definition.library)
    for node in definition.node:
        if node.name in names:
            inputs = [one for one in node.input if not one.startswith("^") or one[1:] in names]
            copy = part.node.add(name=node.name, op=node.op, input=inputs, device=node.device)
            for key, value in node.attr.items():
                if key != "_class":  # where it lies, if that is where another one does
                    copy.attr[key].CopyFrom(value)
    return part


def _names(structure: Any) -> Any:
    """The keys and lengths of a nested structure, which its leaves do not show."""
    if isinstance(structure, Mapping):
        return tuple((name, _names(structure[name])) for name in structure)
    if isinstance(structure, (tuple, list)):
        return tuple(map(_names, structure))
    return None


def _flat(structure: Any) -> list[Any]:
    found: list[Any] = tf.nest.flatten(structure, expand_composites=True)
    return found
