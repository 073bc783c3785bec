"""Hooks that start the reduction of a module's gradients during its backward pass, and the calls around a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ef_common.collectives.gradients.bucket_run import Confirmation, Weights
from ef_common.collectives.gradients.buckets import BucketLayout
from ef_common.collectives.gradients.module_buffers import Kind, ModuleBuffers, finder
from ef_common.collectives.gradients.pieces import Pieces
from ef_common.collectives.gradients.reduction import Reduction, num_words, squared_norm
from ef_common.collectives.gradients.sparse import sparse_parameters
from ef_common.core.view import View
from ef_common.errors import UsageError
from ef_common.session import Barrier, Session


def hook(parameter: Parameter, act: Callable[[Tensor], None]) -> Any:
    """Call `act` when the gradient of a parameter is complete. Returns a handle to remove the hook.

    The parameter may be frozen now, and have a gradient again later; torch takes a hook only while it is not.
    """
    trainable = parameter.requires_grad
    parameter.requires_grad_(True)
    try:
        return parameter.register_post_accumulate_grad_hook(act)  # type: ignore[no-untyped-call]
    finally:
        parameter.requires_grad_(trainable)


class Inventory:
    """Notices when a module gets another parameter, or when one begins to require a gradient.

    It is asked before each backward pass, and `module.parameters()` would take longer than all else there.
    """

    def __init__(self, module: Module) -> None:
        modules = list(module.modules())
        self._sizes = [(d, len(d)) for m in modules for d in (m._parameters, m._modules)]
        owned = [m._parameters for m in modules]
        self._parameters = [(finder(entries), name, p) for entries in owned for name, p in entries.items()]
        self._frozen = [p for p in module.parameters() if not p.requires_grad]

    def changed(self) -> bool:
        """Whether the parameters have changed. A change of anything else may count as one too."""
        for entries, size in self._sizes:
            if len(entries) != size:
                return True
        for find, name, parameter in self._parameters:
            if find(name) is not parameter:
                return True
        return any(parameter.requires_grad for parameter in self._frozen)


class GradientReducer:
    """Keeps gradients, and the module's buffers, equal over the members of a session.

    Args:
        session: The worker's session.
        module: Its parameters are reduced; one that begins to require a gradient later is taken in then.
        weights: Weight of each member of a view, asked for at the start of each reduction and after a loss.
        buffers: Tensors of the module that take rank 0's values with each reduction; by default, its buffers.
        parameters: Gives the parameters in an order that is the same in all members; by default, the module's own.

    Attributes:
        spares_equal: Buffers that have rank 0's values already are not written to, because further backward passes need
            them; comparing takes time.
        fraction: Size of this worker's batch, as a part of a full one; its gradients weigh so much less.
        pieces: The global batch that the next gradients are of, if they are of one.
        wants_stop: Above 0 if this worker wants all to interrupt the training after the next reduction.
        num_stops: Sum of the members' `wants_stop` in the newest reduction.
        finds: Whether this worker has found the end of a shard in its next batch.
        num_finds: Members that had found one, in the newest reduction.
        measures: Whether the noise is measured in the next reduction; the same in all members.
        asks: What this member adds to a sum over the members, in reductions in which the noise is measured.
        decides: Tells numbers of this member, always as many, of which all take those of rank 0; before `attach`. They
            travel with the flags, without a message of their own.
        decided: Those of rank 0 in the newest reduction.
        watches: Note gradients that other backward passes compute than those between the two calls; before `attach`.
        local: Gradients that such passes have changed since the newest reduction, by the identities of the parameters.
        on_measured: Called with the mean of the members' squared norms of their gradients, the squared norm of the
            reduced ones, and that sum, if it was.
    """

    def __init__(
        self,
        session: Session,
        module: Module,
        *,
        weights: Weights,
        buffers: Sequence[Tensor] | None = None,
        parameters: Callable[[], Iterable[Parameter]] | None = None,
    ) -> None:
        self._session = session
        self._module = module
        self._parameters = module.parameters if parameters is None else parameters
        self._weights = weights
        self._given_buffers = buffers
        self._buffers: ModuleBuffers | None = None
        self.spares_equal = False
        self.fraction = 1.0
        self.pieces: Pieces | None = None
        self.wants_stop = 0.0
        self.num_stops = 0.0
        self.finds = False
        self.num_finds = 0.0
        self.measures: Callable[[], bool] = lambda: False
        self.asks: Callable[[], float] = lambda: 0.0
        self.decides: Callable[[], Sequence[float]] = tuple
        self.decided: list[float] = []
        self.watches = False
        self.local: dict[int, weakref.ref[Tensor]] = {}
        self.on_measured: Callable[[float, float, float], None] = lambda local, reduced, asked: None
        self._layout: BucketLayout | None = None
        self._handles: list[Any] = []
        self._reduction: Reduction | None = None
        self._inventory: Inventory | None = None

    def attach(self, names: Sequence[str] | None = None, kinds: Sequence[Kind] | None = None) -> None:
        """Hook into the parameters, the same in every member.

        Args:
            names: Of the parameters; by default, all that require a gradient, and this is a collective.
            kinds: The buffers that the other members send, which a newcomer takes in.
        """
        if names is None:
            self._rebuild((p for p in self._parameters() if p.requires_grad), agrees=True)
        elif list(names) != self.names() or kinds not in (None, self.kinds()):
            chosen = set(names)
            self._rebuild((p for name, p in self._module.named_parameters() if name in chosen), kinds=kinds)

    def names(self) -> list[str]:
        """Names of the parameters whose gradients are reduced."""
        known = set() if self._layout is None else self._layout.place_of.keys()
        return [name for name, p in self._module.named_parameters() if id(p) in known]

    def kinds(self) -> list[Kind] | None:
        """The module's buffers that are sent; None if none are, or if they were given."""
        return None if self._buffers is None else self._buffers.kinds()

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._reduction = None

    def _rebuild(
        self, parameters: Iterable[Parameter], *, agrees: bool = False, kinds: Sequence[Kind] | None = None
    ) -> None:
        """Make the buckets anew.

        Args:
            parameters: Whose gradients are reduced.
            agrees: All members are here, and agree on their buffers. Else these are the same as before.
            kinds: Those of the others, if they are known.
        """
        self.detach()
        self._inventory = None
        chosen = list(parameters)
        if not chosen:
            self._layout = None
            return
        buffers = self._given_buffers
        if buffers is None:
            if self._buffers is None or agrees:
                self._buffers = ModuleBuffers(self._module)
            if agrees:
                self._buffers.agree(self._session)
            if kinds is not None:
                self._buffers.take_kinds(kinds)
            buffers = self._buffers.tensors
        self._layout = BucketLayout(
            chosen,
            list(buffers),
            sparse_parameters(self._module),
            num_more_flags=num_words(len(self.decides())),
        )
        self._handles = [hook(p, self._gradient_ready) for p in self._layout.hooked()]
        if self.watches:
            self._handles += [hook(p, self._watch) for p in chosen]

    def _gradient_ready(self, parameter: Tensor) -> None:
        if self._reduction is not None:
            self._reduction.gradient_ready(parameter)

    def _watch(self, parameter: Tensor) -> None:
        if self._reduction is None and parameter.grad is not None:
            self.local[id(parameter)] = weakref.ref(parameter.grad)

    def is_local(self, parameter: Tensor) -> bool:
        """Whether the gradient of a parameter is one that only this worker has computed. The user may replace it."""
        found = self.local.get(id(parameter))
        return found is not None and parameter.grad is not None and found() is parameter.grad

    def before_backward(self, *, overlap: bool = True) -> None:
        """Call before a backward pass whose gradients are to be reduced.

        Args:
            overlap: Begin to reduce in the backward pass. Not if that has collectives of its own, the order of which
                would be another one in each worker.
        """
        self._take_in_new()
        if self._layout is None:
            return
        self._follow_buffers(self._layout)
        if not self._layout.double_buffered:
            self._layout.own_gradients()
        self._reduction = Reduction(
            self._layout, self._session, self._weights, fraction=self.fraction, pieces=self.pieces
        )
        if overlap:
            self._reduction.start()

    def after_backward(self) -> View | None:
        """Call after the backward pass. Gradients are then the weighted mean over the members.

        Returns:
            The view whose members contributed; None if there was nothing to reduce.

        Raises:
            UsageError: In all members, if some but not all of them have skipped the step.
        """
        reduction, self._reduction = self._reduction, None
        if reduction is None:
            return None
        self._follow_buffers(reduction.layout)  # a backward pass with checkpoints runs code of forward passes
        reduction.wants_stop, reduction.finds = self.wants_stop, self.finds
        reduction.measures = self.measures()
        reduction.asks = self.asks() if reduction.measures else 0.0
        reduction.decides = self.decides()
        contributors = self._session.run(reduction)
        is_lent = contributors.world_size > 1 and not reduction.layout.double_buffered
        confirmation = Confirmation(self._session, torch.zeros(1, device="cpu")) if is_lent else None
        if confirmation is not None:
            confirmation.start()
        num_changes = reduction.read_flags()
        self._session.agree(num_changes, reduction.num_wishes)
        self.num_stops, self.num_finds = reduction.num_stops, reduction.num_finds
        self.decided = reduction.decided
        if 0 < reduction.num_skipped < contributors.world_size:
            raise UsageError(
                "some workers had a backward pass in this step and others had none, so they would not make the "
                "same update. Skip a batch in all workers or in none; a loss of zero has no effect. "
                f"Received: {reduction.num_skipped:g} of {contributors.world_size} workers without"
            )
        if confirmation is not None:
            self._session.run(confirmation)  # everybody has the result: the buckets may be changed
        reduction.apply(spares_equal=self.spares_equal)
        self.local.clear()
        if reduction.measures and contributors.world_size > 1:
            local = reduction.squared_norms / contributors.world_size
            self.on_measured(local, squared_norm(reduction.layout), reduction.asked)
        return contributors

    def cancel(self) -> None:
        """Forget a backward pass that did not finish. It must not have been overlapped."""
        self._reduction = None

    def skip(self) -> View | None:
        """Join the reduction of a step without a backward pass, in place of the two calls around it."""
        self.before_backward()
        if self._reduction is not None:
            self._reduction.skipped = True
        return self.after_backward()

    def _follow_buffers(self, layout: BucketLayout) -> None:
        """The module's code may have put other tensors in the place of its buffers."""
        if self._buffers is not None and self._buffers.follow():
            layout.follow_buffers([tensor.detach() for tensor in self._buffers.tensors])

    def _take_in_new(self) -> None:
        if self._inventory is not None and not self._inventory.changed():
            return
        known = set() if self._layout is None else self._layout.place_of
        fresh = [p for p in self._parameters() if p.requires_grad and id(p) not in known]
        if not fresh:
            self._inventory = Inventory(self._module)
            return
        if self._layout is not None:
            self._session.run(
                Barrier("barrier before more parameters are trained")
            )  # the last result must not be needed any more
        taken = {id(p) for p in fresh} | set(known)
        self._rebuild((p for p in self._parameters() if id(p) in taken), agrees=True)
