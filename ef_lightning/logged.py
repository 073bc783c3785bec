"""Makes the values of `self.log` equal in all workers before anybody decides by them.

Workers see different batches, so they have collected different values, perhaps under different names. They exchange the
values by name at places that all workers pass, regardless of who reads them later:

* at the end of a pass of evaluation, together with what has been evaluated (`contributions`);
* at the end of an epoch, before its hooks: what its batches have logged;
* after these hooks, before a ModelCheckpoint, an EarlyStopping or a scheduler is asked: what the hooks have logged.

Reading a value needs no communication, because rank 0's progress bar reads alone: until the exchange, each worker reads
its own. Values that a *batch* has logged stay local, unless a ModelCheckpoint or a scheduler is about to decide by
them.

An exchange sends the logged values from each worker to each; for torchmetrics objects, these are their states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from ef_common.core.view import View
from ef_common.errors import UsageError
from ef_common.session import Session
from ef_lightning import hooks
from ef_lightning.contributions import Contributions
from ef_lightning.host import LightningHost
from ef_lightning.metrics import MetricSync, metrics_of, metrics_within, state_of
from ef_lightning.reductions import WorkerPart, combine

Gather = Callable[[Any, str], tuple[list[Any], View]]
"""Everybody's value, in rank order, and of whom they are; the second argument says what it is for."""


class Logged:
    """The values that one Trainer logs, from `attach` to `detach`.

    Args:
        trainer: The Trainer.
        host: The class tree.
        session: The worker's session.
        metrics: Its torchmetrics objects.
        gather: How to get everybody's values.
        weight: The samples of the newest training batch that were this worker's, in any unit.
    """

    def __init__(
        self,
        trainer: Any,
        host: LightningHost,
        session: Session,
        *,
        metrics: MetricSync,
        gather: Gather,
        weight: Callable[[], float],
    ) -> None:
        self._trainer, self._host, self._session = trainer, host, session
        self._metrics = metrics
        self._gather = gather
        self._weight = weight
        self._common: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by identity
        self._evaluation: Contributions | None = None
        self._hooks = hooks.LoggingHooks(
            trainer, host, settle=self._settle, show=self._show, candidates=self._agree_on_batch
        )

    def attach(self) -> None:
        """Exchange values from now on."""
        self._hooks.attach()

    def detach(self) -> None:
        """Leave everything as it was."""
        self._hooks.detach()
        self.end_evaluation()

    # ------------------------------------------------------------ evaluation

    @property
    def evaluation(self) -> Contributions | None:
        """The workers' contributions to the evaluation that is running."""
        return self._evaluation

    def begin_evaluation(self) -> None:
        """A validation or a test begins."""
        self._evaluation = Contributions(self._trainer, self._take)
        self._metrics.of_the_lost = self._evaluation.of_the_lost

    def end_evaluation(self) -> None:
        """All members have the result of the evaluation."""
        self._evaluation = None
        self._metrics.of_the_lost = lambda metric, present: []

    def _take(self, contributions: Sequence[dict[str, Any]]) -> None:
        if len(contributions) < 2 and self._is_alone:
            return
        named = [contribution["metrics"] for contribution in contributions]
        self._apply([contribution["logged"] for contribution in contributions], lambda names: named)

    # ------------------------------------------------------------ reading

    @property
    def _is_alone(self) -> bool:
        """Whether no other worker has anything to report, so that all is as without ElasticFlow."""
        evaluation = self._evaluation
        if self._session.newcomer or self._trainer.interrupted:
            return True
        return self._session.completed_in.world_size == 1 and (evaluation is None or evaluation.num_workers < 2)

    def _show(self, original: Callable[[Any, bool], Any], result: Any, on_step: bool) -> Any:
        if on_step or not result.meta.on_epoch:
            return original(result, on_step)
        computed = hooks.computed(result)
        if self._is_common(computed):
            return computed
        if computed is None and self._is_alone:
            result.compute()  # Lightning would advise to exchange it, as there is a default group
        if computed is not None or self._is_alone:
            return original(result, on_step)
        with self._metrics.alone():
            return hooks.shown_here(result)

    # ------------------------------------------------------------ exchanging

    def _settle(self) -> None:
        """All workers are here: make the values of an epoch, and what was shown before, the same in all."""
        if self._is_alone:
            return
        own = {"logged": self._weighed(hooks.epoch_results(self._trainer)), "shown": self._unsettled()}
        parts, _ = self._gather({**own, "weight": self._weight()}, "exchange of what is logged")
        self._apply([part["logged"] for part in parts], self._gather_states)
        self._settle_shown(parts)

    def _weighed(self, logged: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Weight what a hook logs at the end of an evaluation by all samples that this worker has evaluated."""
        if self._evaluation is not None:
            samples = self._evaluation.num_samples
            for entry in logged.values():
                totals = entry["totals"]
                at_end = entry["fields"]["fx"].partition(".")[0].endswith("epoch_end") and not any(entry["sync"])
                if at_end and totals.get("cumulated_batch_size", 0) == 1:
                    entry["totals"] = {
                        "value": totals["value"] * (samples or 1),
                        "cumulated_batch_size": totals["cumulated_batch_size"] * samples,
                    }
        return logged

    def _apply(self, logged: Sequence[dict[str, Any]], states: Callable[[list[str]], Sequence[dict[str, Any]]]) -> None:
        """Show what all workers have logged.

        Args:
            logged: By each of them, in an order that is the same in all.
            states: Returns the states of these metrics in each worker; called in all of them or in none.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for of_worker in logged:
            for key, entry in of_worker.items():
                found.setdefault(key, []).append(entry)
        pending = {key: entries for key, entries in found.items() if any(entry["pending"] for entry in entries)}
        for entries in pending.values():
            _check(entries)
        for entries in pending.values():
            if entries[0]["is_tensor"]:
                self._show_result(entries[0], reduced(entries))
        computed = [entries[0] for entries in pending.values() if not entries[0]["is_tensor"]]
        if computed:
            self._compute(computed, states)

    def _compute(
        self, entries: Sequence[dict[str, Any]], states: Callable[[list[str]], Sequence[dict[str, Any]]]
    ) -> None:
        module = self._trainer.lightning_module
        within = [metrics_within(module, entry["fields"]["metric_attribute"]) for entry in entries]
        names = sorted({name for some in within for name in some})
        of_workers, metrics = states(names), metrics_of(module)
        known = {id(metrics[name]): [found[name] for found in of_workers if name in found] for name in names}
        with self._metrics.knowing(known):
            for entry, some in zip(entries, within, strict=True):
                if some:  # a module that only others have made has none
                    self._show_result(entry, None)

    def _show_result(self, entry: dict[str, Any], value: Tensor | None) -> None:
        shown = hooks.show_result(self._trainer, self._host, entry, value)
        if isinstance(shown, Tensor):
            self._common[id(shown)] = shown

    def _gather_states(self, names: list[str]) -> list[dict[str, Any]]:
        metrics = metrics_of(self._trainer.lightning_module)
        parts, view = self._gather(
            {name: state_of(metrics[name]) for name in names}, "exchange of the states of logged metrics"
        )
        return parts + ([] if self._evaluation is None else self._evaluation.states_of_the_lost(view.ids))

    # ------------------------------------------------------------ what is shown already

    def adopt(self) -> None:
        """All current values come from others or from a checkpoint, so this worker has nothing to add."""
        for values in hooks.metric_dicts(self._trainer).values():
            self._common.update((id(value), value) for value in values.values() if isinstance(value, Tensor))

    def _is_common(self, value: Any) -> bool:
        return value is not None and self._common.get(id(value)) is value

    def _unsettled(self) -> dict[str, dict[str, Any]]:
        """Tensors in Lightning's dicts that came there without an exchange, usually values of batches."""
        return {
            which: {n: v for n, v in values.items() if isinstance(v, Tensor) and not self._is_common(v)}
            for which, values in hooks.metric_dicts(self._trainer).items()
        }

    def _settle_shown(self, parts: Sequence[dict[str, Any]]) -> None:
        for which, values in hooks.metric_dicts(self._trainer).items():
            values.update(self._combined([part["shown"].get(which, {}) for part in parts], parts))
        self.adopt()

    def _agree_on_batch(self, values: dict[str, Any]) -> dict[str, Any]:
        """Agree on values by which a scheduler or a checkpoint will decide in the middle of an epoch.

        Args:
            values: By the names in the callbacks' dict, or copies of them.
        """
        if self._is_alone:
            return values
        shown = hooks.monitored(self._trainer)
        settled = {name for name in values if self._is_common(shown.get(name))}
        own = {name: v for name, v in values.items() if isinstance(v, Tensor) and name not in settled}
        parts, _ = self._gather(
            {"values": own, "weight": self._weight()}, "exchange of what a scheduler or a checkpoint monitors"
        )
        return {**values, **self._combined([part["values"] for part in parts], parts)}

    def _combined(self, values: Sequence[dict[str, Tensor]], parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        reductions, device = hooks.reductions(self._trainer), self._trainer.strategy.root_device
        names = dict.fromkeys(name for some in values for name in some)
        return {
            name: combine(
                reductions.get(name, "mean"),
                [WorkerPart(some[name], p["weight"]) for some, p in zip(values, parts, strict=True) if name in some],
            ).to(device)
            for name in names
        }


def reduced(entries: Sequence[dict[str, Any]]) -> Tensor:
    """The combination of a value from several workers."""
    first, values = entries[0], [entry["totals"]["value"] for entry in entries]
    reduction = "first" if first["sync"][1] else first["reduce_fx"]  # of what is logged with `rank_zero_only=True`
    if first["reduce_fx"] != "mean":
        return combine(reduction, [WorkerPart(value) for value in values])
    counts = [entry["totals"]["cumulated_batch_size"] for entry in entries]
    means = [value.double() / count if count else value.double() for value, count in zip(values, counts, strict=True)]
    parts = [WorkerPart(mean, float(count)) for mean, count in zip(means, counts, strict=True)]
    return combine(reduction, parts).to(values[0].dtype)


def _check(entries: Sequence[dict[str, Any]]) -> None:
    kinds = {("tensor" if entry["is_tensor"] else "metric", entry["reduce_fx"]) for entry in entries}
    if len(kinds) > 1:
        first = entries[0]["fields"]
        raise UsageError(
            f"workers have logged {first['name']!r} in {first['fx']} in different ways, so it cannot be reduced. "
            f"Expected the same reduce_fx in all of them, and either tensors or metrics. Received: {sorted(kinds)}"
        )
