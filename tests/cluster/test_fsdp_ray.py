"""FSDP2 on real Ray: a worker dies after half of a shard, and the run goes on as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from deaths import deaths_of, half_a_shard

from coherent_ray.commit.generations import Generations
from coherent_ray.config import Config
from coherent_ray.state import state_digest
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators, loop
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.receipts import first_difference
from coherent_ray.train.trainer import make_trainer


def trained(config: Config, function: object) -> tuple[Generations, str]:
    """Train to the end, and return what is there then, and the digest of the last state."""
    tiny.fit(make_trainer(config, function))
    coordinators.stop(run_id_of(config))
    storage = open_storage(config.run.root)
    generations = Generations(storage)
    return generations, state_digest(storage, generations.manifest(generations.find("latest")))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_sharded_run_is_exact_through_a_killed_worker(
    ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    whole, killed = (
        tiny.configured(tmp_path / name, tiny_data, run__claim="exact", training__strategy="fsdp2")
        for name in ("fsdp-whole", "fsdp-killed")
    )
    _, reference = trained(whole, loop.train)
    generations, state = trained(killed, half_a_shard)

    assert deaths_of(killed.run.root) == {"worker:half-written": "g1-a1"}
    names = [publish.name for publish in generations.history().publishes]
    assert names == ["g1-a1", "g2-a2", "g3-a2", "g4-a2"]
    layout = generations.manifest(generations.find("latest")).header.layout
    assert {spec.parts for spec in layout.tensors if spec.shape} == {2}
    ours, theirs = tiny.history(killed.run.root), tiny.history(whole.run.root)
    assert first_difference(ours, theirs) is None
    assert len(ours) == tiny.UPDATES
    assert (state, ours[-1].digest) == (reference, theirs[-1].digest)
