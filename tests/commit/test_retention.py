"""Retention: what a plan gives up, and what no plan, nor any number of plans, ever does."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_history import attempt, pin, retire, told

from coherent_ray.commit.history import GenerationKey, History
from coherent_ray.commit.manifest import manifest_path
from coherent_ray.commit.records import Body, PublishBody
from coherent_ray.commit.retention import (
    Plan,
    Policy,
    Unverified,
    can_never_be_published,
    key_of,
    plan,
)
from coherent_ray.digests import digest_of


def publish(number: int, of: int = 1, update: int | None = None) -> PublishBody:
    return PublishBody(
        number=number, attempt=of, update=10 * number if update is None else update, epoch=0,
        manifest=manifest_path(number, of), manifest_size=1, manifest_digest=digest_of(b"m"),
        receipts=None,
    )  # fmt: skip


def decided(
    history: History,
    policy: Policy,
    damaged: set[GenerationKey] | None = None,
    held: set[GenerationKey] | None = None,
) -> tuple[Plan, list[str]]:
    """Answer every question of a plan with the truth; return it, and what it asked for."""
    verdicts: dict[GenerationKey, bool] = {}
    asked: list[str] = []
    while True:
        found = plan(history, policy, verdicts, held or set())
        if isinstance(found, Plan):
            return found, asked
        assert isinstance(found, Unverified)
        key = key_of(found.publish)
        assert key not in verdicts, "asked twice"
        asked.append(found.publish.name)
        verdicts[key] = key not in (damaged or set())


def retired(found: Plan) -> list[str]:
    return [body.name for body in found.retire]


def reasons(found: Plan) -> dict[str, str]:
    return {kept.publish.name: kept.reason for kept in found.kept}


FIVE = told(attempt(1), *(publish(number) for number in range(1, 6)))


# --- keep -----------------------------------------------------------------------------------------


def test_without_a_limit_nothing_goes_and_nothing_is_read() -> None:
    found, asked = decided(FIVE, Policy())
    assert (retired(found), asked) == ([], [])
    assert set(reasons(found).values()) == {"all"}
    assert len(found.kept) == 5


@pytest.mark.parametrize("keep", [1, 2, 3, 4])
def test_the_newest_stay_and_only_they_are_read(keep: int) -> None:
    found, asked = decided(FIVE, Policy(keep))
    assert retired(found) == [f"g{n}-a1" for n in range(1, 6 - keep)]
    assert asked == [f"g{n}-a1" for n in range(5, 5 - keep, -1)]
    assert all(kept.whole for kept in found.kept)


@pytest.mark.parametrize("keep", [5, 6, 1000])
def test_where_nothing_can_go_nothing_is_read(keep: int) -> None:
    found, asked = decided(FIVE, Policy(keep))
    assert (retired(found), asked) == ([], [])


def test_only_whole_generations_count() -> None:
    found, asked = decided(FIVE, Policy(2), damaged={(5, 1), (3, 1)})
    assert asked == ["g5-a1", "g4-a1", "g3-a1", "g2-a1"]
    # The damaged ones among them stay as well: somebody may put their files back.
    assert retired(found) == ["g1-a1"]
    assert [kept.whole for kept in found.kept] == [True, False, True, False]


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_with_fewer_whole_ones_than_asked_for_nothing_goes(keep: int) -> None:
    damaged = {(number, 1) for number in range(keep, 6)}
    found, asked = decided(FIVE, Policy(keep), damaged)
    assert retired(found) == []
    assert len(asked) == 5
    assert set(reasons(found).values()) == {"all"}


def test_a_damaged_generation_before_the_last_kept_one_goes() -> None:
    found, _ = decided(FIVE, Policy(2), damaged={(1, 1), (2, 1)})
    assert retired(found) == ["g1-a1", "g2-a1", "g3-a1"]


def test_newest_means_published_last() -> None:
    """A resume that fell back publishes a lower update, which is what the run is now."""
    history = told(
        attempt(1), publish(1), publish(2), publish(3, update=90), attempt(2),
        publish(4, 2, update=30),
    )  # fmt: skip
    found, _ = decided(history, Policy(1))
    assert reasons(found) == {"g4-a2": "recent"}


def test_an_empty_history_has_an_empty_plan() -> None:
    for history in (History(), told(attempt(1))):
        assert plan(history, Policy(1, 10), {}) == Plan((), ())


@pytest.mark.parametrize("values", [(0, None), (-1, None), (1, 0), (None, -5)])
def test_a_policy_that_would_keep_nothing_is_refused(values: tuple[int | None, int | None]) -> None:
    with pytest.raises(ValueError, match="at least"):
        Policy(*values)


# --- pins and holds -------------------------------------------------------------------------------


def test_pinned_ones_stay_until_they_are_unpinned() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 6)), pin(1), pin(2), pin(2, 1, False))
    found, asked = decided(history, Policy(1))
    assert reasons(found) == {"g1-a1": "pinned", "g5-a1": "recent"}
    assert retired(found) == ["g2-a1", "g3-a1", "g4-a1"]
    assert asked == ["g5-a1"]


def test_held_ones_stay() -> None:
    found, _ = decided(FIVE, Policy(1), held={(2, 1), (5, 1), (99, 9)})
    assert reasons(found) == {"g2-a1": "held", "g5-a1": "recent"}


def test_a_pinned_one_does_not_count_as_one_of_the_newest() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 4)), pin(1))
    found, _ = decided(history, Policy(2))
    assert reasons(found) == {"g1-a1": "pinned", "g2-a1": "recent", "g3-a1": "recent"}


# --- keep_every -----------------------------------------------------------------------------------


def test_one_of_so_many_updates_stays() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 11)))
    found, _ = decided(history, Policy(2, 30))
    assert reasons(found) == {
        "g3-a1": "every", "g6-a1": "every", "g9-a1": "recent", "g10-a1": "recent",
    }  # fmt: skip


def test_it_is_the_last_one_where_no_save_meets_the_multiple() -> None:
    history = told(attempt(1), *(publish(n, update=7 * n) for n in range(1, 11)))
    found, _ = decided(history, Policy(1, 20))
    kept = {k.publish.update: k.reason for k in found.kept}
    assert kept == {14: "every", 35: "every", 56: "every", 70: "recent"}


def test_the_last_whole_one_of_a_window_stays() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 11)))
    found, asked = decided(history, Policy(1, 50), damaged={(5, 1), (4, 1)})
    assert reasons(found) == {"g3-a1": "every", "g10-a1": "recent"}
    assert asked == ["g10-a1", "g5-a1", "g4-a1", "g3-a1"]


def test_a_window_without_a_whole_one_keeps_its_last() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 7)))
    found, _ = decided(history, Policy(1, 30), damaged={(1, 1), (2, 1), (3, 1)})
    assert reasons(found) == {"g3-a1": "every", "g6-a1": "recent"}


def test_a_window_that_was_thinned_out_is_not_read_again() -> None:
    history = told(attempt(1), *(publish(n) for n in range(1, 11)), *(retire(n) for n in (1, 2)))
    _, asked = decided(history, Policy(1, 30))
    assert "g3-a1" not in asked
    assert asked == ["g10-a1", "g6-a1", "g9-a1"]


def test_the_first_state_is_a_window_of_its_own() -> None:
    history = told(attempt(1), publish(1, update=0), *(publish(n) for n in range(2, 5)))
    found, _ = decided(history, Policy(1, 100))
    assert reasons(found) == {"g1-a1": "every", "g4-a1": "recent"}


# --- any history, any policy ----------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Attempts, publishes, pins and retirements in any order that the log allows."""
    history = told(attempt(1))
    opened, number, update = 1, 0, 0
    for step in draw(st.lists(st.sampled_from("ppppprux+"), max_size=24)):
        body: Body | None = None
        if step == "p":
            number += 1
            update = max(0, update + draw(st.integers(-15, 25)))
            body = publish(number, opened, update)
        elif step == "+":
            opened += 1
            body = attempt(opened)
        elif history.live:
            chosen = key_of(draw(st.sampled_from(history.live)))
            body = retire(*chosen) if step == "r" else pin(*chosen, step == "x")
        if body is not None and history.refusal(body) is None:
            history = history.extended([history.successor(body, "writer")])
    return history


POLICIES = st.builds(Policy, st.integers(1, 4), st.none() | st.integers(1, 60))


def subsets(history: History) -> st.SearchStrategy[set[GenerationKey]]:
    keys = sorted(key_of(body) for body in history.live)
    return st.sets(st.sampled_from(keys)) if keys else st.just(set())


@given(st.data(), histories(), POLICIES)
def test_no_plan_gives_up_what_must_stay(
    data: st.DataObject, history: History, policy: Policy
) -> None:
    damaged, held = data.draw(subsets(history)), data.draw(subsets(history))
    found, _ = decided(history, policy, damaged, held)
    gone = {key_of(body) for body in found.retire}
    whole = [key_of(body) for body in history.live if key_of(body) not in damaged]
    assert policy.keep is not None

    assert gone.isdisjoint(whole[-policy.keep :]), "one of the newest whole ones"
    assert gone.isdisjoint(history.pinned)
    assert gone.isdisjoint(held)
    if history.latest:
        assert key_of(history.latest) not in gone
    if len(whole) < policy.keep:
        assert not gone
    if policy.keep_every is not None:
        _check_windows(history, policy.keep_every, gone, damaged)
    together = [*found.retire, *(kept.publish for kept in found.kept)]
    assert sorted(map(key_of, together)) == sorted(map(key_of, history.live))


def _check_windows(
    history: History, every: int, gone: set[GenerationKey], damaged: set[GenerationKey]
) -> None:
    windows: dict[int, list[GenerationKey]] = {}
    for body in history.live:
        windows.setdefault(-(-body.update // every), []).append(key_of(body))
    for keys in windows.values():
        left = set(keys) - gone
        assert left, "a window lost all it had"
        if set(keys) - damaged:
            assert left - damaged or len(keys) == 1, "a window lost its whole ones"


@given(st.data(), histories(), POLICIES)
def test_a_plan_that_is_carried_out_leaves_nothing_to_do(
    data: st.DataObject, history: History, policy: Policy
) -> None:
    damaged, held = data.draw(subsets(history)), data.draw(subsets(history))
    found, _ = decided(history, policy, damaged, held)
    for body in found.retire:
        mark = retire(body.number, body.attempt)
        assert history.refusal(mark) is None
        history = history.extended([history.successor(mark, "pruner")])
    again, _ = decided(history, policy, damaged, held)
    assert again.retire == ()
    assert reasons(again).keys() == reasons(found).keys()


@given(st.data(), histories(), st.lists(POLICIES, min_size=2, max_size=4))
def test_plans_made_at_once_never_give_up_the_last_whole_one_together(
    data: st.DataObject, history: History, policies: list[Policy]
) -> None:
    """Each has seen another moment of the log; all are carried out."""
    damaged = data.draw(subsets(history))
    newest = next((b for b in reversed(history.live) if key_of(b) not in damaged), None)
    gone: set[GenerationKey] = set()
    for policy in policies:
        seen = History.of(history.records[: data.draw(st.integers(0, history.seq))])
        found, _ = decided(seen, policy, damaged)
        gone |= {key_of(body) for body in found.retire}
    if newest is not None:
        assert key_of(newest) not in gone


@given(st.data(), histories(), POLICIES)
def test_a_plan_depends_on_no_verdict_that_it_did_not_ask_for(
    data: st.DataObject, history: History, policy: Policy
) -> None:
    damaged = data.draw(subsets(history))
    found, asked = decided(history, policy, damaged)
    known: Mapping[GenerationKey, bool] = {
        key_of(body): key_of(body) not in damaged
        for body in history.live
        if body.name in asked or data.draw(st.booleans())
    }
    full = plan(history, policy, known)
    assert isinstance(full, Plan)
    assert full.retire == found.retire


# --- what can never be published ------------------------------------------------------------------


def test_what_is_left_of_older_attempts_is_over() -> None:
    history = told(attempt(1), publish(1), attempt(2), attempt(5))
    assert can_never_be_published(history, (2, 1))
    assert can_never_be_published(history, (2, 4))
    assert not can_never_be_published(history, (1, 1)), "it is published"
    assert not can_never_be_published(history, (2, 5)), "it may be on its way"
    assert not can_never_be_published(history, (2, 6)), "nobody knows that attempt"


def test_what_the_same_attempt_has_overtaken_is_over() -> None:
    history = told(attempt(1), publish(1), attempt(2), publish(4, 2))
    assert can_never_be_published(history, (3, 2))
    assert not can_never_be_published(history, (4, 2))
    assert not can_never_be_published(history, (5, 2))


@given(histories(), st.integers(1, 30), st.integers(1, 10), st.data())
def test_the_log_refuses_for_ever_what_is_called_over(
    history: History, number: int, of: int, data: st.DataObject
) -> None:
    if not can_never_be_published(history, (number, of)):
        return
    body = publish(number, of)
    for _ in range(3):
        assert history.refusal(body) is not None
        following = data.draw(
            st.sampled_from(
                [attempt(history.attempt + 1), publish(history.next_number, history.attempt)]
            )
        )
        if history.refusal(following) is None:
            history = history.extended([history.successor(following, "writer")])
