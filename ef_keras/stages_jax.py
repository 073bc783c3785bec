"""Cuts a step that JAX compiles into stages, so that Python is called between them and not from XLA.

A step is traced once for each shape of its batch, into a JAX program. Where it calls Python, the trace contains an
operation of ours, at which the program is cut: a stage consists of all operations that need no result of a later call.
Each stage is compiled by itself. Between two of them, Python runs as it does between two steps, in its own thread, with
no XLA work in progress that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend import core
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, Var

from ef_common.errors import UnsupportedError
from ef_keras import hooks

Act = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""What is called: takes arrays, and returns arrays of the shapes and types that were said, which nobody changes later:
JAX may use their memory."""


class _CallsPython(core.Effect):
    """An effect that keeps calls without results, and makes JAX refuse calls within its own control flow."""


_EFFECT = _CallsPython()
_CALL = Primitive("elasticflow_call")
_CALL.multiple_results = True
_CALL.def_effectful_abstract_eval(lambda *arrays, act, results: (list(results), {_EFFECT}))
_CALL.def_impl(lambda *arrays, act, results: _called(act, arrays))


def call(act: Act, arrays: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Within a step: call Python, and continue with what it returns. Outside of one, call it at once.

    No derivative is taken through it.

    Args:
        act: Called each time that a step reaches this point.
        arrays: Its arguments.
        like: Something with a shape and a type, for each of its results.
    """
    results = tuple(jax.core.ShapedArray(tuple(one.shape), jnp.dtype(one.dtype)) for one in like)
    found: list[Any] = _CALL.bind(*map(jax.lax.stop_gradient, arrays), act=act, results=results)
    return found


def _called(act: Act, arrays: Iterable[Any]) -> list[Any]:
    found: list[Any] = jax.device_put(list(act([np.asarray(array) for array in arrays])))
    return found


@dataclass
class _Stage:
    """Operations between two calls.

    Attributes:
        equations: The operations.
        reads: Variables that they need.
        writes: Variables that other stages need from them.
        run: The compiled operations.
    """

    equations: list[JaxprEqn] = field(default_factory=list)
    reads: list[Var] = field(default_factory=list)
    writes: list[Var] = field(default_factory=list)
    run: Callable[..., Sequence[Any]] = lambda *values: ()


class StagedStep:
    """A step that may call Python.

    Args:
        step: A pure function of (state, batch), which returns (results, new state). A state consists of groups, as
            Keras's does.
        variables: Variables that hold the state before and after the step, in these groups.
        late: Variables that the first call with results may change, so that nobody uses them before it.
        reads: Other variables that the step reads and does not change, which Keras does not know.
    """

    def __init__(
        self,
        step: Callable[[Any, Any], tuple[Any, Any]],
        variables: Sequence[Sequence[keras.Variable]],
        *,
        late: Iterable[keras.Variable] = (),
        reads: Sequence[keras.Variable] = (),
    ) -> None:
        self._step = step
        self._groups = variables
        self._variables = [variable for group in variables for variable in group]
        late_ones = {id(variable) for variable in late}
        self._late = [place for place, variable in enumerate(self._variables) if id(variable) in late_ones]
        self._reads = list(reads)
        self._programs: dict[Any, _Program] = {}

    def __call__(self, batch: Any, *, before_call: Callable[[Sequence[Any]], None] = lambda known: None) -> Any:
        """Make the step and return its results.

        Args:
            batch: The batch.
            before_call: Called with what is known of the new state, flat, before each call; None is not known.
        """
        leaves, structure = jax.tree.flatten(batch)
        key = (structure, *((np.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves))
        if key not in self._programs:
            state = tuple([variable.value for variable in group] for group in self._groups)
            self._programs[key] = _Program(self._traced, state, self._values_read(), batch, late=self._late)
        inputs = [*self._values_read(), *leaves]
        results, values = self._programs[key].run(self._variables, inputs, before_call)
        hold(self._variables, values)
        return results

    def _values_read(self) -> list[Any]:
        return [variable.value for variable in self._reads]

    def _traced(self, state: Any, reads: Sequence[Any], batch: Any) -> tuple[Any, Any]:
        before = self._values_read()
        hold(self._reads, reads)  # or they would be constants
        try:
            return self._step(state, batch)
        finally:
            hold(self._reads, before)


def hold(variables: Iterable[keras.Variable], values: Iterable[Any]) -> None:
    """Set variables to these values, which are arrays of their shapes and types."""
    for variable, value in zip(variables, values, strict=True):
        hooks.set_value(variable, value)


class _Program:
    """A step for batches of one shape."""

    def __init__(
        self,
        step: Callable[[Any, Any, Any], tuple[Any, Any]],
        state: Any,
        reads: Any,
        batch: Any,
        *,
        late: Iterable[int],
    ) -> None:
        def anew(*inputs: Any) -> tuple[Any, Any]:  # JAX keeps the traces of a function that it knows
            return step(*inputs)

        try:
            traced, shapes = jax.make_jaxpr(anew, return_shape=True)(state, reads, batch)
        except NotImplementedError as error:
            if _CallsPython.__name__ not in str(error):
                raise
            raise UnsupportedError(
                "the model's train_step makes its update within a cond, a loop or another function of JAX's. Call "
                "self.optimizer.stateless_apply(…) in train_step itself"
            ) from error
        self._consts = list(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        self._structure = jax.tree.structure(shapes[0])
        self._num_state = len(jax.tree.leaves(state))
        self._inputs, self._outputs = list(traced.jaxpr.invars), list(traced.jaxpr.outvars)
        self._places = {one: place for place, one in enumerate(self._inputs[: self._num_state])}
        self._calls: list[JaxprEqn] = []
        self._stages = [_Stage()]
        self._cut(traced, [self._inputs[place] for place in late])
        for stage in self._stages:
            self._compile(traced, stage)

    def _cut(self, traced: ClosedJaxpr, late: Iterable[Var]) -> None:
        calls = [equation for equation in traced.jaxpr.eqns if equation.primitive is _CALL]
        first = next((number for number, call in enumerate(calls, start=1) if call.outvars), 0)
        places = dict.fromkeys(late, first)  # of variables: the number of the stage in which they can be used
        for equation in traced.jaxpr.eqns:
            if equation.primitive is _CALL:
                if any(places.get(one, 0) > len(self._calls) for one in _variables(equation.invars)):
                    raise UnsupportedError(
                        "the gradients of the model's train_step depend on the optimizer's momentum or learning rate"
                    )
                self._calls.append(equation)
                self._stages.append(_Stage())
                place = len(self._calls)
            else:
                if _EFFECT in equation.effects:
                    raise UnsupportedError(
                        "the model's train_step makes its update within a function that JAX compiles. Call "
                        "self.optimizer.stateless_apply(…) in train_step itself"
                    )
                place = max((places.get(one, 0) for one in _variables(equation.invars)), default=0)
                self._stages[place].equations.append(equation)
            places.update(dict.fromkeys(equation.outvars, place))
        wanted = set(_variables(self._outputs))
        for call in self._calls:
            wanted.update(_variables(call.invars))
        for stage in reversed(self._stages):
            made = dict.fromkeys(one for equation in stage.equations for one in equation.outvars)
            read = dict.fromkeys(one for equation in stage.equations for one in _variables(equation.invars))
            stage.writes = [one for one in made if one in wanted]
            stage.reads = [one for one in read if one not in made]
            wanted.update(stage.reads)

    def _compile(self, traced: ClosedJaxpr, stage: _Stage) -> None:
        if not stage.equations:
            return
        effects = frozenset().union(*(equation.effects for equation in stage.equations))
        jaxpr = traced.jaxpr.replace(
            constvars=[],
            invars=stage.reads,
            outvars=stage.writes,
            eqns=stage.equations,
            effects=effects,
            debug_info=None,
        )
        stage.run = jax.jit(core.jaxpr_as_fun(ClosedJaxpr(jaxpr, ())), donate_argnums=self._replaced_by(stage))

    def _replaced_by(self, stage: _Stage) -> tuple[int, ...]:
        """Inputs that a stage reads for the last time while it makes their new values: their memory can be reused."""
        if stage is self._stages[0]:  # what follows may fail
            return ()
        pairs = zip(self._inputs[: self._num_state], self._outputs[-self._num_state :], strict=True)
        replaced = {old for old, new in pairs if new in stage.writes and old not in self._outputs}
        later = self._stages[self._stages.index(stage) + 1 :]
        replaced -= {one for other in later for one in other.reads}
        return tuple(index for index, one in enumerate(stage.reads) if one in replaced)

    def run(
        self,
        variables: Sequence[keras.Variable],
        others: Sequence[Any],
        before_call: Callable[[Sequence[Any]], None],
    ) -> tuple[Any, list[Any]]:
        """Make the step. Returns its results and the values of the new state."""
        known: dict[Var, Any] = dict(self._consts)
        known.update(zip(self._inputs, [*(one.value for one in variables), *others], strict=True))
        for number, stage in enumerate(self._stages):
            if number:
                places = ((one, self._places[one]) for one in stage.reads if one in self._places)
                known.update((one, variables[place].value) for one, place in places)
            known.update(zip(stage.writes, _run(stage, list(map(known.__getitem__, stage.reads))), strict=True))
            if number < len(self._calls):
                before_call([_value(one, known) for one in self._outputs[-self._num_state :]])
                call = self._calls[number]
                results = _called(call.params["act"], [_value(one, known) for one in call.invars])
                known.update(zip(call.outvars, results, strict=True))
        outputs = [_value(one, known) for one in self._outputs]
        num = len(outputs) - self._num_state
        return jax.tree.unflatten(self._structure, outputs[:num]), outputs[num:]


def _run(stage: _Stage, inputs: Sequence[Any]) -> Sequence[Any]:
    """What a stage computes.

    Raises:
        KeyboardInterrupt: SIGINT came while it ran Python (`jax.debug.callback`), and JAX turned it into another error.
    """
    try:
        results: Sequence[Any] = stage.run(*inputs)
    except Exception as error:
        if str(error).rstrip(": \n").endswith("KeyboardInterrupt"):
            raise KeyboardInterrupt from error
        raise
    return results


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _value(atom: Any, known: dict[Var, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known.get(atom)
