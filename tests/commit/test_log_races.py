"""Races for the next record: every interleaving of two writers, verb by verb, lost answers too."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import names, started
from test_history import publish
from turns import interleave

from coherent_ray.commit.log import CommitLog, History, Record, record_path
from coherent_ray.commit.records import PublishBody
from coherent_ray.errors import Fenced, SaveFailed, StorageError
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage


def orders(first: int, second: int) -> Iterable[tuple[int, ...]]:
    """Every order of so many verbs of writer 0 and of writer 1."""
    for places in itertools.combinations(range(first + second), first):
        yield tuple(0 if place in places else 1 for place in range(first + second))


Action = Callable[[Storage], object]


def appends(body: PublishBody, of: int = 1, writer: str | None = None) -> Action:
    return lambda storage: CommitLog(storage, writer).append(body, of)


def opens(token: str) -> Action:
    return lambda storage: CommitLog(storage).open_attempt("run-1", token)


def check_results(storage: Storage, results: list[object]) -> History:
    """The invariant: the log is sound, and has exactly what was said to have been appended."""
    history = CommitLog(storage).read()
    for result in results:
        if isinstance(result, Record):
            assert history.records[result.seq - 1] == result
        else:
            assert isinstance(result, (Fenced, SaveFailed, StorageError)), repr(result)
    bodies = [record.body for record in history.records]
    assert len(set(map(repr, bodies))) == len(bodies), "a record is there twice"
    return history


def test_publishing_against_an_opening_either_comes_before_or_is_fenced() -> None:
    seen = set()
    for order in orders(6, 7):
        storage = started(0)
        results = interleave([storage] * 2, [appends(publish(2)), opens("token-2")], order)
        history = check_results(storage, results)
        assert isinstance(results[1], Record)
        if isinstance(results[0], Record):
            assert results[0].seq < results[1].seq
        else:
            assert isinstance(results[0], Fenced)
            assert names(history) == []
        seen.add(type(results[0]))
    assert seen == {Record, Fenced}, "both outcomes must have been reached"


def test_two_coordinators_of_one_attempt_publish_one_generation_once() -> None:
    for order in orders(6, 6):
        storage = started(0)
        results = interleave([storage] * 2, [appends(publish(2)), appends(publish(2))], order)
        history = check_results(storage, results)
        assert results[0] == results[1]
        assert names(history) == ["g2-a1"]


def test_two_generations_of_one_attempt_are_published_in_order_or_not_at_all() -> None:
    seen = set()
    for order in orders(6, 6):
        storage = started(0)
        results = interleave([storage] * 2, [appends(publish(2)), appends(publish(3))], order)
        history = check_results(storage, results)
        assert history.latest == publish(3)
        assert isinstance(results[1], Record)
        seen.add(type(results[0]))
    assert seen == {Record, SaveFailed}


def test_two_openings_get_two_numbers() -> None:
    seen = set()
    for order in orders(7, 7):
        storage = started(0)
        results = interleave([storage] * 2, [opens("token-a"), opens("token-b")], order)
        history = check_results(storage, results)
        assert [body.attempt for body in history.attempts] == [1, 2, 3]
        assert history.attempts[1].token != history.attempts[2].token
        seen.add(history.attempts[2].token)
    assert seen == {"token-a", "token-b"}


@pytest.mark.parametrize("lost", [0, 1])
def test_races_with_lost_answers(lost: int) -> None:
    """Writer `lost` never hears that its first record landed."""
    seen = set()
    for order in orders(6, 7):
        storage = started(0)
        faulty = FaultyStorage(storage, [Fault("lose_answer", verb="create", path=record_path(2))])
        storages = [faulty if index == lost else storage for index in range(2)]
        results = interleave(storages, [appends(publish(2)), opens("token-2")], order)
        history = check_results(storage, results)
        published = "g2-a1" in names(history)
        assert isinstance(results[0], Record) == published
        assert isinstance(results[1], Record)
        seen.add((published, bool(faulty.struck)))
    assert (True, True) in seen


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(1, 6), max_size=3))
def test_four_writers_in_any_order(order: list[int], lost: list[int]) -> None:
    storage = started()
    faulty = FaultyStorage(storage, [Fault("lose_answer", at=at, verb="create") for at in lost])
    actions = [appends(publish(2)), appends(publish(2)), opens("token-2"), opens("token-3")]
    results = interleave([faulty] * 4, actions, order)
    history = check_results(storage, results)
    assert history.seq == len(set(map(repr, [r for r in results if isinstance(r, Record)]))) + 2


def test_threads_share_a_view(tmp_path: Path) -> None:
    log = CommitLog(LocalStorage(tmp_path))
    log.open_attempt("run-1", "token-1")
    results = interleave([MemoryStorage()] * 4, [lambda _: log.append(publish(1), 1)] * 4, [])
    assert len({repr(result) for result in results}) == 1
    assert CommitLog(LocalStorage(tmp_path)).read().seq == 2
