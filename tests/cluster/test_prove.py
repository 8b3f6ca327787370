"""`coherent-ray prove` on real Ray, as a user types it: rank counts, kills, and a resize."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny
import yaml

from coherent_ray.drill.parting import Side, compare
from coherent_ray.storage import open_storage

LIMIT_S = 280


def prove(
    folder: Path, data: Path, address: str, *more: str, **changes: Any
) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what the command printed as JSON."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny.values(folder / "run", data, **changes)))
    words = ["prove", str(path), "--out", str(folder / "proof"), "--address", address, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "coherent_ray", *words, *more],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_job_of_two_rank_counts_and_a_kill(
    ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    more = ("--ranks", "2,1", "--kills", "1", "--updates", "12", "--keep")
    code, proof = prove(tmp_path, tiny_data, ray_cluster, *more)
    assert code == 0, proof
    assert proof["good"] is True
    names = [run["name"] for run in proof["runs"]]
    assert (
        names == ["reference", "2 ranks, killed", "1 rank, killed", "resized"] == proof["planned"]
    )
    assert len({(run["receipts"], run["state"]) for run in proof["runs"]}) == 1
    reference, killed, alone, resized = proof["runs"]
    assert reference["attempts"] == 1
    assert reference["done"] == []
    assert killed["done"] == ["killed: worker in mid-shard, update 4"]
    assert killed["attempts"] == alone["attempts"] == 2
    assert resized["ranks"] == [2, 1, 2]
    assert resized["attempts"] == 3
    # The verdict is not taken on trust: the runs are there, and are one history.
    sides = [Side(open_storage(reference["root"])), Side(open_storage(resized["root"]))]
    assert compare(*sides).same
    page = (tmp_path / "proof" / "proof.md").read_text()
    assert page.startswith("# The claim `invariant` holds\n")
    written = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert written["runs"] == proof["runs"]
    assert not (tmp_path / "run").exists(), "the configuration's own run is not touched"
