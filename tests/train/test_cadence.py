"""When it is time to save, by a clock that only the test moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from slow_clock import SlowClock

from coherent_ray.commit.fates import Fate
from coherent_ray.commit.timings import Loss
from coherent_ray.config.sections import Checkpoint
from coherent_ray.train.cadence import FIRST_S, Cadence, interval_of
from coherent_ray.train.failures import Past
from coherent_ray.train.pace import ENOUGH, Pace
from coherent_ray.train.saving import Saved
from coherent_ray.train.wishes import BUSY, DUE, WISH_LEAVE, WISH_SAVE, WISH_STOP


@dataclass
class Saves:
    """A rank's saves, as the test says."""

    saving: bool = False
    patient: bool = False
    landed: Saved | None = None

    def land(self, number: int, durable_s: float) -> None:
        self.saving = self.patient = False
        fate = Fate("published", number, 1, seq=number)
        self.landed = Saved(f"g{number}-a1", number, number, fate, 0.1, durable_s, 1, {})


@dataclass
class Rank:
    """A cadence, its clock, and the saves that it looks at."""

    cadence: Cadence
    clock: SlowClock
    saves: Saves

    def update(self, seconds: float) -> int:
        """Train for an update, and return what the rank votes at its end."""
        self.cadence.begins()
        self.clock.pass_by(seconds)
        self.cadence.ended()
        return self.cadence.bits()


def rank_of(rank: int = 0, past: Past | None = None, **options: Any) -> Rank:
    clock, saves = SlowClock(), Saves()
    return Rank(Cadence(Checkpoint(**options), rank, saves, past, clock), clock, saves)


# --- fixed forms ----------------------------------------------------------------------------------


def test_updates_are_counted_by_every_rank_and_need_no_word() -> None:
    for rank in (0, 3):
        one = rank_of(rank, every_updates=4)
        assert one.update(1_000.0) == 0
        saved = [n for n in range(1, 13) if one.cadence.why(n, 0, last=False)]
        assert saved == [4, 8, 12]


def test_seconds_are_counted_by_rank_0_alone() -> None:
    first, other = rank_of(0, every_seconds=10.0), rank_of(1, every_seconds=10.0)
    assert [other.update(100.0) for _ in range(3)] == [0, 0, 0]
    assert [first.update(4.0) for _ in range(3)] == [0, 0, DUE]
    assert first.cadence.why(3, DUE, last=False) == "due"
    assert other.cadence.why(3, DUE, last=False) == "due", "the union of the bits decides"
    assert first.cadence.why(100, 0, last=False) is None, "no number of updates does"
    first.cadence.saved("g1-a1", 0.1)
    assert [first.update(4.0) for _ in range(3)] == [0, 0, DUE], "counted from the last save"


@pytest.mark.parametrize(
    ("wishes", "last", "why"),
    [
        (0, True, "end"),
        (WISH_SAVE, False, "asked"),
        (WISH_STOP | WISH_SAVE, False, "stop"),
        (WISH_LEAVE | WISH_SAVE, False, "leave"),
        (DUE | WISH_SAVE, False, "asked"),
    ],
)
def test_what_ends_a_run_or_is_asked_for_is_never_left_out(
    wishes: int, last: bool, why: str
) -> None:
    one = rank_of(every_updates=1, on_busy="skip")
    assert one.cadence.why(1, wishes | BUSY, last=last) == why
    assert one.cadence.skipped == 0


def test_a_save_that_is_due_is_left_out_where_any_rank_is_busy() -> None:
    one = rank_of(1, every_updates=2, on_busy="skip")
    assert [one.cadence.why(n, BUSY, last=False) for n in (1, 2, 3, 4)] == [None] * 4
    assert one.cadence.skipped == 2, "in the other two none was due"
    assert one.cadence.why(6, 0, last=False) == "due"


def test_who_waits_says_nothing_of_its_saves() -> None:
    for on_busy, bits in (("wait", 0), ("skip", BUSY)):
        one = rank_of(1, every_updates=2, on_busy=on_busy)
        one.saves.patient = True
        assert one.update(1.0) == bits


def test_a_save_by_the_clock_that_is_left_out_is_due_an_interval_later() -> None:
    one = rank_of(every_seconds=10.0, on_busy="skip")
    assert one.update(10.0) == DUE
    assert one.cadence.why(1, DUE | BUSY, last=False) is None
    assert [one.update(5.0), one.update(5.0)] == [0, DUE]


# --- auto -----------------------------------------------------------------------------------------


def test_the_interval_is_daly_s() -> None:
    assert interval_of(0.0, 100.0) == 0.0
    assert interval_of(1.0, 86_400.0) == pytest.approx(math.sqrt(2 * 86_400.0), rel=0.01)
    # x = 1/4: sqrt(2 * 8 * 16) * (1 + 1/6 + 1/36) - 8
    assert interval_of(8.0, 16.0) == pytest.approx(16 * 43 / 36 - 8)
    assert interval_of(200.0, 100.0) == 100.0, "where a save costs more than a failure"
    assert interval_of(199.999, 100.0) == pytest.approx(2 * 200 * (1 + 1 / 3 + 1 / 9) / 2 - 200, 1)


def test_without_a_measure_the_first_save_comes_soon() -> None:
    one = rank_of(every="auto")
    assert one.update(FIRST_S - 1.0) == 0
    assert one.update(1.0) == DUE
    choice = one.cadence.choice()
    assert choice is not None
    assert (choice.cost_s, choice.interval_s) == (None, FIRST_S)
    assert one.cadence.news() == []


def test_the_interval_follows_from_what_a_save_costs_and_says_why() -> None:
    one = rank_of(every="auto", mtbf_s=10_000.0)
    for _ in range(10):
        one.update(10.0)
    one.cadence.saved("g1-a1", 2.0)
    choice = one.cadence.choice()
    assert choice is not None
    assert (choice.cost_s, choice.mtbf_s) == (2.0, 10_100.0)
    assert choice.interval_s == interval_of(2.0, 10_100.0)
    assert one.update(choice.interval_s - 1.0) == 0
    assert one.update(10.0) == DUE, "it has grown a little meanwhile: more was trained"
    [told] = one.cadence.news()
    assert told == (
        "a save every 202 s: one costs training 2 s, and the run is taken to fail once in "
        "10,299 s (a prior of 10,000 s, and 0 failures in 299 s of training)"
    )
    assert one.cadence.news() == []


def test_lost_updates_are_a_cost_too() -> None:
    one = rank_of(every="auto")
    for _ in range(ENOUGH):
        one.update(10.0)
    one.cadence.saved("g1-a1", 2.0)
    one.saves.saving = True
    one.update(13.0)
    one.cadence.begins()
    one.saves.land(1, durable_s=14.0)
    one.clock.pass_by(11.0)
    one.cadence.ended()
    choice, about = one.cadence.choice(), one.cadence.about("due")
    assert choice is not None
    assert choice.cost_s == pytest.approx(2.0 + 3.0 + 1.0)
    assert about is not None
    assert about.before == Loss("g1-a1", 4.0, 2)
    assert one.cadence.lost() == ("g1-a1", 4.0)


def test_no_interval_is_shorter_than_a_save_takes() -> None:
    one = rank_of(every="auto")
    one.update(1.0)
    one.cadence.saved("g1-a1", 0.0001)
    one.saves.land(1, durable_s=500.0)
    choice = one.cadence.choice()
    assert choice is not None
    assert choice.interval_s == choice.durable_s == 500.0
    assert "takes 500 s to be durable" in choice.in_words()


def test_what_the_run_has_seen_outweighs_the_prior() -> None:
    past = Past(failures=9, trained_s=99_000.0, cost_s=3.0, durable_s=4.0)
    choice = rank_of(past=past, every="auto", mtbf_s=1_000.0).cadence.choice()
    assert choice is not None
    assert (choice.mtbf_s, choice.failures, choice.cost_s) == (10_000.0, 9, 3.0)
    assert choice.interval_s == interval_of(3.0, 10_000.0)
    fewer = rank_of(past=Past(0, 99_000.0, 3.0, 4.0), every="auto", mtbf_s=1_000.0).cadence.choice()
    assert fewer is not None
    assert fewer.interval_s > choice.interval_s


def test_other_ranks_choose_nothing() -> None:
    one = rank_of(1, every="auto")
    assert one.update(1e6) == 0
    assert one.cadence.about("due") is None


# --- the pace -------------------------------------------------------------------------------------


def run_updates(pace: Pace, clock: SlowClock, lasting: list[float], *, beside: bool) -> None:
    for seconds in lasting:
        pace.begins(beside=beside)
        clock.pass_by(seconds)
        pace.ended()
        clock.pass_by(100.0)  # what is done at a boundary is no update's


def test_lost_is_what_updates_beside_a_save_take_longer() -> None:
    clock = SlowClock()
    pace = Pace(clock)
    run_updates(pace, clock, [9.0, 1.0, 1.0, 2.0, 1.0], beside=False)
    pace.saved()
    assert pace.lost() is None, "no update has begun beside it"
    run_updates(pace, clock, [1.5, 2.0], beside=True)
    run_updates(pace, clock, [1.0], beside=False)
    assert pace.lost() == (pytest.approx(1.5), 2)
    pace.saved()
    assert pace.lost() is None


def test_what_cannot_be_told_is_not_told() -> None:
    clock = SlowClock()
    pace = Pace(clock)
    run_updates(pace, clock, [1.0] * (ENOUGH - 1), beside=False)
    run_updates(pace, clock, [1.0], beside=True)
    assert pace.lost() is None
    assert pace.trained_s == pytest.approx(ENOUGH + 100.0 * ENOUGH)


def test_the_rest_of_an_update_that_was_saved_in_its_middle_counts_for_nothing() -> None:
    clock = SlowClock()
    pace = Pace(clock)
    run_updates(pace, clock, [1.0] * ENOUGH, beside=False)
    pace.begins(beside=False)
    clock.pass_by(1.0)
    pace.saved()
    clock.pass_by(500.0)
    pace.ended()
    run_updates(pace, clock, [3.0], beside=True)
    assert pace.lost() == (pytest.approx(2.0), 1)
