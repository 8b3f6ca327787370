"""The session: what a training function holds.

    with coherent_ray.session(config) as run:
        run.track(model, optimizer, scheduler)
        for update in run.updates():
            for micro in update.microbatches():
                loss_sum, count = task.loss(run.model, micro.batch)
                update.backward(loss_sum, count)
            update.step()

`updates` starts where the published history ends. A rank that raises inside an update still votes
in that update's reduction, so the others raise too and none waits for it. At the end of the block
Ray Train is told the last metrics and the last generation, so every rank must come there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from coherent_ray.config import Config
from coherent_ray.data.loader import LoadedUpdate, Loader
from coherent_ray.errors import (
    ConfigError,
    NotFinite,
    PeerLost,
    ReplicaDiverged,
    SaveFailed,
    TrainingFailed,
)
from coherent_ray.state.capture import (
    MODEL,
    State,
    capture,
    check_unchanged,
    plain,
    state_spec,
)
from coherent_ray.state.layout import layout_of
from coherent_ray.state.optimizer import require_plain_step
from coherent_ray.train import agreement, datasets, fsdp, hooks, spares
from coherent_ray.train import partial as partial_
from coherent_ray.train.admit import Admitted, current
from coherent_ray.train.boundaries import Boundaries
from coherent_ray.train.buffers import LaneBuffers
from coherent_ray.train.coordination import Line
from coherent_ray.train.hooks import reach
from coherent_ray.train.leaving import SIGTERM, farewell, sigterm
from coherent_ray.train.memory.wiring import memory_of
from coherent_ray.train.outcome import report_outcome
from coherent_ray.train.own_line import in_words, own_line
from coherent_ray.train.partial import Usable
from coherent_ray.train.progress import Progress
from coherent_ray.train.receipts import ReceiptChain
from coherent_ray.train.reduce import LaneReducer, Met, Reduced
from coherent_ray.train.restoring import give_state, usable_of
from coherent_ray.train.saving import Saver
from coherent_ray.train.sharing import Among, share
from coherent_ray.train.update import Update, lanes_with_examples
from coherent_ray.train.whereabouts import LISTEN_S, REPEAT_S, Beacon
from coherent_ray.train.wishes import CANNOT_KEEP, WISH_LEAVE, WISH_SAVE, WISH_STOP, Wish

Collate = Callable[..., Any]


def session(config: Config | None = None, *, collate: Collate | None = None) -> Session:
    """Return the session of this worker, inside a function that Ray's `TorchTrainer` runs.

    Args:
        config: The configuration that the trainer's ``torch_config`` was made from; None: that one.
        collate: Turns rows into a batch; None: the task's.

    Raises:
        AdmissionRefused: This worker was never admitted.
        ConfigError: The configuration is another, or there is no collate function.
    """
    admitted = current()
    # Ray gives a worker a directory of its own: relative paths still mean the driver's.
    if config is not None and config.resolved(admitted.directory) != admitted.config:
        raise ConfigError(
            "the session's configuration is not the one that the workers were admitted with",
            where="coherent_ray.session",
            remedy="make both from one configuration: torch_config(config) and session(config)",
        )
    chosen = collate or (admitted.task.collate if admitted.task else None)
    if chosen is None:
        raise ConfigError(
            "nothing says how rows become a batch",
            where="coherent_ray.session",
            remedy="pass collate=..., or name a task in the configuration",
        )
    return Session(admitted, chosen)


class StoppedMidway(BaseException):
    """Unwinds a training function whose run stops between two microbatches; the session ends it.

    No `Exception`: what wraps a training step to survive its errors must not keep it.
    """


class Session:
    """One rank's run, from admission to the last update."""

    def __init__(self, admitted: Admitted, collate: Collate) -> None:
        self._admitted = admitted
        self._collate = collate
        self.config = admitted.config
        self.rank = admitted.rank
        self.ranks = admitted.ranks
        self.device = admitted.device
        self.plan = admitted.plan
        self.position = admitted.position
        """What is read next; grows with every update."""
        self.stopped = False
        """Whether the run was asked to stop, and has."""
        self._leaves = False
        self._unproven = True
        self._before: Usable | None = None
        self._model: nn.Module | None = None
        self._update: Update | None = None

    # --- what a training function uses ------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The tracked model, on this rank's device."""
        if self._model is None:
            raise ConfigError(
                "no model is tracked",
                remedy="call run.track(model, optimizer) before run.updates()",
            )
        return self._model

    @property
    def updates_total(self) -> int:
        """Updates of the whole run."""
        return total_updates(self.config, self.plan.updates_per_epoch)

    @property
    def sharded(self) -> bool:
        """Whether this rank holds some rows of every parameter, not all of it."""
        return self.config.training.strategy == "fsdp2" and self.ranks > 1

    @property
    def canonical(self) -> LaneReducer:
        """The reduction over lanes, for what is done between two microbatches."""
        assert isinstance(self.reducer, LaneReducer)
        return self.reducer

    def shard(self, model: nn.Module, task: object = None) -> bool:
        """Cut a model over all ranks where the configuration says so, and return whether it is.

        In place, on every rank, before the optimizer is made; see `fsdp.shard_model`.
        """
        if self.sharded:
            fsdp.shard_model(plain(model), self.ranks, self.device, task)
        return self.sharded

    def track(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        average: AveragedModel | None = None,
    ) -> None:
        """Say what is trained; gives it the state of the generation to resume from.

        Args:
            model: On `device`; the same on every rank.
            optimizer: Of the model's parameters.
            scheduler: Takes one step after each update.
            scaler: None: one is made where the precision is fp16.
            average: Of the model's weights; takes them in after each update that is not skipped.

        Raises:
            StateMismatch: It does not fit the stored state, or the ranks differ.
            TaskError: It cannot be stored exactly, or the optimizer's step needs a closure.
        """
        require_plain_step(optimizer)
        self._model = model
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.average = average
        self._first_groups = len(optimizer.param_groups)
        if scaler is None and self.config.training.precision == "fp16":
            scaler = GradScaler(self.device.type)
        self.scaler = scaler
        if self.sharded:
            fsdp.require_sharded(plain(model), self.ranks, average)
        stored = give_state(self, self._admitted)
        self._spec = state_spec(model)
        if scaler is not None:
            # It has no scale before its first use, and this rank's first update may have no
            # microbatch.
            scaler.scale(torch.zeros((), device=self.device))
        state = self.capture()
        layout_of(state.tensors)  # what cannot be stored is refused now, and not at the first save
        agreement.check_same_start(state, self.rank, self.ranks, self.device)
        inner = plain(model)
        self.reducer = fsdp.reducer_of(inner, self.config, self.rank, self.ranks)
        self.buffers = LaneBuffers(inner)
        if stored is not None and not self.sharded:
            self._before = usable_of(self, stored)

    def updates(self) -> Iterator[Update]:
        """Yield the updates that are left, in order; each must be stepped before the next.

        Raises:
            ConfigError: `track` was not called.
            TrainingFailed: An update was not stepped, or its data could not be read.
            SaveFailed: More saves in a row failed than the configuration allows.
            RayActorError: The group leaves, since a rank was told to; Ray Train starts it again.
        """
        assert self.model is not None
        for loaded in self._loaded():
            self._update = Update(self, loaded)
            self.beacon.at(loaded.plan.update, "task")
            yield self._update
            if not self._update.stepped:
                raise TrainingFailed(
                    f"update {loaded.plan.update} was not stepped",
                    remedy="call update.step() once at the end of every update",
                )
            self._update = None
            if self._leaves:
                raise self._farewell()
            if self.stopped:
                return

    def capture(self) -> State:
        """Return the whole state as it is now: references, no copies.

        Raises:
            TaskError: The model has not the tensors any more that it was tracked with: a resume
                would build it as it was, and could not take this state.
        """
        check_unchanged(self._spec, state_spec(self.model))
        return capture(
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            average=self.average,
            first_groups=self._first_groups,
        )

    # --- what an update uses ----------------------------------------------------------------------

    def wishes(self) -> Wish:
        """Return what this rank votes at a boundary: its wishes, and what the cadence needs."""
        wish = self._line.wish()
        return replace(wish, bits=wish.bits | self.cadence.bits())

    def advance(self, update: Update, reduced: Reduced) -> None:
        """Take in a finished update: progress, and a generation where one is due or wished."""
        number, wishes = update.number, reduced.wishes
        self.cadence.ended()
        self.beacon.at(number, "save")
        reach(self._hook, "update", number)
        self.position = self.plan.after(number)
        self._line.settle(reduced.tokens)
        spares.ask()
        if self._unproven and self.optimizer.state:
            # Optimizers make their state in their first step: it is refused there, if it must be.
            layout_of(self.capture().tensors)
            self._unproven = False
        self.stopped = bool(wishes & WISH_STOP)
        ended = self.stopped or number == self.updates_total
        self._leaves = bool(wishes & WISH_LEAVE) and not ended
        why = self.cadence.why(number, wishes, last=number == self.updates_total)
        keeps = self.memory.is_due(number) and not ended
        if (why is not None or keeps) and self.config.training.on_nonfinite == "stop":
            fsdp.require_finite(self.reducer, self.model, number)
        if keeps:
            self.keep(agreed=not wishes & CANNOT_KEEP)
        if why is not None:
            self.boundaries.save(self.position, self.capture(), why)
        elif self._checks(number):
            agreement.check_replicas(self.capture(), number, self.rank, self.ranks, self.device)
        if ended:
            self.boundaries.finish(self.position, self.capture(), why or "end")
        self.progress.update(update, self.chain.tip, self.boundaries, ended=ended)
        if not ended:
            self.beacon.at(number + 1, "data")
            self.cadence.begins()

    def keep(self, *, agreed: bool) -> None:
        """Keep the state in memory, too, where all ranks have agreed that they can."""
        describe = partial(self.boundaries.header, self.position)
        self.memory.keep(self.capture(), describe, self.chain.pending, agreed=agreed)

    def _checks(self, number: int) -> bool:
        """Whether all ranks compare their states after an update that none of them saves."""
        every = self.config.checkpoint.check_replicas_every_updates
        return every is not None and number % every == 0

    def done_before(self, update: Update) -> Usable:
        """Return what the generation that this rank resumed from holds of an update."""
        found, self._before = self._before, None
        if found is None or found.update != update.number:
            return Usable(update.number, {})
        update.resume(found)
        return found

    def between(self, update: Update) -> None:
        """Save before a microbatch, where somebody wishes it and the configuration lets them."""
        if self.config.checkpoint.mid_update and (wish := self._line.wish()).bits:
            update.meet(wish)

    def midway(self, update: Update, met: Met) -> None:
        """Save what all ranks have done of an update, and end there if that is wished.

        Raises:
            StoppedMidway: The run was asked to stop, and has.
            RayActorError: The group leaves, since a rank was told to; Ray Train starts it again.
        """
        self.beacon.at(update.number, "save")
        self._line.settle(met.tokens)
        self.stopped = bool(met.wishes & WISH_STOP)
        if self.config.training.on_nonfinite == "stop":
            fsdp.require_finite(self.reducer, self.model, update.number - 1)
        state = self._midway_state(update)
        why = self.cadence.why(update.number, met.wishes | WISH_SAVE, last=False)
        self.boundaries.save(self.position, state, why or "asked")
        if met.wishes & (WISH_STOP | WISH_LEAVE):
            self.canonical.let_go()
        if self.stopped:
            self.boundaries.finish(self.position, state, "stop")
            raise StoppedMidway
        if met.wishes & WISH_LEAVE:
            raise self._farewell()
        self.beacon.at(update.number, "task")

    def _midway_state(self, update: Update) -> State:
        """Return the state before an update, and what the ranks have done of it."""
        state = self.capture()
        # The model's own are in the middle of a lane.
        start = {f"{MODEL}{name}": tensor for name, tensor in self.buffers.start().items()}
        tensors = state.tensors | {n: t for n, t in start.items() if n in state.tensors}
        among = Among(self.rank, self.ranks, self.device)
        record, parts = share(update.held(), layout_of(tensors), among)
        values = (
            {**state.values, partial_.KEY: partial_.dump(record)} if record.lanes else state.values
        )
        return State(tensors, values, parts)

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        admitted = self._admitted
        self._line = Line(admitted.run_id, admitted.attempt, self.rank)
        sigterm.begin(partial(self._line.leave, SIGTERM))
        stand = partial(self._line.stand, self.ranks)
        # Between microbatches a rank hears of a wish by the beacon alone.
        repeat_s = LISTEN_S if self.config.checkpoint.mid_update else REPEAT_S
        self.beacon = Beacon(stand, self.ranks, self.position.update + 1, repeat_s)
        pending = admitted.kept.pending if admitted.kept else ()
        self.chain = ReceiptChain(admitted.receipt_tip, self.position.update, pending)
        self.loader = Loader(
            datasets.open_configured(self.config, admitted.dataset),
            self.plan,
            self.rank,
            self.ranks,
            self._collate,
            prefetch=self.config.data.prefetch,
            spare=self.sharded,
        )
        self._hook = hooks.installed()
        saver = Saver(
            admitted.storage,
            self.rank,
            self.config.checkpoint,
            self._line,
            self._hook,
            log=admitted.log,
            previous=admitted.previous,
        )
        self.boundaries = Boundaries(admitted, saver, self.chain)
        self.cadence = self.boundaries.cadence
        self.progress = Progress(
            self._line, admitted.attempt, self.rank, self.updates_total, self.position.update
        )
        self.memory = memory_of(admitted, self.progress.note, self._hook)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        stopped = isinstance(error, StoppedMidway)
        sigterm.end()
        self.beacon.close()
        self.loader.close()
        self.memory.close()
        try:
            if self.sharded and error is not None and (lost := fsdp.as_lost_peer(error)):
                raise lost from error
            if isinstance(error, Exception | SystemExit):
                self._vote_failed(error)
                # It stays what it is. Its traceback does not cross processes; a note does.
                if place := own_line(error):
                    error.add_note(place)
        finally:
            # A number that is none stops all ranks alike: they can finish the save before it.
            self.boundaries.close(wait=error is None or stopped or isinstance(error, NotFinite))
        if error is None or stopped:
            report_outcome(self)
        return stopped

    def _farewell(self) -> Exception:
        """See the last generation published, say so, and return what ends the attempt.

        A save that fails is not repeated: there is no time for it, and the one before stands.
        """
        try:
            generation = self.boundaries.conclude()
        except ReplicaDiverged:
            raise
        except SaveFailed:
            generation = None
        if self.rank == 0:
            self._line.left(generation)
        words = f"the group leaves with {generation or 'no generation'}, as it was told to"
        error: Exception = farewell(words)
        return error

    def _loaded(self) -> Iterator[LoadedUpdate]:
        """Yield what the loader reads. Where it fails, the other ranks wait in that update."""
        number, last = self.position.update + 1, self.updates_total
        if number > last:
            return
        self.beacon.at(number, "data")
        self.cadence.begins()
        try:
            for loaded in self.loader.updates(number, last):
                yield loaded
                number += 1
        except Exception as error:
            self._abort(number, error)
            raise

    def _vote_failed(self, error: Exception | SystemExit) -> None:
        """Let the other ranks know that this one fails, unless they fail or know already."""
        update = self._update
        if update is None or update.voted or isinstance(error, PeerLost):
            return
        self._abort(update.number, error)

    def _abort(self, number: int, error: Exception | SystemExit) -> None:
        try:
            self.reducer.begin(number, lanes_with_examples(self.plan.update(number)))
            self.reducer.abort(in_words(error))
        except PeerLost:
            return
        except TrainingFailed as failed:
            # One error for the whole group; the rank's own is its cause, for the traceback.
            raise failed from error


def total_updates(config: Config, updates_per_epoch: int) -> int:
    """Return how many updates a whole run has."""
    training = config.training
    if training.updates is not None:
        return training.updates
    assert training.epochs is not None
    return training.epochs * updates_per_epoch
