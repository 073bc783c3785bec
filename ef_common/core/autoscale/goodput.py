"""Counts progress in place of samples: the policy "goodput".

Qiao et al. 2021, "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning": the goodput is the
throughput times the statistical efficiency of the global batch M, (φ + M₀) / (φ + M), where φ is the noise scale (see
`noise_scale`). With the local batch fixed, more nodes mean a larger batch, in which a sample counts for less. The size
is then chosen as by throughput (see `efficiency`), with the goodput in place of the throughput.

Or, Zhang and Freedman (2020) let the global batch grow with the nodes up to a limit, and fix it from there on: the
local batch shrinks (`ef_common.core.sharding.local_batch`). If the user allows a range of global batches, this policy
also says which one to use: the noise scale itself, as far as the range and the workers' own batches allow. There a
training takes twice the updates of the largest batches and twice the samples of the smallest ones (McCandlish et al.
2018). It says so only when the batch should change by more than a third, since φ is a rough value.
"""

from __future__ import annotations

from dataclasses import dataclass

from ef_common.core.autoscale.efficiency import Efficiency
from ef_common.core.autoscale.policy import Situation, Target
from ef_common.core.noise_scale import efficiency

_ROUGH = 4 / 3


@dataclass(frozen=True, slots=True)
class Goodput:
    """The policy "goodput".

    Args:
        threshold: As for the policy "throughput".
        retry_s: Likewise.
        min_global_batch_size: The smallest global batch that it asks for; None: one sample of each worker.
        max_global_batch_size: The largest one; None: the local batch always stays as it is.
    """

    threshold: float = 0.7
    retry_s: float = 3600.0
    min_global_batch_size: int | None = None
    max_global_batch_size: int | None = None

    def decide(self, situation: Situation) -> Target | None:
        """The size and the global batch to ask for."""
        noise = situation.history.noise_scale
        chooser = Efficiency(self.threshold, self.retry_s)
        if noise is None:
            return chooser.decide(situation)
        reference = self._batch_of(situation, situation.least, noise)

        def worth(size: int, throughput: float) -> float:
            return throughput * efficiency(noise, self._batch_of(situation, size, noise), reference)

        target = chooser.decide_by(situation, worth, unit=f"samples/s of progress (noise scale {noise:.4g})")
        return self._with_batch(situation, target, noise)

    def _with_batch(self, situation: Situation, target: Target | None, noise: float) -> Target | None:
        """The target with the global batch that it should have."""
        if self.max_global_batch_size is None:
            return target
        size = situation.size if target is None else target.size
        batch, present = self._batch_of(situation, size, noise), situation.batch_size
        if target is not None:
            return target._replace(batch_size=batch)
        if present / _ROUGH <= batch <= present * _ROUGH:
            return None
        reason = f"a global batch of {batch} suits the noise scale of {noise:.4g} better than one of {present}"
        return Target(size, reason, batch)

    def _batch_of(self, situation: Situation, size: int, noise: float) -> int:
        """The global batch of so many nodes."""
        workers = size * situation.workers_per_node
        most = self.max_global_batch_size
        if most is None:
            return workers * situation.local_batch
        batch = max(self.min_global_batch_size or 1, min(most, noise))
        own = min(situation.local_batch, most // workers)
        return workers * max(1, min(own, round(batch / workers)))
