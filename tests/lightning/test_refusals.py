"""What elastic training cannot keep is refused before anything runs, naming what and what to use instead."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from ef_common.errors import MixedImportsError, UnsupportedError, UsageError
from ef_lightning import strategy_for
from ef_lightning.checks import check_optimizers, check_sync_batchnorm, check_trainer
from ef_lightning.host import HOSTS as TREES
from tests.lightning import training
from tests.lightning.conftest import HOSTS

pl = importlib.import_module(HOSTS[0])
Regression = training.regression(pl)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Predicting(Regression):  # type: ignore[misc, valid-type]
    def predict_step(self, batch: Any) -> None:
        pass


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


class OwnBatches(BatchSampler):
    pass


class Alternating(pl.utilities.CombinedLoader):  # type: ignore[misc, name-defined]
    def __next__(self) -> Any:
        return super().__next__()


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(int, 1)


class Divided(SequentialSampler):
    """Draws the part of one worker of two, without the fields of a DistributedSampler."""

    rank, world_size = 0, 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 8, self.world_size))

    def __len__(self) -> int:
        return 8 // self.world_size


def sequential() -> SequentialSampler:
    return SequentialSampler(training.data(8))


LOADERS: dict[str, tuple[Callable[[], Any], str]] = {
    "no_batches": (lambda: training.loader(8, None), "give it `batch_size=`"),
    "own_batches": (
        lambda: DataLoader(training.data(8), batch_sampler=OwnBatches(sequential(), 2, False)),
        "Received: batch_size=None, batch_sampler=OwnBatches",
    ),
    "own_iterator": (lambda: OwnLoader(training.data(8), 2), "dataset or into `collate_fn`"),
    "distributed_sampler": (
        lambda: training.loader(8, 2, sampler=DistributedSampler(training.data(8), 2, 0)),
        "Leave it out: ElasticFlow deals the samples",
    ),
    "divided_sampler": (
        lambda: training.loader(8, 2, sampler=Divided(training.data(8))),
        "Leave it out: ElasticFlow deals the samples",
    ),
    "endless_sampler": (lambda: training.loader(8, 2, sampler=Endless()), "Give it .* a `__len__`"),
    "one_after_the_other": (
        lambda: pl.utilities.CombinedLoader([training.loader(8), training.loader(8)], "sequential"),
        "Lightning does not support it",
    ),
    "own_combination": (lambda: Alternating([training.loader(8), training.loader(8)]), "Use one of its modes"),
    "no_loader": (lambda: [torch.zeros(2, 4)] * 3, "only a torch DataLoader"),
}


TORCH = set(LOADERS) - {"one_after_the_other", "own_combination", "no_loader"}
"""Those that are one DataLoader."""


@pytest.mark.parametrize("name", LOADERS)
def test_training_loader_that_cannot_be_dealt_raises(name: str) -> None:
    make, hint = LOADERS[name]
    module = Regression()
    module.training_step = lambda *args: pytest.fail("training has begun")
    with pytest.raises((UnsupportedError, UsageError), match=hint):
        training.trainer(pl, strategy_for(HOSTS[0])()).fit(module, make())


@pytest.mark.parametrize("name", [name for name in LOADERS if name in TORCH])
def test_evaluation_loader_that_cannot_be_dealt_raises(name: str) -> None:
    make, hint = LOADERS[name]
    with pytest.raises(UnsupportedError, match=hint):
        training.trainer(pl, strategy_for(HOSTS[0])()).predict(Predicting(), make())


def test_what_is_no_loader_at_all_among_several_is_lightnings_to_refuse() -> None:
    with pytest.raises(TypeError, match="invalid dataloader was passed"):
        training.trainer(pl, strategy_for(HOSTS[0])()).fit(Regression(), [training.loader(8), object()])


def test_several_loaders_with_a_fixed_global_batch_raise() -> None:
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(global_batch_size=4))
    with pytest.raises(UnsupportedError, match="Received: 2 training DataLoaders"):
        trainer.fit(Regression(), [training.loader(8), training.loader(8)])


class Short(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1))


def test_sampler_that_draws_less_than_it_says_raises() -> None:
    loader = training.loader(8, 2, sampler=Short(training.data(8)))
    with pytest.raises(UsageError, match=r"Expected: 8\. Received: 7"):
        training.trainer(pl, strategy_for(HOSTS[0])()).fit(Regression(), loader)


class Sharded(torch.nn.Parameter):
    device_mesh = None


class Fetching(Regression):  # type: ignore[misc, valid-type]
    def training_step(self, dataloader_iter: Any) -> Any:
        pass


class Lazy(Regression):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.lazy = torch.nn.LazyLinear(3)


class Split(Regression):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.split = Sharded(torch.zeros(3))


class Graph(Regression):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(3).to_sparse())


def callback(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"callbacks": [getattr(pl.callbacks, name)(**kwargs)]}


class FSDPPrecision(pl.plugins.precision.Precision):  # type: ignore[misc, name-defined]
    """Named as the one that needs FSDP to be installed."""


class OwnSync(pl.plugins.LayerSync):  # type: ignore[misc, name-defined]
    def apply(self, model: Any) -> Any:
        return model

    revert = apply


TRAINERS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "precision_of_another_strategy": ({"plugins": [FSDPPrecision()]}, Regression, "bf16-mixed"),
    "layer_sync_of_the_user": ({"plugins": [OwnSync()]}, Regression, "Use Trainer"),
    "fetching_step": ({}, Fetching, r"training_step\(batch, batch_idx\)"),
    "lazy_parameter": ({}, Lazy, "configure_model"),
    "sharded_parameter": ({}, Split, "whole model"),
    "sparse_buffer": ({}, Graph, "Make it dense"),
    "weight_averaging": (callback("StochasticWeightAveraging", swa_lrs=0.1), Regression, "EMAWeightAveraging"),
    "rate_finder": (callback("LearningRateFinder"), Regression, "python train.py"),
    "batch_size_finder": (callback("BatchSizeFinder"), Regression, 'strategy="auto"'),
    "pruning": (callback("ModelPruning", pruning_fn="l1_unstructured"), Regression, "Prune with one worker"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_that_cannot_be_elastic_raises(name: str) -> None:
    options, module, hint = TRAINERS[name]
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), **options)
    trainer.strategy.connect(module())
    with pytest.raises(UnsupportedError, match=hint):
        check_trainer(trainer, TREES[HOSTS[0]], elastic=True)


class Elsewhere(pl.accelerators.CPUAccelerator):  # type: ignore[misc, name-defined]
    """Its device is none that ElasticFlow knows."""

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xpu", 0)]

    def setup_device(self, device: torch.device) -> None:
        pass


def test_device_that_is_neither_cpu_nor_cuda_raises() -> None:
    module = Regression()
    before = training.weights(module)
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), accelerator=Elsewhere())
    with pytest.raises(UnsupportedError, match=r"Expected cpu or cuda\. Received: xpu"):
        trainer.fit(module, training.loader())
    assert training.weights(module) == before


def test_lbfgs_in_a_changing_world_raises() -> None:
    with pytest.raises(UnsupportedError, match="Use SGD"):
        check_optimizers([torch.optim.LBFGS(Regression().parameters())])


def test_unknown_backend_raises() -> None:
    with pytest.raises(UsageError, match=r"Expected one of .*gloo.* Received: backend='mpi'"):
        strategy_for(HOSTS[0])(backend="mpi")


def test_gathering_with_gradients_in_a_step_that_cannot_be_made_again_raises() -> None:
    strategy = strategy_for(HOSTS[0])()
    strategy._worker = SimpleNamespace(elastic=True)
    strategy._trainer = SimpleNamespace(training=True, interrupted=False)
    with pytest.raises(UnsupportedError, match="manual optimization"):
        strategy.all_gather(torch.zeros(1, requires_grad=True), sync_grads=True)


def test_synchronized_batch_norm_in_steps_that_cannot_be_made_again_raises() -> None:
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), sync_batchnorm=True)
    trainer.strategy.connect(Regression())
    check_sync_batchnorm(trainer, global_batch_size=None)
    with pytest.raises(UnsupportedError, match="Leave out sync_batchnorm"):
        check_sync_batchnorm(trainer, global_batch_size=8)
    trainer.lightning_module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="manual optimization"):
        check_sync_batchnorm(trainer, global_batch_size=None)


class Activated(torch.nn.BatchNorm1d):
    """A BatchNorm layer with an activation, as in image models."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).relu()


class ActivatedSync(torch.nn.SyncBatchNorm):
    """The same, converted."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return super().forward(values).relu()


@pytest.mark.parametrize(
    ("layer", "options", "refused"),
    [
        (Activated, {"sync_batchnorm": True}, True),
        (ActivatedSync, {}, True),
        (Activated, {}, False),
        (torch.nn.BatchNorm3d, {"sync_batchnorm": True}, False),
        (torch.nn.SyncBatchNorm, {"sync_batchnorm": True}, False),
    ],
)
def test_synchronized_batch_norm_whose_forward_does_more_raises(
    layer: Any, options: dict[str, Any], refused: bool
) -> None:
    trainer, module = training.trainer(pl, strategy_for(HOSTS[0])(), **options), Regression()
    module.net.insert(0, layer(4))
    trainer.strategy.connect(module)
    if refused:
        with pytest.raises(UnsupportedError, match=rf"net\.0 has one of its own.*Received: .*\.{layer.__name__}$"):
            check_sync_batchnorm(trainer, global_batch_size=None)
        module.net[0].eval()  # frozen: its own forward is called
        frozen = pytest.raises(UnsupportedError) if layer is ActivatedSync else nullcontext()
        with frozen:
            check_sync_batchnorm(trainer, global_batch_size=None)
    else:
        check_sync_batchnorm(trainer, global_batch_size=None)


def test_converted_batch_norm_in_steps_that_cannot_be_made_again_raises() -> None:
    trainer, module = training.trainer(pl, strategy_for(HOSTS[0])()), Regression()
    module.net.insert(0, torch.nn.SyncBatchNorm(4))
    trainer.strategy.connect(module)
    check_sync_batchnorm(trainer, global_batch_size=None)
    with pytest.raises(UnsupportedError, match="Leave the BatchNorm layers as they were"):
        check_sync_batchnorm(trainer, global_batch_size=8)
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match=r"torch.nn.SyncBatchNorm needs .* manual optimization"):
        check_sync_batchnorm(trainer, global_batch_size=None)


class SparseOfItsOwn(torch.autograd.Function):
    """Has a sparse gradient, as code of users may."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.shape = weight.shape
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.ones(ctx.shape).to_sparse(1)


def test_sparse_gradient_of_users_raises_also_as_long_as_nobody_has_joined(world_of_one: Path) -> None:
    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return SparseOfItsOwn.apply(self.net[0].weight)  # type: ignore[no-untyped-call]

    module = Module()
    before = training.weights(module)
    with pytest.raises(UnsupportedError, match="Make it dense in your own function"):
        training.trainer(pl, strategy_for(HOSTS[0])()).fit(module, training.loader())
    assert training.weights(module) == before


def test_callback_of_the_other_class_tree_raises() -> None:
    other = importlib.import_module(HOSTS[1])
    trainer = training.trainer(pl, strategy_for(HOSTS[0])(), callbacks=[other.callbacks.Timer()])
    with pytest.raises(MixedImportsError, match="Timer is of `pytorch_lightning`"):
        trainer.fit(Regression(), training.loader())


def test_strategy_of_the_other_class_tree_is_named_by_lightning() -> None:
    with pytest.raises(ValueError, match="ElasticFlowStrategy for a Trainer of pytorch_lightning"):
        training.trainer(pl, strategy_for(HOSTS[1])())


def test_unknown_class_tree_raises() -> None:
    with pytest.raises(UsageError, match="unknown Lightning"):
        strategy_for("lightning")


ORDERS = """
import ef_lightning
from ef_lightning import ElasticFlowStrategy      # both are installed, and neither is imported yet
from ef_common.errors import MixedImportsError, UsageError
try:
    ElasticFlowStrategy()
except UsageError as error:
    print("too early:", error)
import pytorch_lightning as pl
print(isinstance(ElasticFlowStrategy(), pl.strategies.Strategy))
print(type(pl.Trainer(accelerator="cpu", strategy="elasticflow", logger=False).strategy).__name__)
print(ef_lightning.ElasticFlowStrategy is ef_lightning.strategy_for("pytorch_lightning"))
import lightning.pytorch
print(type(lightning.pytorch.Trainer(accelerator="cpu", strategy="elasticflow", logger=False).strategy).__name__)
looked_for = ef_lightning.ElasticFlowStrategy      # as tools do that describe or document what they find
try:
    looked_for()
except MixedImportsError as error:
    print("mixed:", error)
"""


@pytest.mark.thorough
def test_strategy_is_found_in_any_order_of_imports() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ORDERS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    early, *between, mixed = done.stdout.splitlines()
    assert "import `lightning.pytorch` or `pytorch_lightning` before" in early
    assert between == ["True", "ElasticFlowStrategy", "True", "ElasticFlowStrategy"]
    assert all(f"strategy_for('{name}')" in mixed for name in HOSTS)
