"""Verdicts: the promises of a drilled run, and whether each was kept.

Nothing is forgiven: a promise that could not be checked is broken, and so is a drill whose strike
found no moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coherent_ray.commit.generations import Generations
from coherent_ray.drill.acts import LATE_WORD
from coherent_ray.drill.injections import Injected
from coherent_ray.drill.replay import history_of
from coherent_ray.drill.scenarios import Scenario
from coherent_ray.drill.scene import Scene
from coherent_ray.errors import CoherentRayError
from coherent_ray.state import state_digest
from coherent_ray.storage import StorageOptions, open_storage
from coherent_ray.train.receipts import Receipt, first_difference


@dataclass(frozen=True, slots=True)
class Ended:
    """What is left of a run to compare."""

    history: tuple[Receipt, ...]
    state: str
    """Digest of the final state's bytes."""
    attempts: int
    size: int
    """Bytes under the root."""

    @property
    def tip(self) -> str:
        """Digest of the last receipt: equal tips are equal histories."""
        return self.history[-1].digest if self.history else ""


@dataclass(frozen=True, slots=True)
class Promise:
    """One thing that must hold."""

    name: str
    kept: bool
    says: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one scenario ended."""

    scenario: str
    promises: tuple[Promise, ...]
    injected: tuple[Injected, ...] = ()
    attempts: int = 0
    updates: int = 0
    receipts: str = ""
    state: str = ""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return all(promise.kept for promise in self.promises)

    @property
    def lost(self) -> int:
        """Updates that were lost and done again, over all injections."""
        return sum(seen.lost for seen in self.injected)

    @property
    def torn_selected(self) -> int:
        """How often a reader selected a generation that is not whole."""
        return sum(seen.damages > 0 for seen in self.injected)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "scenario": self.scenario,
            "good": self.good,
            "promises": [asdict(promise) for promise in self.promises],
            "injected": [seen.as_json() for seen in self.injected],
            "attempts": self.attempts,
            "updates": self.updates,
            "lost_and_replayed": self.lost,
            "torn_selected": self.torn_selected,
            "receipts": self.receipts,
            "state": self.state,
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
        }


def ended(root: str, options: StorageOptions | None = None) -> Ended:
    """Return what is left of a run that has ended.

    Raises:
        CoherentRayError: Its history cannot be read.
    """
    storage = open_storage(root, options)
    generations = Generations(storage)
    return Ended(
        history=tuple(history_of(root, options)),
        state=state_digest(storage, generations.manifest(generations.find("latest"))),
        attempts=generations.history().attempt,
        size=sum(entry.size for entry in storage.list()),
    )


def judge(scene: Scene, scenario: Scenario, reference: Ended) -> Verdict:
    """Return the verdict on a run that has ended.

    Args:
        scene: The run.
        scenario: What was done to it.
        reference: The run that nothing struck.
    """
    config = scene.config
    found = ended(config.run.root, config.storage.options)
    promises = [_moments(scene.left), *_selections(scene.done), *_same(found, reference)]
    if scenario.attempts is not None:
        wanted = scenario.attempts
        promises.append(Promise("attempts", found.attempts == wanted, f"{found.attempts}"))
    promises += [*_whole_at_the_end(scene), *_own(scene, scenario)]
    return Verdict(
        scenario=scenario.name,
        promises=tuple(promises),
        injected=tuple(scene.done),
        attempts=found.attempts,
        updates=len(found.history),
        receipts=found.tip,
        state=found.state,
        notes=tuple(scene.notes),
    )


def broken(scenario: str, error: CoherentRayError) -> Verdict:
    """Return the verdict on a run that did not reach its end."""
    return Verdict(scenario, (Promise("completes", False, str(error)),))


def _moments(left: Sequence[str]) -> Promise:
    says = f"no moment found for: {', '.join(left)}" if left else ""
    return Promise("every strike found its moment", not left, says)


def _selections(done: Sequence[Injected]) -> Iterator[Promise]:
    torn = [seen.selected for seen in done if seen.damages]
    yield Promise("readers select what is whole", not torn, ", ".join(map(str, torn)))
    wrong, newest = [], 0
    for seen in done:
        wanted, got = seen.injection.selects, seen.selected_update
        if wanted is not None and got != wanted:
            wrong.append(f"update {got} instead of {wanted}")
        # A damaged generation is the one reason to go back.
        if seen.injection.act != "flip" and got < newest:
            wrong.append(f"update {got} after {newest}")
        newest = got
    yield Promise("readers select the right one", not wrong, "; ".join(wrong))


def _same(found: Ended, reference: Ended) -> Iterator[Promise]:
    difference = first_difference(reference.history, found.history)
    same = difference is None and found.tip == reference.tip
    yield Promise("receipts equal the reference", same, "" if same else str(difference))
    same = found.state == reference.state
    yield Promise("final state equals the reference", same, "" if same else found.state)


def _whole_at_the_end(scene: Scene) -> Iterator[Promise]:
    storage = scene.storage
    generations = Generations(storage)
    faults = [
        f"{publish.name}: {damage.where}: {damage.what}"
        for publish in generations.history().live
        for damage in generations.verify(publish)
    ]
    flipped = [seen.victim.partition(",")[0] for seen in scene.done if seen.injection.act == "flip"]
    unexplained = [fault for fault in faults if not any(path in fault for path in flipped)]
    yield Promise("all generations are whole", not unexplained, "; ".join(unexplained))
    if flipped:
        named = all(any(path in fault for fault in faults) for path in flipped)
        yield Promise("verify names the flipped byte", named, "; ".join(faults))


def _own(scene: Scene, scenario: Scenario) -> Iterator[Promise]:
    """Yield what only some scenarios promise."""
    acts = {seen.injection.act for seen in scene.done}
    if "free" in acts:
        failed = scene.failed_saves
        kept = bool(failed) and all("space" in text for text in failed)
        yield Promise("saves fail while it is full, and say so", kept, "; ".join(failed))
        yield Promise("the next save works", _published_after(scene))
    if "join" in acts:
        most = scene.config.cluster.most
        told = [text.split(",")[0] for text in scene.notes if text.startswith("now ")]
        sizes = [f"now {n} worker{'s' if n > 1 else ''}" for n in (most, most - 1, most)]
        yield Promise("the group shrinks and grows", told == sizes, "; ".join(told))
        lost = sum(seen.lost for seen in scene.done if seen.injection.act == "join")
        yield Promise("a group that grows loses no update", not lost, f"{lost} lost")
    if "freeze" in acts:
        told = [seen.says for seen in scene.done if seen.injection.act == "go on"]
        kept = any(LATE_WORD in text for text in told)
        yield Promise("the late rank is fenced", kept, "; ".join(told))
    if scenario.ends is not None:
        error = scene.error
        says = "it completed" if error is None else str(error)
        yield Promise(f"the old command ends with {scenario.ends}", error is not None, says)
        said = [line for line in scene.last_words.splitlines() if "fenced" in line]
        yield Promise("the old coordinator says so in its log", bool(said), "; ".join(said))


def _published_after(scene: Scene) -> bool:
    """Whether the first generation that is due once there is room again was published."""
    freed = next(seen.update for seen in scene.done if seen.injection.act == "free")
    every = scene.config.checkpoint.updates_apart or 1
    due = freed - freed % every + every
    publishes = Generations(scene.storage).history().publishes
    return any(publish.update == due for publish in publishes)
