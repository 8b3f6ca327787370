"""Who was told to leave, and whether it was in time."""

from __future__ import annotations

from coherent_ray.train.departures import Departures, end_in_words, told_in_words

WHY = "its node is being drained"


def test_the_ranks_of_a_drained_node_are_told_once() -> None:
    made = Departures()
    for rank, node in enumerate("abb"):
        made.lives(2, rank, node)
    assert not made.drained({"c": None}, WHY)
    assert made.summary() is None
    assert made.drained({"b": 9.5, "c": 1.0}, WHY)
    assert not made.drained({"b": 7.5}, WHY)
    assert made.summary() == {
        "attempt": 2, "ranks": [1, 2], "why": WHY, "seconds": 9.5, "left": None, "resized": None,
    }  # fmt: skip
    assert not made.drained({"a": None, "b": 5.0}, WHY)
    assert (made.summary() or {})["ranks"] == [0, 1, 2]


def test_a_deadline_is_the_first_of_all() -> None:
    made = Departures()
    made.lives(1, 0, "a")
    made.lives(1, 1, "b")
    made.drained({"a": None, "b": 30.0}, WHY)
    assert (made.summary() or {})["seconds"] == 30.0


def test_a_new_attempt_lives_elsewhere() -> None:
    made = Departures()
    made.lives(1, 0, "a")
    made.lives(1, 1, "b")
    made.lives(2, 0, "c")
    assert not made.drained({"b": None}, WHY)
    made.lives(1, 1, "b")
    assert not made.drained({"b": None}, WHY), "an old attempt's late word"
    assert not made.told(1, [0], "SIGTERM", None)


def test_leaving_is_of_its_attempt() -> None:
    made = Departures()
    made.lives(3, 0, "a")
    assert made.told(3, [0], "SIGTERM", None)
    made.left(2, "g1-a2")
    assert (made.summary() or {})["left"] is None
    made.left(3, "g2-a3")
    assert (made.summary() or {})["left"] == "g2-a3"
    made.lives(4, 0, "a")
    assert made.told(4, [0], "SIGTERM", None)
    assert (made.summary() or {})["left"] is None


def test_a_group_that_is_resized_leaves_as_a_whole() -> None:
    made = Departures()
    assert not made.resized(1, 3), "nobody trains yet"
    assert not made.leaves(1)
    made.lives(1, 0, "a")
    made.lives(1, 1, "b")
    assert not made.resized(2, 3), "the ranks that are known are of an older attempt"
    assert made.resized(1, 3)
    assert made.leaves(1)
    assert not made.leaves(2)
    facts = made.summary() or {}
    assert facts["ranks"] == [0, 1]
    assert told_in_words(facts) == (
        "there is room for 3 workers instead of 2: they publish one more generation and start again"
    )


def test_who_was_told_before_leaves_with_the_others() -> None:
    made = Departures()
    made.lives(1, 0, "a")
    made.lives(1, 1, "b")
    made.told(1, [1], "SIGTERM", None)
    assert not made.resized(1, 3)
    assert made.leaves(1)
    assert (made.summary() or {})["ranks"] == [0, 1]
    assert "(SIGTERM)" in told_in_words(made.summary() or {})


def test_the_words() -> None:
    made = Departures()
    made.lives(1, 0, "a")
    made.told(1, [0], "SIGTERM", None)
    facts = made.summary() or {}
    assert told_in_words(facts).startswith("rank 0 was told to leave (SIGTERM): ")
    assert "g4-a1 stands" in end_in_words(facts, "g4-a1")
    assert "begins again" in end_in_words(facts, None)
    made.left(1, None)
    assert "could not be saved: g4-a1 stands" in end_in_words(made.summary() or {}, "g4-a1")
    made.left(1, "g5-a1")
    assert end_in_words(made.summary() or {}, "g5-a1") == (
        "the workers left with g5-a1; they start again"
    )
