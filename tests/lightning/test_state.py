"""What a newcomer is sent, and memory that it has at hand for it before the others wait."""

from __future__ import annotations

import copy
import importlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ef_common.collectives.torch_codec import TENSORS
from ef_common.errors import ElasticFlowError
from ef_lightning import strategy_for
from ef_lightning.state import state_kinds
from tests.lightning import training
from tests.lightning.conftest import HOSTS

SHAPES = [(3, 2), (3,)]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in SHAPES]


def kept(optimizer: torch.optim.Optimizer) -> Counter[Any]:
    """What the optimizer really keeps, after a step, in tensors of the shapes of its parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return Counter((value.dtype, tuple(value.shape)) for value in values if value.ndim)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}]),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    ],
)
def test_kinds_of_state_are_those_that_the_optimizer_will_keep(make: Any) -> None:
    optimizer = make(parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps `step`
    found = Counter((dtype, tuple(shape)) for dtype, shape in state_kinds(optimizer))
    assert not optimizer.state
    assert scheduler.last_epoch == 0
    assert all(torch.equal(p, torch.ones_like(p)) and p.grad is None for p in optimizer.param_groups[0]["params"])
    assert found == kept(optimizer)


def test_optimizer_that_wants_a_closure_is_left_alone() -> None:
    assert state_kinds(torch.optim.LBFGS(parameters())) == []


@pytest.mark.parametrize("host", HOSTS)
def test_memory_that_a_newcomer_prepares_is_on_the_host_whatever_the_default_device_is(host: str) -> None:
    pl = importlib.import_module(host)
    found: list[torch.Tensor] = []

    class Prepares(training.regression(pl)):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            with torch.device("meta"):
                state.prepare()
            found.extend(state._transfer.prepared)
            state._transfer.prepared = ()

    training.trainer(pl, strategy_for(host)()).fit(Prepares(), training.loader(9))
    assert found
    assert {tensor.device.type for tensor in found} == {"cpu"}


@pytest.mark.parametrize("extra", [None, {"seen": 3}, [torch.ones(2)]], ids=["nothing", "dict", "list of tensors"])
def test_newcomer_prepares_for_a_model_whose_state_is_not_of_tensors_alone(extra: Any) -> None:
    pl = importlib.import_module(HOSTS[0])
    shapes: list[tuple[int, ...]] = []

    class Extra(training.regression(pl)):  # type: ignore[misc]
        def get_extra_state(self) -> Any:
            return extra

        def set_extra_state(self, state: Any) -> None: ...

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            state.prepare()
            shapes.extend(tuple(tensor.shape) for tensor in state._transfer.prepared)
            state._transfer.prepared = ()

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1).fit(Extra(), training.loader(9))
    assert (8, 4) in shapes


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("host", HOSTS)
def test_hyper_parameters_of_any_type_keep_no_newcomer_out(host: str) -> None:
    pl = importlib.import_module(host)
    config = OmegaConf.create({"width": 4})

    class Own(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def on_train_batch_end(self, *args: Any) -> None:
            self.sent = json.loads(self.trainer.strategy.session.state.describe())

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

        def train_dataloader(self) -> Any:
            return training.loader(9)

    module = Own()
    training.trainer(pl, strategy_for(host)()).fit(module, datamodule=Data(config))
    keys = [key for key, _ in module.sent["tree"][1]]
    assert "checkpoint" in keys
    assert "error" not in keys


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("host", HOSTS)
def test_hooks_find_a_newcomers_own_hyper_parameters_in_the_state_that_it_takes_over(host: str) -> None:
    pl = importlib.import_module(host)

    class Own(training.regression(pl)):  # type: ignore[misc]
        def __init__(self, width: int = 4, path: Any = object) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.seen: list[Any] = []

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen.append(checkpoint["hyper_parameters"])

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            state._load_checkpoint(state._collect())

    module = Own()
    training.trainer(pl, strategy_for(host)()).fit(module, training.loader(9))
    assert module.seen
    assert all(seen == {"width": 4, "path": object} for seen in module.seen)


class ByFactors(torch.optim.SGD):
    """Keeps values of its own type, in a list, as SOAP does."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("factors", [torch.full((2,), 1 / 3), torch.full((2,), 2 / 3)])
        return result


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.Adam, ByFactors])
def test_state_of_optimizers_keeps_its_types_in_a_newcomer(cls: Any, precision: str) -> None:
    pl = importlib.import_module(HOSTS[0])
    found: list[Any] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            _, features, target = batch
            return (self.net(features) - target).square().mean()

        def configure_optimizers(self) -> Any:
            return cls(self.parameters(), 0.05)

        def on_train_batch_end(self, *args: Any) -> None:
            state, optimizer = self.trainer.strategy.session.state, self.optimizers().optimizer
            before = copy.deepcopy(list(optimizer.state.values()))
            state._load_optimizers(TENSORS.loads(TENSORS.dumps(state._collect())))
            found.append((before, copy.deepcopy(list(optimizer.state.values()))))

    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=2, precision=precision)
    trainer.fit(Own(), training.loader(9))
    for before, after in found:
        leaves = zip(tree_leaves(before), tree_leaves(after), strict=True)
        assert all(one.dtype == other.dtype and torch.equal(one, other) for one, other in leaves)
    assert len(found) == 2


def test_state_of_optimizers_that_a_hook_has_changed_has_the_types_of_the_parameters() -> None:
    pl = importlib.import_module(HOSTS[0])
    found: list[Any] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.05)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for saved in checkpoint["optimizer_states"]:
                saved["state"] = tree_map(
                    lambda leaf: leaf.half() if isinstance(leaf, torch.Tensor) else leaf, saved["state"]
                )

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            state._load_optimizers(TENSORS.loads(TENSORS.dumps(state._collect())))
            found.extend(leaf.dtype for leaf in tree_leaves(list(self.optimizers().optimizer.state.values())))

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=2).fit(Own(), training.loader(9))
    assert set(found) <= {torch.float32, torch.float16}
    assert found.count(torch.float32) >= 2 * found.count(torch.float16)  # the counts of steps are never cast
    assert len(found) == 2 * 4 * 3


def test_hook_of_checkpoints_that_fails_keeps_newcomers_out_and_ends_no_member(
    world_of_one: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pl = importlib.import_module(HOSTS[0])
    told: list[Any] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            raise KeyError("adapters")

        def on_train_batch_end(self, *args: Any) -> None:
            told.append(TENSORS.decode(self.trainer.strategy.session.state.describe(), [])["error"])

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1, enable_checkpointing=False).fit(
        Own(), training.loader(9)
    )
    assert "on_save_checkpoint, or a state_dict(), has failed" in told[0]
    assert "KeyError('adapters')" in told[0]
    assert "a newcomer cannot join" in caplog.text


def test_what_start_hooks_change_in_place_is_the_others_again() -> None:
    pl = importlib.import_module(HOSTS[0])
    found: list[Any] = []

    class Remembering(pl.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.seen = torch.ones(3)

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]

    class Own(training.regression(pl)):  # type: ignore[misc]
        def tensors(self) -> list[torch.Tensor]:
            (remembering,) = (c for c in self.trainer.callbacks if isinstance(c, Remembering))
            kept = tree_leaves(list(self.optimizers().optimizer.state.values()))
            return [remembering.seen, *self.parameters(), *(leaf for leaf in kept if isinstance(leaf, torch.Tensor))]

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            found.append([tensor.detach().clone() for tensor in self.tensors()])
            state._adopt(TENSORS.loads(TENSORS.dumps(state._collect())))
            with torch.no_grad():  # as a hook may do when an epoch begins
                for tensor in self.tensors():
                    tensor.zero_()
            state.adopt_again()
            found.append([tensor.detach().clone() for tensor in self.tensors()])

    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1, callbacks=[Remembering()])
    trainer.fit(Own(), training.loader(9))
    expected, taken = found
    assert all(torch.equal(one, other) for one, other in zip(expected, taken, strict=True))
    assert len(taken) == 1 + 4 + 4


def halved(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.half() for name, tensor in saved.items()}


def without_frozen(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in saved.items() if not name.startswith("teacher")}


@pytest.mark.parametrize(
    "save", [halved, without_frozen, lambda saved: {k: 0.5 * v for k, v in saved.items()}, lambda saved: None]
)
def test_newcomer_has_the_others_weights_whatever_a_hook_puts_into_checkpoints(save: Any) -> None:
    pl = importlib.import_module(HOSTS[0])
    found: list[dict[str, Any]] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        strict_loading = False

        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.BatchNorm1d(4).requires_grad_(False)
            self.register_buffer("table", torch.ones(2), persistent=False)
            self.register_buffer("ones", torch.ones(1).expand(3), persistent=False)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            saved = save(checkpoint.pop("state_dict"))
            if saved is not None:
                checkpoint["state_dict"] = saved

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint.setdefault("state_dict", self.state_dict())

        def tensors_in_place(self) -> list[torch.Tensor]:
            return [tensor for tensor in (*self.parameters(), *self.buffers()) if tensor.stride() != (0,)]

        def tensors(self) -> dict[str, torch.Tensor]:
            return {name: t.detach().clone() for name, t in (*self.named_parameters(), *self.named_buffers())}

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            received = TENSORS.loads(TENSORS.dumps(state._collect()))
            found.append(self.tensors())
            with torch.no_grad():  # a newcomer begins with others
                for tensor in self.tensors_in_place():
                    tensor.add_(1)
            self.ones = torch.zeros(1).expand(3)
            self.table = torch.ones(3)
            state._load_checkpoint(received)
            found.append(self.tensors())
            self.table = torch.ones(2)

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1).fit(Own(), training.loader(9))
    expected, taken = found
    assert taken.pop("table").tolist() == [1.0] * 3  # the buffer's shape is the worker's own
    assert all(torch.equal(tensor, expected[name]) for name, tensor in taken.items())


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("lacks_it", [False, True])
def test_part_of_the_model_that_a_hook_puts_into_checkpoints_is_the_newcomers_own(host: str, lacks_it: bool) -> None:
    pl = importlib.import_module(host)
    loaded: list[Any] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.losses = nn.ModuleList([nn.BatchNorm1d(2)])

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint.update(criterion=self.losses[0], model=self)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            loaded.append([checkpoint["criterion"] is self.losses[0], checkpoint["model"] is self])

        def on_train_batch_end(self, *args: Any) -> None:
            state, (loss,) = self.trainer.strategy.session.state, self.losses
            nn.init.constant_(loss.running_mean, 7.0)
            received = TENSORS.loads(TENSORS.dumps(state._collect()))
            nn.init.constant_(loss.running_mean, 0.0)
            if lacks_it:
                self.losses = nn.ModuleList()
                with pytest.raises(ElasticFlowError, match=r"checkpoint\['criterion'\] a part that this model lacks"):
                    state._adopt(received)
            else:
                state._adopt(received)
                assert loss.running_mean.tolist() == [7.0, 7.0]

    training.trainer(pl, strategy_for(host)(), max_steps=1, enable_checkpointing=False).fit(Own(), training.loader(9))
    assert loaded == [[True, True]] * (not lacks_it)


@pytest.mark.parametrize("averages", [False, True])
def test_weights_that_a_checkpoint_holds_are_sent_once(averages: bool) -> None:
    pl = importlib.import_module(HOSTS[0])
    sent: list[Any] = []

    class Own(training.regression(pl)):  # type: ignore[misc]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if averages:
                checkpoint["state_dict"]["net.0.weight"] = torch.zeros(8, 4)

        def on_train_batch_end(self, *args: Any) -> None:
            sent.append(self.trainer.strategy.session.state._collect()["weights"])

    training.trainer(pl, strategy_for(HOSTS[0])(), max_steps=1).fit(Own(), training.loader(9))
    assert [*sent[0]["parameters"]] == (["net.0.weight"] if averages else [])
    assert not sent[0]["buffers"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("has_function", [True, False])
def test_newcomer_makes_the_function_of_a_schedule_for_the_workers_of_the_others_start(
    host: str, has_function: bool
) -> None:
    pl = importlib.import_module(host)

    class Own(training.regression(pl)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def configure_optimizers(self) -> Any:
            num_workers = self.trainer.world_size
            self.seen.append(num_workers)
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            if has_function:
                return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / num_workers)]
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 8 // num_workers)]

        def on_train_batch_end(self, *args: Any) -> None:
            state = self.trainer.strategy.session.state
            collected = {**state._collect(), "world_size_at_start": 4}
            for _ in range(2):
                state._load_optimizers(collected)
            self.sent = state._collect()

    module = Own()
    trainer = training.trainer(pl, strategy_for(host)(), max_steps=1)
    trainer.fit(module, training.loader(9))
    assert module.seen == ([1, 4] if has_function else [1])
    assert module.sent["world_size_at_start"] == 4
    assert all(set(factors) == {0.25} for factors in module.sent["factors"])
    assert trainer.world_size == 1
