"""`ef_lightning.module()` makes a LightningModule of a `model` and a `forward`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ef_common.errors import UsageError
from ef_common.program.binding import binding_of, no_predict
from ef_common.program.outcome import LOSS, check_tensor, outcome_of
from ef_common.program.parts import Model, check_framework, parts_of
from ef_lightning import host as hosts
from ef_lightning.entries import Entries

Function = Callable[..., Any]


def module(
    model: Model,
    forward: Function,
    *,
    evaluate: Function | None = None,
    predict: Function | None = None,
    allow_unused: bool = False,
) -> Any:
    """Make a LightningModule of a program.

    Example::

        def model():
            return {"net": nn.Linear(4, 2), "optimizer": partial(torch.optim.SGD, lr=0.1)}

        def forward(x, y, params):
            return F.cross_entropy(params["net"](x), y)

        Trainer(max_epochs=10).fit(ef_lightning.module(model, forward), loader)

    Args:
        model: Returns a dict of modules and tensors, which may be nested in dicts and lists; or that dict itself.
            Tensors that require a gradient are parameters, and others are buffers. "optimizer" is a class, a partial or
            a function that is called with the parameters. "scheduler", if there is one, is a function that is called
            with the optimizer and returns what Lightning accepts as a scheduler. The function runs under the caller's
            seed.
        forward: Called with the entries of a batch and the model. Returns the cost, of shape (), or a dict with the
            cost as "loss" and with metrics, each a mean over the samples. See :mod:`ef_common.program.binding`.
        evaluate: The same for validation and test, where a dict needs no "loss". The default is `forward`. Results are
            means over the samples, and are logged as `val_loss`, `val_<metric>`, or `test_…`.
        predict: Called like `forward`, with the entries that it names; returns predictions.
        allow_unused: Allow parameters that the cost of the first step does not depend on.

    Returns:
        A LightningModule of the class tree that the program has imported. The parts of the model are in
        `module.params`, and in the state dict as `params.<key>.…`. In training it logs `loss` and metrics as means over
        the samples of an epoch, and `loss_step` of this worker alone. A checkpoint has the weights and no functions;
        load it with `type(module).load_from_checkpoint(path, model=model, forward=forward)`, and the other functions if
        there are any.

    Raises:
        UsageError: The model has no parameters, or is of Keras or of both frameworks; a function cannot be called with
            a batch; or, in the first step: entries do not fit the parameters, or the cost is not a scalar, has no
            gradient, or does not depend on all parameters.
    """
    host = hosts.detect()
    if host is None:
        raise UsageError("import `lightning.pytorch` or `pytorch_lightning` before you make a module")
    return module_class(host.name)(model, forward, evaluate=evaluate, predict=predict, allow_unused=allow_unused)


@functools.cache
def module_class(host_name: str) -> Any:
    """The class of these modules for `"lightning.pytorch"` or `"pytorch_lightning"`."""
    base = hosts.HOSTS[host_name].get("core.module", "LightningModule")
    namespace = {"__doc__": ProgramMixin.__doc__, "__module__": ProgramMixin.__module__}
    return type("Program", (ProgramMixin, base), namespace)


class ProgramMixin:
    """A LightningModule without its base class.

    Args and errors are those of :func:`module`, so that Lightning can make it, too: `load_from_checkpoint` does.
    """

    if TYPE_CHECKING:
        log: Callable[..., None]
        parameters: Callable[[], Any]
        named_parameters: Callable[[], Any]
        global_step: int

    def __init__(
        self,
        model: Model,
        forward: Function,
        *,
        evaluate: Function | None = None,
        predict: Function | None = None,
        allow_unused: bool = False,
    ) -> None:
        super().__init__()
        parts = parts_of(model)
        self._forward = self._evaluate = binding_of(forward)
        if evaluate is not None:
            self._evaluate = binding_of(evaluate, role="evaluate")
        self._predict = None if predict is None else binding_of(predict, role="predict")
        check_framework(parts, "torch")
        self.params = Entries(parts.params)
        if not any(parameter.requires_grad for parameter in self.parameters()):
            raise UsageError(
                "the model has no parameters to train. Return modules with parameters, or tensors with "
                f"requires_grad=True. Received: {sorted(parts.params)}"
            )
        self._optimizer, self._scheduler = parts.optimizer, parts.scheduler
        self._unchecked = not allow_unused

    # ------------------------------------------------------------ steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The cost of a batch."""
        forward = self._forward
        outcome = outcome_of(forward.call(batch, self.params.get(), training=True), name=forward.name)
        loss: Tensor = outcome[LOSS]
        if not getattr(loss, "requires_grad", False):
            self._refuse(loss)
        if self._unchecked:
            self._unchecked = False
            if self.global_step == 0:  # a newcomer's first batch, and that of a new start, is as any later one
                self._check_all_used(loss)
        self.log(f"{LOSS}_step", loss, prog_bar=True)
        for name, value in outcome.items():
            self.log(name, _float(value), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log the cost and the metrics of a batch, as means over the samples."""
        self._log_evaluation(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Do the same under another name."""
        self._log_evaluation(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        """Predictions for a batch."""
        return self.forward(batch)

    def forward(self, batch: Any) -> Any:
        """Predictions for a batch.

        Raises:
            UsageError: The program has no `predict`.
        """
        if self._predict is None:
            raise no_predict("module")
        return self._predict.call(batch, self.params.get(), training=False, partly=True)

    def _log_evaluation(self, batch: Any, prefix: str) -> None:
        evaluate = self._evaluate
        returned = evaluate.call(batch, self.params.get(), training=False)
        outcome = outcome_of(returned, name=evaluate.name, needs_loss=evaluate.function is self._forward.function)
        for name, value in outcome.items():
            self.log(f"{prefix}_{name}", _float(value), prog_bar=True, sync_dist=True)

    # ------------------------------------------------------------ optimizer

    def configure_optimizers(self) -> Any:
        """The model's optimizer and its scheduler.

        Raises:
            UsageError: There is no optimizer, or the given value does not make one.
        """
        make = self._optimizer
        if make is None or isinstance(make, Optimizer | str) or not callable(make):
            raise UsageError(
                'the "optimizer" of a model must be a class, a partial or a function that makes an optimizer of the '
                f"parameters that it is called with: partial(torch.optim.SGD, lr=0.1). Received: {make!r}"
            )
        optimizer = make(list(self.parameters()))
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f'"optimizer" must make an optimizer of torch. Received: {type(optimizer).__name__}')
        if self._scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self._scheduler(optimizer)}

    # ------------------------------------------------------------ checks

    def _refuse(self, loss: Any) -> NoReturn:
        check_tensor(loss, torch.is_tensor, name=self._forward.name, framework="torch")
        raise UsageError(
            f"the loss that {self._forward.name} returns has no gradient: it does not depend on a parameter, or was "
            "made with detach(), item() or no_grad(). Compute it from the modules and tensors in `params`"
        )

    def _check_all_used(self, loss: Tensor) -> None:
        used = _leaves_of(loss)
        if used is None:
            return
        unused = [name for name, p in self.named_parameters() if p.requires_grad and id(p) not in used]
        if unused:
            raise UsageError(
                "the loss of the first step does not depend on these parameters, so they would never change. Use them "
                "in forward(), freeze them with requires_grad_(False), or pass allow_unused=True if other batches use "
                f"them. Received: {', '.join(unused)}"
            )


def _leaves_of(loss: Tensor) -> set[int] | None:
    """Ids of the tensors that a gradient of it would reach.

    None if that cannot be known: checkpointed activations reach parameters that are not among their inputs.
    """
    found, seen = {id(loss)}, set[Any]()
    ahead: list[Any] = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction) and "Checkpoint" in type(node).__name__:
            return None  # torch's own, or DeepSpeed's
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        ahead += [following for following, _ in node.next_functions]
    return found


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and not value.is_floating_point() else value
