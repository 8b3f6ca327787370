"""The end of a log: the same answer as the whole log's, in as many reads however long it is."""

from __future__ import annotations

import pytest
from logs import started
from test_history import publish

from coherent_ray import canonical
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import HINT, CommitLog, PinBody, RetireBody, record_path
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.testing.memory import MemoryStorage


class Counted(MemoryStorage):
    """Counts what is read, and remembers which records."""

    def __init__(self, inner: MemoryStorage) -> None:
        super().__init__()
        self.inner = inner
        self.reads: list[str] = []
        self.asked = 0

    def read(self, path: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(path)
        return self.inner.read(path, start, length)

    def size(self, path: str) -> int:
        self.asked += 1
        return self.inner.size(path)

    def list(self, prefix: str = "") -> object:  # type: ignore[override]
        self.asked += 1
        return self.inner.list(prefix)


def long_log(
    generations: int, keep: int = 3, *, hint: bool = True, writer: str = "setup"
) -> MemoryStorage:
    storage = started(0)
    log = CommitLog(storage, writer)
    for number in range(1, generations + 1):
        log.append(publish(number), 1)
        if number > keep:
            log.append(RetireBody(number - keep, 1), 1)
    if hint:
        log.refresh_hint(log.read())
    return storage


def same(storage: MemoryStorage) -> None:
    """The end says what the whole log says."""
    end, whole = CommitLog(storage).read_end(), CommitLog(storage).read()
    assert end.latest == whole.latest
    assert (end.seq, end.attempt, end.run_id) == (whole.seq, whole.attempt, whole.run_id)
    assert end.next_number == whole.next_number
    assert end.records == whole.records[end.omitted :]
    assert list(CommitLog(storage).newest_first(end)) == list(reversed(whole.live))


@pytest.mark.parametrize("generations", [20, 200])
def test_as_much_is_read_however_long_the_log_is(generations: int) -> None:
    storage = Counted(long_log(generations))
    end = CommitLog(storage).read_end()
    assert end.latest is not None
    assert end.latest.number == generations
    assert end.omitted > 0
    assert len(storage.reads) <= 6
    assert storage.asked <= 17
    same(storage.inner)


@pytest.mark.parametrize("more", [0, 1, 5])
def test_what_came_after_the_hint_is_found(more: int) -> None:
    storage = long_log(10)
    log = CommitLog(storage)
    for number in range(11, 11 + more):
        log.append(publish(number), 1)
    same(storage)
    log.open_attempt("run-1", "token-2")
    log.append(PinBody(9, 1, pinned=True), 2)
    log.append(RetireBody(8, 1), 2)
    same(storage)
    for body in log.read().live[2:]:
        log.append(RetireBody(body.number, body.attempt), 2)
    same(storage)


@pytest.mark.parametrize("generations", [0, 1, 2])
def test_a_short_log_is_read_to_its_beginning(generations: int) -> None:
    storage = long_log(generations)
    assert CommitLog(storage).read_end().seq == CommitLog(storage).read().seq
    same(storage)


@pytest.mark.parametrize(
    "hint",
    [
        None,
        b"",
        b"[]",
        canonical.dump({"seq": 5}),
        canonical.dump({"seq": True, "digest": 3}),
        canonical.dump({"seq": 4000, "digest": "x"}),
        canonical.dump({"seq": -1, "digest": "x"}),
    ],
)
def test_no_hint_changes_what_is_told(hint: bytes | None) -> None:
    storage = long_log(10, hint=False)
    if hint is not None:
        storage.replace(HINT, hint)
    same(storage)


def test_an_old_hint_is_a_place_to_begin() -> None:
    storage = long_log(10)
    old = storage.read(HINT)
    log = CommitLog(storage)
    for number in range(11, 400):
        log.append(publish(number), 1)
    storage.replace(HINT, old)
    same(storage)


@pytest.mark.parametrize("lost", [1, 2, 3, 7])
def test_records_that_are_lost_behind_the_hint_are_missed(lost: int) -> None:
    storage = long_log(10)
    tip = CommitLog(storage).read().seq
    log = CommitLog(storage)
    for number in range(11, 31):
        log.append(publish(number), 1)
    for seq in range(tip + 1, tip + 1 + lost):
        storage.delete(record_path(seq))
    with pytest.raises(LogDamaged, match="missing"):
        CommitLog(storage).read_end()


def test_damage_in_the_end_is_told_and_before_it_not_looked_at() -> None:
    storage = long_log(10)
    tip = CommitLog(storage).read().seq
    data = storage.read(record_path(tip - 1))
    storage.replace(record_path(tip - 1), data.replace(b"publish", b"publisH"))
    with pytest.raises(LogDamaged, match="damaged"):
        CommitLog(storage).read_end()
    storage.replace(record_path(tip - 1), data)
    storage.delete(record_path(3))
    assert CommitLog(storage).read_end().omitted
    with pytest.raises(LogDamaged, match="missing"):
        CommitLog(storage).read()


def test_a_record_that_another_log_has_in_its_place_breaks_the_chain() -> None:
    storage, other = long_log(10), long_log(10, writer="other")
    tip = CommitLog(storage).read().seq
    storage.replace(record_path(tip - 1), other.read(record_path(tip - 1)))
    with pytest.raises(LogDamaged, match="chain"):
        CommitLog(storage).read_end()


def test_a_view_of_the_end_reads_on_and_a_writer_reads_all() -> None:
    storage = long_log(10)
    reader, writer = CommitLog(storage), CommitLog(storage)
    assert reader.read_end().omitted
    writer.append(RetireBody(8, 1), 1)
    writer.append(publish(11), 1)
    history = reader.read_on()
    assert history.omitted
    assert history.latest == publish(11)
    assert (8, 1) in history.retired
    reader.confirm()
    with pytest.raises(Exception, match="retired already"):
        reader.append(PinBody(1, 1, pinned=True), 1)
    assert reader.append(RetireBody(9, 1), 1).seq == history.seq + 1
    assert not reader.read_on().omitted


def test_a_log_that_is_another_one_is_missed_by_a_view_of_its_end() -> None:
    storage = long_log(10)
    reader = CommitLog(storage)
    reader.read_end()
    for entry in list(storage.list("log")):
        storage.delete(entry.path)
    with pytest.raises(LogDamaged):
        reader.read_on()


def test_latest_is_found_by_its_end() -> None:
    storage = Counted(long_log(100))
    assert Generations(storage).find("latest") == publish(100)
    assert len(storage.reads) <= 6


def test_an_attempt_opens_without_reading_all_of_a_known_log_again() -> None:
    storage = Counted(long_log(50))
    log = CommitLog(storage)
    storage.create = storage.inner.create  # type: ignore[method-assign]
    log.read_on()
    storage.reads.clear()
    log.open_attempt("run-1", "token-2")
    assert len(storage.reads) <= 6
