"""A module of a `model` and a `forward` is as one that was written by hand."""

from __future__ import annotations

import copy
import importlib
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import ef_lightning
from ef_common.errors import UsageError
from ef_lightning import host as hosts
from tests.lightning.conftest import HOSTS
from tests.lightning.training import trainer, weights

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.fixture(autouse=True)
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The class tree that the program works with: other tests of this process may have imported the other one."""
    name = str(getattr(request, "param", "lightning.pytorch"))
    monkeypatch.setattr(hosts, "detect", lambda: hosts.HOSTS[name])
    return name


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))


def model() -> dict[str, Any]:
    torch.manual_seed(3)
    return {
        "net": net(),
        "scale": torch.ones(1, requires_grad=True),
        "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
    }


def forward(x: Tensor, y: Tensor, params: Any) -> Any:
    error = params["net"](x) * params["scale"] - y
    return {"loss": error.square().mean(), "error": error.detach().abs().mean()}


def predict(x: Tensor, params: Any) -> Tensor:
    return params["net"](x) * params["scale"]


class ByHand(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.scale = net(), nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self.net(x) * self.scale - y).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def data(length: int = 30) -> TensorDataset:
    noise = torch.Generator().manual_seed(7)
    x = torch.randn(length, 4, generator=noise)
    return TensorDataset(x, x.sum(1, keepdim=True))


def loader(length: int = 30, **kwargs: Any) -> Any:
    return DataLoader(data(length), 4, **kwargs)


def fit(module: Any, **kwargs: Any) -> Any:
    torch.manual_seed(5)
    found = trainer(pl, "auto", **kwargs)
    found.fit(module, loader(shuffle=True))
    return found


def by_name(module: nn.Module) -> dict[str, Any]:
    return {name.removeprefix("params."): value for name, value in module.state_dict().items()}


# ---------------------------------------------------------------- as by hand


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}],
    ids=["plain", "mixed", "accumulated", "clipped"],
)
def test_weights_are_bit_for_bit_those_of_the_module_by_hand(options: dict[str, Any]) -> None:
    program, by_hand = ef_lightning.module(model, forward), ByHand()
    fit(program, **options)
    fit(by_hand, **options)
    ours, theirs = by_name(program), by_name(by_hand)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["scale"], torch.ones(1))


@pytest.mark.parametrize("host", HOSTS, indirect=True)
def test_module_is_of_the_class_tree_of_the_program(host: str) -> None:
    tree = importlib.import_module(host)
    module = ef_lightning.module(model, forward)
    assert isinstance(module, tree.LightningModule)
    trainer(tree, ef_lightning.strategy_for(host)()).fit(module, loader(), loader(10))
    assert not torch.equal(module.params.get()["scale"], torch.ones(1))


def test_module_without_a_lightning_that_is_imported_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "detect", lambda: None)
    with pytest.raises(UsageError, match=r"import `lightning\.pytorch` or"):
        ef_lightning.module(model, forward)


def test_dict_batches_are_bound_by_name() -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            x, y = data(8)[index]
            return {"y": y, "x": x}

    found = []
    for batches in (DataLoader(Rows(), 4), loader(8)):
        module = ef_lightning.module(model, forward)
        torch.manual_seed(5)
        trainer(pl, "auto").fit(module, batches)
        found.append(weights(module))
    assert found[0] == found[1]


def test_evaluation_is_the_mean_over_samples_in_eval_mode_without_gradients() -> None:
    seen = []

    def told(x: Tensor, y: Tensor, params: Any, training: bool) -> Any:
        seen.append((training, params["net"].training, torch.is_grad_enabled()))
        return forward(x, y, params)

    module = ef_lightning.module(model, told)
    (results,) = trainer(pl, "auto").validate(module, loader(30), verbose=False)  # the last batch has 2 samples
    module.eval()
    with torch.no_grad():
        expected = forward(*data(30).tensors, module.params.get())
    assert results["val_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert results["val_error"] == pytest.approx(float(expected["error"]), rel=1e-5)
    assert set(seen) == {(False, False, False)}
    (tested,) = trainer(pl, "auto").test(module, loader(30), verbose=False)
    assert tested["test_loss"] == results["val_loss"]


def test_evaluate_may_be_another_function_without_a_loss() -> None:
    def evaluate(x: Tensor, y: Tensor, params: Any) -> Any:
        return {"close": (predict(x, params) - y).abs() < 1}

    def reduced(x: Tensor, y: Tensor, params: Any) -> Any:
        return {"close": evaluate(x, y, params)["close"].float().mean(), "positive": (y > 0).sum() > 2}

    module = ef_lightning.module(model, forward, evaluate=reduced)
    (results,) = trainer(pl, "auto").validate(module, loader(), verbose=False)
    assert set(results) == {"val_close", "val_positive"}
    module = ef_lightning.module(model, forward, evaluate=evaluate)
    with pytest.raises(UsageError, match=r"evaluate\(\) returns must be scalars"):
        trainer(pl, "auto").validate(module, loader(), verbose=False)


def test_predictions_are_of_the_predict_function() -> None:
    module = ef_lightning.module(model, forward, predict=predict)
    batches = trainer(pl, "auto").predict(module, loader(10))
    module.eval()
    expected = predict(data(10).tensors[0], module.params.get())
    torch.testing.assert_close(torch.cat(batches), expected)
    with pytest.raises(UsageError, match=r"has no `predict`.*module\(…, predict=function\)"):
        trainer(pl, "auto").predict(ef_lightning.module(model, forward), loader(10))


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole = ef_lightning.module(model, forward_without_dropout)
    trainer(pl, "auto", max_epochs=4).fit(whole, loader())
    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    trainer(pl, "auto", max_epochs=2, **saving).fit(ef_lightning.module(model, forward_without_dropout), loader())
    resumed = ef_lightning.module(model, forward_without_dropout)
    trainer(pl, "auto", max_epochs=4, **saving).fit(resumed, loader(), ckpt_path=tmp_path / "last.ckpt")
    assert weights(resumed) == weights(whole)


@pytest.mark.parametrize("host", HOSTS, indirect=True)
def test_module_of_a_checkpoint_is_made_of_the_same_functions(host: str, tmp_path: Path) -> None:
    tree = importlib.import_module(host)
    module = ef_lightning.module(model, forward, predict=predict)
    training = trainer(tree, "auto")
    training.fit(module, loader())
    training.save_checkpoint(tmp_path / "a.ckpt")
    functions = {"model": model, "forward": forward, "predict": predict}
    loaded = type(module).load_from_checkpoint(tmp_path / "a.ckpt", **functions)
    assert type(loaded) is type(module)
    assert weights(loaded) == weights(module)
    assert weights(loaded) != weights(ef_lightning.module(model, forward))
    batches = [torch.cat(trainer(tree, "auto").predict(made, loader(10))) for made in (module, loaded)]
    assert torch.equal(*batches)
    with pytest.raises(TypeError, match="'model' and 'forward'"):
        type(module).load_from_checkpoint(tmp_path / "a.ckpt")


def forward_without_dropout(x: Tensor, y: Tensor, params: Any) -> Any:
    params["net"][1].p = 0.0
    return forward(x, y, params)


def test_loggers_callbacks_and_summary_see_what_they_see_by_hand(tmp_path: Path) -> None:
    logger, stopping = CSVLogger(tmp_path), EarlyStopping("val_loss", min_delta=100.0, patience=1)
    module = ef_lightning.module(model, forward)
    found = trainer(pl, "auto", logger=logger, log_every_n_steps=1, callbacks=[stopping], max_epochs=9)
    found.fit(module, loader(), loader(10))
    assert found.current_epoch == 2
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0]
    assert {"loss", "error", "val_loss", "val_error"} <= set(header.split(","))
    assert "Linear" in str(pl.utilities.model_summary.ModelSummary(module, max_depth=-1))


# ---------------------------------------------------------------- parts of a model


def test_parts_of_all_kinds_are_trained_and_moved() -> None:
    shared = torch.zeros(4, 1, requires_grad=True)

    def parts() -> dict[str, Any]:
        return {
            "layers": [nn.Linear(4, 4), {"weight": shared}],
            "head": (shared, torch.full((1,), 2.0)),
            "power": 2,
            "optimizer": torch.optim.SGD,
        }

    def cost(x: Tensor, y: Tensor, params: Any) -> Tensor:
        hidden = params["layers"][0](x) @ params["layers"][1]["weight"] @ params["head"][0].T
        assert isinstance(params["head"], tuple)
        return ((hidden * params["head"][1] - y) ** params["power"]).mean()

    module = ef_lightning.module(parts, cost)
    assert len(list(module.parameters())) == 3
    assert sorted(dict(module.named_buffers())) == ["params.head.1"]
    assert module.params.get()["head"][1].dtype == torch.float32
    module.double()
    found = module.params.get()
    assert found["head"][1].dtype == found["head"][0].dtype == torch.float64
    assert found["head"][0] is found["layers"][1]["weight"]
    again = copy.deepcopy(module)
    again.params.get()["head"][0].data += 1
    assert not module.params.get()["head"][0].any()


def test_tensor_that_was_computed_becomes_a_parameter() -> None:
    module = ef_lightning.module({"w": torch.ones(2, requires_grad=True) * 0.1}, lambda x, params: x)
    (parameter,) = module.parameters()
    assert parameter.is_leaf
    assert parameter.tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("name", ["train", "a.b"])
def test_key_that_torch_does_not_take_raises(name: str) -> None:
    with pytest.raises(UsageError, match=f"choose another key. Received: '{name}'"):
        ef_lightning.module({name: nn.Linear(1, 1)}, lambda x, params: x)


# ---------------------------------------------------------------- mistakes


def losses(**changes: Any) -> Any:
    def cost(x: Tensor, y: Tensor, params: Any) -> Any:
        return changes["returns"](F.mse_loss(predict(x, params), y, reduction="none"))

    return cost


MISTAKES = [
    (losses(returns=lambda errors: errors), r"scalars that are means.* 'loss' of shape \(4, 1\)"),
    (losses(returns=lambda errors: {"accuracy": 1.0}), 'with the cost as "loss"'),
    (losses(returns=lambda errors: errors.mean().item()), r"must be a tensor of torch.* Received: builtins\.float"),
    (losses(returns=lambda errors: errors.mean().detach()), "has no gradient"),
    (lambda x, y, params: params["net"](x).mean(), r"does not depend on these.* Received: params\.scale"),
    (lambda x, params: params["net"](x).mean(), "a batch has more entries"),
    (lambda x, y, z, params: params["net"](x).mean(), "no entry of the batch is for `z`"),
]


@pytest.mark.parametrize(("mistaken", "message"), MISTAKES)
def test_mistake_in_forward_raises_before_an_update(mistaken: Any, message: str) -> None:
    module = ef_lightning.module(model, mistaken)
    before = weights(module)
    with pytest.raises(UsageError, match=message):
        fit(module)
    assert weights(module) == before


def test_parameter_that_is_not_used_is_allowed_if_the_user_says_so() -> None:
    fit(ef_lightning.module(model, lambda x, y, params: params["net"](x).mean(), allow_unused=True))


def test_parameter_that_later_batches_do_not_use_is_no_mistake() -> None:
    calls = []

    def cost(x: Tensor, y: Tensor, params: Any) -> Tensor:
        calls.append(0)
        return forward(x, y, params)["loss"] if len(calls) == 1 else params["net"](x).square().mean()

    fit(ef_lightning.module(model, cost))


def test_parameter_that_the_first_batch_after_a_new_start_does_not_use_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "epoch.ckpt"
    fit(ef_lightning.module(model, forward), max_epochs=1).save_checkpoint(file)
    again = trainer(pl, "auto", max_epochs=2)
    module = ef_lightning.module(model, lambda x, y, params: params["net"](x).square().mean())
    again.fit(module, loader(shuffle=True), ckpt_path=file)
    assert again.current_epoch == 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_parameters_within_a_checkpointed_part_are_used(use_reentrant: bool) -> None:
    def cost(x: Tensor, y: Tensor, params: Any) -> Tensor:
        found = checkpoint(params["net"], x.requires_grad_(), use_reentrant=use_reentrant)
        return (found * params["scale"] - y).square().mean()

    module = ef_lightning.module(model, cost)
    before = weights(module)
    fit(module)
    assert all(new != old for new, old in zip(weights(module), before, strict=True))


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of what it rounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_function_of_the_users_hides_no_parameter_that_is_not_used() -> None:
    module = ef_lightning.module(model, lambda x, y, params: Straight.apply(params["net"](x)).square().mean())
    with pytest.raises(UsageError, match=r"does not depend on these parameters.*Received: params\.scale"):
        fit(module)


MODELS = [
    ({"size": torch.zeros(1)}, "no parameters to train"),
    ({"net": nn.Linear(1, 1).requires_grad_(False)}, "no parameters to train"),
    ({"size": 3}, "must return modules or tensors of torch"),
]


@pytest.mark.parametrize(("mistaken", "message"), MODELS)
def test_model_without_parameters_raises(mistaken: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ef_lightning.module(mistaken, forward)


OPTIMIZERS = [
    (None, r'the "optimizer" of a model must be a class.* Received: None'),
    ("sgd", "Received: 'sgd'"),
    (torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1), "Received: SGD"),
    (lambda parameters: parameters, "must make an optimizer of torch. Received: list"),
]


@pytest.mark.parametrize(("optimizer", "message"), OPTIMIZERS)
def test_optimizer_that_is_none_raises_when_it_is_needed(optimizer: Any, message: str) -> None:
    module = ef_lightning.module({"net": net(), "optimizer": optimizer}, lambda x, y, params: params["net"](x).mean())
    trainer(pl, "auto").validate(module, loader(), verbose=False)
    with pytest.raises(UsageError, match=message):
        fit(module)
