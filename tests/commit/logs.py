"""Logs that tests begin with."""

from test_history import publish

from coherent_ray.commit.log import CommitLog, History
from coherent_ray.commit.records import PublishBody
from coherent_ray.storage.testing.memory import MemoryStorage


def started(generations: int = 1) -> MemoryStorage:
    """A storage with attempt 1 open and some generations published."""
    storage = MemoryStorage()
    log = CommitLog(storage, "setup")
    log.open_attempt("run-1", "token-1")
    for number in range(1, generations + 1):
        log.append(publish(number), 1)
    return storage


def append_all(*bodies: PublishBody) -> None:
    log = CommitLog(started(0))
    for body in bodies:
        log.append(body, 1)


def names(history: History) -> list[str]:
    return [body.name for body in history.publishes]
