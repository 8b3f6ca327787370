"""The commit log: appended exactly once, fenced, never believed where it is damaged."""

import json
from pathlib import Path

import pytest
from logs import append_all, names, started
from test_history import attempt, pin, publish, retire

from coherent_ray.commit.log import CommitLog, History, record_path
from coherent_ray.commit.records import AttemptBody, encode
from coherent_ray.errors import (
    AlreadyExists,
    ConfigError,
    Fenced,
    LogDamaged,
    SaveFailed,
    StorageError,
    StorageFull,
    WrongRun,
)
from coherent_ray.storage import LocalStorage
from coherent_ray.storage.base import Storage
from coherent_ray.storage.testing.faults import Crash, Fault, FaultyStorage
from coherent_ray.storage.testing.memory import MemoryStorage

# --- one writer -----------------------------------------------------------------------------------


def test_no_log_is_an_empty_history() -> None:
    assert CommitLog(MemoryStorage()).read() == History()


def test_records_are_numbered_files_in_a_chain() -> None:
    storage = started(2)
    assert sorted(storage.files) == [f"log/{seq:020d}.json" for seq in (1, 2, 3)]
    records = CommitLog(storage).read().records
    assert [record.seq for record in records] == [1, 2, 3]
    assert records[0].previous is None
    assert [r.previous for r in records[1:]] == [r.digest for r in records[:-1]]
    assert [storage.files[record_path(r.seq)] for r in records] == [encode(r) for r in records]


def test_what_is_appended_is_what_is_read(tmp_path: Path) -> None:
    log = CommitLog(LocalStorage(tmp_path / "run"))
    appended = [
        log.append(attempt(1), 1),
        log.append(publish(1), 1),
        log.append(pin(1), 1),
        log.append(publish(2), 1),
        log.append(retire(2), 1),
    ]
    for reader in (log, CommitLog(LocalStorage(tmp_path / "run"))):
        assert reader.read().records == tuple(appended)
        assert reader.read_on().records == tuple(appended)


def test_saying_it_again_changes_nothing() -> None:
    storage = MemoryStorage()
    bodies = [attempt(1), publish(1), publish(2), retire(1), pin(2)]
    first = [CommitLog(storage).append(body, 1) for body in bodies]
    assert [CommitLog(storage).append(body, 1) for body in bodies] == first
    assert len(storage.files) == len(bodies)


def test_what_the_rules_refuse_is_not_written() -> None:
    storage = started(2)
    log = CommitLog(storage)
    with pytest.raises(SaveFailed, match="published already"):
        log.append(publish(1, content=b"other"), 1)
    with pytest.raises(SaveFailed, match="cannot be published after g5-a1"):
        append_all(publish(5), publish(4))
    with pytest.raises(ConfigError, match="never published"):
        log.append(retire(9), 1)
    log.append(pin(2), 1)
    with pytest.raises(ConfigError, match="pinned"):
        log.append(retire(2), 1)
    assert CommitLog(storage).read().seq == 4


def test_another_run_is_refused() -> None:
    storage = started()
    with pytest.raises(WrongRun) as caught:
        CommitLog(storage).open_attempt("run-2", "token-2")
    assert caught.value.details == {"stored": "run-1", "wanted": "run-2"}
    with pytest.raises(WrongRun):
        CommitLog(storage).append(attempt(2, "run-2"), 2)


# --- fencing --------------------------------------------------------------------------------------


def test_opening_an_attempt_fences_the_one_before() -> None:
    storage = started()
    old, new = CommitLog(storage), CommitLog(storage)
    old.append(publish(2), 1)
    assert new.open_attempt("run-1", "token-2").body == attempt(2)
    for body in (publish(3), retire(1), pin(1), attempt(1, token="another")):
        with pytest.raises(Fenced) as caught:
            old.append(body, 1)
        assert caught.value.details["attempt"] == 1
        assert caught.value.details["current"] == 2
        assert "run-1" in caught.value.where
        assert caught.value.remedy
    new.append(publish(3, 2), 2)
    assert names(old.read()) == ["g1-a1", "g2-a1", "g3-a2"]


def test_a_fenced_writer_still_learns_that_it_had_succeeded() -> None:
    storage = started()
    CommitLog(storage).open_attempt("run-1", "token-2")
    assert CommitLog(storage).append(publish(1), 1).seq == 2


def test_an_attempt_that_is_open_cannot_be_opened_by_another() -> None:
    storage = started()
    with pytest.raises(Fenced):
        CommitLog(storage).append(attempt(1, token="another"), 1)


def test_the_same_token_opens_the_same_attempt() -> None:
    storage = started()
    for _ in range(2):
        assert CommitLog(storage).open_attempt("run-1", "token-1").seq == 1
    assert CommitLog(storage).open_attempt("run-1", "token-2").body == attempt(2)
    assert CommitLog(storage).open_attempt("run-1", "token-1").body == attempt(1)


def test_a_writer_of_an_attempt_that_the_log_does_not_know_stops() -> None:
    """The log has lost its end, or this is not the log that the attempt was opened in."""
    with pytest.raises(LogDamaged, match="opened attempt 2 is gone"):
        CommitLog(started()).append(publish(2, 2), 2)


# --- lost answers ---------------------------------------------------------------------------------


def test_a_lost_answer_is_found_out_by_reading_back() -> None:
    storage = FaultyStorage(started(), [Fault("lose_answer", verb="create")])
    record = CommitLog(storage).append(publish(2), 1)
    assert record.seq == 3
    assert storage.struck
    assert CommitLog(storage.inner).read().records[-1] == record
    assert [verb for verb, _ in storage.calls].count("create") == 2, "it must be durable too"


def test_a_record_that_is_seen_but_never_said_to_be_durable_is_not_a_success() -> None:
    class NeverSure(MemoryStorage):
        def create(self, path: str, data: bytes) -> None:  # type: ignore[override]
            self.files.setdefault(path, bytes(data))
            raise StorageError("the directory cannot be synced", where=path)

    storage = NeverSure()
    storage.files = dict(started().files)
    with pytest.raises(StorageError, match="does not say whether"):
        CommitLog(storage).append(publish(2), 1)


@pytest.mark.parametrize(("effect", "kind"), [("refuse", StorageError), ("full", StorageFull)])
def test_an_append_that_failed_left_nothing_and_can_be_repeated(
    effect: str, kind: type[StorageError]
) -> None:
    fault = Fault(effect, verb="create", path=record_path(3))  # type: ignore[arg-type]
    storage = FaultyStorage(started(), [fault])
    log = CommitLog(storage)
    with pytest.raises(kind):
        log.append(publish(2), 1)
    assert names(CommitLog(storage.inner).read()) == ["g1-a1"]
    assert log.append(publish(2), 1).seq == 3


def test_an_answer_that_stays_lost_is_found_at_the_next_append() -> None:
    """The record lands after the writer gave up: the number is taken, and by itself."""
    storage = started()
    log = CommitLog(storage, "writer")
    late = log.read().successor(publish(2), "writer")
    storage.files[record_path(3)] = encode(late)
    assert log.append(publish(2), 1) == late
    assert log.append(publish(3), 1).seq == 4


def test_taken_and_absent_at_once_is_asked_again_a_few_times() -> None:
    """As some object stores answer a conflict, while the other writer's object is not there."""

    class Confused(MemoryStorage):
        conflicts = 0

        def create(self, path: str, data: bytes) -> None:  # type: ignore[override]
            if self.conflicts:
                self.conflicts -= 1
                raise AlreadyExists("conflict", where=path)
            super().create(path, data)

    storage = Confused()
    storage.files = dict(started().files)
    log = CommitLog(storage)
    log.settled()
    storage.conflicts = 2
    assert log.append(publish(2), 1).seq == 3
    storage.conflicts = 3
    with pytest.raises(StorageError):
        log.append(publish(3), 1)


# --- a writer that dies ---------------------------------------------------------------------------


def story(storage: Storage) -> None:
    """All kinds of records, as one coordinator after another would write them."""
    log = CommitLog(storage, "w1")
    log.open_attempt("run-1", "token-1")
    log.append(publish(1), 1)
    log.append(publish(2), 1)
    log.append(retire(1), 1)
    log.refresh_hint(log.read())
    log = CommitLog(storage, "w2")
    log.open_attempt("run-1", "token-2")
    log.append(publish(3, 2), 2)
    log.refresh_hint(log.read())


def verbs_of_the_story() -> int:
    storage = FaultyStorage(MemoryStorage())
    story(storage)
    return len(storage.calls)


@pytest.mark.parametrize("effect", ["crash_before", "crash_after", "lose_answer", "refuse", "full"])
def test_whatever_strikes_wherever_the_log_is_sound_and_the_story_can_be_told_on(
    effect: str,
) -> None:
    whole = MemoryStorage()
    story(whole)
    expected = [record.body for record in CommitLog(whole).read().records]
    struck = 0
    for at in range(1, verbs_of_the_story() + 1):
        storage = FaultyStorage(MemoryStorage(), [Fault(effect, at=at)])  # type: ignore[arg-type]
        try:
            story(storage)
        except (Crash, StorageError):
            struck += 1
        history = CommitLog(storage.inner).read()
        assert [record.body for record in history.records] == expected[: history.seq]
        if storage.crashed or history.seq < len(expected):
            # The same words again: those that were said are found, the rest is said now.
            if history.attempt < 2:
                story(storage.inner)
            else:
                CommitLog(storage.inner).append(publish(3, 2), 2)
        assert [r.body for r in CommitLog(storage.inner).read().records] == expected
    assert struck > 10


# --- the hint -------------------------------------------------------------------------------------


def test_the_hint_says_where_the_end_was() -> None:
    storage = started(2)
    log = CommitLog(storage)
    history = log.read()
    assert log.refresh_hint(history)
    assert json.loads(storage.files["latest.json"]) == {
        "attempt": 1,
        "digest": history.records[-1].digest,
        "generation": "g2-a1",
        "run_id": "run-1",
        "seq": 3,
        "update": 20,
    }


@pytest.mark.parametrize("hint", [None, b"", b"torn{", b'{"seq":999}', b"\xff" * 100])
def test_no_hint_changes_what_is_read(hint: bytes | None) -> None:
    storage = started(2)
    if hint is not None:
        storage.files["latest.json"] = hint
    log = CommitLog(storage)
    assert log.read().latest == publish(2)
    assert log.append(publish(3), 1).seq == 4


@pytest.mark.parametrize("effect", ["refuse", "full", "lose_answer"])
def test_a_hint_that_cannot_be_written_is_no_error(effect: str) -> None:
    storage = FaultyStorage(started(), [Fault(effect, verb="replace")])  # type: ignore[arg-type]
    log = CommitLog(storage)
    assert not log.refresh_hint(log.read())
    assert log.refresh_hint(log.read())


def test_an_empty_history_has_a_hint_too() -> None:
    storage = MemoryStorage()
    assert CommitLog(storage).refresh_hint(History())
    assert json.loads(storage.files["latest.json"])["seq"] == 0


def test_bodies_are_reachable_where_the_log_is() -> None:
    body = CommitLog(started()).read().records[0].body
    assert isinstance(body, AttemptBody)
