"""One update: microbatches of this rank's lanes, one canonical reduction, one optimizer step.

What a microbatch computes depends on the plan, its lane and its index, never on the rank: the shape
of its batch is the lane's, and its randomness is keyed by (seed, update, lane, microbatch).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from coherent_ray.data.loader import LoadedUpdate
from coherent_ray.data.plan import UpdatePlan
from coherent_ray.errors import TaskError, TrainingFailed
from coherent_ray.train import finite, losses, partial
from coherent_ray.train.fsdp import ShardedReducer, passes
from coherent_ray.train.partial import Held, Started, Usable
from coherent_ray.train.reduce import Met, Reduced
from coherent_ray.train.tally import Tally
from coherent_ray.train.wishes import CANNOT_KEEP, Wish

if TYPE_CHECKING:
    from coherent_ray.train.session import Session

#: Of a pass that belongs to no lane.
_NO_LANE = -1
_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Micro:
    """One microbatch, ready for forward and backward."""

    lane: int
    index: int
    """From 0 within its lane."""
    batch: Any
    """What the task's ``collate`` returned, on this rank's device."""


class Update:
    """One optimizer step, as a training function sees it."""

    def __init__(self, session: Session, loaded: LoadedUpdate) -> None:
        self._session = session
        self._loaded = loaded
        self._tally = Tally()
        self._lane: int | None = None
        self._weightless = False
        self._begun = False
        self._walked = False
        self.number: int = loaded.plan.update
        """From 1."""
        self.epoch: int = loaded.plan.epoch
        """From 0."""
        self.examples: int = loaded.plan.examples
        """Examples that it takes, over all lanes."""
        self.stepped = False
        self.voted = False
        """Whether this rank's vote in the reduction is cast, so that no rank waits for it."""
        self.loss = float("nan")
        """Loss an accepted example or token, over all lanes; known after `step`."""
        self.grad_norm = float("nan")
        """Norm of the gradient before clipping; known after `step`."""

    def microbatches(self) -> Iterator[Micro]:
        """Yield the microbatches of the lanes that this rank carries, in order.

        Forward passes run under the configured autocast precision, with keyed random state.

        Raises:
            TaskError: They were taken before.
        """
        session = self._session
        if self._begun:
            raise TaskError(
                f"the microbatches of update {self.number} were taken before",
                remedy="loop over update.microbatches() once, then call update.step()",
            )
        self._begun = True
        session.reducer.begin(self.number, lanes_with_examples(self._loaded.plan))
        session.buffers.begin()
        before = session.done_before(self)
        all_of_them = [m for lane in self._loaded.lanes for m in lane.microbatches]
        for lane in self._loaded.lanes:
            if not lane.microbatches or self._goes_on(lane.lane, before):
                continue
            self._lane = lane.lane
            session.buffers.lane_begin(lane.lane)
            self._go_on_within(lane.lane, before)
            for loaded in lane.microbatches[self._tally.done(lane.lane) :]:
                session.between(self)
                if loaded is all_of_them[-1]:
                    session.reducer.closes(lane.lane)
                index = loaded.plan.index
                seed_everything(session.plan.seed_for("step", self.number, lane.lane, index))
                micro = Micro(lane.lane, index, to_device(loaded.batch, session.device))
                with self._autocast():
                    yield micro
                self._tally.did(lane.lane)
            session.buffers.lane_end(lane.lane)
            session.reducer.lane_done(lane.lane)
            self._lane = None
        yield from self._repeated()
        self._walked = True

    def _repeated(self) -> Iterator[Micro]:
        """Yield a microbatch again as often as other ranks have more, where passes are collective.

        What it computes counts zero times, and the buffers that it changes are put back.
        """
        session, plan = self._session, self._loaded.plan
        if not session.sharded:
            return
        own = [(lane.lane, micro) for lane in self._loaded.lanes for micro in lane.microbatches]
        missing = passes(plan, session.ranks) - len(own)
        lane, loaded = own[-1] if own else (0, self._loaded.spare)
        if missing and loaded is not None:
            self._lane, self._weightless = lane, True
            session.buffers.lane_begin(_NO_LANE)
            for _ in range(missing):
                index = loaded.plan.index
                seed_everything(session.plan.seed_for("step", self.number, lane, index))
                with self._autocast():
                    yield Micro(lane, index, to_device(loaded.batch, session.device))
            session.buffers.lane_end(_NO_LANE)
            self._lane, self._weightless = None, False

    def backward(self, loss_sum: Tensor, count: int) -> None:
        """Add a microbatch's gradient to its lane's.

        Args:
            loss_sum: Scalar: the loss *summed* over the accepted examples or tokens.
            count: How many these are.

        Raises:
            TaskError: The loss is not a scalar with a gradient, or the count is impossible.
        """
        lane = self._lane
        if lane is None:
            raise TaskError(
                "backward was called outside a microbatch",
                remedy="call update.backward inside the loop over update.microbatches()",
            )
        where = losses.calling_line(1)
        count = losses.check(loss_sum, count, self._session.device, where)
        if self._weightless:
            loss_sum = loss_sum * 0.0
        else:
            self._tally.add(lane, loss_sum.detach(), count)
        scaler = self._session.scaler
        with torch.autocast(self._session.device.type, enabled=False):
            torch.autograd.backward(scaler.scale(loss_sum) if scaler else loss_sum)

    def step(self) -> None:
        """Reduce over all lanes, step optimizer and scheduler, write the receipt, save when due.

        Raises:
            TaskError: Not all microbatches were taken, or it was stepped before.
            TrainingFailed: A rank failed in this update, or nothing was accepted in it.
            NotFinite: It is not finite, and ``training.on_nonfinite`` is ``stop``.
            PeerLost: Another rank is gone.
        """
        session = self._session
        self._require_walked()
        reduced: Reduced = self._reduce()
        while reduced.midway:
            session.midway(self, Met(reduced.wishes, reduced.tokens))
            reduced = self._reduce()
        if reduced.count == 0:
            raise TrainingFailed(
                f"update {self.number} accepted no example or token in any lane",
                remedy="the task's loss must count at least one in every update",
            )
        session.reducer.sync_buffers(session.buffers)
        rates = [float(group["lr"]) for group in session.optimizer.param_groups]
        skipped = self._optimize(reduced)
        self.loss = reduced.loss_sum / reduced.count
        self.stepped = True
        plan = self._loaded.plan
        session.chain.append(
            epoch=plan.epoch,
            start=plan.start,
            stop=plan.stop,
            ids=self._loaded.ids,
            count=reduced.count,
            loss=self.loss,
            grad_norm=self.grad_norm,
            lr=rates,
            skipped=skipped,
        )
        session.advance(self, reduced)

    def _require_walked(self) -> None:
        """Refuse to drop, in silence, what microbatches that were left out would have added."""
        if self.stepped:
            raise TaskError(
                f"update {self.number} was stepped before",
                remedy="call update.step() once, at the end of every update",
            )
        if not self._walked:
            raise TaskError(
                f"update {self.number} was stepped before all of its microbatches were taken",
                remedy="let the loop over update.microbatches() end by itself, then call "
                "update.step()",
            )

    def meet(self, wish: Wish) -> None:
        """Have all ranks save between two microbatches, as this one wishes, and go on.

        Args:
            wish: Of this rank.
        """
        session = self._session
        if self._lane is not None:
            session.canonical.gradients()  # what can fail here alone must fail before the vote
        self.voted = True
        session.beacon.at(self.number, "reduction")
        session.midway(self, session.canonical.meet(wish))
        self.voted = False

    def held(self) -> Held:
        """Return what this rank has done of the update."""
        session, lane = self._session, self._lane
        started = None
        if lane is not None and self._tally.done(lane):
            started = lane, Started(session.canonical.gradients(), session.buffers.changed())
        return partial.held(
            self.number,
            self._tally.so_far(),
            session.canonical.held(),
            started,
            session.buffers.kept(),
        )

    def resume(self, before: Usable) -> None:
        """Go on from what a generation holds of this update."""
        self._tally.resume(before.tally)

    def _goes_on(self, lane: int, before: Usable) -> bool:
        """Take a node that begins with a lane from a generation; whether the lane is in one."""
        found = before.nodes.get(lane)
        if found is not None:
            self._session.canonical.put(found.node, found.present, found.tensors)
            if lane == 0:
                self._session.buffers.keep(before.kept or {})
        return found is not None or before.within(lane)

    def _go_on_within(self, lane: int, before: Usable) -> None:
        """Put a lane that has just begun where a generation left it, if it did."""
        found = before.started.get(lane)
        if found is not None:
            self._session.canonical.resume(found.gradients)
            self._session.buffers.resume(found.buffers)

    def _reduce(self) -> Reduced:
        session = self._session
        wish = session.wishes()
        tally = self._tally.so_far()
        sums = {lane: found.loss for lane, found in tally.items()}
        counts = {lane: found.count for lane, found in tally.items()}
        self.voted = True
        session.beacon.at(self.number, "reduction")
        bits = wish.bits | (0 if session.memory.can(self.number) else CANNOT_KEEP)
        return session.reducer.finish(sums, counts, bits, wish.token)

    def _optimize(self, reduced: Reduced) -> bool:
        """Step with the mean gradient; return whether the scaler skipped the step."""
        session = self._session
        for flat in reduced.gradients:
            flat.div_(reduced.count)
        scaler, optimizer = session.scaler, session.optimizer
        if scaler:
            scaler.unscale_(optimizer)
        self.grad_norm = self._clip()
        self._require_finite(reduced)
        before = scaler.get_scale() if scaler else 0.0
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        skipped = bool(scaler) and scaler.get_scale() < before if scaler else False
        if session.scheduler is not None and not skipped:
            _step_scheduler(session.scheduler, reduced.loss_sum / reduced.count)
        if session.average is not None and not skipped:
            session.average.update_parameters(session.model)
        return skipped

    def _require_finite(self, reduced: Reduced) -> None:
        """Stop before a step that would poison the state; or tell of it, as is configured."""
        session = self._session
        what = finite.in_words(
            reduced.loss_sum / reduced.count,
            self.grad_norm,
            reduced.losses,
            session.ranks,
            scaled=bool(session.scaler and session.scaler.is_enabled()),
        )
        if what and session.config.training.on_nonfinite == "stop":
            raise finite.stopped(self.number, what)
        session.progress.not_finite(self.number, what)

    def _clip(self) -> float:
        training = self._session.config.training
        if isinstance(self._session.reducer, ShardedReducer):
            return self._session.reducer.clip(training.clip_norm, training.clip_value)
        parameters = [p for p in self._session.model.parameters() if p.grad is not None]
        before = norm = _norm_of(parameters)
        if training.clip_value is not None:
            clip_grad_value_(parameters, training.clip_value)
            norm = _norm_of(parameters) if training.clip_norm is not None else norm
        if training.clip_norm is not None:
            clip_grads_with_norm_(parameters, training.clip_norm, norm)
        return float(before)

    def _autocast(self) -> torch.autocast:
        dtype = _PRECISIONS.get(self._session.config.training.precision)
        return torch.autocast(self._session.device.type, dtype=dtype, enabled=dtype is not None)


def lanes_with_examples(plan: UpdatePlan) -> list[int]:
    """Return the lanes of all ranks that an update has examples for."""
    return [lane.lane for lane in plan.lanes if lane.microbatches]


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), NumPy and Python's random.

    Args:
        seed: Below ``2**63``.
    """
    torch.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device: a tensor, or tuples, lists and dicts of them; else unchanged."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def _norm_of(parameters: Sequence[nn.Parameter]) -> Tensor:
    return get_total_norm([p.grad for p in parameters if p.grad is not None])


def _step_scheduler(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
