"""The cause of a difference, as near as running the update again can come to it.

Two histories part at an update. From the last generation whose state both share, that update is run
again as each side ran it, and recorded. What can be told:

| kind | what was seen |
|---|---|
| not deterministic | run twice in the same way, it is not the same |
| rank count | as each side ran it, it is not the same |
| resume | from the generation it is one side's; trained on without a restart, it is the other's |
| elsewhere | neither is seen again: other machines, or something that is not repeated here |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.records import PublishBody
from coherent_ray.config import Config
from coherent_ray.drill.rerun import Rerun, rerun
from coherent_ray.drill.spots import Spot, first_spot
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage import open_storage
from coherent_ray.train import receipts
from coherent_ray.train.receipts import Receipt

#: Generations before the last common one that training is begun from again.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Cause:
    """What is known of why two histories part."""

    kind: str
    update: int
    """The first whose state differs when it is run again; else the one at which they part."""
    says: str
    spot: Spot | None = None

    def __str__(self) -> str:
        return f"{self.says}: {self.spot}" if self.spot else self.says

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "kind": self.kind,
            "update": self.update,
            "says": str(self),
            "spot": self.spot.as_json() if self.spot else None,
        }


def cause_of(one: Config, other: Config, update: int) -> Cause:
    """Return why two histories part, as far as it can be seen in this process.

    Args:
        one: A run that has ended.
        other: Another one, of the same job.
        update: The first update at which they part.
    """
    if "fsdp2" in {one.training.strategy, other.training.strategy}:
        says = "updates of a sharded model cannot be run again in one process"
        return Cause("elsewhere", update, says)
    try:
        return _Search(one, other, update).cause()
    except CoherentRayError as error:
        says = f"the update could not be run again here: {error.what}"
        return Cause("elsewhere", update, says)


@dataclass(slots=True)
class _Run:
    config: Config
    generations: Generations
    standing: dict[int, PublishBody]
    """By update: what was published last of it."""

    def ranks_at(self, update: int) -> int:
        """Return the rank count that did an update, as the next generation tells it."""
        later = [at for at in sorted(self.standing) if at >= update]
        if not later:
            return self.config.cluster.most
        return self.generations.manifest(self.standing[later[0]]).header.ranks

    def is_again(self, done: Rerun) -> bool:
        """Whether updates that were run again left what this run has stored of the last one."""
        update = done.receipt.update
        stored = self._receipt(update)
        if stored is None or not _same(stored, done.receipt):
            return False
        if update not in self.standing:
            return True
        manifest = self.generations.manifest(self.standing[update])
        values = canonical.digest(manifest.header.values)
        return done.states[-1] == (manifest.fingerprint, values)

    def _receipt(self, update: int) -> Receipt | None:
        storage = open_storage(self.config.run.root, self.config.storage.options)
        commits = self.generations.history()
        return next(receipts.history(storage, commits, None, update), None)


def _opened(config: Config) -> _Run:
    generations = Generations(open_storage(config.run.root, config.storage.options))
    return _Run(config, generations, {p.update: p for p in generations.history().live})


class _Search:
    def __init__(self, one: Config, other: Config, update: int) -> None:
        self._one, self._other = _opened(one), _opened(other)
        self._update = update
        self._ranks = self._one.ranks_at(update), self._other.ranks_at(update)

    def cause(self) -> Cause:
        common = self._last_common()
        start = common or 0

        def first(until: int) -> Rerun:
            return self._again(self._one, common, self._ranks[0], until)

        def second(until: int) -> Rerun:
            return self._again(self._other, common, self._ranks[1], until)

        again = first(self._update)
        if found := self._parting(again, first, first, start):
            update, spot = found
            says = (
                f"update {update} is not deterministic: run twice on this machine, from the same "
                "state, it differs first at"
            )
            return Cause("not deterministic", update, says, spot)
        if found := self._parting(again, second, first, start):
            update, spot = found
            says = f"update {update}, run again at {self._ranks_in_words()}, differs first at"
            return Cause("rank count", update, says, spot)
        return self._resume(again, common) or Cause(
            "elsewhere",
            self._update,
            f"update {self._update} is the same on this machine however it is run again: what "
            "differed was not repeated here (another machine, another moment, a fault)",
        )

    def _resume(self, again: Rerun, common: int | None) -> Cause | None:
        """Look for what a generation does not give back, where one side trained on without it."""
        for run, ranks in zip((self._one, self._other), self._ranks, strict=True):
            if common is None or run.is_again(again):
                continue
            earlier = [at for at in sorted(run.standing, reverse=True) if at < common][:_TRIES]
            for start in [*earlier, None]:
                straight = self._again(run, start, ranks, self._update)
                if not run.is_again(straight):
                    continue
                return self._lost(run, ranks, (start, common), straight)
        return None

    def _lost(
        self, run: _Run, ranks: int, starts: tuple[int | None, int], straight: Rerun
    ) -> Cause | None:
        start, common = starts

        def on(until: int) -> Rerun:
            return self._again(run, start, ranks, until)

        def resumed(until: int) -> Rerun:
            return self._again(run, common, ranks, until)

        found = self._parting(straight, resumed, on, common)
        if found is None:
            return None
        update, spot = found
        says = (
            f"a resume from update {common} does not give back all that training goes on with: "
            f"update {update}, after it and without it, differs first at"
        )
        return Cause("resume", update, says, spot)

    def _parting(
        self,
        known: Rerun,
        other: Callable[[int], Rerun],
        same: Callable[[int], Rerun],
        after: int,
    ) -> tuple[int, Spot] | None:
        """Return the first update after which states or receipts differ, and the spot in it.

        Args:
            known: One way, to the update at which the histories part.
            other: The other way, to an update.
            same: The way of `known`, to an update.
            after: Updates that both ways have done before.
        """
        compared = other(self._update)
        count = self._update - after
        pairs = zip(_last(known, count), _last(compared, count), strict=True)
        index = next((i for i, (left, right) in enumerate(pairs) if left != right), None)
        if index is None:
            spot = first_spot(known.recordings, compared.recordings)
            return (self._update, spot) if spot else None
        update = after + 1 + index
        if update < self._update:
            known, compared = same(update), other(update)
        spot = first_spot(known.recordings, compared.recordings)
        return update, spot or Spot("values", "the receipt")

    def _last_common(self) -> int | None:
        """Return the update of the last generation before the parting that both share."""
        common = self._one.standing.keys() & self._other.standing.keys()
        for at in sorted((at for at in common if at < self._update), reverse=True):
            one, other = (
                run.generations.manifest(run.standing[at]) for run in (self._one, self._other)
            )
            same_values = one.header.values == other.header.values
            if one.fingerprint == other.fingerprint and same_values:
                return at
        return None

    def _again(self, run: _Run, start: int | None, ranks: int, until: int) -> Rerun:
        publish = None if start is None else run.standing[start]
        return rerun(run.config, publish, ranks, until)

    def _ranks_in_words(self) -> str:
        one, other = self._ranks
        return f"{one} rank{'s' if one > 1 else ''} and at {other}"


def _last(done: Rerun, count: int) -> list[tuple[str, tuple[str, str]]]:
    pairs = [(r.digest, state) for r, state in zip(done.receipts, done.states, strict=True)]
    return pairs[-count:]


def _same(stored: Receipt, again: Receipt) -> bool:
    """Whether a receipt says the same of its own update, whatever was before it."""
    found = receipts.differences(stored, again)
    return all(each.field in {"previous", "digest", "state"} for each in found)
