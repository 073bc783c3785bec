"""The evaluation that a loader is wrapped for: what is the same for every kind of data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ef_common.collectives.torch_codec import TENSORS
from ef_common.data.coverage import Coverage
from ef_common.events import EventLog
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.contributions import Contributions


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One of the loaders of an evaluation, and what it needs of the worker.

    Args:
        session: The worker's session.
        trainer: The Trainer that iterates over the loader.
        log: Event log.
        stage: "val", "test" or "predict", as Trainer's limits are named.
        index: Number of the loader within its stage.
        contributions: To the metrics of the evaluation that runs; None in a prediction.
    """

    session: Session
    trainer: Any
    _: KW_ONLY
    log: EventLog
    stage: str
    index: int
    contributions: Callable[[], Contributions | None] = lambda: None

    @property
    def limit_name(self) -> str:
        """Name of the Trainer's limit."""
        return f"limit_{self.stage}_batches"

    @property
    def limit(self) -> float:
        """The Trainer's limit: a number of batches, or a fraction of them."""
        limit: float = getattr(self.trainer, self.limit_name)
        return limit

    @property
    def is_reduced(self) -> bool:
        """Whether workers reduce what they log, and so must make the same number of steps; a prediction does not."""
        return self.stage != "predict"

    @property
    def is_logged(self) -> bool:
        """Whether the pass is logged: it is no sanity check."""
        return not self.trainer.sanity_checking

    @property
    def num_sanity_steps(self) -> float:
        """Number of steps of a sanity check."""
        steps: float = self.trainer.num_sanity_val_steps
        return steps

    @property
    def epoch(self) -> int:
        """Number of the training epoch after which the pass is made."""
        epoch: int = self.trainer.fit_loop.epoch_progress.current.processed
        return epoch

    @property
    def world_size(self) -> int:
        """Number of workers that the pass is dealt to."""
        return self.session.completed_in.world_size

    @property
    def loop(self) -> Any:
        """The evaluation loop that runs, if one does."""
        return hooks.active_evaluation_loop(self.trainer)

    def coverage(self) -> Coverage:
        """Deals the positions of a pass."""
        return Coverage(self.session, log=self.log, stage=self.stage, index=self.index, codec=TENSORS)

    def free_length(self) -> None:
        """Let the loader decide when the pass is over, whatever number of batches the loop was told before."""
        loop = self.loop
        if loop is not None:
            hooks.free_evaluation_length(loop)

    def set_num_batches(self, num_batches: float) -> None:
        """Tell the loop how many batches there are: the world may have another size than when it was set up."""
        loop = self.loop
        if loop is not None:
            hooks.set_evaluation_length(loop, self.index, num_batches)

    def end(self) -> None:
        """The pass is over."""
        loop = self.loop
        if loop is not None:
            hooks.mark_evaluation_done(loop)

    def result(self, num_samples: int) -> dict[str, Any]:
        """What this worker reports to the others.

        Args:
            num_samples: Number of samples that it has evaluated since its last report.
        """
        contributions = self.contributions()
        own = None if contributions is None else contributions.own(num_samples)
        return {"worker": self.session.worker.id, "metrics": own}

    def complete(self, results: Sequence[dict[str, Any]]) -> None:
        """The pass is complete with these results of all workers."""
        contributions = self.contributions()
        if contributions is not None:
            contributions.complete({result["worker"]: result["metrics"] for result in results})
