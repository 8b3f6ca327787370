"""Proving a claim: an untouched reference, the runs that the claim covers, and their comparison.

The first run that differs ends the proof: what follows it would only differ again. Where that was,
and why, is looked for as far as the runs' own generations and this machine allow (`causes`).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import ray
import torch

from coherent_ray import __version__, canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.manifest import Manifest
from coherent_ray.config import Config
from coherent_ray.drill import accounting, cases
from coherent_ray.drill.cases import Case, Leg
from coherent_ray.drill.causes import cause_of
from coherent_ray.drill.lives import Way
from coherent_ray.drill.parting import Parting, Side, compare
from coherent_ray.drill.proof import Proof, Proved
from coherent_ray.errors import CoherentRayError, Interrupted, ReplicaDiverged
from coherent_ray.state import state_digest
from coherent_ray.storage import Storage, open_storage
from coherent_ray.train.receipts import Receipt, history

Tell = Callable[[str], None]

#: What an update consumes: all that the claim `statistical` promises of it.
_CONSUMED = ("update", "epoch", "start", "stop", "ids", "count")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is proved, and how."""

    config: Config
    """As `cases.prepared` makes it."""
    root: str
    """Where the runs lie: absolute, empty, seen by every node; a path or an address."""
    ranks: tuple[int, ...]
    """As `cases.rank_counts` gives them."""
    kills: int = 4
    """Of each run."""
    seed: int = 0


def prove(plan: Plan, way: Way, tell: Tell) -> Proof:
    """Run the reference and what the claim covers, and compare.

    Args:
        plan: What to prove.
        way: How runs are run.
        tell: Gets a line for each thing that happens.

    Raises:
        Interrupted: Somebody asked to stop.
        CoherentRayError: The reference did not come to its end.
    """
    config = plan.config
    reference = Case("reference", (Leg(plan.ranks[0]),))
    todo = cases.cases_of(config, plan.ranks, plan.kills, plan.seed)
    proof = Proof(
        claim=config.run.claim,
        config=canonical.digest(config.model_dump(mode="json", exclude={"run", "cluster"})),
        way=way.name,
        versions={
            "coherent-ray": __version__,
            "torch": str(torch.__version__),
            "ray": ray.__version__,
            "python": platform.python_version(),
        },
        seed=plan.seed,
        updates=config.training.updates or 0,
        planned=[reference.name, *(case.name for case in todo)],
    )
    first = _Compared(plan, way, reference)
    tell(f"{reference.name}: begins, at {plan.ranks[0]}")
    proof.runs.append(first.live())
    header = first.manifest().header
    proof.facts = {
        "data": f"{accounting.epochs_of(header.plan, header.update):.3g} epochs of "
        f"{header.plan.examples:,} examples",
        "plan": asdict(header.plan),
        "environment": header.environment,
    }
    for case in todo:
        if not proof.runs[-1].good:
            break
        tell(f"{case.name}: begins, at {' then '.join(map(str, case.ranks))}")
        proof.runs.append(_Compared(plan, way, case).against(first))
        found = proof.runs[-1]
        tell(f"{case.name}: {'the same' if found.good else 'DIFFERS'}, {found.seconds:.0f} s")
    return proof


class _Compared:
    """One run: lived, read, and compared with the reference."""

    def __init__(self, plan: Plan, way: Way, case: Case) -> None:
        name = "".join(c if c.isalnum() else "-" for c in case.name)
        run = plan.config.run.model_copy(update={"root": f"{plan.root}/{name}"})
        cluster = plan.config.cluster.model_copy(update={"workers": case.ranks[-1]})
        self.config = plan.config.model_copy(update={"run": run, "cluster": cluster})
        self._plan, self._way, self._case = plan, way, case

    @property
    def storage(self) -> Storage:
        return open_storage(self.config.run.root, self.config.storage.options)

    def manifest(self) -> Manifest:
        """Return the newest generation's."""
        generations = Generations(self.storage)
        return generations.manifest(generations.find("latest"))

    def receipts(self) -> list[Receipt]:
        """Return all of them."""
        return list(history(self.storage, Generations(self.storage).history()))

    def live(self) -> Proved:
        """Run it to its end, and see what it consumed.

        Raises:
            CoherentRayError: It did not come to its end.
        """
        begun = time.monotonic()
        done = self._way.live(self.config, self._case, self._plan.seed)
        seconds = time.monotonic() - begun
        manifest, told = self.manifest(), self.receipts()
        faults = accounting.faults(manifest.header.plan, told)
        total = self.config.training.updates
        if len(told) != total:
            faults.append(f"it has {len(told):,} updates instead of {total:,}")
        return Proved(
            name=self._case.name,
            root=self.config.run.root,
            ranks=self._case.ranks,
            done=tuple(done),
            attempts=Generations(self.storage).history().attempt,
            updates=len(told),
            receipts=told[-1].digest,
            state=state_digest(self.storage, manifest),
            seconds=round(seconds, 1),
            faults=tuple(faults),
        )

    def against(self, reference: _Compared) -> Proved:
        """Run it and compare; one that does not come to its end is no proof."""
        begun = time.monotonic()
        try:
            run = self.live()
            parting = compare(Side(reference.storage), Side(self.storage))
        except Interrupted:
            raise
        except CoherentRayError as error:
            seconds = round(time.monotonic() - begun, 1)
            case, root = self._case, self.config.run.root
            says = f"it did not come to its end: {type(error).__name__}: {error}"
            cause = None
            if isinstance(error, ReplicaDiverged):
                cause = cause_of(reference.config, self.config, self._refused())
            return Proved(
                case.name, root, case.ranks, (), 0, 0, "", "", seconds, (says,), cause=cause
            )
        if self.config.run.claim == "statistical":
            return self._statistical(reference, run, parting)
        faults = [*run.faults, *_in_words(parting)]
        cause = None
        if not parting.same:
            update = parting.update or (parting.stored.updates[0] if parting.stored else 1)
            cause = cause_of(reference.config, self.config, update)
        return replace(run, faults=tuple(faults), parting=parting, cause=cause)

    def _refused(self) -> int:
        """Return the update whose generation was refused."""
        latest = Generations(self.storage).history().latest
        total = self.config.training.updates or 1
        every = self.config.checkpoint.updates_apart or 1
        return min(total, (latest.update if latest else 0) + every)

    def _statistical(self, reference: _Compared, run: Proved, parting: Parting) -> Proved:
        """Compare what was consumed; tell what else differs, which the claim allows."""
        faults, rounded = [*run.faults], 0
        for one, other in zip(reference.receipts(), self.receipts(), strict=False):
            for name in _CONSUMED:
                ours, theirs = getattr(one, name), getattr(other, name)
                if ours != theirs:
                    faults.append(f"update {one.update}: {name} is {ours} and {theirs}")
            rounded += (one.loss, one.grad_norm) != (other.loss, other.grad_norm)
        notes = [*parting.job.lines]
        if rounded:
            notes.append(f"{rounded:,} of {run.updates:,} updates have sums with other bits")
        return replace(run, faults=tuple(faults), parting=parting, notes=tuple(notes))


def _in_words(parting: Parting) -> list[str]:
    """Return what differs: the first update, then the first tensor."""
    links = {"previous", "digest"}
    causes = [d for d in parting.receipts if d.field not in links] or [*parting.receipts]
    words = [
        f"update {each.update} is the first that differs: {each.field} is {each.first} in the "
        f"reference and {each.second} here"
        for each in causes
    ]
    stored = parting.stored
    if stored is not None and not stored.same:
        tensors = [*stored.tensors.layout, *map(str, stored.tensors.tensors)]
        first = tensors[0] if tensors else stored.values[0]
        words.append(
            f"after update {stored.updates[0]}, {len(stored.tensors.tensors)} of "
            f"{stored.tensors.compared} tensors differ; the first: {first}"
        )
    return words
