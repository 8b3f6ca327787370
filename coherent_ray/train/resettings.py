"""Settings of the optimizer that the user changed for a resume, under the claim statistical.

A resume gives the optimizer back what the generation holds, its settings too: a learning rate that
a schedule has brought down, a momentum that it moves. But who lowers the learning rate in the
configuration, and runs again, means it. So where the job itself has changed, the settings that it
would begin with now, and that the stored run did not begin with, win.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from coherent_ray.commit.manifest import GenerationHeader
from coherent_ray.config import Config
from coherent_ray.train.code import Code
from coherent_ray.train.recipe import CODE, differences, recipe_of

#: Entries of a parameter group that a schedule may have changed since it began.
_RATES = frozenset({"lr", "initial_lr"})
#: Entries of a group whose presence says that a schedule moves its momentum too.
_CYCLES = frozenset({"base_momentum", "max_momentum"})
_MOMENTA = frozenset({"momentum", "betas"}) | _CYCLES

Settings = list[dict[str, Any]]


def are_meant(config: Config, header: GenerationHeader, code: Code) -> bool:
    """Return whether a resume goes on with another job, whose settings of the optimizer count.

    Under the other claims what differs is only what one of the two sides does not know.

    Args:
        config: The run's configuration.
        header: Of the generation that it goes on from.
        code: What the job computes from.
    """
    changed = differences(header.recipe, recipe_of(config, code))
    told = any(line.startswith(("optimizer.", "task.", CODE)) for line in changed)
    return told and config.run.claim == "statistical"


def settings_of(optimizer: Optimizer) -> Settings:
    """Return what an optimizer that has not taken a step was made with, group by group."""
    others = {"params", "param_names"}
    return [
        {key: _copied(value) for key, value in group.items() if key not in others}
        for group in optimizer.param_groups
    ]


def take_over(
    begins: Settings, optimizer: Optimizer, scheduler: LRScheduler | None = None
) -> list[str]:
    """Let the settings that a changed job begins with win over those that it was just given back.

    A learning rate under a schedule keeps its place in it: it changes as the rate that the schedule
    began with does.

    Args:
        begins: What `settings_of` said before the optimizer got its stored state.
        optimizer: With the stored state.
        scheduler: With its stored state.

    Returns:
        One line for each setting that changed, and for each that could not be changed.
    """
    notes = []
    # Groups that were added later have no other beginning.
    for index, (group, begin) in enumerate(zip(optimizer.param_groups, begins, strict=False)):
        where = f"optimizer.param_groups.{index}"
        for key in sorted(begin.keys() - _RATES):
            if key in _MOMENTA and _CYCLES & begin.keys():
                continue
            if not _equal(group.get(key), begin[key]):
                notes.append(f"{where}: {key}: {_shown(group.get(key))} -> {_shown(begin[key])}")
                group[key] = begin[key]
        notes += [f"{where}: {note}" for note in _rate(index, group, begin, scheduler)]
    return notes


def _rate(
    index: int, group: dict[str, Any], begin: Mapping[str, Any], scheduler: LRScheduler | None
) -> Iterator[str]:
    key = "initial_lr" if "initial_lr" in begin and "initial_lr" in group else "lr"
    before, now = float(group[key]), float(begin[key])
    if before == now:
        return
    if key == "lr" and scheduler is not None:
        yield (
            f"lr stays {before:g}, though the job begins with {now:g} now: "
            f"{type(scheduler).__name__} does not keep what the run began with"
        )
        return
    yield f"lr, where it begins: {before:g} -> {now:g}"
    if before == 0.0 or key == "lr":
        _set(group, "lr", now)
    else:
        _set(group, "lr", float(group["lr"]) * (now / before))
    if key in group:
        _set(group, key, now)
    for schedule in _all(scheduler):
        for name in ("base_lrs", "_last_lr"):
            rates = getattr(schedule, name, None)
            if isinstance(rates, list) and index < len(rates) and before:
                rates[index] = rates[index] * (now / before)


def _all(scheduler: object) -> Iterator[object]:
    """Yield a schedule, and those that it is made of."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", []):
            yield from _all(inner)


def _set(group: dict[str, Any], key: str, value: float) -> None:
    before = group[key]
    if isinstance(before, torch.Tensor):
        before.fill_(value)  # captured graphs hold it
    else:
        group[key] = value


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return one == other


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _shown(value: object) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)
