"""The driver beside Ray: a coordinator that hangs is started again, one that is slow is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError
from small_run import config_for

from coherent_ray.train import driver as driver_module
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.driver import HUNG_S, Driver
from coherent_ray.train.events import Event


class Cluster:
    """A coordinator that answers, or does not, on a clock of the test's own."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now = 100.0
        self.answers = True
        self.restarted: list[str] = []
        self.told: list[Event] = []
        actor = CoordinatorActor("job", str(folder), ack_timeout_s=1.0, read_back=False)
        self.status = asyncio.run(actor.status())
        self.driver = Driver(config_for(folder), self.told.append)
        handle = SimpleNamespace(status=SimpleNamespace(remote=lambda: None))
        patch.setattr(driver_module.coordinators, "find", lambda run_id: handle)
        patch.setattr(driver_module.coordinators, "restart", self.restarted.append)
        patch.setattr(driver_module.ray, "get", self._get)
        patch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _get(self, reference: Any, timeout: float) -> dict[str, Any]:
        if self.answers:
            return self.status
        self.now += timeout
        raise GetTimeoutError("no answer")

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.driver._look("job") == self.answers
            self.now += 0.2


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch, tmp_path)


def test_a_coordinator_that_does_not_answer_is_started_again(cluster: Cluster) -> None:
    cluster.look()
    cluster.answers = False
    begun = cluster.now
    while not cluster.restarted:
        assert cluster.now - begun <= HUNG_S + 6
        cluster.look()
    assert cluster.restarted == ["job"]
    assert cluster.now - begun >= HUNG_S
    assert "has not answered" in cluster.told[-1].text
    cluster.look(2)
    assert cluster.restarted == ["job"], "the next one gets as much time"


def test_one_that_is_slow_now_and_then_is_left_alone(cluster: Cluster) -> None:
    for _ in range(20):
        cluster.answers = False
        cluster.look(2)
        cluster.answers = True
        cluster.look()
    assert cluster.restarted == []


def test_time_without_a_question_does_not_count(cluster: Cluster) -> None:
    cluster.answers = False
    cluster.look()
    cluster.answers = True
    cluster.now += 10 * HUNG_S
    cluster.look()
    cluster.answers = False
    cluster.look()
    assert cluster.restarted == []


def restarts(cluster: Cluster) -> list[tuple[str, int]]:
    told = [event.facts for event in cluster.told if event.kind == "restarted"]
    return [(facts["what"], facts["times"]) for facts in told]


def test_a_coordinator_that_died_is_told_and_counted(cluster: Cluster) -> None:
    cluster.look(2)
    assert restarts(cluster) == []
    cluster.status = cluster.status | {"incarnation": "another"}
    cluster.look(2)
    assert restarts(cluster) == [("coordinator", 1)]
    assert [e.text for e in cluster.told if "the coordinator ended" in e.text] != []


def test_workers_that_died_are_counted(cluster: Cluster) -> None:
    cluster.look()
    cluster.status = cluster.status | {"failures": {"count": 2, "last": "rank 1", "taken": 1}}
    cluster.look(2)
    assert restarts(cluster) == [("worker group", 3)]


def test_saves_that_were_left_out_are_added_up_over_all_attempts(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coherent_ray.train.driver._facts", lambda after: {})
    for attempt, skipped in ((1, 0), (1, 2), (2, 0), (2, 3)):
        cadence = {"text": f"chosen by attempt {attempt}"}
        progress = {"attempt": attempt, "skipped": skipped, "cadence": cadence, "saves": []}
        cluster.status = cluster.status | {"progress": progress}
        cluster.look()
    cluster.status = cluster.status | {"progress": {}}
    cluster.look()
    cluster.driver._finished(None, stopped=False)  # type: ignore[arg-type]
    facts = cluster.told[-1].facts
    assert (facts["skipped"], facts["cadence"]) == (5, {"text": "chosen by attempt 2"})
