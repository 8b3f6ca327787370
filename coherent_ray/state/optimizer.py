"""An optimizer's state, keyed by the names of its parameters, and back, bit for bit.

``Optimizer.state_dict()`` keys by position, so a reordered group loads the wrong moments, and
``load_state_dict()`` casts moments to their parameter's dtype, so they come back rounded. Here each
state tensor has a name of its own in the flat state (``optimizer/<parameter>/<key>``), and what
else there is stands in the manifest. State that does not exist yet is stored as absent, and comes
back absent: the optimizer then makes it in its next step, as it would have.

A group that was added while the job ran comes back by itself, and its parameters train or not as
they did then: a new process makes only the groups that the job began with.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch.optim import Optimizer

from coherent_ray.canonical import Json
from coherent_ray.errors import StateMismatch, TaskError
from coherent_ray.state.sharded import is_distributed
from coherent_ray.state.values import decode, encode

#: Where a state tensor lives: with its parameter, or in host memory (``step`` of most optimizers).
_PARAMETER: Json = {"$state": "parameter"}
_HOST: Json = {"$state": "host"}
#: Entries of a parameter group that are not settings.
_NOT_SETTINGS = frozenset({"params", "param_names"})
#: How many groups a job began with, where more were added.
_FIRST = "first_groups"


def capture_optimizer(
    optimizer: Optimizer, names: Mapping[torch.Tensor, str], first_groups: int | None = None
) -> tuple[dict[str, torch.Tensor], Json]:
    """Return an optimizer's state tensors by name, not copied, and everything else as JSON.

    Args:
        optimizer: Any optimizer whose state lies in `state` and `param_groups`.
        names: The model's name of each parameter.
        first_groups: How many parameter groups the job began with; None: all that there are.

    Raises:
        TaskError: A parameter is not the model's, or a value cannot be stored exactly.
    """
    _refuse_other_state(optimizer)
    tensors: dict[str, torch.Tensor] = {}
    groups: list[dict[str, Json]] = []
    state: dict[str, Json] = {}
    for index, group in enumerate(optimizer.param_groups):
        members = [_name(parameter, names, index) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
        where = f"optimizer.param_groups.{index}"
        groups.append({"parameters": members, "settings": encode(settings, where)})
        for name, parameter in zip(members, group["params"], strict=True):
            entries = optimizer.state.get(parameter) or {}
            forms = {key: _form(entries[key], parameter, group, name, key) for key in entries}
            if forms:
                state[name] = forms
            tensors |= {
                tensor_name(name, key): entries[key] for key, form in forms.items() if _stored(form)
            }
    values: dict[str, Json] = {
        "kind": type(optimizer).__qualname__,
        "groups": groups,
        "state": state,
    }
    if first_groups is not None and first_groups < len(groups):
        values[_FIRST] = first_groups
        for form, group in zip(
            groups[first_groups:], optimizer.param_groups[first_groups:], strict=True
        ):
            form["trainable"] = [parameter.requires_grad for parameter in group["params"]]
    return tensors, values


def require_plain_step(optimizer: Optimizer) -> None:
    """Return if an optimizer's step needs nothing but gradients.

    Raises:
        TaskError: It evaluates the model again by a closure, which only knows one rank's batch.
    """
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        raise TaskError(
            f"{type(optimizer).__qualname__}.step() needs an argument: a closure that evaluates "
            "the model again would see this rank's part of the batch alone",
            where="optimizer",
            remedy="Use an optimizer that steps by the gradients that are there.",
        ) from None


def tensor_name(parameter: str, key: str) -> str:
    """Return what a state tensor is called in the flat state."""
    return f"optimizer/{parameter}/{key}"


def tensor_names(stored: Json) -> Iterator[str]:
    """Yield the names of all state tensors that some stored values speak of."""
    for parameter, forms in stored["state"].items():
        for key, form in forms.items():
            if _stored(form):
                yield tensor_name(parameter, key)


def check_optimizer(optimizer: Optimizer, stored: Json, names: Mapping[torch.Tensor, str]) -> None:
    """Check that stored values are those of such an optimizer; changes nothing.

    Raises:
        StateMismatch: Another kind of optimizer, other groups, or other parameters in a group.
    """
    kind = type(optimizer).__qualname__
    if kind != stored["kind"]:
        raise _mismatch("optimizer", stored["kind"], kind)
    live = [[_name(p, names, i) for p in g["params"]] for i, g in enumerate(optimizer.param_groups)]
    kept = [group["parameters"] for group in stored["groups"]]
    first = stored.get(_FIRST, len(kept))
    if len(live) != first:
        raise _mismatch("optimizer.param_groups", f"{first} groups", f"{len(live)} groups")
    _check_added(kept[first:], {*names.values()} - {name for group in live for name in group})
    for index, (ours, theirs) in enumerate(zip(live, kept[:first], strict=True)):
        where = f"optimizer.param_groups.{index}"
        if len(ours) != len(theirs):
            raise _mismatch(where, f"{len(theirs)} parameters", f"{len(ours)} parameters")
        for position, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            if our != their:
                raise _mismatch(f"{where}, parameter {position}", their, our)


@torch.no_grad()
def restore_optimizer(
    optimizer: Optimizer,
    stored: Json,
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[torch.Tensor, str],
) -> None:
    """Give an optimizer the state that was captured; what it held before is gone.

    Args:
        optimizer: Passed by `check_optimizer`.
        stored: The captured values.
        tensors: All state tensors by their names; they are copied.
        names: The model's name of each parameter.
    """
    _add_groups(optimizer, stored["groups"], names)
    for group, kept in zip(optimizer.param_groups, stored["groups"], strict=True):
        for key, value in decode(kept["settings"]).items():
            _set(group, key, value)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            forms = stored["state"].get(names[parameter], {})
            before = optimizer.state.pop(parameter, {})
            if forms:
                optimizer.state[parameter] = {
                    key: _revive(
                        form,
                        parameter,
                        before.get(key),
                        tensors.get(tensor_name(names[parameter], key)),
                    )
                    for key, form in forms.items()
                }


def _check_added(groups: list[list[str]], free: set[str]) -> None:
    """Check that groups which were added later can be added again."""
    for members in groups:
        for name in members:
            if name not in free:
                raise _mismatch("optimizer.param_groups", f"{name} in a later group", "none free")
            free.remove(name)


def _add_groups(
    optimizer: Optimizer, groups: list[Json], names: Mapping[torch.Tensor, str]
) -> None:
    """Add the groups that the job added while it ran."""
    by_name = {name: parameter for parameter, name in names.items()}
    for kept in groups[len(optimizer.param_groups) :]:
        parameters = [by_name[name] for name in kept["parameters"]]
        for parameter, trainable in zip(parameters, kept["trainable"], strict=True):
            parameter.requires_grad_(trainable)
        optimizer.add_param_group({"params": parameters})


def _form(
    value: Any, parameter: torch.Tensor, group: Mapping[str, Any], name: str, key: str
) -> Json:
    """Return how one entry of a parameter's state is stored."""
    if not isinstance(value, torch.Tensor):
        return encode(value, f"optimizer.state.{name}.{key}")
    if is_distributed(value) and value.shape != parameter.shape:
        raise TaskError(
            f"the optimizer's {key!r} of {name!r} is sharded, and has another shape than the "
            f"parameter: {list(value.shape)} for {list(parameter.shape)}",
            where=f"optimizer.state.{name}.{key}",
            remedy="use an optimizer whose sharded state has its parameter's shape, or "
            "training.strategy: replicated",
        )
    if value.device != parameter.device:
        return _HOST
    # On the CPU both places are one. A job that moves to an accelerator wants counters where
    # torch puts them: in host memory, unless the step itself runs on the device.
    on_device = group.get("capturable") or group.get("fused")
    at_host = value.device.type == "cpu" and value.dim() == 0 and not on_device
    return _HOST if at_host else _PARAMETER


def _stored(form: Json) -> bool:
    return form in (_PARAMETER, _HOST)


def _revive(
    form: Json, parameter: torch.Tensor, before: object, source: torch.Tensor | None
) -> object:
    if not _stored(form):
        return decode(form)
    assert source is not None  # `restore` has checked all names.
    device = parameter.device if form == _PARAMETER else torch.device("cpu")
    if _same_kind(before, source) and before.device == device:
        target = before
    elif source.shape == parameter.shape:
        # In the strides that the optimizer itself would choose.
        target = torch.empty_like(parameter, dtype=source.dtype, device=device)
    else:
        target = torch.empty_like(source, device=device)
    return target.copy_(source)


def _same_kind(before: object, source: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(before, torch.Tensor)
        and before.shape == source.shape
        and before.dtype == source.dtype
    )


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    before: object = group.get(key)
    if isinstance(value, torch.Tensor) and _same_kind(before, value):
        # The same tensor as before: captured graphs and other groups may hold it.
        before.copy_(value)
    else:
        group[key] = value


def _refuse_other_state(optimizer: Optimizer) -> None:
    """State that belongs to no parameter would be lost without a word."""
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    others = [f"state[{key!r}]" for key in optimizer.state if key not in parameters]
    if type(optimizer).state_dict is not Optimizer.state_dict:
        others += sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
    if others:
        raise TaskError(
            f"{type(optimizer).__qualname__} keeps state of its own that cannot be stored: "
            f"{', '.join(others)}",
            where="optimizer",
            remedy="Use an optimizer that keeps its state by parameter.",
        )


def _name(parameter: torch.Tensor, names: Mapping[torch.Tensor, str], group: int) -> str:
    name = names.get(parameter)
    if name is None:
        raise TaskError(
            f"the optimizer holds a parameter of shape {list(parameter.shape)} that the model "
            "does not have",
            where=f"optimizer.param_groups.{group}",
            remedy="Make the optimizer from the parameters of the model that is trained.",
        )
    return name


def _mismatch(where: str, stored: str, live: str) -> StateMismatch:
    return StateMismatch(
        f"{where}: stored is {stored}, the running job has {live}",
        where=where,
        remedy="Resume with the optimizer and the parameter groups that the run was started with, "
        "or start a new run.",
        details={"stored": stored, "live": live},
    )
