"""The claim: what a resume must keep, checked against the generation that it would go on from.

What would break the claim is refused; what it allows is told. ``docs/claims.md`` says why it holds.
"""

from __future__ import annotations

from coherent_ray.commit.manifest import Manifest
from coherent_ray.config import Config
from coherent_ray.errors import ClaimRefused
from coherent_ray.train.recipe import differences, recipe_of

#: How much a claim promises. A statistical history has no exact past to go on from.
_STRENGTH = {"statistical": 0, "exact": 1, "invariant": 1}


def check_claim(config: Config, manifest: Manifest, ranks: int, facts: dict[str, str]) -> list[str]:
    """Check that a resume keeps what the run claims.

    Returns:
        What the user should know although the claim allows it.

    Raises:
        ClaimRefused: The claim would be broken; says by what.
    """
    header, claim = manifest.header, config.run.claim
    if _STRENGTH[claim] > _STRENGTH[header.claim]:
        raise ClaimRefused(
            f"run.claim is {claim}, but the history was made under {header.claim}: less was "
            "promised then",
            where="run.claim",
            remedy=f"set run.claim: {header.claim}, or start a new run",
        )
    other = differences(header.recipe, recipe_of(config))
    if other and claim != "statistical":
        raise ClaimRefused(
            f"the job changed, and run.claim is {claim}: {'; '.join(other)}",
            where=other[0].partition(":")[0],
            remedy="set this back; or go on with run.claim: statistical, under which updates may "
            "differ; or start a new run under another run.root",
            details={"changes": other},
        )
    changed = differences(header.environment, facts)
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
    notes = [f"the job changed: {line}" for line in other]
    notes += [f"environment changed: {line}" for line in changed]
    if header.ranks != ranks:
        notes.append(f"rank count changed from {header.ranks} to {ranks}")
    return notes
