"""Where two histories part: the job first, then the update, then the tensor. No Ray.

What a user must see first is that two runs are not of one job: another seed explains every loss
that differs. Then the receipts, one update after the other, as far as both go; then what is stored
of both after the newest update of which both have a generation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.manifest import GenerationHeader, Manifest
from coherent_ray.commit.records import PublishBody
from coherent_ray.errors import ManifestDamaged, NoGeneration
from coherent_ray.state.difference import StateDifference, compare_states
from coherent_ray.storage.base import Storage
from coherent_ray.train import recipe
from coherent_ray.train.receipts import Difference, Receipt, differences, first_link_of, history


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two."""

    storage: Storage
    generation: str | None = None
    """The one whose state is compared, and to whose update; None: what both have."""


@dataclass(frozen=True, slots=True)
class JobDifference:
    """What is another job, or other conditions; lines ``key: first -> second``."""

    plan: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    """Claim and rank count: what a run may differ in and still be the same history."""

    @property
    def lines(self) -> list[str]:
        """All of them, each with what it belongs to."""
        return [f"{kind}: {line}" for kind, lines in asdict(self).items() for line in lines]


@dataclass(frozen=True, slots=True)
class Stored:
    """What two generations of one update hold."""

    first: str
    """Name of the first run's generation."""
    second: str
    updates: tuple[int, int]
    """The same twice, but where generations were named."""
    tensors: StateDifference
    values: tuple[str, ...]
    """State that is no tensor, where it differs; lines ``key: first -> second``."""

    @property
    def same(self) -> bool:
        """Whether both hold one state."""
        return self.tensors.same and not self.values


@dataclass(frozen=True, slots=True)
class Parting:
    """What two histories have not in common."""

    job: JobDifference
    lengths: tuple[int, int]
    """The last update of each that receipts tell of."""
    compared: int
    """Updates 1 to this one were compared; less where they part."""
    receipts: tuple[Difference, ...]
    """Every field in which they differ, at the first update at which they do."""
    stored: Stored | None
    """None: no update has a generation in both."""
    notes: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether they are one history, as far as both go."""
        return not self.receipts and (self.stored is None or self.stored.same)

    @property
    def update(self) -> int | None:
        """The first update at which the receipts part."""
        return self.receipts[0].update if self.receipts else None

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        stored = self.stored
        return {
            "same": self.same,
            "job": asdict(self.job),
            "lengths": list(self.lengths),
            "compared": self.compared,
            "update": self.update,
            "receipts": [asdict(difference) for difference in self.receipts],
            "state": None
            if stored is None
            else {**asdict(stored), "same": stored.same, "tensors": stored.tensors.as_json()},
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class _Run:
    """One side, read as far as the log and one manifest tell."""

    side: Side
    generations: Generations
    live: list[PublishBody]
    named: PublishBody | None
    header: GenerationHeader


def compare(first: Side, second: Side) -> Parting:
    """Return where two histories part.

    Raises:
        NoGeneration: One has published none, or not the one that was named.
        Damage: What would be compared does not hold what was published.
        LogDamaged: A log cannot be trusted.
        StorageError: A storage failed.
    """
    one, other = _read(first), _read(second)
    compared, found, lengths = _receipts(one, other)
    stored, notes = _stored(one, other)
    if lengths[0] != lengths[1]:
        notes.insert(0, _lengths_in_words(lengths))
    return Parting(_job(one.header, other.header), lengths, compared, found, stored, tuple(notes))


def _read(side: Side) -> _Run:
    generations = Generations(side.storage)
    live = list(generations.history().live)
    named = generations.find(side.generation) if side.generation else None
    header = next(_headers(generations, [named] if named else live[::-1]), None)
    if header is None:
        raise NoGeneration(
            "there is no generation to compare",
            where=side.storage.uri,
            remedy="let the run publish one, or see `coherent-ray ls`",
        )
    return _Run(side, generations, live, named, header)


def _headers(generations: Generations, publishes: list[PublishBody]) -> Iterator[GenerationHeader]:
    """Yield what generations say of the job; a damaged one is no reason not to compare others."""
    for publish in publishes:
        try:
            yield generations.manifest(publish).header
        except ManifestDamaged:
            if len(publishes) == 1:
                raise


# --- the job --------------------------------------------------------------------------------------


def _job(one: GenerationHeader, other: GenerationHeader) -> JobDifference:
    terms = [{"claim": header.claim, "ranks": str(header.ranks)} for header in (one, other)]
    return JobDifference(
        plan=tuple(recipe.differences(_plain(one.plan), _plain(other.plan))),
        recipe=tuple(recipe.differences(one.recipe, other.recipe)),
        environment=tuple(recipe.differences(one.environment, other.environment)),
        terms=tuple(recipe.differences(*terms)),
    )


def _plain(plan: Any) -> dict[str, str]:
    return {key: str(value) for key, value in asdict(plan).items()}


# --- the updates ----------------------------------------------------------------------------------


def _receipts(one: _Run, other: _Run) -> tuple[int, tuple[Difference, ...], tuple[int, int]]:
    """Return how many updates were compared, where they part, and how long both are."""
    sides = [_history(run) for run in (one, other)]
    lengths = [0, 0]
    compared = 0
    found: list[Difference] = []
    while True:
        pair = [next(side, None) for side in sides]
        lengths = [r.update if r else n for r, n in zip(pair, lengths, strict=True)]
        if pair[0] is None or pair[1] is None:
            break
        compared = pair[0].update
        if found := differences(pair[0], pair[1]):
            break
    # To their ends, so that what is said of their lengths is true, and damage is told.
    for index, side in enumerate(sides):
        for receipt in side:
            lengths[index] = receipt.update
    return compared, tuple(found), (lengths[0], lengths[1])


def _history(run: _Run) -> Iterator[Receipt]:
    commits = run.generations.history()
    told = history(run.side.storage, commits, first_link_of(run.header))
    return told if run.named is None else islice(told, run.named.update)


def _lengths_in_words(lengths: tuple[int, int]) -> str:
    longer = "first" if lengths[0] > lengths[1] else "second"
    return (
        f"the {longer} goes on to update {max(lengths):,}; beyond update {min(lengths):,} there is "
        "nothing to compare it with"
    )


# --- the state ------------------------------------------------------------------------------------


def _stored(one: _Run, other: _Run) -> tuple[Stored | None, list[str]]:
    pair = _pair(one, other)
    if pair is None:
        return None, ["no update has a generation in both: no state was compared"]
    manifests = [
        run.generations.manifest(publish) for run, publish in zip((one, other), pair, strict=True)
    ]
    stored = Stored(
        first=pair[0].name,
        second=pair[1].name,
        updates=(pair[0].update, pair[1].update),
        tensors=compare_states(one.side.storage, manifests[0], other.side.storage, manifests[1]),
        values=_values(*manifests),
    )
    notes = []
    if pair[0].update != pair[1].update:
        notes.append("the generations that were named are not of one update")
    return stored, notes


def _pair(one: _Run, other: _Run) -> tuple[PublishBody, PublishBody] | None:
    """Return the newest generations of one update that both have; or those that were named."""
    # What was published last of an update is what stands.
    choices = [
        {p.update: p for p in ([run.named] if run.named else run.live)} for run in (one, other)
    ]
    if one.named and other.named:
        return one.named, other.named
    common = choices[0].keys() & choices[1].keys()
    return (choices[0][max(common)], choices[1][max(common)]) if common else None


def _values(one: Manifest, other: Manifest) -> tuple[str, ...]:
    flat = [dict(leaves("", manifest.header.values)) for manifest in (one, other)]
    return tuple(recipe.differences(*flat))


def leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield every leaf of a JSON value under its dotted key, as canonical JSON.

    Args:
        prefix: Before each key; empty: nothing.
        value: Any JSON value.
    """
    inner: Any = None
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    if not inner:
        yield prefix, canonical.dump(value).decode()
        return
    for key, each in inner:
        yield from leaves(f"{prefix}.{key}" if prefix else str(key), each)
