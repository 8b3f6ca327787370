"""Model, optimizer, scheduler and scaler: to and from a flat named state.

What is a tensor becomes an entry of `State.tensors`, a reference to the live tensor, never a copy;
all else becomes JSON in `State.values`. `restore` is the exact inverse: it checks every name, dtype
and shape first and changes something only when all fit, so a refusal leaves the job as it was.

| name | what |
|---|---|
| ``model/<name>`` | parameters and persistent buffers; tied ones once, under their first name |
| ``optimizer/<parameter>/<key>`` | state of that parameter, by its name, never by its position |
| ``average/<name>`` | of the averaged model, where there is one: like the model's |

Buffers that are not persistent are derived by declaration, and not stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coherent_ray import canonical
from coherent_ray.canonical import Json
from coherent_ray.commit.manifest import StateLayout, TensorSpec
from coherent_ray.digests import Digest
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.layout import describe, mismatch, spec_of
from coherent_ray.state.optimizer import (
    capture_optimizer,
    check_optimizer,
    restore_optimizer,
    tensor_names,
)
from coherent_ray.state.parts import Part
from coherent_ray.state.values import decode, encode

#: Before the names of a model's tensors in the flat state.
MODEL = "model/"
#: Before the names of an averaged model's.
AVERAGE = "average/"


@dataclass(frozen=True, slots=True)
class State:
    """All of a job's state at one boundary."""

    tensors: dict[str, torch.Tensor]
    """References to live tensors."""
    values: dict[str, Json]
    """For `GenerationHeader.values`."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Tensors of which each rank has only the items that it stores."""


def capture(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    scaler: GradScaler | None = None,
    extra: Mapping[str, object] | None = None,
    *,
    average: nn.Module | None = None,
    first_groups: int | None = None,
) -> State:
    """Return the whole state of a job, between two updates.

    Args:
        model: Every rank holds the whole of it, or of each parameter some rows (`DTensor`).
        optimizer: Makes part of the state exist only in its first step; that is fine.
        scheduler: Anything with ``state_dict`` and ``load_state_dict``, `ReduceLROnPlateau` too.
        scaler: Must have been updated since its last step.
        extra: Values of the caller's own; see `coherent_ray.state.values` for what can be stored.
        average: A model of averaged weights, as torch's ``AveragedModel``.
        first_groups: How many parameter groups the optimizer began with; None: all that it has.

    Raises:
        TaskError: Something cannot be stored exactly; names its place.
    """
    model = plain(model)
    tensors = {MODEL + name: tensor for name, tensor in model_tensors(model)}
    values: dict[str, Json] = {"model": _extra_states(model)}
    values["optimizer"] = None
    if optimizer is not None:
        moments, values["optimizer"] = capture_optimizer(
            optimizer, _parameter_names(model), first_groups
        )
        tensors |= moments
    values["scheduler"] = _value(scheduler, "scheduler")
    values["scaler"] = _value(scaler, "scaler")
    values["extra"] = encode(dict(extra or {}), "extra")
    if average is not None:
        tensors |= {AVERAGE + name: tensor for name, tensor in model_tensors(average)}
        kind = type(average).__qualname__
        values["average"] = {"kind": kind, "modules": _extra_states(average)}
    return State(tensors, values)


def restore(  # noqa: PLR0917 - one for each part of a job
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Json],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: LRScheduler | None = None,
    scaler: GradScaler | None = None,
    average: nn.Module | None = None,
) -> dict[str, Any]:
    """Give a job the state that was captured, so that its next update is the one that followed.

    The tensors are copied into the live ones, which keep their device and strides. Optimizer state
    that was not there when the state was captured is removed.

    Args:
        tensors: By name, from `coherent_ray.state.shards.load_state`; any device.
        values: `State.values`, or `GenerationHeader.values`.
        model: Built as it was for the captured run; likewise the others.
        optimizer: None exactly where it was None.
        scheduler: None exactly where it was None.
        scaler: None exactly where it was None.
        average: None exactly where it was None.

    Returns:
        The caller's own values that `capture` was given as `extra`.

    Raises:
        StateMismatch: Something does not fit; names the first tensor or part, and both values.
            Nothing was changed.
    """
    model = plain(model)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    for name, part in [*parts.items(), ("average", average)]:
        _check_part(name, values.get(name), part)
    names = _parameter_names(model)
    if optimizer is not None:
        check_optimizer(optimizer, values["optimizer"], names)
    _check_names(tensors, values, _live_tensors(model, average))
    _check_scaler(values.get("scaler"), scaler)
    _restore_model(model, tensors, values["model"], MODEL)
    if average is not None:
        _restore_model(average, tensors, values["average"]["modules"], AVERAGE)
    if optimizer is not None:
        restore_optimizer(optimizer, values["optimizer"], tensors, names)
    for name in ("scheduler", "scaler"):
        _load(parts[name], values.get(name))
    extra: dict[str, Any] = decode(values.get("extra", {}))
    return extra


def state_spec(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a model, by its name in the flat state.

    Args:
        model: May be sharded, or on the meta device.

    Raises:
        TaskError: A tensor cannot be stored.
    """
    named = model_tensors(plain(model))
    specs = [spec_of(MODEL + name, tensor, with_memory=False) for name, tensor in named]
    return {spec.name: (spec.dtype, spec.shape) for spec in specs}


def spec_digest(spec: Mapping[str, tuple[str, tuple[int, ...]]]) -> Digest:
    """Return the digest of a `state_spec`, for the comparison of ranks."""
    return canonical.digest({name: [dtype, *shape] for name, (dtype, shape) in spec.items()})


def check_spec(layout: StateLayout, spec: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Check that a model has the tensors that a stored state has.

    Raises:
        StateMismatch: It has not; names the first tensor in layout order and both values.
    """
    live = {name: TensorSpec(name, dtype, shape) for name, (dtype, shape) in spec.items()}
    stored = {t.name: t.whole for t in layout.tensors if t.name.startswith(MODEL)}
    for name in [*stored, *sorted(set(live) - set(stored))]:
        if stored.get(name) != live.get(name):
            raise mismatch(name, _described(stored.get(name)), _described(live.get(name)))


def check_unchanged(
    before: Mapping[str, tuple[str, tuple[int, ...]]],
    now: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Check that a model has the tensors that it had when its training began.

    Raises:
        TaskError: It has not; names the first one.
    """
    for name in [*before, *sorted(now.keys() - before.keys())]:
        if before.get(name) != now.get(name):
            was, has = (
                describe(TensorSpec(name, *spec[name])) if name in spec else "missing"
                for spec in (before, now)
            )
            raise TaskError(
                f"the model changed while it was trained: {name} was {was}, and is {has} now; a "
                "resume builds the model as it was, and could not take such a state",
                where=name,
                remedy="make every parameter and buffer when the model is built, with its final "
                "shape; register_buffer(..., persistent=False) keeps what need not be stored",
                details={"before": was, "now": has},
            )


def _described(tensor: TensorSpec | torch.Tensor | None) -> str:
    return "missing" if tensor is None else describe(tensor)


def plain(model: nn.Module) -> nn.Module:
    """Return the module under ``torch.compile``, whose names are the same in both."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def _parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then persistent buffers; what is there under two names comes once."""
    yield from model.named_parameters()
    seen: set[torch.Tensor] = set()
    for prefix, module in model.named_modules():
        transient = module._non_persistent_buffers_set
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in transient and buffer not in seen:
                seen.add(buffer)
                yield f"{prefix}.{key}" if prefix else key, buffer


def _stateful_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def _extra_states(model: nn.Module) -> Json:
    return {
        name: encode(module.get_extra_state(), f"model.{name}.get_extra_state()")
        for name, module in _stateful_modules(model)
    }


def _value(part: LRScheduler | GradScaler | None, where: str) -> Json:
    if part is None:
        return None
    return {"kind": type(part).__qualname__, "state": encode(part.state_dict(), where)}


def _check_part(name: str, stored: Json, live: object) -> None:
    kept = None if stored is None else stored["kind"]
    ours = None if live is None else type(live).__qualname__
    if kept != ours:
        raise StateMismatch(
            f"{name}: stored is {kept or 'none'}, the running job has {ours or 'none'}",
            where=name,
            remedy=f"Resume with the {name} that the run was started with, or start a new run.",
            details={"stored": kept, "live": ours},
        )


def _check_scaler(stored: Json, scaler: GradScaler | None) -> None:
    if scaler is None:
        return
    kept, ours = bool(stored["state"]), scaler.is_enabled()
    if kept != ours:
        words = {True: "enabled", False: "disabled"}
        raise StateMismatch(
            f"the gradient scaler was {words[kept]}, and is {words[ours]} now",
            where="scaler",
            remedy="Resume with the precision that the run was started with.",
            details={"stored": words[kept], "live": words[ours]},
        )


def _check_names(
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, Json],
    live: Mapping[str, torch.Tensor],
) -> None:
    for name, tensor in live.items():
        stored = tensors.get(name)
        if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            raise mismatch(name, _described(stored), describe(tensor))
    moments = set() if values.get("optimizer") is None else set(tensor_names(values["optimizer"]))
    for name in sorted(moments - set(tensors)):
        raise mismatch(name, "missing, though the stored values speak of it", "nothing yet")
    for name in sorted(set(tensors) - set(live) - moments):
        raise mismatch(name, describe(tensors[name]), "missing")


def _live_tensors(model: nn.Module, average: nn.Module | None) -> dict[str, torch.Tensor]:
    live = {MODEL + name: tensor for name, tensor in model_tensors(model)}
    if average is not None:
        live |= {AVERAGE + name: tensor for name, tensor in model_tensors(average)}
    return live


@torch.no_grad()
def _restore_model(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], stored: Json, prefix: str
) -> None:
    for name, tensor in model_tensors(model):
        tensor.copy_(tensors[prefix + name])
    for name, module in _stateful_modules(model):
        if name in stored:
            module.set_extra_state(decode(stored[name]))


def _load(part: Any, stored: Json) -> None:
    # A disabled scaler has an empty state, which it refuses to load.
    if part is not None and (stored["state"] or not isinstance(part, GradScaler)):
        part.load_state_dict(decode(stored["state"]))
