"""The proof: what was run, what was compared, and what came out. Records and their two documents.

``proof.json`` has everything; ``proof.md`` is the page for people. Both say on what the proof
rests: versions, environment, the job's digest, its data. Where something differs, they say where.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from coherent_ray.drill.causes import Cause
from coherent_ray.drill.parting import Parting
from coherent_ray.errors import AlreadyExists
from coherent_ray.storage.base import Storage

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Proved:
    """One run, compared."""

    name: str
    root: str
    ranks: tuple[int, ...]
    """Leg by leg."""
    done: tuple[str, ...]
    """What was done to it."""
    attempts: int
    updates: int
    receipts: str
    """Digest of the last receipt: equal ones are equal histories."""
    state: str
    """Digest of the final state's bytes."""
    seconds: float
    faults: tuple[str, ...] = ()
    """What is not as the claim promises; none: it is."""
    parting: Parting | None = None
    """From the reference; None: it is the reference, or it did not come to its end."""
    cause: Cause | None = None
    notes: tuple[str, ...] = ()
    """What the claim allows, and differs."""

    @property
    def good(self) -> bool:
        """Whether the claim holds for it."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **value,
            "good": self.good,
            "parting": self.parting.as_json() if self.parting else None,
            "cause": self.cause.as_json() if self.cause else None,
        }


@dataclass(slots=True)
class Proof:
    """A claim, and the runs that it was tried on."""

    claim: str
    config: str
    """Digest of the configuration that all runs share."""
    way: str
    """How they were run."""
    versions: dict[str, str]
    seed: int
    updates: int
    planned: list[str] = field(default_factory=list)
    """Names of the runs that the claim covers."""
    facts: dict[str, Any] = field(default_factory=dict)
    """``environment`` and ``plan`` of the reference, ``epochs`` that it has."""
    runs: list[Proved] = field(default_factory=list)
    """The reference first."""

    @property
    def good(self) -> bool:
        """Whether every run that the claim covers was run, and none differs."""
        return len(self.runs) == len(self.planned) and all(run.good for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        runs = [run.as_json() for run in self.runs]
        return {"format": FORMAT, "good": self.good, **value, "runs": runs}

    def page(self) -> str:
        """Return the page for people, as Markdown."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        verdict = "holds" if self.good else "does NOT hold"
        yield f"# The claim `{self.claim}` {verdict}"
        yield ""
        yield (
            f"{len(self.runs)} of {len(self.planned)} runs of one job, {self.updates:,} updates "
            f"each, {self.way}. Each was compared with the first, which nothing disturbed: "
            f"{_COMPARED[self.claim]}."
        )
        yield ""
        yield "| run | ranks | what was done to it | attempts | receipts | final state | |"
        yield "|---|---|---|---|---|---|---|"
        for run in self.runs:
            cells = [
                run.name,
                " → ".join(map(str, run.ranks)),
                "; ".join(run.done) or "nothing",
                str(run.attempts),
                f"`{_short(run.receipts)}`",
                f"`{_short(run.state)}`",
                "same" if run.good else "**differs**",
            ]
            yield f"| {' | '.join(cells)} |"
        for run in self.runs:
            if run.faults:
                yield from ("", f"## {run.name}", "")
                yield from (f"- {fault}" for fault in run.faults)
            if run.cause:
                yield f"- cause: {run.cause}"
            if run.notes:
                yield from ("", f"Allowed by the claim, in the run *{run.name}*:", "")
                yield from (f"- {note}" for note in run.notes)
        yield from ("", "## On what this rests", "")
        yield f"- configuration: `{self.config}`, kills from seed {self.seed}"
        for kind, facts in (("versions", self.versions), *self.facts.items()):
            words = facts if isinstance(facts, str) else _listed(facts)
            yield f"- {kind}: {words}"


#: What is compared, under each claim.
_COMPARED = {
    "exact": "every field of every receipt, and every bit of the final state",
    "invariant": "every field of every receipt, and every bit of the final state",
    "statistical": "the examples of every update, each once an epoch; sums may round differently",
}


def write(proof: Proof, place: Storage) -> None:
    """Write both documents.

    Args:
        proof: What came out.
        place: Where to; what an earlier proof has left there is replaced.

    Raises:
        StorageError: They cannot be written.
    """
    text = json.dumps(proof.as_json(), indent=2, ensure_ascii=False) + "\n"
    for name, data in (("proof.json", text), ("proof.md", proof.page())):
        try:
            place.create(name, data.encode())
        except AlreadyExists:
            place.replace(name, data.encode())


def _short(digest: str) -> str:
    return digest.partition(":")[2][:8] or "-"


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())
