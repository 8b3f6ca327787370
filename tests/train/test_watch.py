"""What a driver says while it waits for resources, for admission, and when workers die."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from coherent_ray.commit.findings import finding_of
from coherent_ray.config.sections import Cluster
from coherent_ray.errors import ShardDamaged
from coherent_ray.train.watch import Resources, Watch


class Scene:
    def __init__(self, stale: dict[str, Any] | None = None, **settings: Any) -> None:
        self.now = 0.0
        self.there = Resources({"CPU": 4.0}, {"CPU": 2.0}, asked_for=True)
        self.up: int | None = None
        self.watch = Watch(
            Cluster.model_validate(settings),
            3,
            stale=stale,
            resources=lambda: self.there,
            processes=lambda: self.up,
            clock=lambda: self.now,
        )

    def at(self, now: float, **changes: Any) -> list[str]:
        self.now = now
        status = {
            "attempt": 3,
            "admitted": 0,
            "failures": {"count": 0, "last": "", "taken": 0},
            "whereabouts": None,
            "leave": None,
            "generation": None,
        }
        return list(self.watch.look(status | changes))


def test_what_is_waited_for_is_said_within_seconds() -> None:
    scene = Scene(workers=8)
    assert scene.at(1.0) == []
    [words] = scene.at(5.0)
    assert "8 workers ask for 8 CPU; the cluster has 4 CPU (2 free)" in words
    assert scene.at(6.0) == []
    assert len(scene.at(40.0)) == 1
    assert list(scene.watch.look(None)) == []


def test_workers_that_merely_start_are_no_lack_of_resources() -> None:
    scene = Scene(workers=4)
    scene.there = Resources({"CPU": 4.0}, {"CPU": 0.0}, asked_for=False)
    scene.up = 3
    told = {now: words for now in range(130) for words in scene.at(float(now))}
    assert list(told) == [60, 120], "once it takes long, and again when that has doubled"
    assert told[60].startswith("the workers have been starting for 60 s: 3 of 4 processes are up")
    scene = Scene(workers=4)
    told = [now for now in range(25) if scene.at(float(now))]
    assert told == [20]


ELASTIC = {"workers": {"min": 1, "max": 4}}


def test_as_many_workers_as_there_are_are_told_where_that_changes() -> None:
    scene = Scene(**ELASTIC)
    assert scene.at(1.0, attempt=4, admitted=3, ranks=3) == [], "they are not admitted yet"
    assert scene.at(2.0, attempt=4, admitted=4, ranks=3) == ["now 3 workers, of 4 at most"]
    assert scene.at(3.0, attempt=4, admitted=4, ranks=3) == []
    lost = {"count": 0, "last": "rank 2: its node was lost", "taken": 1}
    [told] = scene.at(4.0, attempt=4, admitted=4, ranks=3, failures=lost)
    assert told.startswith("rank 2: its node was lost; it does not count as a failure")
    assert scene.at(5.0, attempt=5, admitted=5, ranks=1, failures=lost) == [
        "now 1 worker, of 4 at most"
    ]
    assert scene.at(6.0, attempt=6, admitted=6, ranks=1, failures=lost) == []
    assert scene.at(7.0, attempt=7, admitted=7, ranks=4, failures=lost) == ["now 4 workers"]


def test_a_number_of_workers_that_cannot_change_is_not_told() -> None:
    assert Scene(workers=3).at(1.0, attempt=4, admitted=4, ranks=3) == []


def test_a_range_waits_for_its_fewest_workers_only() -> None:
    scene = Scene(workers={"min": 2, "max": 9})
    scene.there = Resources({"CPU": 2.0}, {"CPU": 2.0}, asked_for=True)
    scene.up = 2
    assert scene.at(5.0) == [], "there is room for two"
    scene.there = Resources({"CPU": 1.0}, {"CPU": 1.0}, asked_for=True)
    [words] = scene.at(10.0)
    assert "2 workers at least ask for 2 CPU; the cluster has 1 CPU" in words
    scene.there = Resources({"CPU": 9.0}, {"CPU": 0.0}, asked_for=False)
    [words] = scene.at(200.0)
    assert "2 processes are up" in words


def test_all_resources_are_asked_for() -> None:
    cluster = Cluster(workers=2, use_gpu=True, resources_per_worker={"CPU": 2.0, "disk": 0.5})
    assert cluster.needs == {"CPU": 4.0, "disk": 1.0, "GPU": 2.0}


def test_a_death_is_said_once_and_then_nothing_trains() -> None:
    scene = Scene(max_failures=5)
    scene.at(1.0, attempt=4, admitted=4)
    assert scene.watch.training
    lost = {"count": 1, "last": "rank 1: gone", "taken": 0}
    told = scene.at(2.0, attempt=4, admitted=4, failures=lost)
    assert told == ["rank 1: gone; failure 1 of 5 allowed, the workers start again"]
    assert scene.at(3.0, attempt=4, admitted=4, failures=lost) == []
    assert not scene.watch.training
    assert scene.at(4.0, attempt=5, admitted=5, failures=lost) == []
    assert scene.watch.training


def test_what_an_earlier_controller_has_lost_is_not_counted_again() -> None:
    stale = {"count": 2, "last": "rank 1: gone", "taken": 0}
    scene = Scene(stale=stale, max_failures=5)
    assert scene.at(1.0, attempt=4, admitted=4, failures=stale) == []
    assert (scene.watch.ends, scene.watch.training) == (0, True)
    lost = {"count": 1, "last": "rank 0: gone", "taken": 0}
    [words] = scene.at(2.0, attempt=4, admitted=4, failures=lost)
    assert words.startswith("rank 0: gone; failure 1 of 5 allowed")
    assert scene.watch.ends == 1


def test_a_coordinator_that_was_started_again_does_not_undo_the_admission() -> None:
    """It has forgotten it, and before it has read the log the attempt too."""
    scene = Scene(quiet_warning_s=30.0)
    scene.at(1.0, attempt=4, admitted=4)
    assert scene.at(2.0, attempt=0) == []
    assert scene.watch.training
    assert scene.at(90.0, attempt=4) == []
    assert scene.watch.training


def test_an_admission_that_hangs_is_said() -> None:
    scene = Scene(quiet_warning_s=30.0)
    assert scene.at(1.0, attempt=4) == []
    [words] = scene.at(32.0, attempt=4)
    assert "not all admitted" in words


def test_what_a_scrub_has_found_is_said_once_a_scrub() -> None:
    scene = Scene()
    damage = ShardDamaged("block 3 is bad; it holds 'model/weight'", where="generations/g2-a1/s")

    def scrub(minute: int) -> dict[str, Any]:
        at = datetime(2026, 5, 4, 12, minute, tzinfo=UTC)
        return {"damaged": [finding_of("g2-a1", [damage], at).to_json()]}

    assert scene.at(1.0, scrub=None) == []
    (words,) = scene.at(2.0, scrub=scrub(1))
    assert words.startswith("scrub: g2-a1 is damaged: generations/g2-a1/s: block 3 is bad; it")
    assert "coherent-ray verify RUN@g2-a1" in words
    assert scene.at(3.0, scrub=scrub(1)) == []
    assert len(scene.at(4.0, scrub=scrub(2))) == 1


LEAVE = {"attempt": 4, "ranks": [1], "why": "SIGTERM", "seconds": None, "left": None}
NOW = {"attempt": 4, "admitted": 4, "generation": {"name": "g2-a4"}}


def test_a_departure_is_said_and_that_it_went_well() -> None:
    scene = Scene()
    scene.at(1.0, **NOW)
    [told] = scene.at(2.0, **NOW, leave=LEAVE)
    assert told.startswith("rank 1 was told to leave (SIGTERM): the workers publish one more")
    assert scene.at(3.0, **NOW, leave=LEAVE) == []
    left = LEAVE | {"left": "g3-a4"}
    gone = {"count": 0, "last": "ranks 0 and 1: the group leaves", "taken": 1}
    ended = scene.at(4.0, **NOW, leave=left, failures=gone)
    assert ended == ["the workers left with g3-a4; they start again"]
    assert not scene.watch.training
    later = {"attempt": 5, "admitted": 5, "leave": left, "failures": gone}
    assert scene.at(5.0, **NOW | later) == []
    assert scene.watch.training


def test_a_departure_that_was_cut_off_says_which_generation_stands() -> None:
    scene = Scene(max_failures=5)
    scene.at(1.0, **NOW)
    leave = LEAVE | {"seconds": 4.6, "why": "its node is being drained"}
    [told] = scene.at(2.0, **NOW, leave=leave)
    assert "told to leave within 5 s (its node is being drained)" in told
    lost = {"count": 1, "last": "rank 1: gone", "taken": 0}
    cut, failure = scene.at(3.0, **NOW, leave=leave, failures=lost)
    assert "had to leave within 5 s" in cut
    assert "too short" in cut
    assert "G2-a4 stands" not in cut
    assert "g2-a4 stands, and what came after it is trained again" in cut
    assert "failure 1 of 5" in failure


def test_a_node_that_was_reclaimed_without_a_word_is_no_failure() -> None:
    scene = Scene(max_failures=0)
    scene.at(1.0, **NOW)
    lost = {"count": 0, "last": "rank 1: its process ended", "taken": 1}
    [told] = scene.at(2.0, **NOW, failures=lost)
    assert "does not count" in told


def test_a_new_controller_s_watch_does_not_tell_an_old_departure() -> None:
    scene = Scene()
    old = LEAVE | {"attempt": 3, "left": "g1-a3"}
    assert scene.at(1.0, attempt=3, admitted=3, leave=old) == []
    assert scene.at(2.0, attempt=4, admitted=4, leave=old) == []
