"""A training that chooses its number of nodes: measures itself, asks a policy, and acts.

Every member measures, because any of them may become rank 0; only rank 0 decides and acts. What was measured travels
with the state to newcomers, and lies in checkpoints. What is wanted is kept by the coordinator. So the next rank 0, and
a new start of the job, know what those before them have learned.

A step costs two readings of a clock and O(1) work; no member sends anything for it but rank 0, with a decision.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from ef_common.core.autoscale import Autoscale, Policy, Situation, Target
from ef_common.core.autoscale.cost import Cost
from ef_common.core.noise_scale import NoiseScale
from ef_common.core.room import Room
from ef_common.core.throughput import SpeedHistory, SpeedWindow
from ef_common.core.view import View
from ef_common.data.dealer import Dealer, Rest
from ef_common.data.fleet import Fleet
from ef_common.data.provisioners import Provisioner
from ef_common.data.replacing import Replacing
from ef_common.events import EventLog
from ef_common.session import Session
from ef_common.terminal import say

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_LONG_S = 1.0
_LONG = 10.0  # a step that takes so many times as long as usual contains something else: a validation, a checkpoint
_RARE_STEPS = 50  # unless there are more of them than one in so many within an epoch: then it waits for its data
_FADE = 0.1
_NOISE_EVERY = 4


class Autoscaler:
    """Chooses the number of nodes of one training, and has stragglers replaced.

    Args:
        settings: How to choose; None to leave the number as it is, and only to have stragglers replaced.
        session: The worker's session.
        log: Event log of the worker.
        provisioner: Gives the provisioner, the same each time; None where nothing starts nodes.
        clock: Monotonic time in seconds.
        wall: Time in seconds since the epoch.

    Attributes:
        history: What is known of the throughput at each number of nodes.
    """

    def __init__(
        self,
        settings: Autoscale | None,
        session: Session,
        *,
        log: EventLog,
        provisioner: Callable[[], Provisioner | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._settings, self._session, self._log = settings, session, log
        self._clock, self._wall = clock, wall
        self._fleet = Fleet(session, provisioner, clock=clock)
        self._replacing = Replacing(
            session, self._fleet, keeps_wish=settings is not None, tell=self._tell, clock=clock, wall=wall
        )
        self._policy: Policy | None = None if settings is None else settings.make_policy()
        self.history = SpeedHistory()
        self._dealer: Dealer | None = None
        self._accumulation = 1
        self._wanted_batch: int | None = None  # samples of an update, of all workers
        self._window = SpeedWindow(10 if settings is None else settings.every_steps)
        self._view: View | None = None
        self._nodes = 0
        self._last_at: float | None = None
        self._paused_s = 0.0
        self._usual_s = 0.0
        self._since_long = _RARE_STEPS  # steps since the last one that took long
        self._epoch = -1
        self._batch_size = 0
        self._noise = NoiseScale()
        self._squares: tuple[float, float] | None = None
        self._asked = 0.0
        self._began = wall()
        self._elapsed_s = self._worker_s = 0.0
        self._look_at = 0.0
        self._acts = False
        self._has_checked = self._has_warned = False

    def follow(self, dealer: Dealer, *, accumulation: int = 1) -> None:
        """Measure and control the training whose samples this dealer deals, the newest one that was given.

        Args:
            dealer: Deals them.
            accumulation: Steps of an update.
        """
        self._dealer, self._accumulation = dealer, accumulation
        dealer.on_committed = self.committed
        limit = None if self._settings is None else self._settings.max_global_batch_size
        if limit is not None:
            dealer.max_batch = self._positions(dealer, limit)
            if dealer.samples_per_position > 1 or dealer.parts is not None:
                logger.warning(
                    "max_global_batch_size has no effect, because batches of these data cannot be divided. Pass one "
                    "DataLoader, arrays or an ef_keras.dataset. Received: max_global_batch_size=%d",
                    limit,
                )

    def _positions(self, dealer: Dealer, num_samples: float) -> int:
        """Positions of a step that has so many samples in an update."""
        return max(1, int(num_samples / (dealer.samples_per_position * self._accumulation)))

    # ------------------------------------------------------------ a step

    @property
    def needs_noise(self) -> bool:
        """Whether the policy may ask for the noise scale of the gradients."""
        return self._settings is not None and self._settings.policy not in ("throughput", "cost")

    def measures_noise(self, num_updates: int) -> bool:
        """Whether the gradients of the next update are measured: every few, which is the same in all members."""
        return self.needs_noise and num_updates % _NOISE_EVERY == 0

    def asks(self) -> float:
        """In rank 0, if the policy has chosen a batch: samples of one worker in an update, for all; else 0."""
        if self._wanted_batch is None or self._session.rank != 0:
            return 0.0
        return self._wanted_batch / self._session.completed_in.world_size

    def note_squares(self, local: float, reduced: float, asked: float) -> None:
        """The gradients of the update that is about to be committed were measured.

        Args:
            local: Mean over the members of the squared norm of their own gradient.
            reduced: Squared norm of the mean gradient.
            asked: Sum of what the members have asked for.
        """
        self._squares, self._asked = (local, reduced), asked

    def committed(self, contributors: View, num_samples: float, step: int) -> None:
        """All members have made an update.

        Args:
            contributors: The members that have made it.
            num_samples: Their samples in it.
            step: Number of the update.
        """
        session, settings, now = self._session, self._settings, self._clock()
        self._choose_batch(contributors)
        if session.newcomer or session.entering:
            return
        if settings is not None:
            self._measure(settings, contributors, num_samples, now)
        room = session.job.room
        if room is not None:
            self._replacing.follow(room, contributors, acts=self._acts)
        if session.rank != 0:
            self._acts, self._has_checked = False, True
            return
        is_due = settings is not None and step % settings.every_steps == 0
        if room is None or (now < self._look_at and not is_due):
            return
        self._look_at = now + _LOOK_S
        self._act(settings, room, contributors, is_due=is_due)

    def _choose_batch(self, contributors: View) -> None:
        """Take over the batch that rank 0 has asked for: all members have read this in the same update."""
        asked, self._asked = self._asked, 0.0
        if contributors.world_size == 1:
            asked = self.asks()
        if asked and self._dealer is not None:
            before, chosen = self._dealer.chosen_batch, round(asked * contributors.world_size)
            self._dealer.chosen_batch = self._positions(self._dealer, chosen)
            if self._dealer.chosen_batch != before:
                self._window.restart()

    def _act(self, settings: Autoscale | None, room: Room, view: View, *, is_due: bool) -> None:
        if not self._acts:
            self._acts = True
            if room.wanted:
                self.history = self.history.with_wanted(room.wanted)
            self._fleet.take_over(room)
            self._replacing.take_over(room)
        if settings is not None and not self._has_checked:
            self._has_checked = True
            self._check_limits(settings, room)
        is_settled = self._fleet.settle(room) and self._replacing.settle(room, view)
        if is_due and is_settled and settings is not None and room.nodes == self._nodes:
            self._decide(settings, room)

    def _check_limits(self, settings: Autoscale, room: Room) -> None:
        if settings.max > room.max_nodes:
            say(
                f"the job can have at most {room.max_nodes} nodes (the number behind the colon of --nnodes), so it "
                f"does not grow beyond them. Received: autoscale with max={settings.max}",
                color="yellow",
                event="autoscale_limited",
                max_nodes=room.max_nodes,
            )

    # ------------------------------------------------------------ what is measured

    def _measure(self, settings: Autoscale, view: View, num_samples: float, now: float) -> None:
        before_s, self._paused_s = self._paused_s, self._session.stats.paused_s
        paused_s = self._paused_s - before_s
        took_s = 0.0 if self._last_at is None else now - self._last_at
        self._last_at = now
        self._elapsed_s += took_s
        self._worker_s += took_s * view.world_size
        self._note_noise(view, num_samples)
        if view is not self._view:
            self._enter(view, paused_s)
        paused_s += self._excess(max(0.0, took_s - paused_s))
        measure = self._window.note(self._wall(), self._nodes, round(num_samples), paused_s=paused_s)
        if measure is None:
            return
        self.history = self.history.with_measure(measure)
        if self._session.rank == 0:
            self._log.write(
                "throughput",
                nodes=measure.size,
                samples_per_s=measure.throughput,
                spread=measure.spread,
                seconds=measure.seconds,
                **_known(noise_scale=self.history.noise_scale, change_s=self.history.change_s or None),
            )

    def _note_noise(self, view: View, num_samples: float) -> None:
        squares, self._squares = self._squares, None
        num_workers, before = view.world_size, self._batch_size
        self._batch_size = round(num_samples)
        is_smaller = num_samples < before  # as the last batches of an epoch are
        if squares is None or view is not self._view or is_smaller:
            return
        self._noise = self._noise.with_update(*squares, local_batch=num_samples / num_workers, num_workers=num_workers)
        self.history = self.history.with_noise_scale(self._noise.samples)

    def _enter(self, view: View, paused_s: float) -> None:
        """The newest update is the first one in this view, before which training has paused."""
        known, before = self._view is not None, self._nodes
        self._view, self._nodes, self._usual_s = view, len({member.node for member in view.members}), 0.0
        self._window.restart()
        if known and self._nodes != before and paused_s > 0:
            self.history = self.history.with_change(paused_s)

    def _excess(self, took_s: float) -> float:
        """The part of the time since the update before that is none of this step's."""
        epoch = -1 if self._dealer is None else self._dealer.progress.epoch
        begins_epoch, self._epoch = epoch != self._epoch, epoch
        usual_s = self._usual_s
        self._since_long += 1
        if usual_s and took_s > max(_LONG * usual_s, _LONG_S):
            is_rare, self._since_long = self._since_long >= _RARE_STEPS, 0
            return took_s - usual_s if is_rare or begins_epoch else 0.0
        self._usual_s = took_s if not usual_s else usual_s + _FADE * (took_s - usual_s)
        return 0.0

    # ------------------------------------------------------------ what is decided

    def _decide(self, settings: Autoscale, room: Room) -> None:
        most = max(1, min(settings.max, self._fleet.most(room)))
        rest = None if self._dealer is None else self._dealer.rest()
        self._check_end(rest)
        situation = Situation(
            size=room.nodes,
            least=min(max(settings.min, room.min_nodes), most),
            most=most,
            now=self._wall(),
            history=self.history,
            batch_size=self._present_batch_size,
            local_batch_size=self._own_batch_size,
            workers_per_node=max(1, self._session.completed_in.world_size // max(1, self._nodes)),
            elapsed_s=max(self._elapsed_s, self._wall() - self._began),
            worker_s=self._worker_s,
            remaining_samples=None if rest is None else rest.samples,
            counts_steps=rest is not None and rest.counts_steps,
        )
        target = self._answer(situation)
        if target is None:
            return
        nodes, chosen, limit = situation.bounded(target.size), {}, settings.max_global_batch_size
        if target.batch_size is not None and limit is not None:
            before, wanted = self._wanted_batch, max(settings.min_global_batch_size or 1, min(limit, target.batch_size))
            self._wanted_batch, chosen = wanted, {"batch_size": wanted} if wanted != before else {}
        if nodes == room.nodes and not chosen:
            return
        self._log.write("autoscale", nodes=room.nodes, wanted=nodes, reason=target.reason, **chosen)
        if nodes != room.nodes:
            self.history = self.history.with_wanted(nodes)
            self._fleet.aim(nodes, room)

    def _check_end(self, rest: Rest | None) -> None:
        """Say once if the policy can decide nothing because nobody knows what is left to do."""
        policy = self._policy
        if rest is not None or self._has_warned or not isinstance(policy, Cost) or not policy.needs_end:
            return
        self._has_warned = True
        name, value = ("deadline_s", policy.deadline_s) if policy.budget is None else ("budget", policy.budget)
        logger.warning(
            "autoscale cannot keep %s, because nobody knows how many samples are left of this training, so the number "
            "of nodes stays as it is. Limit the training: in Lightning by max_epochs and data with a length, by "
            "max_steps, or by a number in limit_train_batches; in Keras by steps_per_epoch. Or give value_per_hour "
            "instead. Received: %s=%s",
            name,
            name,
            value,
        )

    @property
    def _present_batch_size(self) -> int:
        """Samples of a whole update; the newest one may have been the last of an epoch."""
        dealer, num_workers = self._dealer, self._session.completed_in.world_size
        if dealer is None or dealer.global_batch is not None:
            return max(1, self._batch_size)
        return max(1, dealer.local_samples(num_workers) * num_workers * self._accumulation)

    @property
    def _own_batch_size(self) -> int | None:
        """Samples of a worker in an update, if nothing limits them."""
        dealer = self._dealer
        if dealer is None:
            return None
        return max(1, round(dealer.batch_size * dealer.samples_per_position * self._accumulation))

    def _answer(self, situation: Situation) -> Target | None:
        """What the policy says. It may be the user's, and its mistakes are no reason to end a training."""
        policy = self._policy
        if policy is None:
            return None
        try:
            target = policy.decide(situation)
            if target is None:
                return None
            size, reason, batch_size = (*target, None)[:3]
            return Target(int(size), str(reason), None if batch_size is None else max(1, int(batch_size)))
        except Exception as error:
            self._policy = None
            logger.warning(
                "the policy of autoscale has raised an exception, so the number of nodes stays as it is: %s: %s",
                type(error).__name__,
                error,
                exc_info=error,
            )
            return None

    def _tell(self, nodes: int, reason: str) -> None:
        self._log.write("autoscale", nodes=nodes, wanted=nodes, reason=reason)

    # ------------------------------------------------------------ what is shown, and handed on

    @property
    def wanted_nodes(self) -> int | None:
        """How many nodes are wanted; None if the training does not choose its size."""
        room = self._session.job.room
        return None if self._settings is None else (room.wanted if room is not None else 0) or self._nodes

    def state(self) -> dict[str, Any] | None:
        """The state for newcomers and checkpoints, as plain data; None if there is none."""
        replaced = self._replacing.state()
        if self._settings is None:
            return None if replaced is None else {"history": None, "replaced": replaced}
        return {
            "history": self.history.to_plain(),
            "began": self._began,
            "elapsed_s": self._elapsed_s,
            "worker_s": self._worker_s,
            "replaced": replaced,
        }

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the others' state, or from a checkpoint's; None if that has none.

        What cannot be read is left out: a training can learn it again.
        """
        if state is None:
            return
        try:
            self._replacing.load_state(state.get("replaced"))
            if self._settings is not None and state["history"] is not None:
                history = SpeedHistory.from_plain(state["history"])
                elapsed_s, worker_s = float(state["elapsed_s"]), float(state["worker_s"])
                self._began = float(state.get("began", self._wall() - elapsed_s))
                self.history, self._elapsed_s, self._worker_s = history, elapsed_s, worker_s
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("what autoscale had learned cannot be read, and is learned again: %s", error)

    def close(self) -> None:
        """The training is over."""
        self._fleet.close()


def _known(**values: float | None) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}
