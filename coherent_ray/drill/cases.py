"""Which runs a claim covers: rank counts, resizes in mid-epoch, kills. Plans, no deeds.

| claim | the reference | what must be the same |
|---|---|---|
| exact | at `cluster.workers` ranks | at as many, killed in and between saves |
| invariant, statistical | at the first rank count | at each one, killed; from one to the next |
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from coherent_ray.config import Config
from coherent_ray.drill.scenarios import FEWEST_SAVES
from coherent_ray.errors import ConfigError

Where = Literal[
    "worker in mid-shard", "coordinator before publish", "coordinator after publish", "worker"
]
#: In the order in which a run suffers them; more are workers at random updates.
POINTS: tuple[Where, ...] = (
    "worker in mid-shard", "coordinator before publish", "coordinator after publish", "worker",
)  # fmt: skip
#: Updates of a proof, unless the user chooses.
UPDATES = 40
#: Lanes up to which every rank count is tried, unless the user chooses.
MANY_LANES = 64


@dataclass(frozen=True, slots=True)
class Blow:
    """One kill."""

    where: Where
    update: int
    """The first at whose save, or behind which, it falls."""

    def __str__(self) -> str:
        return f"{self.where}, update {self.update}"


@dataclass(frozen=True, slots=True)
class Leg:
    """A stretch of a run at one rank count."""

    ranks: int
    blows: tuple[Blow, ...] = ()
    until: int | None = None
    """It ends after this update, whatever is saved by then; None: with the run."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run that is to be the reference's history."""

    name: str
    legs: tuple[Leg, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Rank counts, leg by leg."""
        return tuple(leg.ranks for leg in self.legs)


def prepared(config: Config, updates: int | None) -> Config:
    """Return the job that is proved: its length, and saves enough to be struck at.

    Args:
        config: The user's.
        updates: Of the whole run; None: what the user has set, but `UPDATES` at most.
    """
    told = config.training.updates
    length = updates or min(told or UPDATES, UPDATES)
    enough = max(1, length // (FEWEST_SAVES + 1))
    every = min(config.checkpoint.updates_apart or enough, enough)
    changes: dict[str, dict[str, object]] = {
        "run": {"run_id": None},
        "training": {"updates": length, "epochs": None},
        # Old generations are what a difference is looked for in.
        "checkpoint": {**fixed(every), "keep": None, "keep_every": None},
        "cluster": {"max_failures": -1, "num_cpus": None, "address": None},
    }
    sections = {
        name: getattr(config, name).model_copy(update=values) for name, values in changes.items()
    }
    return config.model_copy(update=sections)


def fixed(every: int) -> dict[str, object]:
    """Return the settings of a checkpoint section that saves in such updates, and in all of them.

    Args:
        every: Updates between two generations.
    """
    clock = {"every": None, "every_seconds": None, "mtbf_s": None}
    return {"every_updates": every, "on_busy": "wait", **clock}


def rank_counts(config: Config, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the rank counts that are tried; the reference runs at the first.

    Args:
        config: The run.
        wanted: By the user; none: all that the claim allows.

    Raises:
        ConfigError: The claim or the lanes do not allow them, or they are very many.
    """
    lanes, workers = config.data.lanes, config.cluster.most
    if config.run.claim == "exact":
        if len(set(wanted)) > 1:
            raise ConfigError(
                "run.claim is exact, which promises nothing at another rank count",
                where="--ranks",
                remedy="name one rank count, or --set run.claim=invariant",
            )
        return tuple(wanted[:1]) or (workers,)
    if not wanted and lanes > MANY_LANES:
        raise ConfigError(
            f"there are {lanes} rank counts from 1 to {lanes}",
            where="--ranks",
            remedy="name some of them, as --ranks 1,2,3,8",
        )
    wrong = [ranks for ranks in wanted if not 1 <= ranks <= lanes]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} ranks cannot carry {lanes} lanes",
            where="--ranks",
            remedy=f"name rank counts from 1 to data.lanes, {lanes}",
        )
    return tuple(dict.fromkeys(wanted)) or tuple(range(1, lanes + 1))


def cases_of(config: Config, ranks: Sequence[int], kills: int, seed: int) -> list[Case]:
    """Return the runs that are compared with the reference.

    Args:
        config: The job, `prepared`.
        ranks: As `rank_counts` gives them.
        kills: Of each run.
        seed: Decides which updates they fall behind.
    """
    updates, every = config.training.updates or 0, config.checkpoint.updates_apart or 1
    draw = random.Random(seed)
    cases = [
        Case(
            f"{count} rank{'s' if count > 1 else ''}{', killed' * (kills > 0)}",
            (Leg(count, blows),),
        )
        for count in (ranks if kills else ranks[1:])
        for blows in [_blows(updates, every, kills, draw)]
    ]
    if len(ranks) > 1:
        cases.append(Case("resized", _resizes(updates, ranks)))
    return cases


def _blows(updates: int, every: int, kills: int, draw: random.Random) -> tuple[Blow, ...]:
    """Return kills, each in a stretch of the run of its own."""
    saves = max(updates // every, 2)
    result = []
    for index in range(kills):
        save = 2 if kills == 1 else 1 + index * (saves - 1) // kills
        where: Where = POINTS[index] if index < len(POINTS) else "worker"
        at = every * save
        if where == "worker":
            at = draw.randint(at, at + every - 1)
        result.append(Blow(where, max(1, min(at, updates - 1))))
    return tuple(result)


def _resizes(updates: int, ranks: Sequence[int]) -> tuple[Leg, ...]:
    """Return a run that goes through all rank counts, and back to the first."""
    row = [*ranks, ranks[0]][:updates]
    # Where no generation is due, if there is room for that.
    beyond = 1 if updates >= 2 * len(row) else 0
    stops = [index * updates // len(row) + beyond for index in range(1, len(row))]
    return tuple(Leg(count, until=stop) for count, stop in zip(row, [*stops, None], strict=True))
