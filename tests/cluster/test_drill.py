"""`coherent-ray drill` on real Ray, as a user types it: every promise of every scenario is kept.

One scenario runs with all tests, on the session's own cluster, which must survive it. The others
take minutes and start clusters of their own: ``pytest -m campaign tests/cluster/test_drill.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
import ray
import tiny
import yaml

from coherent_ray import config as config_
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.manifest import Manifest
from coherent_ray.drill.rehearsal import Life, rehearse
from coherent_ray.drill.scenarios import SCENARIOS
from coherent_ray.storage import open_storage
from coherent_ray.train.receipts import first_difference

LIMIT_S = 280
UPDATES = 20
QUICK = "worker-mid-shard"


@pytest.fixture
def configuration(tiny_data: Path, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny.values(tmp_path / "run", tiny_data)))
    return path


def command(configuration: Path, root: Path, *more: str) -> list[str]:
    program = [sys.executable, "-m", "coherent_ray", "drill", str(configuration)]
    return [*program, "--root", str(root), "--set", f"training.updates={UPDATES}", *more]


def drilled(
    configuration: Path, root: Path, *more: str, limit_s: float = LIMIT_S
) -> dict[str, Any]:
    done = subprocess.run(
        command(configuration, root, "--json", *more),
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    broken = [
        f"{scenario['scenario']}: {promise['name']}: {promise['says']}"
        for scenario in result.get("scenarios", [])
        for promise in scenario["promises"]
        if not promise["kept"]
    ]
    assert broken == []
    assert done.returncode == 0, done.stderr
    return result


def test_a_strike_on_a_given_cluster(ray_cluster: str, configuration: Path, tmp_path: Path) -> None:
    root = tmp_path / "drills"
    words = ("--address", ray_cluster, "--keep", "--scenario", QUICK)
    result = drilled(configuration, root, *words)
    (scenario,) = result["scenarios"]
    (killed,) = scenario["injected"]
    assert (killed["point"], killed["target"], killed["selected"]) == (
        "shard:half-written", "worker", "g1-a1",
    )  # fmt: skip
    # Training goes on behind a save: it may have been some updates further.
    assert killed["lost"] == killed["update"] - tiny.EVERY >= tiny.EVERY
    assert killed["next_update_s"] > 0
    assert (scenario["scenario"], scenario["attempts"]) == (QUICK, 2)

    # The verdict is not taken on trust: the runs are there, and are one history.
    reference, struck = (Path(result["root"]) / name for name in ("reference", QUICK))
    assert tiny.history(reference) == tiny.history(struck)
    assert len(tiny.history(struck)) == UPDATES
    # The struck worker's half of a shard is there, and nothing of it was ever published.
    assert "g2-a1" not in tiny.published(struck)
    assert Generations(open_storage(str(struck))).select() is not None

    assert not (tmp_path / "run").exists(), "the configuration's own run is not touched"
    asked = ray.remote(num_cpus=0)(lambda: os.getpid()).remote()
    assert ray.get(asked) != os.getpid(), "the cluster lives"


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != QUICK])
def test_every_scenario_on_a_cluster_of_the_drill_s_own(
    name: str, configuration: Path, tmp_path: Path
) -> None:
    root = tmp_path / "drills"
    result = drilled(configuration, root, "--scenario", name, "--kills", "4")
    (scenario,) = result["scenarios"]
    assert scenario["injected"]
    assert scenario["torn_selected"] == 0
    assert list(root.iterdir()) == [], "what went well is removed"


@pytest.mark.campaign
def test_two_live_coordinators_on_one_root(configuration: Path, tmp_path: Path) -> None:
    """All of a run is stopped, the same command completes it elsewhere, and the old ones go on."""
    result = drilled(configuration, tmp_path / "drills", "--scenario", "partition")
    promises = {p["name"]: p["says"] for p in result["scenarios"][0]["promises"]}
    assert "attempt 1 is over: attempt 2 has opened" in promises["the old command ends with Fenced"]
    said = promises["the old coordinator says so in its log"]
    assert "fenced, and publishes nothing more" in said


@pytest.mark.campaign
def test_a_zombie_s_late_shard_and_acknowledgement(configuration: Path, tmp_path: Path) -> None:
    """A frozen node's worker goes on when its group has long been replaced."""
    result = drilled(configuration, tmp_path / "drills", "--scenario", "node-frozen", "--keep")
    promises = {p["name"]: p["says"] for p in result["scenarios"][0]["promises"]}
    assert "rank 1 is too late with g2-a1" in promises["the late rank is fenced"]
    root = Path(result["root"]) / "node-frozen"
    # It wrote its shard to the end, and no generation is made of it.
    assert (root / "generations" / "g2-a1" / "shard-00001-of-00002.safetensors").exists()
    assert "g2-a1" not in tiny.published(root)


@pytest.mark.campaign
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_run_that_follows_its_cluster_is_the_one_rank_run(
    tiny_data: Path, configuration: Path, tmp_path: Path
) -> None:
    """On three nodes: one is taken, another comes. No power of two, and no failure to spare."""
    more = ("--set", "cluster.workers=3", "--scenario", "elastic", "--keep")
    result = drilled(configuration, tmp_path / "drills", *more, limit_s=3 * LIMIT_S)
    (scenario,) = result["scenarios"]
    lost, joined = scenario["injected"]
    assert (lost["act"], joined["act"], joined["victim"]) == ("lose", "join", "for 3 workers")
    assert (scenario["attempts"], joined["lost"]) == (3, 0)

    alone = tmp_path / "alone"
    changes = {"training__updates": UPDATES, "cluster__workers": 1}
    assert rehearse(config_.build(tiny.values(alone, tiny_data, **changes)), Life(1))
    followed = Path(result["root"]) / "elastic"
    histories = tiny.history(followed), tiny.history(alone)
    assert first_difference(*histories) is None
    assert len({history[-1].digest for history in histories}) == 1
    ranks = {(m.header.attempt, m.header.ranks) for m in manifests(followed)}
    assert ranks == {(1, 3), (2, 2), (3, 3)}


def manifests(root: Path) -> list[Manifest]:
    generations = Generations(open_storage(str(root)))
    return [generations.manifest(publish) for publish in generations.history().live]


@pytest.mark.campaign
def test_ctrl_c_leaves_nothing_running(configuration: Path, tmp_path: Path) -> None:
    """Where a worker is stopped by SIGSTOP at that moment, and others wait for it."""
    root, mark = tmp_path / "drills", uuid.uuid4().hex
    process = subprocess.Popen(
        command(configuration, root, "--scenario", "hang"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "DRILL_MARK": mark},
    )  # fmt: skip
    try:
        until = time.monotonic() + LIMIT_S
        while not list(root.glob("*/hang.stage/held/stop")):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < until
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 1, out
    assert list(root.iterdir()) == []
    # Ray's processes take some seconds to see that their cluster is gone.
    until = time.monotonic() + 30.0
    while left := marked(mark):
        assert time.monotonic() < until, left
        time.sleep(0.2)


def marked(mark: str) -> list[str]:
    """The command lines of all processes that have a word in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
