"""One driver at a time: who is refused, who takes over, who is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from coherent_ray.errors import OwnedElsewhere
from coherent_ray.train import ownership
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.ownership import Owner, lost, take

FIRST = Owner("01000000", "here", 11, 0.0)
SECOND = Owner("02000000", "there", 22, 60.0)


class Cluster:
    """A coordinator's methods without Ray, and the jobs that live."""

    def __init__(self, tmp_path: Any) -> None:
        self.actor = CoordinatorActor("run", str(tmp_path), ack_timeout_s=1.0, read_back=False)
        self.alive = {FIRST.job, SECOND.job}
        self.silent_s = 0.0

    def take(self, me: Owner, patience_s: float = 0.0) -> None:
        hold = SimpleNamespace(remote=lambda *given: self.actor.hold(*given))
        take(
            "run",
            me,
            find=lambda run_id: SimpleNamespace(hold=hold),
            ask=self.ask,
            lives=self.alive.__contains__,
            patience_s=patience_s,
        )

    def ask(self, call: Any) -> dict[str, Any]:
        found = asyncio.run(call)
        return {**found, "silent_s": found["silent_s"] + self.silent_s}

    @property
    def owner(self) -> str:
        assert self.actor._owner is not None
        return str(self.actor._owner["job"])


@pytest.fixture
def cluster(tmp_path: Any) -> Cluster:
    return Cluster(tmp_path)


def test_a_second_driver_is_refused_at_once_and_told_whom_to_ask(cluster: Cluster) -> None:
    cluster.take(FIRST)
    cluster.take(FIRST)
    with pytest.raises(OwnedElsewhere) as caught:
        cluster.take(SECOND, patience_s=600.0)
    text = str(caught.value)
    for words in ("since 1970-01-01", "process 11", "here", "job 01000000", "kill -TERM 11"):
        assert words in text
    assert caught.value.exit_code == 1
    assert cluster.owner == FIRST.job


def test_a_dead_driver_is_replaced(cluster: Cluster) -> None:
    cluster.take(FIRST)
    cluster.alive.remove(FIRST.job)
    cluster.take(SECOND)
    assert cluster.owner == SECOND.job
    assert "another driver took over" in str(lost("run", SECOND))


def test_a_silent_driver_gets_time_to_be_found_dead(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.take(FIRST)
    cluster.silent_s = 10.0
    monkeypatch.setattr(ownership.time, "sleep", lambda s: cluster.alive.discard(FIRST.job))
    cluster.take(SECOND, patience_s=600.0)
    assert cluster.owner == SECOND.job


def test_a_silent_driver_that_lives_is_not_replaced(cluster: Cluster) -> None:
    cluster.take(FIRST)
    cluster.silent_s = 10.0
    with pytest.raises(OwnedElsewhere):
        cluster.take(SECOND, patience_s=0.0)


def test_who_knows_of_another_owner_s_death_by_hearsay_takes_nothing(cluster: Cluster) -> None:
    """Two that wait for one death: the second finds the first of them, who lives."""
    cluster.take(SECOND)
    found = asyncio.run(cluster.actor.hold({"job": "03"}, FIRST.job))
    assert found["owner"]["job"] == SECOND.job
