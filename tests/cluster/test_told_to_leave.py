"""Told to leave: SIGTERM to one rank, a node that is drained, a save on demand. On real Ray."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import leavers
import pytest
import tiny
from test_seed_cases import assert_same_run

from coherent_ray.config import Config
from coherent_ray.train import coordinators
from coherent_ray.train.coordinators import answer
from coherent_ray.train.departures import end_in_words
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.trainer import make_trainer

if TYPE_CHECKING:
    from conftest import OwnRun

HERE = Path(__file__).parent


def trained(config: Config, function: Callable[..., None]) -> tuple[Any, dict[str, Any]]:
    """Fit, and return the result's metrics and what the coordinator says at the end."""
    result = tiny.fit(make_trainer(config, function))
    status = answer(coordinators.find(run_id_of(config)).status.remote())
    coordinators.stop(run_id_of(config))
    return result.metrics, status


def test_sigterm_to_one_rank_makes_one_generation_and_the_group_starts_again(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    # None may fail: to leave is no failure.
    config = tiny.configured(tmp_path / "run", tiny_data, cluster__max_failures=0)
    metrics, status = trained(config, leavers.terminated)
    assert tiny.published(config.run.root) == ["g1-a1", "g2-a1", "g3-a2", "g4-a2", "g5-a2"]
    assert (metrics["attempt"], metrics["resumed_at"]) == (2, leavers.BEFORE + 1)
    assert status["leave"] == {
        "attempt": 1, "ranks": [1], "why": "SIGTERM", "seconds": None, "left": "g2-a1",
        "resized": None,
    }  # fmt: skip
    assert (status["failures"]["count"], status["failures"]["taken"]) == (0, 1)
    assert "the group leaves with g2-a1" in status["failures"]["last"]
    assert_same_run(Path(config.run.root), reference)


@pytest.mark.campaign
def test_a_rank_that_is_killed_before_the_boundary_leaves_the_generation_before(
    reference: OwnRun, tiny_data: Path, tmp_path: Path
) -> None:
    config = tiny.configured(tmp_path / "run", tiny_data)
    metrics, status = trained(config, leavers.cut_off)
    assert tiny.published(config.run.root) == ["g1-a1", "g2-a2", "g3-a2", "g4-a2"]
    assert (metrics["attempt"], metrics["resumed_at"]) == (2, tiny.EVERY)
    assert status["leave"]["left"] is None
    words = end_in_words(status["leave"], "g1-a1")
    assert "rank 1 had to leave (SIGTERM), and that was too short" in words
    assert "g1-a1 stands" in words
    assert status["failures"]["count"] == 1
    assert_same_run(Path(config.run.root), reference)


@contextmanager
def training(config: Config) -> Iterator[Any]:
    """A run that trains meanwhile, slowly, until the end of the block; gives its coordinator."""
    with ThreadPoolExecutor(1) as pool:
        fitted = pool.submit(tiny.fit, make_trainer(config, leavers.slow))
        try:
            yield waited_for(config)
        finally:
            handle = coordinators.find(run_id_of(config))
            while not fitted.done():
                handle.request.remote("stop")
                time.sleep(0.5)
            fitted.result()
            coordinators.stop(run_id_of(config))


def waited_for(config: Config) -> Any:
    """Return the coordinator of a run once it trains."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        handle = coordinators.find(run_id_of(config))
        if handle is not None and answer(handle.status.remote())["progress"].get("update"):
            return handle
        time.sleep(0.1)
    raise TimeoutError("it never trained")


def saved(root: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run ``coherent-ray save``; return its exit code and what it says."""
    command = [sys.executable, "-m", "coherent_ray", "save", root, "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout or done.stderr)


@pytest.mark.timeout(300)
def test_save_on_demand_makes_one_generation_and_says_which(
    ray_cluster: str, tiny_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    config = tiny.configured(
        root, tiny_data, training__updates=5000, checkpoint__every_updates=5000
    )
    with training(config) as coordinator:
        before = answer(coordinator.status.remote())["progress"]["update"]
        code, told = saved(str(root), "--address", ray_cluster)
        assert (code, told["generation"]) == (0, "g1-a1")
        assert told["update"] >= before
        # Every rank has heard of the wish by now; one generation was made of it.
        update = answer(coordinator.status.remote())["progress"]["update"]
        while answer(coordinator.status.remote())["progress"]["update"] < update + 30:
            time.sleep(0.2)
        assert tiny.published(root) == ["g1-a1"]
        assert answer(coordinator.status.remote())["wish"] == "none"
        code, told = saved(str(root), "--address", ray_cluster)
        assert (code, told["generation"]) == (0, "g2-a1")
    code, told = saved(str(root), "--address", ray_cluster)
    assert code == 1
    assert "has no coordinator" in str(told)


@pytest.mark.campaign
@pytest.mark.timeout(300)
def test_a_drained_node_is_left_with_one_more_generation(tiny_data: Path, tmp_path: Path) -> None:
    """On a cluster of its own, where one node after the other can be taken."""
    command = [sys.executable, str(HERE / "drained.py"), str(tmp_path / "run"), str(tiny_data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    leave = told["leave"]
    assert (leave["attempt"], len(leave["ranks"])) == (1, 1)
    assert leave["why"] == "its node is being drained"
    assert 0 < leave["seconds"] <= 120
    assert leave["left"] == told["published"][0]
    assert (told["failures"]["count"], told["failures"]["taken"]) == (0, 1)
    assert told["attempt"] == 2
    assert told["drained"] not in told["nodes"]
