"""Which of all that is held an attempt may go on from; compared with a search by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shelved import header, history_of, opens, publishes, retires, shelved

from coherent_ray.commit.history import History
from coherent_ray.digests import digest_of
from coherent_ray.train.memory.choice import candidates, name_of, refusal
from coherent_ray.train.memory.shelf import Entry


@cache
def entry(
    rank: int, update: int, attempt: int = 1, ranks: int = 2, node: str = "", kind: str = ""
) -> Entry:
    """A part of a snapshot; `kind` is another header, another replica or another token."""
    about = header(update, attempt, ranks)
    changes: dict[str, Any] = {}
    if kind == "header":
        about = replace(about, values={"another": True})
    if kind == "replica":
        changes["fingerprint"] = digest_of(b"another replica")
    if kind == "token":
        changes["token"] = "token-of-another-run"
    return shelved(rank, about, node, **changes)


def best(entries: list[Entry], history: History, diverged: int = 0) -> tuple[int, int] | None:
    found = candidates(entries, history, diverged)
    return (found[0].facts.attempt, found[0].facts.update) if found else None


OPEN = history_of(opens(1), opens(2))


def test_the_newest_update_that_all_ranks_have() -> None:
    held = [entry(0, 4), entry(0, 5), entry(1, 3), entry(1, 4)]
    assert best(held, OPEN) == (1, 4)
    (choice,) = candidates(held, OPEN)
    assert choice.name == name_of(4, 1) == "update 4 of attempt 1 in memory"
    assert choice.holders == ((held[0],), (held[3],))


@pytest.mark.parametrize(
    "held",
    [
        [],
        [entry(0, 4)],
        [entry(1, 4)],
        [entry(0, 4), entry(1, 5)],
        [entry(0, 4), entry(1, 4, kind="header")],
        [entry(0, 4), entry(1, 4, kind="replica")],
        [entry(0, 4), entry(1, 4, kind="token")],
        [entry(0, 4), entry(1, 4, ranks=3)],
        [entry(0, 4, kind="token"), entry(1, 4, kind="token")],
    ],
)
def test_parts_that_are_no_whole(held: list[Entry]) -> None:
    assert best(held, OPEN) is None


def test_a_later_attempt_decides_before_a_later_update() -> None:
    held = [entry(r, u, a) for r in (0, 1) for u, a in ((9, 1), (6, 2))]
    assert best(held, history_of(opens(1), opens(2), opens(3))) == (2, 6)


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        (history_of(opens(1, "other"), opens(2, "other")), "of run small"),
        (history_of(opens(1)), "no such attempt 1"),
        (history_of(opens(2), opens(3)), "no such attempt 1"),
        (history_of(opens(1), publishes(1, 1, 5), opens(2)), "g1-a1 has update 5"),
        (history_of(opens(1), publishes(1, 1, 6), opens(2)), "g1-a1 has update 6"),
        (history_of(opens(1), opens(2), publishes(1, 2, 2), opens(3)), "of a later attempt"),
        (history_of(opens(1), publishes(1, 1, 2), opens(2), retires(1, 1)), "is retired"),
        (history_of(opens(1), publishes(1, 1, 4), opens(2)), None),
        (OPEN, None),
    ],
)
def test_what_the_log_does_not_allow(history: History, reason: str | None) -> None:
    held = [entry(0, 5), entry(1, 5)]
    found = refusal(held[0].facts, history)
    assert (found is None) if reason is None else (found is not None and reason in found)
    assert best(held, history) == (None if reason else (1, 5))


def test_nothing_of_an_attempt_that_diverged_or_of_one_before() -> None:
    log = history_of(opens(1), opens(2), opens(3))
    held = [entry(r, u, a) for r in (0, 1) for u, a in ((4, 1), (6, 2))]
    assert best(held, log, diverged=2) is None
    assert best(held, log, diverged=1) == (2, 6)


def test_a_copy_stands_in_for_a_lost_node() -> None:
    held = [entry(0, 4, node="a"), entry(0, 4, node="b"), entry(1, 4, node="b")]
    (choice,) = candidates(held, OPEN)
    assert [e.node for e in choice.holders[0]] == ["a", "b"]
    assert best(held[1:], OPEN) == (1, 4)
    assert best(held[:1] + held[2:], OPEN) == (1, 4)
    assert best(held[:2], OPEN) is None


def test_a_copy_that_was_hashed_otherwise_is_not_read() -> None:
    spoilt = replace(entry(0, 4, node="b").shard, blocks=entry(1, 4).shard.blocks)
    held = [
        entry(0, 4, node="a"),
        replace(entry(0, 4, node="b"), shard=spoilt),
        entry(0, 4, node="c"),
        entry(1, 4),
    ]
    (choice,) = candidates(held, OPEN)
    assert [e.node for e in choice.holders[0]] == ["a", "c"]


parts = st.builds(
    entry,
    st.integers(0, 2),
    st.integers(1, 4),
    st.integers(1, 3),
    st.just(3),
    st.sampled_from(["a", "b"]),
    st.sampled_from(["", "", "", "header", "replica", "token"]),
)


@settings(max_examples=300)
@given(
    held=st.lists(parts, max_size=24),
    latest=st.integers(0, 4),
    by=st.integers(1, 3),
    diverged=st.integers(0, 2),
)
def test_whatever_is_held_the_choice_is_the_best_that_is_whole(
    held: list[Entry], latest: int, by: int, diverged: int
) -> None:
    bodies = [opens(1), opens(2), opens(3), opens(4)]
    if latest:
        bodies.insert(by, publishes(1, by, latest))
    history = history_of(*bodies)
    there = {(e.facts.rank, e.facts.attempt, e.facts.update, kind_of(e)) for e in held}
    allowed = [
        (attempt, update)
        for attempt in (1, 2, 3)
        for update in (1, 2, 3, 4)
        if update > latest and attempt > diverged and (not latest or attempt >= by)
        if any(
            {(rank, attempt, update, kind) for rank in range(3)} <= there
            for kind in ("", "header", "replica")
        )
    ]
    assert best(held, history, diverged) == max(allowed, default=None)
    for choice in candidates(held, history, diverged):
        assert [entries[0].facts.rank for entries in choice.holders] == [0, 1, 2]
        assert len({e.facts.header_digest for each in choice.holders for e in each}) == 1
        assert len({e.facts.fingerprint for each in choice.holders for e in each}) == 1


def kind_of(found: Entry) -> str:
    facts = found.facts
    if facts.token != f"token-{facts.attempt}":
        return "token"
    plain = entry(facts.rank, facts.update, facts.attempt, 3).facts
    if facts.header_digest != plain.header_digest:
        return "header"
    return "replica" if facts.fingerprint != plain.fingerprint else ""
