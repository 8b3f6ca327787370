"""A root that vanishes under who uses it: another directory is there, and no second history begins.

As after an unmount: the directory below the mount point is empty, and can be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from logs import publish, started

from coherent_ray.commit.holds import holding
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.pruning import Pruner
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.service import Service
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.testing.memory import MemoryStorage


class Mounted(MemoryStorage):
    """A storage that can be taken away and come back."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__()
        self.files = dict(files)
        self._below: dict[str, bytes] = {}

    def swap(self) -> None:
        """Unmount, or mount again."""
        self.files, self._below = self._below, self.files


@pytest.fixture
def storage() -> Mounted:
    return Mounted(started(3).files)


USES: dict[str, Callable[[CommitLog], object]] = {
    "append": lambda log: log.append(publish(4), 1),
    "open": lambda log: log.open_attempt("run-1", "another"),
    "read on": lambda log: log.read_on(),
    "settle": lambda log: log.settled(),
    "confirm": lambda log: log.confirm(),
}


@pytest.mark.parametrize("use", USES)
def test_a_log_that_is_gone_is_damage_and_nothing_is_written(use: str, storage: Mounted) -> None:
    log = CommitLog(storage)
    before = log.settled()
    storage.swap()
    with pytest.raises(LogDamaged, match="not here any more") as caught:
        USES[use](log)
    assert caught.value.where == f"{storage.uri}/{record_path(before.seq)}"
    assert "mounted" in caught.value.remedy
    assert storage.files == {}
    storage.swap()
    USES[use](log)
    assert CommitLog(storage).read().records[: before.seq] == before.records


def test_one_that_vanishes_between_looking_and_writing_is_noticed_behind_it() -> None:
    class Flighty(Mounted):
        armed = False

        def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
            if self.armed:
                self.swap()
                self.armed = False
            super().create(path, data)

    storage = Flighty(started(3).files)
    log = CommitLog(storage)
    before = log.settled()
    storage.armed = True
    with pytest.raises(LogDamaged, match="not here any more"):
        log.append(publish(4), 1)
    assert list(storage.files) == [record_path(before.seq + 1)]
    storage.swap()
    assert log.append(publish(4), 1).seq == before.seq + 1


def test_a_record_that_was_read_before_it_was_sure_may_be_lost(storage: Mounted) -> None:
    """By a power cut elsewhere; then there is no damage, and its number is free."""
    log = CommitLog(storage)
    before = log.read_on()
    del storage.files[record_path(before.seq)]
    assert log.read_on().records == before.records[:-1]
    log.append(publish(9), 1)
    assert CommitLog(storage).read().latest == publish(9)


def test_a_record_that_was_sure_may_not(storage: Mounted) -> None:
    log = CommitLog(storage)
    before = log.settled()
    del storage.files[record_path(before.seq)]
    with pytest.raises(LogDamaged, match="not here any more"):
        log.append(publish(9), 1)


def test_another_history_in_its_place_is_noticed(storage: Mounted) -> None:
    log = CommitLog(storage)
    log.settled()
    other = MemoryStorage()
    CommitLog(other).open_attempt("run-1", "another-history")
    storage.files = dict(other.files)
    with pytest.raises(LogDamaged, match="not here any more"):
        log.append(publish(9), 1)


def test_readers_and_pruners_turn_away(storage: Mounted) -> None:
    log = CommitLog(storage)
    latest = log.read().latest
    assert isinstance(latest, PublishBody)
    pruner = Pruner(storage, Policy(keep=1), log=log)
    storage.swap()
    with pytest.raises(LogDamaged), holding(storage, log, latest):
        pass
    with pytest.raises(LogDamaged):
        pruner.prune(1)
    assert storage.files == {}


def test_a_coordinator_that_was_started_again_asks_what_the_caller_knows(
    storage: Mounted,
) -> None:
    """It has no memory, and an empty root looks like a new run's."""

    async def play() -> None:
        storage.swap()
        service = Service("run-1", lambda: storage)
        with pytest.raises(LogDamaged, match=r"attempt 3 has been opened, .* ends with attempt 0"):
            await service.open_attempt("token", known=3)
        assert storage.files == {}
        assert await service.open_attempt("token", known=0) == 1

    asyncio.run(play())
