"""`coherent-ray prove` on real Ray, as a user types it: rank counts, kills, and a resize.

Each takes minutes: ``pytest -m campaign tests/cluster/test_prove.py``. Without Ray, with all tests:
``tests/cli/test_cli_prove.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from coherent_ray.drill.parting import Side, compare
from coherent_ray.storage import open_storage

LIMIT_S = 280
pytestmark = pytest.mark.campaign


def prove(
    folder: Path, data: Path, address: str, *more: str, limit_s: int = LIMIT_S, **changes: Any
) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what the command printed as JSON."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny.values(folder / "run", data, **changes)))
    words = ["prove", str(path), "--out", str(folder / "proof"), "--address", address, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "coherent_ray", *words, *more],
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_job_and_a_kill(ray_cluster: str, tiny_data: Path, tmp_path: Path) -> None:
    more = ("--ranks", "2", "--kills", "1", "--updates", "12", "--keep")
    code, proof = prove(tmp_path, tiny_data, ray_cluster, *more)
    assert code == 0, proof
    assert proof["good"] is True
    reference, killed = proof["runs"]
    assert [reference["name"], killed["name"]] == ["reference", "2 ranks, killed"]
    assert proof["planned"] == ["reference", "2 ranks, killed"]
    assert (reference["attempts"], killed["attempts"]) == (1, 2)
    assert (reference["done"], killed["done"]) == ([], ["killed: worker in mid-shard, update 4"])
    assert (reference["receipts"], reference["state"]) == (killed["receipts"], killed["state"])
    # The verdict is not taken on trust: the runs are there, and are one history.
    sides = [Side(open_storage(reference["root"])), Side(open_storage(killed["root"]))]
    assert compare(*sides).same
    page = (tmp_path / "proof" / "proof.md").read_text()
    assert page.startswith("# The claim `invariant` holds\n")
    written = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert written["runs"] == proof["runs"]
    assert not (tmp_path / "run").exists(), "the configuration's own run is not touched"


def test_two_rank_counts_and_a_resize(ray_cluster: str, tiny_data: Path, tmp_path: Path) -> None:
    more = ("--ranks", "2,1", "--kills", "1", "--updates", "12")
    code, proof = prove(tmp_path, tiny_data, ray_cluster, *more)
    assert code == 0, proof
    assert [run["name"] for run in proof["runs"]] == proof["planned"]
    assert proof["planned"] == ["reference", "2 ranks, killed", "1 rank, killed", "resized"]
    assert len({(run["receipts"], run["state"]) for run in proof["runs"]}) == 1
    _, killed, alone, resized = proof["runs"]
    assert killed["attempts"] == alone["attempts"] == 2
    assert (resized["ranks"], resized["attempts"]) == ([2, 1, 2], 3)


def test_what_is_not_deterministic_is_named(
    ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    more = ("--ranks", "1,2", "--kills", "0", "--updates", "6")
    unkeyed = {"task__factory": "tiny:UnkeyedTask"}
    code, proof = prove(tmp_path, tiny_data, ray_cluster, *more, **unkeyed)
    assert code == 1
    last = proof["runs"][-1]
    assert last["parting"]["update"] == 1
    assert last["cause"]["kind"] == "not deterministic"
    assert last["cause"]["spot"]["lane"] == 0
    assert "tiny.py:" in last["cause"]["says"]


@pytest.mark.timeout(1800)
def test_every_kill_at_every_rank_count(ray_cluster: str, tiny_data: Path, tmp_path: Path) -> None:
    code, proof = prove(tmp_path, tiny_data, ray_cluster, "--updates", "20", limit_s=1800)
    assert code == 0, proof
    assert [run["ranks"] for run in proof["runs"]] == [
        [1], [1], [2], [3], [4], [1, 2, 3, 4, 1],
    ]  # fmt: skip
    for run in proof["runs"][1:-1]:
        assert [done.partition(",")[0] for done in run["done"]] == [
            "killed: worker in mid-shard", "killed: coordinator before publish",
            "killed: coordinator after publish", "killed: worker",
        ]  # fmt: skip
