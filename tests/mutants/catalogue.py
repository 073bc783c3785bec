"""Bugs that the product could have, each as a change of a few lines in one place.

A test suite that is good enough notices every one of them. Each breaks something that a user has been promised: that
processes are kept, that no update is lost or doubled, that each sample is used exactly once, that all workers have
equal weights, that checkpoints are valid, that the learning rate is right, that strangers get nowhere, or that the exit
status tells the truth. None of them makes everything fail at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One way to break the product.

    Attributes:
        name: Words joined by hyphens.
        file: Path from the root of the project.
        old: Text that stands in the file exactly once.
        new: What is put in its place.
        harm: What a user would suffer, as one sentence.
    """

    name: str
    file: str
    old: str
    new: str
    harm: str


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="result-for-no-more-laggards-than-holders",
        file="ef_common/core/replay.py",
        old="results = tuple((ahead[i % len(ahead)], rank) for i, rank in enumerate(behind))",
        new="results = tuple(zip(ahead, behind))",
        harm="If one worker has the newest result and two lack it, one of the two keeps its local gradients, so that "
        "the weights of the workers differ from then on.",
    ),
    Mutant(
        name="weights-count-the-lost",
        file="ef_common/core/sharding.py",
        old="    total = sum(counts)\n    if total == 0:\n",
        new="    total = sum(window.stop - window.start for window in uncommitted)\n    if total == 0:\n",
        harm="The update in which a worker is lost is too small, as its samples are counted though they are not in it.",
    ),
    Mutant(
        name="ramp-begins-one-update-late",
        file="ef_common/core/compensation.py",
        old="return Ramp(self.ratio(ramp), goal, 1)",
        new="return Ramp(self.ratio(ramp), goal, 0)",
        harm="After each change of the world the learning rate lags behind the ramp by one update.",
    ),
    Mutant(
        name="each-half-decides",
        file="ef_common/core/quorum.py",
        old="decides = link.over and absent <= frozenset(dead) and _deciding(link.view, counted) in present",
        new="decides = link.over",
        harm="If the coordinator ends while the network falls into halves, both halves train on, each for itself.",
    ),
    Mutant(
        name="lineage-without-the-parent",
        file="ef_common/core/lineage.py",
        old="(not limit or one <= limit)",
        new="(not limit or one < limit)",
        harm="A job whose last start has saved nothing begins at an older checkpoint than the one that start used.",
    ),
    Mutant(
        name="kept-checkpoints-are-not-the-multiples",
        file="ef_common/core/retention.py",
        old="-(-one.id.step // retention.keep_every)",
        new="one.id.step // retention.keep_every",
        harm="With keep_every=1000 the checkpoint of step 1000 is removed, and one of some step before 2000 is kept.",
    ),
    Mutant(
        name="all-leave-before-the-newcomers-have-the-state",
        file="ef_common/core/membership/rules.py",
        old="hands_over = bool(joining) and not staying",
        new="hands_over = bool(coming) and not staying",
        harm="If all members are told to go while newcomers are ready, these begin anew, and what was trained is lost.",
    ),
    Mutant(
        name="takeover-of-a-view-that-some-have-not-received",
        file="ef_common/core/membership/takeover.py",
        old="whole = serving.settled.issuperset(view.ids) and not serving.suspects",
        new="whole = serving.workers.keys() >= set(view.ids) and not serving.suspects",
        harm="If the coordinator is lost while it sends a view, those who lack it and those who have it wait for each "
        "other.",
    ),
    Mutant(
        name="worker-that-has-moved-counts-as-dead",
        file="ef_common/protocol/server.py",
        old='self._depart(peer, "it has gone to another coordinator", silent=True)',
        new='self._depart(peer, "it has gone to another coordinator")',
        harm="A coordinator that was stopped and goes on takes its workers for dead, and can begin a second group "
        "beside them.",
    ),
    Mutant(
        name="successor-is-not-told-of-the-boundary",
        file="ef_common/core/resume_state.py",
        old="            at_boundary=bool(newest) and self.boundary == newest,\n",
        new="",
        harm="If the coordinator is lost while workers wait at a boundary for newcomers, they wait there for ever.",
    ),
    Mutant(
        name="proof-of-a-worker-without-the-challenge",
        file="ef_common/protocol/auth.py",
        old='return _proof(token, "worker", server_nonce, client_nonce, key,',
        new='return _proof(token, "worker", client_nonce, key,',
        harm="Whoever has overheard the introduction of a worker can connect under its name without the token.",
    ),
    Mutant(
        name="published-values-are-not-sent-again",
        file="ef_common/protocol/client.py",
        old="            self._publish_again()  # it may have been lost with the old link\n",
        new="",
        harm="If the line of a worker breaks while a group is being built, the others wait for its address for ever.",
    ),
    Mutant(
        name="failure-is-believed-without-a-proof",
        file="ef_common/protocol/introduction.py",
        old="if not proves(expected, message.proof):",
        new="if not isinstance(message, wire.Aborted) and not proves(expected, message.proof):",
        harm="A stranger who listens at the address of a coordinator can end the workers by saying that the job has "
        "failed.",
    ),
    Mutant(
        name="client-tells-for-whom-it-has-asked",
        file="ef_common/protocol/client.py",
        old="self._say(membership.Claimed(self.member.id, bid.claim, named))",
        new="self._say(membership.Claimed(self.member.id, bid.claim, bid.members))",
        harm="In a network that has fallen apart both sides believe that they have the claim, and train on.",
    ),
    Mutant(
        name="updates-are-confirmed-at-once",
        file="ef_common/session/collective_log.py",
        old="if self.completed_in.world_size == 1 and not self._current.is_ousted:",
        new="if not self._current.is_ousted:",
        harm="The event log holds an update that the survivors of a loss have made in another way.",
    ),
    Mutant(
        name="received-result-is-reduced-again",
        file="ef_common/session/session.py",
        old="if self.completed == number:",
        new="if self.completed >= number:",
        harm="A worker that has received a result after a loss reduces its gradients once more, in the next step of "
        "the others.",
    ),
    Mutant(
        name="no-barrier-after-a-loss-in-a-join",
        file="ef_common/session/session.py",
        old="        if changed:\n            self.run(Barrier(_ENTERED))\n",
        new="        if changed and self.view.admitted_at == self.view.generation:\n"
        "            self.run(Barrier(_ENTERED))\n",
        harm="If a worker is lost while a newcomer is admitted, the newcomer and the members run different "
        "collectives, and hang or end.",
    ),
    Mutant(
        name="closed-peer-connections-leave-a-receiver-waiting",
        file="ef_common/collectives/peer_connections.py",
        old="            strangers = list(self._strangers)\n            self._changed.notify_all()\n",
        new="            strangers = list(self._strangers)\n",
        harm="A worker that waits for the state from one that dies before it has connected waits for ever.",
    ),
    Mutant(
        name="small-sums-begin-with-the-own-part",
        file="ef_common/collectives/torch_exchange.py",
        old="    first, second, *others = parts\n",
        new="    first, second, *others = sorted(parts, key=lambda part: not torch.equal(part, own))\n",
        harm="With three workers or more the sums of small tensors are rounded differently in each of them, so that "
        "their weights drift apart.",
    ),
    Mutant(
        name="one-buffer-for-two-results",
        file="ef_common/collectives/gradients/buckets.py",
        old="num_buffers=2 if self.double_buffered else 1",
        new="num_buffers=1",
        harm="A worker that lacks the newest result receives buffers in which gradients of the next step lie already.",
    ),
    Mutant(
        name="gradients-copied-early-are-not-copied-again",
        file="ef_common/collectives/gradients/bucket_run.py",
        old="        self.copied = set()\n        self._pending = []\n",
        new="        self._pending = []\n",
        harm="After a loss in the backward pass, large gradients are summed again from what the broken sum has left in "
        "the buffers.",
    ),
    Mutant(
        name="spare-memory-is-used-twice",
        file="ef_common/collectives/codec.py",
        old="free[kind].pop() if free.get(kind)",
        new="free[kind][-1] if free.get(kind)",
        harm="A newcomer receives parameters of equal shape into the same memory, and begins with wrong weights.",
    ),
    Mutant(
        name="horovod-is-shut-down-before-its-sockets",
        file="ef_common/horovod/group.py",
        old="                self._cut()\n                self._horovod.shutdown()\n",
        new="                self._horovod.shutdown()\n                self._cut()\n",
        harm="On Horovod, workers whose peer has been stopped or cut off wait for it instead of going on without it.",
    ),
    Mutant(
        name="returned-positions-are-not-loaded",
        file="ef_common/data/dealer.py",
        old='returned=tuple(np.asarray(state["returned"]).tolist()),',
        new="returned=(),",
        harm="Samples that a lost worker had been dealt are never trained on if the job is resumed in that epoch, and "
        "a newcomer deals otherwise than the others.",
    ),
    Mutant(
        name="claim-at-a-place-that-is-another-by-now",
        file="ef_common/data/claiming.py",
        old="            if claims.digest() != digest:  # nothing is mounted there any more, or another etcd answers\n",
        new="            if not named:\n",
        harm="A worker whose shared directory is no longer mounted gets the claim on its own disk, and trains on "
        "beside the others.",
    ),
    Mutant(
        name="evaluation-remembers-the-pass-before",
        file="ef_common/data/coverage.py",
        old="self._done, self._length, self._logged = [], length, logged",
        new="self._length, self._logged = length, logged",
        harm="Samples of a worker that is lost in a later validation count as done if another one had them in an "
        "earlier one.",
    ),
    Mutant(
        name="checkpoint-a-step-before-it-is-due",
        file="ef_common/data/checkpointer.py",
        old='return "alone" if self._due(step) else None',
        new='return "alone"',
        harm="With every_steps=10 checkpoints are taken at the steps 9 and 10, 19 and 20, and so on.",
    ),
    Mutant(
        name="newcomer-skips-the-ramp",
        file="ef_common/data/compensator.py",
        old='self._ramp = None if state["ramp"] is None else Ramp(*state["ramp"])',
        new="self._ramp = None",
        harm="The updates of a newcomer have another learning rate than those of the others, so that its weights "
        "differ.",
    ),
    Mutant(
        name="share-of-a-lost-worker-is-waited-for",
        file="ef_common/data/sharing.py",
        old="lambda id: id in session.view.ids",
        new="lambda id: id in view.ids",
        harm="After the loss of a worker that was writing its share, no checkpoint is saved for five minutes.",
    ),
    Mutant(
        name="files-are-closed-without-a-sync",
        file="ef_common/storage/store.py",
        old="        file.flush()\n        sync(number)\n",
        new="        file.flush()\n",
        harm="After a power cut a checkpoint with a manifest may lack its data.",
    ),
    Mutant(
        name="name-is-there-before-its-bytes",
        file="ef_common/storage/store.py",
        old='        with self._opened(draft, "wb", what) as file:\n'
        "            file.write(data)\n"
        "        try:\n"
        "            return self._run(what, link, exclusive=True)\n",
        new='        with self._opened(draft, "wb", what) as file:\n'
        "            linked = self._run(what, link, exclusive=True)\n"
        "            file.write(data)\n"
        "        try:\n"
        "            return linked\n",
        harm="A worker that is killed at the wrong moment leaves an empty manifest or claim under its final name.",
    ),
    Mutant(
        name="checksums-of-pieces-do-not-matter",
        file="ef_common/storage/checkpoints.py",
        old='found = (found[0], "" if pieces.hold else "another one")',
        new='found = (found[0], "")',
        harm="A checkpoint that several workers have written is started from though its bytes are damaged.",
    ),
    Mutant(
        name="older-generations-are-not-fenced",
        file="ef_common/storage/checkpoints.py",
        old="if one == id or one[:2] > id[:2]]",
        new="if one == id or one.run > id.run]",
        harm="A worker that the others have gone on without still publishes checkpoints of its abandoned training.",
    ),
    Mutant(
        name="oldest-checkpoints-are-kept",
        file="ef_common/storage/checkpoints.py",
        old="chain=chain, valid=self._valid",
        new="chain=sorted(chain), valid=self._valid",
        harm="Of the checkpoints before the newest, the first ones of the run stay and all recent ones are removed.",
    ),
    Mutant(
        name="late-writer-empties-a-shared-file",
        file="ef_common/storage/store.py",
        old="        fs.touch(path, truncate=False)\n    except FileNotFoundError:\n",
        new="        fs.touch(path)\n    except FileNotFoundError:\n",
        harm="A worker that begins to write its share after another one makes zeros of what that one has written.",
    ),
    Mutant(
        name="one-restart-less-than-allowed",
        file="ef_common/launch/run.py",
        old="agent.lives <= self._max_restarts",
        new="agent.lives < self._max_restarts",
        harm="With --max-restarts=1 a worker that has been killed is never started again.",
    ),
    Mutant(
        name="drained-worker-counts-as-finished",
        file="ef_common/launch/run.py",
        old="if not agent.asked and not _has_left(agent)",
        new="if True",
        harm="Once a job has been scaled down, killed workers are not replaced, and its exit status is 0 even if all "
        "others fail.",
    ),
    Mutant(
        name="newer-start-without-waiting",
        file="ef_common/core/founding.py",
        old="if now - self._since >= LEASE_S:",
        new="if now - self._since >= 0.0:",
        harm="An agent that cannot reach the others at once starts the job a second time.",
    ),
    Mutant(
        name="coordinator-hands-over-and-leads-on",
        file="ef_common/protocol/server.py",
        old="        if hands_over:\n            self._step_down()\n",
        new="",
        harm="Workers hear nothing of it, and lose their coordinator.",
    ),
    Mutant(
        name="worker-outlives-its-agent",
        file="ef_common/launch/notice_sources.py",
        old="self._has_ended = has_ended(self._agent)",
        new="self._has_ended = False",
        harm="A worker whose agent was killed trains on, on a machine that may be somebody else's by then.",
    ),
    Mutant(
        name="second-signal-of-one-notice-kills",
        file="ef_common/launch/notices.py",
        old="now > self._first_term + SAME_NOTICE_S",
        new="now > self._first_term",
        harm="Under a launcher that sends SIGTERM to the group and then to the worker, the worker is killed instead of "
        "leaving with its state saved.",
    ),
    Mutant(
        name="ratio-stays-at-the-first-step-of-its-ramp",
        file="ef_lightning/compensation.py",
        old="self._settled = (contributors, loader, dealer.chosen_batch) if self.compensator.settled else None",
        new="self._settled = (contributors, loader, dealer.chosen_batch)",
        harm="After a join or a loss the learning rate makes one of eight steps to its new value and stays there.",
    ),
    Mutant(
        name="first-batch-that-keeps-step-counts",
        file="ef_lightning/evaluation_loader.py",
        old="self.padding = self._next >= self._num_own",
        new="self.padding = self._next > self._num_own",
        harm="Metrics of a validation count a sample twice if some worker has fewer batches than the others.",
    ),
    Mutant(
        name="batches-of-an-open-accumulation-are-skipped",
        file="ef_lightning/train_loader.py",
        old='        if uncommitted:\n            state["cursor"] = uncommitted[0].start\n',
        new="",
        harm="After a resume in the middle of a gradient accumulation its first batches are never trained on.",
    ),
    Mutant(
        name="momentum-of-later-epochs-has-the-wrong-rate",
        file="ef_keras/compensation.py",
        old="        self._settled = None\n        for scaled in self._scaled:\n",
        new="        for scaled in self._scaled:\n",
        harm="From the second epoch on, the momentum of SGD is that of one worker while the learning rate is that of "
        "all.",
    ),
    Mutant(
        name="batch-made-ready-is-used-whatever-is-dealt",
        file="ef_keras/training_data.py",
        old="ahead[1] if ahead is not None and ahead[0] == window else",
        new="ahead[1] if ahead is not None else",
        harm="After a change of the members a worker trains on samples that are another one's, and never on its own.",
    ),
    Mutant(
        name="next-rank-zero-forgets-the-best",
        file="ef_keras/rank_zero.py",
        old="            begin()\n        restore(self.wrapped, self._memory)\n",
        new="            begin()\n",
        harm="When the first worker is lost, the ModelCheckpoint of the next one saves a worse model over the best.",
    ),
    Mutant(
        name="shuffled-orders-stay-each-workers-own",
        file="ef_common/data/orders.py",
        old="        _rearrange(owner, mine, orders)\n",
        new="",
        harm="A PyDataset that shuffles itself without a seed has an order of its own in each worker, so that "
        "samples are trained twice or never.",
    ),
    Mutant(
        name="schedule-forgets-that-an-epoch-begins",
        file="ef_keras/schedules.py",
        old="            self._epoch, self._reached = epoch, 0\n",
        new="            self._epoch = epoch\n",
        harm="From the second epoch on, the learning rate of a schedule goes backwards.",
    ),
    Mutant(
        name="batch-read-for-another-worker-is-handed-out",
        file="ef_keras/foretold.py",
        old="        if next(self._coming, None) != wanted:\n",
        new="        if next(self._coming, None) is None:\n",
        harm="After a change of the members a worker trains on samples of a DataLoader that are another one's.",
    ),
    Mutant(
        name="what-was-read-before-a-shuffle-is-handed-out",
        file="ef_common/data/read_ahead.py",
        old="        self.pause()\n        self._pending.clear()\n",
        new="        self.pause()\n",
        harm="After `on_epoch_end` has shuffled a PyDataset with `workers=`, the first batches are those of the "
        "order before.",
    ),
    Mutant(
        name="exception-leaves-the-model-elastic",
        file="ef_keras/guard.py",
        old="            self.release()\n            self._leave(error)\n",
        new="            self.release()\n",
        harm="After an exception in `fit`, the next plain `fit` of the model trains on data of the elastic one, "
        "and the others wait for a worker that has failed.",
    ),
    Mutant(
        name="audit-believes-what-was-read",
        file="ef_common/audit/samples.py",
        old="        if not are_alike(found.checksums, other.checksums):\n",
        new="        if False:\n",
        harm="The audit ticks that each sample was used once, although two workers have read different data at "
        "one position.",
    ),
    Mutant(
        name="newcomer-is-not-told-of-the-change-that-it-is",
        file="ef_keras/fit.py",
        old='        self._workers.load_state(None if saved else state.get("workers"))\n',
        new="        self._workers.load_state(None)\n",
        harm="`on_workers_changed` is called in all workers but the newcomer, so that a collective in it never ends.",
    ),
    Mutant(
        name="all-nodes-are-asked-to-leave",
        file="ef_common/core/membership/size.py",
        old="    beyond = set(nodes[: max(0, num_beyond)])\n",
        new="    beyond = set(nodes) if num_beyond > 0 else set()\n",
        harm="If fewer nodes are wanted than train, all of them are told to leave, and the training ends.",
    ),
    Mutant(
        name="last-ones-leave-with-the-state",
        file="ef_common/core/membership/size.py",
        old="    nodes = _by_dispensability(state, able)[::-1][: max(0, num_missing)]\n",
        new="    nodes = _by_dispensability(state, able)[::-1][: max(0, min(0, num_missing))]\n",
        harm="If the only node that was to stay dies while the others are about to leave, these leave in spite of "
        "that, and the training ends.",
    ),
    Mutant(
        name="demand-is-forgotten-at-a-takeover",
        file="ef_common/core/resume_state.py",
        old="            demand=self.demand,\n",
        new="",
        harm="When the coordinator is lost, nodes that were sent away because they are not worth their price are "
        "admitted again.",
    ),
    Mutant(
        name="former-rank-0-is-heeded",
        file="ef_common/core/membership/size.py",
        old="    if state.view.rank_of(event.worker) != 0 or event.worker not in state.workers:\n",
        new="    if event.worker not in state.workers:\n",
        harm="A worker that is not rank 0 any more, or never was, sends others away.",
    ),
    Mutant(
        name="large-job-is-passed-by-small-ones",
        file="ef_common/core/cluster/shares.py",
        old="            barred = barred or (one.limit >= one.minimum and could_ever_fit(one.share.job, nodes))\n",
        new="",
        harm="A job with a large minimum never starts in a busy cluster, as smaller ones that come later get the room.",
    ),
    Mutant(
        name="each-pod-of-a-power-cut-counts",
        file="ef_common/core/cluster/losses.py",
        old="    if before and all(pod.created < record.crashed_at for pod in lost):\n        return record\n",
        new="",
        harm="A power cut that takes several pods of a job fails it by its backoffLimit, as they count one by one.",
    ),
    Mutant(
        name="room-that-is-promised-to-serving-is-used",
        file="ef_common/kubernetes/reading.py",
        old='where = pod["spec"].get("nodeName") or status.get("nominatedNodeName")',
        new='where = pod["spec"].get("nodeName")',
        harm="While a serving pod waits for the pod that was evicted for it, the controller starts another one in its "
        "place, which the scheduler has to evict as well.",
    ),
    Mutant(
        name="controller-acts-as-long-as-its-lease-counts",
        file="ef_common/kubernetes/lease.py",
        old="self._renewed_at + self._duration_s / 2",
        new="self._renewed_at + self._duration_s * 2",
        harm="A controller that cannot reach its lease goes on while another one has taken over, and both contend.",
    ),
    Mutant(
        name="pod-that-has-gone-comes-back",
        file="ef_common/kubernetes/watching.py",
        old="            elif uid not in self._gone:\n",
        new="            else:\n",
        harm="A pod whose end is known before the call that made it is answered counts as there for minutes, and is "
        "not replaced.",
    ),
    Mutant(
        name="controller-reads-secrets",
        file="ef_common/kubernetes/installation.py",
        old='_rule("", ["services", "secrets"], ["create"])',
        new='_rule("", ["services", "secrets"], ["get", "create"])',
        harm="Whoever takes over the controller reads the secrets of all namespaces.",
    ),
    Mutant(
        name="replaced-buffers-stay-each-workers-own",
        file="ef_common/collectives/gradients/module_buffers.py",
        old="                self.tensors[index], found = _writable(entries, name, tensor), True\n",
        new="                continue\n",
        harm="A running mean that a module replaces in each step, as in `self.center = 0.9 * self.center + …`, is each "
        "worker's own, and so are soon the weights.",
    ),
    Mutant(
        name="epoch-begins-twice-in-a-newcomer",
        file="ef_keras/fit.py",
        old="            if not np.array_equal(hooks.copied(variable), value, equal_nan=True):\n",
        new="            if variable is None:\n",
        harm="A LearningRateScheduler that multiplies the rate does so twice in a newcomer, whose weights drift from "
        "those of the others.",
    ),
    Mutant(
        name="one-standstill-makes-a-straggler",
        file="ef_common/session/progress_tracker.py",
        old="counted_s = min(took_s, max(STANDSTILL_S, _JUMP * self._num_samples * self._sample_s))",
        new="counted_s = took_s",
        harm="A worker that stands still once for a minute, as TensorFlow may, is replaced as one that is always slow.",
    ),
    Mutant(
        name="no-downlink",
        file="ef_common/protocol/client.py",
        old="            self._ask_for_downlink()\n",
        new="",
        harm="Of two nodes without a place for claims, the one that is left may wait for ever.",
    ),
    Mutant(
        name="downlink-of-a-reset-worker-ends-in-order",
        file="ef_common/protocol/server.py",
        old="silent=not proves, resets=how is not End.CLOSED)",
        new="silent=not proves)",
        harm="A worker whose connection a firewall has reset takes its coordinator for dead, which goes on without it.",
    ),
    Mutant(
        name="start-that-overlaps-the-old-job-looks-once",
        file="ef_common/data/checkpointer.py",
        old="        return run, _START(self._checkpoints.newest, before=before or run) == found\n",
        new="        return run, True\n",
        harm="A job that starts while the one before it still saves begins from a checkpoint that is gone by then, and "
        "the newest one is lost.",
    ),
    Mutant(
        name="leftovers-of-broken-saves-fill-the-disk",
        file="ef_common/storage/checkpoints.py",
        old="        self._make_room(id, shared=any(",
        new="        bool(any(",
        harm="A job that was killed while it saved leaves so much that no checkpoint finds room any more.",
    ),
    Mutant(
        name="newcomer-that-its-machine-fails-fails-the-job",
        file="ef_common/launch/deaths.py",
        old="                restarts.excuse()\n",
        new="                pass\n",
        harm="One pod on a node that lacks something ends a training of a thousand others under Kubernetes.",
    ),
    Mutant(
        name="samples-by-number-with-other-shards",
        file="ef_lightning/stream_loader.py",
        old='            self._stream.check_numbering(state["numbering"])\n',
        new="            pass\n",
        harm="A worker with one file more counts other samples by the same numbers: some are trained twice.",
    ),
)
