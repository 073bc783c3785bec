"""The user's settings of an elastic training, for every framework: declared once and checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ef_common.core.autoscale import Autoscale, autoscale_of
from ef_common.core.compensation import Compensation
from ef_common.core.schedule import check_schedules
from ef_common.data.checkpointer import Checkpointing
from ef_common.data.claiming import place_of
from ef_common.data.global_batches import check_size
from ef_common.errors import UsageError
from ef_common.storage.claims import ClaimPlace, place_for


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """The settings that all plugins share.

    Args:
        compensation: How the optimizer's settings follow a global batch that grows and shrinks with the number of
            workers: a :class:`~ef_common.core.compensation.Compensation`, or its rule. A process without a coordinator
            has nothing to compensate, unless a reference batch is named.
        schedules: What learning-rate schedules per step count. "samples": a schedule ends with the training, however
            many workers there were on the way. "updates": it counts updates.
        global_batch_size: Samples of an update, which the workers share. By default, each worker has a batch of its
            own.
        deterministic: The weights have the same bits for every number of workers, whatever was lost or joined. Requires
            `global_batch_size`, which must be a multiple of the batch size.
        checkpoint: A URL (`s3://bucket/run`, `/mnt/shared/run`, …), or a
            :class:`~ef_common.data.checkpointer.Checkpointing`. Checkpoints are taken there while the training
            continues, and the same command resumes from the newest one. The default is `ELASTICFLOW_CHECKPOINT`.
        claims: Where workers claim that they continue without others that are silent: a URL that all workers reach, of
            etcd (`etcd://host:2379,host:2379/prefix`) or of a store that can hold checkpoints. The default is
            `ELASTICFLOW_CLAIMS`, or else the place of the checkpoints.
        evict_stragglers: Replace a worker whose throughput stays below 0.8 of the others' for 30 s, as soon as a
            spare is ready (a newcomer for which the MAX of `--nnodes` leaves no room). The spare joins first; then the
            slow worker ends with status 0. Otherwise, slow workers are only reported. Where the job can ask for nodes
            (`elasticflow run` on one machine, or with `--scale-command`), one is asked for in place of a slow one, at
            most three in an hour.
        autoscale: How the job chooses its number of nodes: an :class:`~ef_common.core.autoscale.Autoscale`, or its
            arguments in a dict or a text. It has stragglers replaced, too. The default is `ELASTICFLOW_AUTOSCALE`;
            False leaves the number as it is in any case.
        log_workers: Whether the framework's loggers get `world_size`, `samples_per_s`, `pause_s`, `lr_scale` and
            `global_batch_size` (:class:`~ef_common.data.meter.Meter`); with `autoscale`, `wanted_nodes`, too.

    Raises:
        UsageError: A value is invalid.

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
    claims: ClaimPlace | None = field(default=None, repr=False)
    evict_stragglers: bool = False
    autoscale: Autoscale | Literal[False] | None = None
    log_workers: bool = True

    def __post_init__(self) -> None:
        check_size(self.global_batch_size)
        check_schedules(self.schedules)

    @property
    def schedules_follow_samples(self) -> bool:
        """Whether schedules can follow samples; updates of a fixed size are the same in each world."""
        return self.schedules == "samples" and self.global_batch_size is None

    @classmethod
    def of(cls, **given: Any) -> ElasticSettings:
        """The settings from what a user has passed: a rule's name, URLs, paths.

        Raises:
            UsageError: A value is invalid, or a package that it needs is missing.
        """
        return cls(**{name: _READ[name](value) if name in _READ else value for name, value in given.items()})

    def checkpointing(self, default: str | None) -> Checkpointing | None:
        """The place of checkpoints.

        Args:
            default: The URL that the environment names.
        """
        return Checkpointing.of(self.checkpoint, default=default)

    def autoscaling(self, default: Autoscale | None) -> Autoscale | None:
        """How the job chooses its number of nodes; None if it does not.

        Args:
            default: What the environment says.

        Raises:
            UsageError: The batch is both fixed and to be chosen.
        """
        found = default if self.autoscale is None else self.autoscale or None
        if self.global_batch_size is not None and found is not None and found.max_global_batch_size is not None:
            raise UsageError(
                "global_batch_size fixes the batch of all workers, so that autoscale cannot limit or choose it. Leave "
                f"out one of the two. Received: global_batch_size={self.global_batch_size}, "
                f"max_global_batch_size={found.max_global_batch_size}"
            )
        return found

    def place(self, default: str | None, *, checkpoints: Checkpointing | None, elastic: bool) -> ClaimPlace | None:
        """The place of claims; see :func:`~ef_common.data.claiming.place_of`."""
        return place_of(self.claims, default, checkpoints=checkpoints, elastic=elastic)


def _place(claims: Any) -> ClaimPlace | None:
    return None if claims is None else place_for(claims)


_READ: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {"compensation": Compensation.of, "checkpoint": Checkpointing.of, "claims": _place, "autoscale": autoscale_of}
)
