"""SIGTERM to a process that trains: a wish the first time, and what it was the second."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import cloudpickle
import pytest

from coherent_ray.train.deaths import in_words, is_taken
from coherent_ray.train.leaving import Listener, farewell


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """A handler as Ray's worker has one; what it got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def told() -> threading.Event:
    return threading.Event()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_is_a_wish_and_the_second_does_what_it_did(
    ended: list[int], told: threading.Event
) -> None:
    listener = Listener()
    assert listener.install()
    listener.begin(told.set)
    terminate()
    assert listener.asked
    assert told.wait(10)
    assert ended == []
    terminate()
    assert ended == [signal.SIGTERM]


def test_while_nothing_trains_it_does_what_it_did(ended: list[int], told: threading.Event) -> None:
    listener = Listener()
    listener.install()
    terminate()
    listener.begin(told.set)
    listener.end()
    terminate()
    assert ended == [signal.SIGTERM] * 2
    assert not told.is_set()


def test_installed_twice_it_does_not_call_itself(ended: list[int], told: threading.Event) -> None:
    listener = Listener()
    listener.install()
    listener.install()
    listener.begin(told.set)
    for _ in range(3):
        terminate()
    assert ended == [signal.SIGTERM] * 2


def test_another_thread_cannot_install_it(ended: list[int]) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(Listener().install()))
    thread.start()
    thread.join()
    assert answers == [False]
    terminate()
    assert ended == [signal.SIGTERM]


def test_a_farewell_is_no_failure_wherever_ray_carries_it() -> None:
    error = cloudpickle.loads(cloudpickle.dumps(farewell("the group leaves with g3-a1")))
    assert is_taken(error)
    assert in_words({0: error, 1: error}) == "ranks 0 and 1: the group leaves with g3-a1"
    assert not is_taken(ValueError())
