"""The checkpoints that a training takes itself and starts from, in Lightning's own format."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ef_common import __version__
from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.checkpointer import Checkpointer, fingerprint
from ef_common.data.source import Source
from ef_common.launch.leaving import leaving_cleanly
from ef_common.session import Session
from ef_common.storage.checkpoints import Content, WriteFile
from ef_common.storage.layout import LEAST_ARRAY_BYTES, Path
from ef_common.storage.shares import SharedFile
from ef_lightning import hooks, own_files
from ef_lightning.host_copy import HostCopies
from ef_lightning.plain_checkpoint import BETWEEN_STEPS, CHECKPOINT_KEY, PlainCheckpoints
from ef_lightning.random_state import restore_random_state
from ef_lightning.saved_tree import FILE, IsShared, SavedTree
from ef_lightning.train_loader import ElasticLoader

logger = logging.getLogger(__name__)


class TrainerCheckpoints:
    """Checkpoints of one `fit`, of which it is the :class:`~ef_common.data.source.Source`.

    Args:
        job: Makes the checkpointer of this source.
        session: The worker's session.
        trainer: The Trainer.
    """

    def __init__(self, job: Callable[[Source], Checkpointer], session: Session, trainer: Any) -> None:
        self.job = job(self)
        self._session = session
        self._trainer = trainer
        self._copies = HostCopies()
        self._collect: Callable[[], dict[str, Any]] = dict
        self._loader: Callable[[], ElasticLoader | None] = lambda: None
        self._resume: Callable[[Mapping[str, Any]], None] = lambda saved: None
        self._random: torch.Tensor | None = None
        self._between_steps: Mapping[str, Any] | None = None
        self._path: str | None = None
        self._model: str | None = None
        self._plain = PlainCheckpoints(None)

    def attach(
        self,
        collect: Callable[[], dict[str, Any]],
        *,
        resume: Callable[[Mapping[str, Any]], None],
        loader: Callable[[], ElasticLoader | None],
    ) -> None:
        """The state to save is available from here on.

        Args:
            collect: Makes the checkpoint.
            resume: Takes in what Lightning does not load of one.
            loader: The training loader, once there is one.
        """
        self._collect, self._resume, self._loader = collect, resume, loader

    # ------------------------------------------------------------ start

    def find(self, path: Any, weights_only: bool | None) -> Any:
        """The file to resume from: ours if there is one, otherwise the one that the user named.

        Args:
            path: The user's.
            weights_only: Argument of `Trainer.fit`.
        """
        self._plain = PlainCheckpoints(weights_only)
        self._model = self._fingerprint()  # as the user made it: its types may change when it is set up
        found = None if self._session.newcomer else self.job.begin(self._model or "")
        if found is None:
            return path
        if path is not None:
            logger.info("resuming from %s, not from ckpt_path=%s, where this job began", found.id.name, path)
        self._path = found.id.name
        return self._path

    def load(self, path: Any) -> dict[str, Any] | None:
        """The checkpoint to resume from, if it is this one."""
        if self._path is None or path != self._path or self.job.found is None:
            return None
        checkpoint = self._read()
        self._stop_if_complete()
        _take_types(self._trainer.lightning_module, checkpoint["state_dict"])
        saved = checkpoint[CHECKPOINT_KEY]
        self._between_steps = {name: saved[name] for name in BETWEEN_STEPS if name in saved}
        return checkpoint

    def _stop_if_complete(self) -> None:
        """Do not continue a training that has ended, whatever ended it, unless it gets other limits."""
        limits = self._limits
        if self.job.is_complete(limits):
            logger.info("the training is complete. To continue it, change one of its limits. Received: %s", limits)
            self._trainer.should_stop = True
            self._do_without_lost_files()

    def _do_without_lost_files(self) -> None:
        own_files.do_without_lost_files(self._trainer, self._trainer.strategy.host, self._session)

    @property
    def _limits(self) -> dict[str, Any]:
        return hooks.limits(self._trainer, self._trainer.strategy.host)

    def saved(self) -> dict[str, Any] | None:
        """The checkpoint to go back to, if all who had a state are lost."""
        found = self.job.begin_again(self._model or "")
        return None if found is None else self._read()

    def load_result(self) -> bool:
        """In a newcomer that skips this training: load its result. Returns whether that was saved."""
        if self.job.look(self._model or "") is None:
            return False
        trainer, checkpoint = self._trainer, self._read()
        running = TENSORS.loads(checkpoint.pop(CHECKPOINT_KEY)["running"].numpy().tobytes())
        _take_types(trainer.lightning_module, checkpoint["state_dict"])
        hooks.load_checkpoint(trainer, checkpoint)
        hooks.load_loop_progress(trainer, running["loops"])
        for name, metrics in hooks.metric_dicts(trainer).items():
            metrics.update(running["metrics"][name])
        self._do_without_lost_files()
        return True

    def _read(self) -> dict[str, Any]:
        with self.job.open(FILE) as file:
            checkpoint = self._plain.load(file)
        self.job.let_go()
        own_files.forget_foreign_files(self._trainer, checkpoint)
        hooks.add_hyper_parameters(self._trainer, checkpoint)
        self._random = checkpoint[CHECKPOINT_KEY].pop("random")
        return checkpoint

    def _fingerprint(self) -> str | None:
        tensors = self._trainer.lightning_module.state_dict()
        if any(torch.nn.parameter.is_lazy(tensor) for tensor in tensors.values()):
            return None
        kinds = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        return fingerprint((name, tensor.shape, str(tensor.dtype)) for name, tensor in kinds.items())

    def begin_loops(self) -> None:
        """The loops will begin next."""
        if self._between_steps is not None:
            hooks.restart_between_steps(self._trainer)

    def go_on(self) -> None:
        """The loops have reached the step in the middle of an epoch at which the state was saved."""
        saved, self._between_steps = self._between_steps, None
        if saved is not None:
            self._resume(saved)

    # ------------------------------------------------------------ while it runs

    def boundary(self) -> None:
        """Between two steps of an epoch."""
        loader = self._loader()
        if loader is not None and loader.in_epoch and not loader.progress.uncommitted:
            with leaving_cleanly():
                self.job.boundary(loader.dealer.num_updates)

    def restore_random_state(self) -> None:
        """Restore random states: before the next step, only samples will be read."""
        if self._random is not None:
            restore_random_state(self._random, rank=self._session.rank)
            self._random = None

    def finish(self) -> None:
        """The training is complete. All members call this.

        Raises:
            StorageError: The state could not be saved.
        """
        loader = self._loader()
        if loader is not None:
            self.job.finish(loader.dealer.num_updates, complete=self._limits)

    def leave(self) -> None:
        """All members are asked to leave, and this worker saves the state.

        Raises:
            StorageError: The state could not be saved.
        """
        loader = self._loader()
        if loader is not None:
            self.job.save(loader.dealer.num_updates)

    # ------------------------------------------------------------ what is saved

    def num_bytes(self) -> int:
        """See the protocol."""
        module = self._trainer.lightning_module
        states = [state for optimizer in self._trainer.optimizers for state in optimizer.state.values()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers(), *kept))

    def state(self, *, whole: bool) -> SavedTree:
        """See the protocol; each worker dumps its own state, as under DDP."""
        with self._trainer.strategy.making_checkpoint():
            tree = self._collect() if whole else hooks.dump_checkpoint(self._trainer)
        return SavedTree(self._plain.of(tree) if whole else tree, self._copies, self._is_shared(), self._content_of)

    def _content_of(self, file: WriteFile | SharedFile) -> Content:
        loader = self._loader()
        if loader is None:
            raise RuntimeError("there is nothing to save before the training has been set up")
        progress = loader.progress
        return Content(
            files={FILE: file},
            progress={
                "epoch": progress.epoch,
                "cursor": progress.cursor,
                "returned": list(progress.returned),
                "seed": loader.seed,
                "epochs": int(self._trainer.current_epoch),
            },
            metrics={name: float(v) for name, v in self._trainer.callback_metrics.items() if v.numel() == 1},
            model=self._model,
            versions={"elasticflow": __version__, "torch": str(torch.__version__)},
        )

    def _is_shared(self) -> IsShared:
        """Which tensors of a checkpoint are equal in all members: the model's own, and the optimizers'."""
        module = self._trainer.lightning_module
        names = {(name,) for name, _ in (*module.named_parameters(), *module.named_buffers())}

        def is_shared(path: Path, tensor: torch.Tensor) -> bool:
            if tensor.nbytes < LEAST_ARRAY_BYTES or not all(isinstance(key, (str, int)) for key in path):
                return False
            return path[0] == "optimizer_states" or (path[0] == "state_dict" and path[1:] in names)

        return is_shared


def _take_types(module: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Let tensors accept every saved digit, because Lightning sets their precision only when they are loaded."""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if name in saved and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.data = tensor.data.to(saved[name].dtype)
