"""What a user sets of an elastic training, whatever the framework: declared once, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ef_common.core.compensation import Compensation
from ef_common.core.schedule import check_schedules
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.claiming import place_of
from ef_common.data.global_batches import check_size
from ef_common.storage.claims import Place, place_for


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The settings that all plugins have in common.

    Args:
        compensation: How the optimizers' settings follow a global batch that grows and shrinks with the world: a
            :class:`~ef_common.core.compensation.Compensation`, or its rule. A process that is no worker of a job has
            nothing to compensate, unless a reference batch is named.
        schedules: "samples": learning-rate schedules per step are where the samples that have been trained put them,
            whatever the workers did; "updates": they count updates.
        global_batch_size: Samples of an update, however many workers share it; None for a batch of each worker's.
        deterministic: The weights have the same bits for every number of workers.
        checkpoint: A URL for checkpoints that are taken while the training goes on, and that the same command starts
            from (`s3://bucket/run`, `/mnt/shared/run`, …), or a
            :class:`~ef_common.data.checkpointer.Checkpointing`; by default that of `ELASTICFLOW_CHECKPOINT`.
        claims: Where workers claim that they go on without others that are silent: a URL that all reach, of
            etcd (`etcd://host:2379,host:2379/prefix`, see :class:`~ef_common.storage.etcd.Etcd`) or of what checkpoints
            can be kept in; by default that of `ELASTICFLOW_CLAIMS`, else where the checkpoints are.
        evict_stragglers: A worker whose throughput is below 0.8 of the others' for a minute is replaced as soon as a
            newcomer waits for which there is no room (`max_nodes`): that one comes in first, then the slow one ends,
            with status 0. Without it, stragglers are reported only.

    Raises:
        UsageError: A value that is none.

    Example:
        >>> settings = ElasticSettings.of(compensation="linear", checkpoint="memory://run")
        >>> settings.compensation.rule, settings.checkpoint.url
        ('linear', 'memory://run')
    """

    compensation: Compensation = field(default_factory=Compensation)
    schedules: str = "samples"
    global_batch_size: int | None = None
    deterministic: bool = False
    checkpoint: Checkpointing | None = None
    claims: Place | None = field(default=None, repr=False)
    evict_stragglers: bool = False

    def __post_init__(self) -> None:
        check_size(self.global_batch_size)
        check_schedules(self.schedules)

    @property
    def schedules_follow_samples(self) -> bool:
        """Whether schedules have anything to follow: an update of a fixed number of samples is one in each world."""
        return self.schedules == "samples" and self.global_batch_size is None

    @classmethod
    def of(cls, **given: Any) -> ElasticSettings:
        """The settings, from what a user has written: a rule's name, URLs, paths.

        Raises:
            UsageError: A value that is none, or a package that it needs is missing.
        """
        return cls(**{name: _READ[name](value) if name in _READ else value for name, value in given.items()})

    def checkpointing(self, default: str | None) -> Checkpointing | None:
        """Where checkpoints go.

        Args:
            default: The URL that the environment names.
        """
        return Checkpointing.of(self.checkpoint, default=default)

    def place(self, default: str | None, *, checkpoints: Checkpointing | None, elastic: bool) -> Place | None:
        """Where claims are kept; see :func:`~ef_common.data.claiming.place_of`."""
        return place_of(self.claims, default, checkpoints=checkpoints, elastic=elastic)


def _place(claims: Any) -> Place | None:
    return None if claims is None else place_for(claims)


_READ: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"compensation": Compensation.of, "checkpoint": Checkpointing.of, "claims": _place}
)
