"""Gradients of the TensorFlow backend: out of the compiled step, reduced, and back into it.

No operation of a communication library is in the graph. Gradients leave it bucket by bucket as the backward pass
computes them; a last call waits for all sums and gives them back, and the update depends on it. A loss is recovered
from within that call: the graph does not fail, so no batch is repeated, and an update happens after all reductions
or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ef_common.collectives.gradients.arrays import ArrayBuckets, ArrayReduction
from ef_common.core.view import View
from ef_common.errors import UnsupportedError
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.reducer import Reducer


class TensorFlowReducer(Reducer):
    """See `Reducer`."""

    def __init__(self, session: Session, model: Any, weights: Callable[[View], Sequence[float]]) -> None:
        super().__init__(session, model, weights)
        self._plans: dict[Any, _Plan] = {}

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Within the step (in a graph, or eagerly): the members' mean gradients, None where there is none."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[index]) for index in present]
        shapes = [tuple(tensor.shape) for tensor in dense]
        if any(None in shape for shape in shapes):
            raise UnsupportedError(f"a gradient without a fixed shape cannot be reduced. Received: shapes={shapes}")
        statistics = hooks.statistics(self.model)
        values = [tf.convert_to_tensor(variable.value) for variable in statistics]
        key = (id(optimizer), tuple(shapes), tuple(tuple(v.shape) for v in values))
        plan = self._plans.get(key)
        if plan is None:
            dtype = "float64" if any(tensor.dtype == tf.float64 for tensor in dense) else "float32"
            plan = _Plan(self, ArrayBuckets(shapes, [tuple(v.shape) for v in values], dtype=dtype))
            self._plans[key] = plan
        outputs = plan.build([*dense, *values], self.take_loss())
        for variable, value in zip(statistics, outputs[len(dense) :], strict=True):
            variable.assign(value)
        reduced: list[Any] = [None] * len(gradients)
        for index, output in zip(present, outputs, strict=False):
            reduced[index] = output
        return reduced


class _Plan:
    """How the gradients of one optimizer leave the graph."""

    def __init__(self, reducer: TensorFlowReducer, buckets: ArrayBuckets) -> None:
        self._reducer = reducer
        self._buckets = buckets
        self._reduction: ArrayReduction | None = None

    def build(self, tensors: Sequence[Any], loss: Any) -> list[Any]:
        """Put the calls into the graph that is being traced, or make them."""
        *early, last = self._buckets.buckets
        token = tf.constant(0)  # one call after the other: all members reduce their buckets in one order
        for bucket in early:
            token = tf.py_function(self._take, [token, *[tensors[i] for i in bucket]], tf.int32)
        loss = tf.constant(np.nan, tf.float32) if loss is None else tf.cast(loss, tf.float32)
        types = [tensor.dtype for tensor in tensors]
        outputs = tf.py_function(self._finish, [token, loss, *[tensors[i] for i in last]], types)
        for output, tensor in zip(outputs, tensors, strict=True):
            output.set_shape(tensor.shape)
        return list(outputs)

    def _take(self, token: Any, *tensors: Any) -> Any:
        self._reducer.guard(partial(self._take_arrays, tensors))
        return token

    def _take_arrays(self, tensors: Sequence[Any]) -> ArrayReduction:
        if self._reduction is None:
            self._reduction = self._reducer.begin(self._buckets)
        self._reduction.take([_array(tensor) for tensor in tensors])
        return self._reduction

    def _finish(self, token: Any, loss: Any, *tensors: Any) -> Any:
        return self._reducer.guard(partial(self._reduce, loss, tensors))

    def _reduce(self, loss: Any, tensors: Sequence[Any]) -> list[Any]:
        reduction, self._reduction = self._take_arrays(tensors), None
        self._reducer.complete(reduction, float(_array(loss)))
        gradients, values = reduction.reduced()
        return [*gradients, *values]


def _array(tensor: Any) -> np.ndarray:
    """The memory of an eager tensor, without a copy where it is the host's."""
    return np.asarray(memoryview(tensor)) if tensor.device.endswith("CPU:0") else np.asarray(tensor)
