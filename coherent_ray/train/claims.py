"""The claim: what a resume must keep, checked against the generation that it would go on from.

What would break the claim is refused; what it allows is told. ``docs/claims.md`` says why it holds.
"""

from __future__ import annotations

from coherent_ray.commit.manifest import GenerationHeader, Manifest
from coherent_ray.config import Config
from coherent_ray.errors import ClaimRefused
from coherent_ray.train.code import NO_CODE, Code
from coherent_ray.train.environment import LIBRARY
from coherent_ray.train.recipe import CODE, ORIGIN, differences, recipe_of

#: How much a claim promises. A statistical history has no exact past to go on from.
_STRENGTH = {"statistical": 0, "exact": 1, "invariant": 1}


def check_claim(
    config: Config, manifest: Manifest, ranks: int, facts: dict[str, str], code: Code = NO_CODE
) -> list[str]:
    """Check that a resume keeps what the run claims.

    Args:
        config: The run's configuration.
        manifest: Of the generation that it would go on from.
        ranks: Ranks of this attempt.
        facts: The environment fingerprint of this process.
        code: What the job computes from.

    Returns:
        What the user should know although the claim allows it.

    Raises:
        ClaimRefused: The claim would be broken; says by what.
    """
    header, claim = manifest.header, config.run.claim
    notes = check_job(config, header, code)
    before, here, _ = _comparable(header.environment, facts, LIBRARY)
    changed = differences(before, here)
    if header.ranks != ranks and claim == "exact":
        raise ClaimRefused(
            f"the rank count changed from {header.ranks} to {ranks}, and run.claim is exact",
            where="cluster.workers",
            remedy=f"use {header.ranks} workers, or run.claim: invariant from the start of a run",
            details={"stored": header.ranks, "now": ranks},
        )
    if changed and claim != "statistical":
        raise ClaimRefused(
            f"the environment changed, and run.claim is {claim}: {'; '.join(changed)}",
            where="environment",
            remedy="resume in the environment that the run was started in, or start a new run "
            "with run.claim: statistical",
            details={"changes": changed},
        )
    notes += [f"environment changed: {line}" for line in changed]
    if header.ranks != ranks and not (config.cluster.elastic and claim == "invariant"):
        notes.append(f"rank count changed from {header.ranks} to {ranks}")
    return notes


def check_job(config: Config, header: GenerationHeader, code: Code = NO_CODE) -> list[str]:
    """Check, of what `check_claim` does, what follows from the configuration.

    Args:
        config: The run's configuration.
        header: Of the generation that it would go on from.
        code: What the job computes from, where that is known.

    Returns:
        What the user should know although the claim allows it.

    Raises:
        ClaimRefused: The claim would be broken; says by what.
    """
    claim = config.run.claim
    if _STRENGTH[claim] > _STRENGTH[header.claim]:
        raise ClaimRefused(
            f"run.claim is {claim}, but the history was made under {header.claim}: less was "
            "promised then",
            where="run.claim",
            remedy=f"set run.claim: {header.claim}, or start a new run",
        )
    # What a run started from is history: nothing that a resume could change.
    kept = {k: v for k, v in header.recipe.items() if not k.startswith(ORIGIN)}
    stored, now, notes = _comparable(kept, recipe_of(config, code), CODE)
    other = differences(stored, now)
    if other and claim != "statistical":
        raise ClaimRefused(
            f"the job changed, and run.claim is {claim}: {'; '.join(other)}",
            where=other[0].partition(":")[0],
            remedy=f"{_put_back(other)}; or go on with run.claim: statistical, under which updates "
            "may differ; or start a new run under another run.root",
            details={"changes": other},
        )
    return [*notes, *(f"the job changed: {line}" for line in other)]


def _comparable(
    stored: dict[str, str], now: dict[str, str], prefix: str
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return both sides without the keys of a kind that one side knows nothing of, and a note.

    An older version stored none; a task without source (interactive, compiled) has none.
    """
    kinds = [any(key.startswith(prefix) for key in side) for side in (stored, now)]
    if all(kinds) or not any(kinds):
        return stored, now, []
    left = [{k: v for k, v in side.items() if not k.startswith(prefix)} for side in (stored, now)]
    whose = "now" if kinds[0] else "when the generation was saved"
    return left[0], left[1], [f"the source of the task was not known {whose}: it is not compared"]


def _put_back(changes: list[str]) -> str:
    edited = [
        line.partition(":")[0].removeprefix(CODE) for line in changes if line.startswith(CODE)
    ]
    if not edited:
        return "set this back"
    kind = "module" if len(edited) == 1 else "modules"
    return f"put the source of {kind} {', '.join(edited)} back as it was (comments do not matter)"
