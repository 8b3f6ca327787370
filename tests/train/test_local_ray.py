"""Ray for one driver: a cluster of its own unless one is named, and always given back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from coherent_ray.config.sections import Cluster
from coherent_ray.errors import ClusterError
from coherent_ray.train.local_ray import connected


class Calls:
    """What Ray was asked for, and how often it was shut down."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.ended = 0
        self.error: Exception | None = None

    def init(self, **options: Any) -> None:
        self.started.append(options)
        if self.error is not None:
            raise self.error

    def shutdown(self) -> None:
        self.ended += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr(ray, "init", made.init)
    monkeypatch.setattr(ray, "shutdown", made.shutdown)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return made


def test_a_local_cluster_is_a_new_one(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Ray on this machine, or in the environment, is not what was asked for."""
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    with connected(Cluster(workers=2)) as address:
        assert address == "local"
        assert calls.ended == 0
    [options] = calls.started
    assert options["address"] == "local"
    assert options["include_dashboard"] is False
    assert calls.ended == 1


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({"workers": 2}, 4),
        ({"workers": 6}, 6),
        ({"workers": 3, "resources_per_worker": {"CPU": 1.5}}, 5),
        ({"workers": 16, "resources_per_worker": {"CPU": 0.5}}, 8),
        ({"workers": 2, "num_cpus": 3}, 3),
        ({"workers": 9, "resources_per_worker": {}}, 9),
    ],
)
def test_it_claims_the_cpus_that_its_workers_need(
    calls: Calls, settings: dict[str, Any], cpus: int
) -> None:
    with connected(Cluster(**settings)):
        assert calls.started[0]["num_cpus"] == cpus


def test_it_has_the_other_resources_that_its_workers_need(calls: Calls) -> None:
    resources = {"CPU": 1.0, "GPU": 1.0, "disk": 0.5, "slot": 2.0}
    with connected(Cluster(workers=4, use_gpu=True, resources_per_worker=resources)):
        # GPUs are counted by Ray itself.
        assert calls.started[0]["resources"] == {"disk": 2.0, "slot": 8.0}


def test_a_named_cluster_is_joined(calls: Calls) -> None:
    with connected(Cluster(address="10.0.0.1:6379")) as address:
        assert address == "10.0.0.1:6379"
    assert calls.started[0]["address"] == "10.0.0.1:6379"
    assert "num_cpus" not in calls.started[0]
    assert calls.ended == 1


@pytest.mark.parametrize(
    ("address", "where", "words", "remedy"),
    [
        (None, "local", "Ray did not start: no", "overloaded"),
        ("auto", "auto", "no Ray there: no", "ray status"),
    ],
)
@pytest.mark.parametrize("kind", [ConnectionError, ValueError, TimeoutError, Exception])
def test_a_cluster_that_is_not_there(
    calls: Calls, address: str | None, where: str, words: str, remedy: str, kind: type[Exception]
) -> None:
    """Of a node that does not come up in time Ray says so by a plain `Exception`."""
    calls.error = kind("no")
    with pytest.raises(ClusterError) as caught, connected(Cluster(address=address)):
        pytest.fail("it is not connected")
    assert (caught.value.what, caught.value.where) == (words, where)
    assert remedy in caught.value.remedy
    assert caught.value.details == (
        {"may_pass": True} if not address and kind is not ValueError else {}
    )
    assert calls.ended == 0


def test_what_fails_inside_is_no_error_of_the_cluster(calls: Calls) -> None:
    with pytest.raises(ValueError, match="mine"), connected(Cluster()):
        raise ValueError("mine")
    assert calls.ended == 1
