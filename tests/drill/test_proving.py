"""The claim `invariant`, proved for every kind of job at every rank count; minutes, by hand.

AdamW, a cosine schedule, clipping, three microbatches a lane, a short tail; killed and resized.
On real Ray: ``tests/cluster/test_prove.py``.
"""

from __future__ import annotations

from pathlib import Path

import acceptance_jobs
import parity_jobs
import pytest

from coherent_ray.drill import cases
from coherent_ray.drill.lives import InProcess
from coherent_ray.drill.proving import Plan, prove

pytestmark = [pytest.mark.campaign, pytest.mark.usefixtures("unsynced")]


@pytest.mark.parametrize(("lanes", "ranks"), [(4, (1, 2, 3, 4)), (6, (1, 2, 3, 5, 6))])
@pytest.mark.parametrize("kind", ["Convolutions", "Recurrent", "Attention", "Frozen"])
def test_the_claim_holds(kind: str, lanes: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    job = parity_jobs.job(
        tmp_path,
        width=acceptance_jobs.WIDTH,
        task__factory=f"acceptance_jobs:{kind}",
        data__lanes=lanes,
        # Three microbatches a lane; the last update of an epoch has fewer examples than lanes.
        data__global_batch=3 * lanes,
    )
    plan = Plan(cases.prepared(job, 8), str(tmp_path / "runs"), ranks, kills=4)
    proof = prove(plan, InProcess(), lambda text: None)
    assert proof.good, proof.page()
    assert len(proof.runs) == len(ranks) + 2
