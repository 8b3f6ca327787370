"""The commit protocol on object stores, with every single request struck in turn.

First a network that loses one answer, or one request, or carries it out late, or twice: the save
must come through, once, whichever request it was. Then a network that goes for good at any request:
what is published must be whole, what was promised must be published, and whoever comes next, on a
store that works again, must publish. The objects are looked at behind the storage's back.
"""

from collections.abc import Callable
from typing import Any

import pytest
from faulty_server import Effect, Strike
from gcs_server import GcsServer
from ranks import Ranks, Shell, check_published_is_whole
from s3_server import S3Server

from coherent_ray.commit.generations import Generations
from coherent_ray.errors import CoherentRayError
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.memory import MemoryStorage

Server = S3Server | GcsServer
#: So small that a rank's shard has two parts.
QUICK: dict[str, Any] = {"part_bytes": 128, "parallel_parts": 1, "backoff_s": 0.001}


def save(shell: Shell, number: int, attempt: int) -> list[str]:
    """Every rank writes and acknowledges; return how each was answered."""
    group = Ranks(ranks=2, number=number, attempt=attempt, update=10 * number)
    group.write(shell.storage)
    return [fate.kind for fate in shell.save(group)]


def story(storage: Storage, done: list[str]) -> None:
    """One attempt opens and publishes one generation; what was promised is noted in `done`."""
    shell = Shell(storage)
    attempt = shell.open("token-1")
    if save(shell, 1, attempt) == ["published", "published"]:
        done.append(f"g1-a{attempt}")


def stored(server: Server, prefix: str) -> MemoryStorage:
    """What lies in the store, seen without the storage under test."""
    storage = MemoryStorage()
    for path in server.keys(prefix):
        data = server.read(f"{prefix}/{path}")
        if data is not None:  # not an upload that has no name
            storage.files[path] = data
    return storage


def check(storage: MemoryStorage, done: list[str]) -> str | None:
    """The invariants; returns the name of the latest generation."""
    history = check_published_is_whole(storage)
    assert set(done) <= {publish.name for publish in history.publishes}
    tokens = [attempt.token for attempt in history.attempts]
    assert len(tokens) == len(set(tokens)), "an attempt was opened twice"
    selected = Generations(storage).select("refuse")
    assert (selected.publish if selected else None) == history.latest
    return history.latest.name if history.latest else None


def go_on(storage: MemoryStorage) -> None:
    """Nothing fails any more: a new attempt opens, and publishes the next generation."""
    shell = Shell(storage)
    number = shell.log.read().next_number
    attempt = shell.open("token-next")
    assert save(shell, number, attempt) == ["published", "published"]
    assert check(storage, []) == f"g{number}-a{attempt}"


def requests_of_the_story(server: Server, prefix: str) -> list[tuple[str, str]]:
    server.faults.forget()
    story(server.open(prefix, **QUICK), [])
    return list(server.faults.requests)


def once(server: Server, prefix: str, effect: Effect, only: Callable[[str], bool]) -> int:
    """Strike each request of the story, once a story; every story must come through."""
    requests = requests_of_the_story(server, f"{prefix}-count")
    whole = {len(stored(server, f"{prefix}-count").files)}
    struck = 0
    for at, (method, _) in enumerate(requests, 1):
        if not only(method):
            continue
        root, done = f"{prefix}-{at}", []
        with server.faults.striking(Strike(effect, at=at, seconds=0.02)):
            story(server.open(root, **QUICK), done)
        assert done == ["g1-a1"]
        storage = stored(server, root)
        assert check(storage, done) == "g1-a1"
        assert {len(storage.files)} == whole, "a record, a shard or a manifest too many"
        struck += 1
    return struck


def changes(method: str) -> bool:
    return method in {"PUT", "POST", "DELETE"}


@pytest.mark.parametrize("effect", ["lose", "broken_after"])
def test_any_answer_may_be_lost(gcs: GcsServer, prefix: str, effect: Effect) -> None:
    assert once(gcs, prefix, effect, lambda method: True) > 30


@pytest.mark.parametrize("effect", ["late", "repeat", "busy"])
def test_any_change_may_be_late_or_doubled_or_refused(
    gcs: GcsServer, prefix: str, effect: Effect
) -> None:
    assert once(gcs, prefix, effect, changes) > 10


def test_any_answer_may_be_lost_on_s3(s3: S3Server, prefix: str) -> None:
    assert once(s3, prefix, "lose", changes) > 10


@pytest.mark.parametrize("effect", ["lose", "cut", "deny"])
def test_the_store_may_go_for_good_at_any_request(
    gcs: GcsServer, prefix: str, effect: Effect
) -> None:
    total = len(requests_of_the_story(gcs, f"{prefix}-count"))
    latest = []
    for at in range(1, total + 1):
        root, done = f"{prefix}-{at}", []
        gone = Strike(effect, at=at, times=10_000)
        try:
            with gcs.faults.striking(gone):
                story(gcs.open(root, **{**QUICK, "retries": 0}), done)
        except CoherentRayError:
            assert gone in gcs.faults.struck
        storage = stored(gcs, root)
        latest.append(check(storage, done))
        go_on(storage)
    assert {None, "g1-a1"} == set(latest), "both sides of the commit point were reached"
    assert latest == sorted(latest, key=lambda name: name is not None), "once there, always there"


def test_two_coordinators_and_a_network_that_loses_answers(gcs: GcsServer, prefix: str) -> None:
    """A partitioned coordinator goes on writing; the one that came later publishes, alone."""
    for at in range(1, 14):
        root = f"{prefix}-{at}"
        old = Shell(gcs.open(root, **QUICK))
        attempt = old.open("token-old")
        new = Shell(gcs.open(root, **QUICK))
        with gcs.faults.striking(Strike("lose", at=at)):
            later = new.open("token-new")
            kinds = save(old, 1, attempt) if at % 2 else []
            assert save(new, 1, later) == ["published", "published"]
        assert set(kinds) <= {"fenced"}
        storage = stored(gcs, root)
        assert check(storage, ["g1-a2"]) == "g1-a2"
        assert [p.name for p in Generations(storage).history().publishes] == ["g1-a2"]
