"""Which ranks a silent run waits for, and when that is said."""

from __future__ import annotations

import threading

from coherent_ray.train.whereabouts import Beacon, Silence, Whereabouts, behind


def group(*places: tuple[int, str], attempt: int = 1, now: float = 0.0) -> Whereabouts:
    made = Whereabouts()
    for rank, place in enumerate(places):
        made.note(attempt, rank, len(places), place, now)
    return made


def said(made: Whereabouts, now: float, warn_s: float = 60.0) -> str | None:
    return Silence(warn_s, 600.0).words(made.summary(now))


def test_the_rank_that_the_others_wait_for_is_named_with_its_update() -> None:
    made = group((7, "reduction"), (7, "task"), (7, "reduction"))
    words = said(made, 75.0)
    assert words is not None
    assert "no update has finished for 75 s: rank 1, in update 7: in the training" in words
    assert "gives up 600 s after it began" in words


def test_ranks_without_data_are_behind_those_that_compute() -> None:
    made = group((7, "task"), (7, "data"), (7, "data"))
    assert "ranks 1 and 2, in update 7: waiting for data" in behind(made.summary(9.0) or {})


def test_a_hang_of_every_rank_is_ended_by_nobody() -> None:
    words = said(group((3, "task"), (3, "task")), 61.0) or ""
    assert "every rank, in update 3" in words
    assert "Nothing but you ends this" in words


def test_a_rank_that_told_nothing_is_behind() -> None:
    made = Whereabouts()
    made.note(1, 0, 3, (1, "reduction"), 0.0)
    assert "ranks 1 and 2: not a word" in behind(made.summary(5.0) or {})


def test_a_frozen_process_is_said_to_be_unheard() -> None:
    made = group((5, "reduction"), (5, "task"))
    made.note(1, 0, 2, (5, "reduction"), 100.0)
    assert "last heard 100 s ago" in behind(made.summary(100.0) or {})


def test_a_word_comes_once_a_silence_and_now_and_then_again() -> None:
    made, silence = group((1, "task")), Silence(60.0, 600.0)
    told = [now for now in range(1, 500) if silence.words(made.summary(float(now)))]
    assert told == [60, 120, 240, 480]
    made.note(1, 0, 1, (2, "task"), 500.0)
    assert silence.words(made.summary(520.0)) is None
    made = group((2, "task"))
    assert silence.words(made.summary(60.0)) is not None


def test_slow_updates_are_no_silence() -> None:
    made = Whereabouts()
    for update in range(1, 4):
        made.note(1, 0, 1, (update, "task"), update * 30.0)
    assert said(made, 90.0 + 290.0) is None
    assert said(made, 90.0 + 301.0) is not None


def test_an_older_attempt_is_not_heard_and_a_newer_one_begins_anew() -> None:
    made = group((9, "task"), attempt=2)
    made.note(1, 0, 1, (1, "data"), 1.0)
    assert (made.summary(2.0) or {})["update"] == 9
    made.note(3, 0, 1, (4, "setup"), 50.0)
    facts = made.summary(51.0) or {}
    assert (facts["attempt"], facts["quiet_s"], facts["phase"]) == (3, 1.0, "setup")


def test_a_beacon_tells_the_newest_place_and_survives_a_lost_coordinator() -> None:
    told: list[tuple[int, str]] = []
    arrived = threading.Event()

    def tell(update: int, phase: str) -> None:
        told.append((update, phase))
        if len(told) == 1:
            raise RuntimeError("the coordinator is gone")
        if (update, phase) == (5, "reduction"):
            arrived.set()

    beacon = Beacon(tell, 1, 5)
    beacon.at(5, "reduction")
    assert arrived.wait(30)
    beacon.close()
