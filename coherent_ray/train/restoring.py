"""Giving a job the state that its rank was admitted with: tensors, and all that is no tensor.

It comes from the generation, or from the snapshot in memory, that all ranks go on from; or, at the
beginning of a run, from the weights that it starts from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coherent_ray.errors import StateMismatch
from coherent_ray.state.capture import check_spec, plain, restore, state_spec
from coherent_ray.state.sharded import placed
from coherent_ray.train import origin, partial, resettings
from coherent_ray.train.admit import Admitted
from coherent_ray.train.partial import Usable, usable

if TYPE_CHECKING:
    from coherent_ray.train.session import Session

Stored = tuple[partial.Record, dict[str, torch.Tensor]]
"""What a generation holds of an update that was not done."""


def give_state(run: Session, admitted: Admitted) -> Stored | None:
    """Give the job its state; returns what is stored of an update that was not done.

    Args:
        run: Whose model and optimizer are tracked.
        admitted: What its rank was admitted with; the stored state is let go of.

    Raises:
        StateMismatch: It does not fit, or was given before.
    """
    header, state = admitted.header, admitted.state
    if header is None:
        if admitted.weights is not None:
            origin.begin(run.config, admitted.weights, run.model)
            admitted.weights = None  # its memory is needed for training
        return None
    if state is None:
        raise StateMismatch("track was called twice", remedy="call run.track once")
    check_spec(header.layout, state_spec(run.model))
    stored: Stored | None = None
    if partial.KEY in header.values:
        record = partial.load(header.values[partial.KEY])
        stored = record, {n: t for n, t in state.items() if partial.is_partial(n)}
        state = {n: t for n, t in state.items() if not partial.is_partial(n)}
    begins = resettings.settings_of(run.optimizer)
    if run.sharded:
        live = dict(plain(run.model).named_parameters())
        state = placed(state, live, admitted.rows)
    parts = (run.optimizer, run.scheduler, run.scaler, run.average)
    restore(state, header.values, run.model, *parts)
    if resettings.are_meant(run.config, header, admitted.code):
        run.progress.note(resettings.take_over(begins, run.optimizer, run.scheduler))
    admitted.state = None  # its memory is needed for training
    return stored


def usable_of(run: Session, stored: Stored) -> Usable:
    """Return what this rank can use of an update that was not done."""
    record, tensors = stored
    plan = {lane.lane: len(lane.microbatches) for lane in run.plan.update(record.update).lanes}
    return usable(record, tensors, run.reducer.owned, plan, run.canonical.trainable)
