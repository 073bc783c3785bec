"""The state that a newcomer receives: what a Lightning checkpoint holds, and what it forgets.

A checkpoint is enough to start a new Trainer. A newcomer goes on in the middle of an epoch with others, and a
difference in what anybody logs, monitors or saves would make the workers' next collectives differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ef_common.collectives import codec
from ef_common.errors import ElasticFlowError, UnsupportedError
from ef_lightning import hooks
from ef_lightning.host import Host
from ef_lightning.train_loader import ElasticLoader

_SMALL_BYTES = 1 << 20
_CHUNK_BYTES = 8 << 20
_NOT_SENT = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")


class TrainerState:
    """The state of one Trainer, as the session's port `State` wants it.

    Args:
        trainer: The Trainer.
        host: Its class tree.
        loader: The training loader; None before it is set up.
        rebuild: Called with the names of the parameters whose gradients the others reduce.
        reduced: Returns these names.
    """

    def __init__(
        self,
        trainer: Any,
        host: Host,
        *,
        loader: Callable[[], ElasticLoader | None],
        reduced: Callable[[], list[str]],
        rebuild: Callable[[list[str]], None],
    ) -> None:
        self._trainer = trainer
        self._host = host
        self._loader = loader
        self._reduced = reduced
        self._rebuild = rebuild
        self._outgoing: list[Tensor] = []
        self._incoming: list[Tensor] = []
        self._packed: list[Tensor] = []

    # ------------------------------------------------------------ port

    def describe(self) -> bytes:
        """Header of this worker's state. What cannot be sent is the newcomer's error, not this worker's."""
        try:
            header, self._outgoing = codec.encode(self._collect(), what="state")
        except UnsupportedError as error:
            header, self._outgoing = codec.encode({"error": str(error)})
        return header

    def tensors(self, header: bytes | None) -> Sequence[Tensor]:
        """The state as few large tensors of bytes."""
        if header is None:
            return _pack(self._outgoing)
        self._incoming = codec.room(header)
        self._packed = _pack(self._incoming)
        return self._packed

    def adopt(self, header: bytes) -> None:
        """Go on from the state that has been received."""
        _unpack(self._packed, self._incoming)
        state = codec.decode(header, self._incoming)
        self._incoming, self._packed = [], []
        if "error" in state:
            raise ElasticFlowError(f"the others cannot send their state: {state['error']}")
        self._adopt(state)

    # ------------------------------------------------------------ collect

    def _collect(self) -> dict[str, Any]:
        trainer = self._trainer
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for key in (*_NOT_SENT, "loops"):
            checkpoint.pop(key, None)
        loader = self._loader()
        return {
            "checkpoint": checkpoint,
            "loops": hooks.loop_progress(trainer),
            "metrics": hooks.metric_dicts(trainer),
            "results": [_describe_result(key, result) for key, result in hooks.epoch_results(trainer).items()],
            "checkpoint_callbacks": [self._private(c) for c in trainer.callbacks if self._is_checkpoint(c)],
            "loggers": logger_versions(trainer),
            "should_stop": bool(trainer.should_stop),
            "loader": None if loader is None else loader.state(),
            "reduced": self._reduced(),
        }

    def _is_checkpoint(self, callback: Any) -> bool:
        return isinstance(callback, self._host.get("callbacks", "ModelCheckpoint"))

    def _private(self, callback: Any) -> dict[str, Any]:
        """Fields of a ModelCheckpoint that it does not save: where it writes, what it has written."""
        return {k: v for k, v in vars(callback).items() if _is_plain(v) and k != "_last_time_checked"}

    # ------------------------------------------------------------ adopt

    def _adopt(self, state: dict[str, Any]) -> None:
        trainer, checkpoint = self._trainer, state["checkpoint"]
        callbacks = [c for c in trainer.callbacks if self._is_checkpoint(c)]
        for callback, private in zip(callbacks, state["checkpoint_callbacks"], strict=True):
            vars(callback).update(private)
        self._load_checkpoint(checkpoint)
        hooks.load_loop_progress(trainer, state["loops"])
        for name, metrics in hooks.metric_dicts(trainer).items():
            metrics.clear()
            metrics.update(state["metrics"][name])
        for described in state["results"]:
            _add_result(self._host, trainer, described)
        set_logger_versions(trainer, state["loggers"])
        trainer.should_stop = state["should_stop"]
        self._rebuild(state["reduced"])
        loader = self._loader()
        if loader is not None and state["loader"] is not None:
            loader.load_state(state["loader"])

    def _load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trainer = self._trainer
        strategy = trainer.strategy
        call = self._host.get("trainer.call", "_call_lightning_module_hook")
        call(trainer, "on_load_checkpoint", checkpoint)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)
        for config, scheduler in zip(strategy.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler)
        connector = trainer._checkpoint_connector
        previous = connector._loaded_checkpoint
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
        finally:
            connector._loaded_checkpoint = previous


def logger_versions(trainer: Any) -> list[Any]:
    """Version of each logger, so that another rank can write on where rank 0 wrote."""
    return [getattr(logger, "version", None) for logger in trainer.loggers]


def set_logger_versions(trainer: Any, versions: Sequence[Any]) -> None:
    """Make the loggers of this worker write where those of rank 0 do, should it become rank 0."""
    for logger, version in zip(trainer.loggers, versions, strict=True):
        if hasattr(logger, "_version") and version is not None:
            logger._version = version


# ---------------------------------------------------------------- results of self.log


def _describe_result(key: str, result: Any) -> dict[str, Any]:
    meta = result.meta
    return {
        "key": key,
        "is_tensor": result.is_tensor,
        "has_reset": result.has_reset,
        "reduce_fx": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "fields": {
            name: getattr(meta, name)
            for name in (
                "fx name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx dataloader_idx "
                "metric_attribute"
            ).split()
        },
    }


def _add_result(host: Host, trainer: Any, described: dict[str, Any]) -> None:
    """Know a logged value, with nothing in it: the end of an epoch reduces all of them, in this order."""
    results = hooks.epoch_results(trainer)
    if described["key"] in results:
        return
    module = "trainer.connectors.logger_connector.result"
    meta = host.get(module, "_Metadata")(reduce_fx=getattr(torch, described["reduce_fx"]), **described["fields"])
    should, rank_zero_only = described["sync"]
    meta.sync = host.get(module, "_Sync")(
        _should=should, fn=trainer.strategy.reduce, rank_zero_only=rank_zero_only
    )
    result = host.get(module, "_ResultMetric")(meta, described["is_tensor"]).to(trainer.strategy.root_device)
    result.has_reset = described["has_reset"]
    if not described["is_tensor"]:
        result.value = dict(trainer.lightning_module.named_modules())[meta.metric_attribute]
    results[described["key"]] = result


# ---------------------------------------------------------------- packing


def _pack(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Large tensors as views of their bytes, small ones copied together: few messages, no needless copy."""
    packed: list[Tensor] = []
    small: list[Tensor] = []
    for tensor in tensors:
        flat = codec.as_bytes(tensor)
        if flat.numel() > _SMALL_BYTES:
            packed.append(flat)
            continue
        small.append(flat)
        if sum(t.numel() for t in small) > _CHUNK_BYTES:
            packed.append(torch.cat(small))
            small = []
    if any(t.numel() for t in small):
        packed.append(torch.cat(small))
    return packed


def _unpack(packed: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy the small tensors out again, in the order in which `_pack` put them together."""
    chunks = iter(packed)
    small: list[Tensor] = []

    def spread() -> None:
        if any(t.numel() for t in small):
            for target, part in zip(small, next(chunks).split([t.numel() for t in small]), strict=True):
                target.copy_(part)

    pending_large: list[Tensor] = []
    for tensor in tensors:
        flat = codec.as_bytes(tensor)
        if flat.numel() > _SMALL_BYTES:
            pending_large.append(next(chunks))  # a view of this tensor: it holds the bytes already
            continue
        small.append(flat)
        if sum(t.numel() for t in small) > _CHUNK_BYTES:
            spread()
            small = []
    spread()


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(codec.encode(value)[0].decode())
    except UnsupportedError:
        return False
    return True
