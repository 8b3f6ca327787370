"""Verdicts: each promise can be broken, and then it is; a drill without a moment never passes."""

from __future__ import annotations

from typing import Any

import pytest

from coherent_ray.digests import digest_of
from coherent_ray.drill import verdicts
from coherent_ray.drill.campaign import Result
from coherent_ray.drill.injections import Act, Injected, Injection
from coherent_ray.drill.stage import Hold
from coherent_ray.drill.verdicts import Ended, Promise, Verdict, broken
from coherent_ray.errors import TrainingFailed
from coherent_ray.train.receipts import Receipt, ReceiptChain


def injected(
    selected_update: int, *, damages: int = 0, wanted: int | None = None, act: Act = "kill"
) -> Injected:
    injection = Injection(Hold("x", "update", 1), "worker", act, selects=wanted)
    return Injected(
        injection, "pid 1", 9, 1, 1.0, f"g{selected_update}-a1", selected_update, damages
    )


def kept(promises: Any) -> dict[str, bool]:
    return {promise.name: promise.kept for promise in promises}


def test_a_strike_that_found_no_moment_is_broken() -> None:
    assert verdicts._moments(()).kept
    promise = verdicts._moments(("kill-007",))
    assert not promise.kept
    assert "kill-007" in promise.says


@pytest.mark.parametrize(
    ("done", "whole", "right"),
    [
        ([injected(3), injected(3), injected(6)], True, True),
        ([injected(3, damages=1)], False, True),
        ([injected(3, wanted=3)], True, True),
        ([injected(3, wanted=6)], True, False),
        ([injected(6), injected(3)], True, False),
        ([injected(6), injected(3, wanted=3, act="flip")], True, True),
        ([injected(6), injected(3, wanted=6, act="flip")], True, False),
    ],
)
def test_what_readers_selected(done: list[Injected], whole: bool, right: bool) -> None:
    assert kept(verdicts._selections(done)) == {
        "readers select what is whole": whole,
        "readers select the right one": right,
    }


def history(*losses: float) -> tuple[Receipt, ...]:
    """A chain of receipts, one for each loss."""
    chain = ReceiptChain(digest_of(b"plan"), 0)
    return tuple(
        chain.append(
            epoch=0, start=at, stop=at + 1, ids=digest_of(b"ids"), count=1, loss=loss,
            grad_norm=1.0, lr=(0.1,),
        )
        for at, loss in enumerate(losses)
    )  # fmt: skip


def test_another_history_or_state_is_broken() -> None:
    reference = Ended(history(1.0, 2.0), "state", 1, 10)

    def judged(found: Ended) -> list[bool]:
        return [promise.kept for promise in verdicts._same(found, reference)]

    assert judged(Ended(history(1.0, 2.0), "state", 7, 99)) == [True, True]
    assert judged(Ended(history(1.0, 2.5), "state", 1, 10)) == [False, True]
    assert judged(Ended(history(1.0), "state", 1, 10)) == [False, True]
    assert judged(Ended(history(1.0, 2.0), "other", 1, 10)) == [True, False]


def test_a_run_that_did_not_end_is_broken_and_says_why() -> None:
    verdict = broken("driver", TrainingFailed("it gave up", where="rank 1"))
    assert not verdict.good
    assert "it gave up" in verdict.promises[0].says
    assert verdict.as_json()["good"] is False


def test_one_broken_promise_breaks_the_drill_and_so_does_none_at_all() -> None:
    good = Verdict("driver", (Promise("a", True),), (injected(3),))
    bad = Verdict("node", (Promise("a", True), Promise("b", False)))
    assert Result(0, {}, [good]).good
    assert not Result(0, {}, [good, bad]).good
    assert not Result(0).good


def test_json_tells_what_was_injected_and_what_was_seen() -> None:
    seen = injected(3, damages=2)
    seen.lost, seen.next_update_s = 6, 1.5
    value = Verdict("storm", (Promise("a", True),), (seen,), attempts=2).as_json()
    assert (value["lost_and_replayed"], value["torn_selected"]) == (6, 1)
    (strike,) = value["injected"]
    assert strike == {
        "point": "update", "target": "worker", "act": "kill", "victim": "pid 1", "update": 9,
        "attempt": 1, "after_s": 1.0, "selected": "g3-a1", "selected_update": 3, "damages": 2,
        "lost": 6, "next_update_s": 1.5, "says": "",
    }  # fmt: skip
