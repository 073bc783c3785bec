"""Gradients of the TensorFlow backend leave the compiled step, are reduced, and return to it.

No operation of a communication library is in the graph. A step that XLA compiles is cut in two where its gradients are
reduced (see `stages_tensorflow`). In any other step, gradients leave the graph bucket by bucket as the backward pass
computes them; a last call waits for all sums and returns them, and the update depends on it. Recovery from a loss
happens within that call: the graph does not fail, so no batch is repeated, and an update happens after all reductions
or not at all.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike
from tensorflow.python.eager import context

from ef_common.collectives.gradients.arrays import ArrayBuckets, ArrayReduction
from ef_common.core.view import View
from ef_common.data.seeds import seed_python
from ef_common.errors import UnsupportedError, UsageError
from ef_common.session import Session
from ef_keras import hooks
from ef_keras.reducer import Reducer
from ef_keras.stages_tensorflow import NotCut, StagedStep, call, is_staged

logger = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16  # of a tensor that leaves the graph together with others: each one by itself costs a call
_PACK_BYTES = 1 << 20


class TensorFlowReducer(Reducer):
    """See `Reducer`."""

    def __init__(self, session: Session, model: Any, weights: Callable[[View], Sequence[float]]) -> None:
        super().__init__(session, model, weights)
        self._exits: dict[Any, _Exit] = {}

    def reduce(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Within the step (in a graph, or eagerly): the members' mean gradients, None where there is none."""
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[index]) for index in present]
        statistics, rates = hooks.statistics(self.model), hooks.rates(self.model)
        values = [tf.convert_to_tensor(variable.value) for variable in (*statistics, *rates)]
        key = (id(optimizer), *(tuple(tensor.shape) for tensor in [*dense, *values]))
        if key not in self._exits:
            num_taken = sum(map(hooks.is_taken, statistics)) + len(rates)
            self._exits[key] = _Exit(self, dense, values, num_taken=num_taken)
        outputs = self._exits[key].build([*dense, *values], self.take_loss())
        for variable, value in zip((*statistics, *rates), outputs[len(dense) :], strict=True):
            variable.assign(value)
        reduced: list[Any] = [None] * len(gradients)
        for index, output in zip(present, outputs, strict=False):
            reduced[index] = output
        return reduced


class _Exit:
    """Where the gradients of one optimizer leave the graph, and come back. It may be built into several graphs.

    Args:
        reducer: The reducer.
        gradients: The gradients, of fixed shapes.
        values: The statistics and the learning rates.
        num_taken: How many of these, the last ones, are not averaged but taken from one worker.
    """

    def __init__(
        self, reducer: TensorFlowReducer, gradients: Sequence[Any], values: Sequence[Any], *, num_taken: int
    ) -> None:
        self._reducer = reducer
        tensors = [*gradients, *values]
        if any(None in tuple(tensor.shape) for tensor in tensors):
            shapes = [tuple(tensor.shape) for tensor in tensors]
            raise UnsupportedError(f"a gradient without a fixed shape cannot be reduced. Received: shapes={shapes}")
        self._dtype = tf.float64 if any(tensor.dtype == tf.float64 for tensor in tensors) else tf.float32
        sizes = [math.prod(tensor.shape) for tensor in tensors]
        ends = [0, len(gradients), len(tensors) - num_taken, len(tensors)]
        of_gradients, averaged, taken = (_packs(sizes, range(*pair)) for pair in pairwise(ends))
        self._packs = [*of_gradients, *averaged, *taken]
        shapes = [(sum(sizes[index] for index in pack),) for pack in self._packs]
        num = len(of_gradients)
        last = range(len(averaged), len(averaged) + len(taken))
        self._buckets = ArrayBuckets(shapes[:num], shapes[num:], taken=last, dtype=self._dtype.name)
        self._reduction: ArrayReduction | None = None

    def build(self, tensors: Sequence[Any], loss: Any) -> list[Any]:
        """Put the calls into the graph that is being traced, or make them."""
        loss = tf.constant(np.nan, tf.float32) if loss is None else tf.cast(loss, tf.float32)
        flat = self._staged(tensors, loss) if is_staged() else self._called(tensors, loss)
        outputs: list[Any] = [None] * len(tensors)
        for pack, values in zip(self._packs, flat, strict=True):
            parts = tf.split(values, [math.prod(tensors[i].shape) for i in pack]) if len(pack) > 1 else [values]
            for index, part in zip(pack, parts, strict=True):
                outputs[index] = tf.cast(tf.reshape(part, tensors[index].shape), tensors[index].dtype)
        return outputs

    def _staged(self, tensors: Sequence[Any], loss: Any) -> list[Any]:
        packed = [self._pack(tensors, index) for index in range(len(self._packs))]
        return call(self._reduce_all, [loss, *packed], like=packed)

    def _called(self, tensors: Sequence[Any], loss: Any) -> list[Any]:
        *early, last = self._buckets.buckets
        token = tf.constant(0)  # one call after the other: all members reduce their buckets in one order
        for bucket in early:
            packed = [self._pack(tensors, index) for index in bucket]
            token = tf.py_function(self._take, [token, *packed], tf.int32)
        packed = [self._pack(tensors, index) for index in last]
        found: list[Any] = tf.py_function(self._finish, [token, loss, *packed], [self._dtype] * len(self._packs))
        return found

    def _pack(self, tensors: Sequence[Any], index: int) -> Any:
        parts = [tf.cast(tf.reshape(tensors[i], [-1]), self._dtype) for i in self._packs[index]]
        return tf.concat(parts, 0) if len(parts) > 1 else parts[0]

    def _take(self, token: Any, *arrays: Any) -> Any:
        self._reducer.guard(partial(self._take_arrays, arrays))
        return token

    def _take_arrays(self, tensors: Sequence[Any]) -> ArrayReduction:
        if self._reduction is None:
            self._reduction = self._reducer.begin(self._buckets)
        self._reduction.take([memory_of(tensor) for tensor in tensors])
        return self._reduction

    def _finish(self, token: Any, loss: Any, *arrays: Any) -> Any:
        return self._reducer.guard(partial(self._reduce, loss, arrays))

    def _reduce_all(self, found: Sequence[Any]) -> list[Any]:
        loss, *packed = found
        *early, last = self._buckets.buckets
        for bucket in early:
            self._take_arrays([packed[index] for index in bucket])
        return list(map(tf.convert_to_tensor, self._reduce(loss, [packed[index] for index in last])))

    def _reduce(self, loss: Any, tensors: Sequence[Any]) -> list[Any]:
        reduction, self._reduction = self._take_arrays(tensors), None
        self._reducer.complete(reduction, float(memory_of(loss)))
        gradients, values = reduction.reduced()
        return [_tensor(array) for array in (*gradients, *values)]


class TensorFlowStep:
    """The train function of a model whose steps XLA compiles, while a `fit` is elastic.

    Args:
        model: The model, built and compiled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._step: Callable[[Any], Any] = StagedStep(_of_one_batch(hooks.inlined_train_function(model)))

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Make a step with each of these batches. Returns the logs of the last one."""
        logs: Any = {}
        for batch in batches:
            logs = self._made(batch)
        return logs

    def _made(self, batch: Any) -> Any:
        try:
            return self._step(batch)
        except NotCut as error:
            logger.warning("the training steps of this fit are not compiled by XLA: %s", error)
            self._step = _of_one_batch(hooks.new_train_function(self._model, xla=False))
            return self._step(batch)


def _of_one_batch(train_function: Callable[[Iterator[Any]], Any]) -> Callable[[Any], Any]:
    return lambda batch: train_function(iter([batch]))


_STATEFUL = frozenset(
    (
        *("Multinomial", "ParameterizedTruncatedNormal", "RandomCrop", "RandomGamma", "RandomPoisson"),
        *("RandomPoissonV2", "RandomShuffle", "RandomStandardNormal", "RandomUniform", "RandomUniformInt"),
        *("StatefulRandomBinomial", "StatefulStandardNormal", "StatefulStandardNormalV2", "StatefulTruncatedNormal"),
        *("StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt", "TruncatedNormal"),
    )
)
"""Operations whose random numbers depend on how often they were run before."""


class TensorFlowPasses:
    """See :class:`~ef_keras.global_batch.Passes`.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._updates: dict[Any, Callable[..., Any]] = {}
        self._deterministic = False

    def hand_out(
        self,
        gradients: Sequence[Any],
        loss: Any,
        *,
        dtype: DTypeLike,
        receive: Callable[[Sequence[np.ndarray], float | None], None],
    ) -> None:
        """See the protocol."""
        if self._deterministic and not tf.executing_eagerly():
            _check_random(tf.compat.v1.get_default_graph())
        has_loss = loss is not None

        def leave(loss: Any, *arrays: Any) -> int:
            receive([memory_of(array) for array in arrays], float(memory_of(loss)) if has_loss else None)
            return 0

        def leave_stage(found: Sequence[Any]) -> Sequence[Any]:
            leave(*found)
            return ()

        loss = tf.cast(loss, tf.float32) if has_loss else tf.constant(np.nan, tf.float32)
        tensors = [tf.cast(tf.convert_to_tensor(gradient), np.dtype(dtype).name) for gradient in gradients]
        if is_staged():
            call(leave_stage, [loss, *tensors])
        else:
            tf.py_function(leave, [loss, *tensors], tf.int32)

    def apply(self, update: Callable[..., Any], gradients: Sequence[np.ndarray], variables: Sequence[Any]) -> None:
        """See the protocol."""
        tensors = [tf.cast(array, variable.dtype) for array, variable in zip(gradients, variables, strict=True)]
        if self._model.run_eagerly:
            update(tensors, variables)
            return
        key = tuple(map(id, variables))
        if key not in self._updates:
            xla = True if self._model.jit_compile and not self._deterministic else None
            self._updates[key] = tf.function(
                lambda tensors: update(tensors, variables), autograph=False, jit_compile=xla
            )
        self._updates[key](tensors)

    def seed(self, key: Sequence[int]) -> None:
        """See the protocol. In graphs, operations that this would concern are refused."""
        number = seed_python(key)
        if self._model.run_eagerly:
            tf.random.set_seed(number >> 1)  # which makes TensorFlow forget all that it has compiled

    def begin_determinism(self) -> None:
        """See the protocol, and `prepare_determinism`."""
        self._deterministic = True

    def end_determinism(self) -> None:
        """See the protocol."""
        self._deterministic = False


def prepare_determinism() -> None:
    """Let operations give the same bits wherever they are run. TensorFlow has no way back.

    It must know before a data set is read: one that draws random numbers does so in another order otherwise.

    Raises:
        UsageError: TensorFlow has begun with another number.
    """
    tf.config.experimental.enable_op_determinism()
    # The sums of an operation depend on the number of its threads.
    if tf.config.threading.get_intra_op_parallelism_threads() == 0 and os.environ.get("TF_NUM_INTRAOP_THREADS") == "1":
        return
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
    except RuntimeError as error:
        raise UsageError(
            "deterministic training computes an operation in one thread, and TensorFlow has begun with more. Set the "
            "environment variable TF_NUM_INTRAOP_THREADS=1, or write at the top of the program: "
            "tf.config.threading.set_intra_op_parallelism_threads(1). Received: "
            f"{tf.config.threading.get_intra_op_parallelism_threads()} (0 is one for each core)"
        ) from error


def _check_random(graph: Any) -> None:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    found = sorted({node.op for node in nodes} & _STATEFUL)
    if found:
        raise UnsupportedError(
            "the model draws random numbers that depend on how many were drawn before, so they cannot be the same for "
            "every number of workers. Use keras.random or a layer of Keras's, with a keras.random.SeedGenerator, "
            f"instead of tf.random. Received: {found}"
        )


def _packs(sizes: Sequence[int], indices: range) -> list[list[int]]:
    """Tensors that leave the graph as one, in the order of the model: small ones with their neighbours."""
    packs: list[list[int]] = []
    room = 0
    for index in indices:
        num_bytes = 4 * sizes[index]
        if num_bytes > _SMALL_BYTES:
            packs.append([index])
            room = 0
        else:
            if room < num_bytes or not room:
                packs.append([])
                room = _PACK_BYTES
            packs[-1].append(index)
            room -= num_bytes
    return packs


def _tensor(array: np.ndarray) -> Any:
    """A tensor for the graph. A large one is no copy: TensorFlow does not write to memory that it does not own."""
    if array.flags.writeable and array.nbytes > _SMALL_BYTES:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return array


def memory_of(tensor: Any) -> np.ndarray:
    """The memory of an eager tensor or a variable, without a copy where it is the host's."""
    tensor = tf.convert_to_tensor(tensor)
    if tensor.device.endswith("CPU:0") and tensor.dtype != tf.bfloat16:  # which is no type of Python's buffers
        return np.asarray(memoryview(tensor))
    return np.asarray(tensor)


def adder_of(states: Sequence[Any]) -> Callable[[int], None]:
    """See `ef_keras.backends`."""

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def add(term: Any) -> None:
        for state in states:
            state.value.assign_add(term, read_value=False)

    return lambda number: add(tf.constant([number, 0], states[0].dtype))


@contextmanager
def drawn_from_key(key: Sequence[int]) -> Iterator[None]:
    """See `ef_keras.backends`."""
    held: Any = context.context()
    # There is no generator before a seed is set. A release that keeps them elsewhere goes on with ours.
    before = getattr(held, "_seed", None), getattr(held, "_rng", None)
    tf.random.set_seed(seed_python(key) >> 1)
    try:
        yield
    finally:
        held._seed, held._rng = before
