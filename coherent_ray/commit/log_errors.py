"""The errors in which a view of the commit log tells what it found. Words only."""

from __future__ import annotations

from coherent_ray.commit.history import History, RecordRefused
from coherent_ray.commit.records import DIRECTORY, record_path
from coherent_ray.errors import Fenced, LogDamaged, NewerLog, NotSigned, WrongRun
from coherent_ray.storage.base import Storage


def gone(storage: Storage, seq: int) -> LogDamaged:
    """The last record that a view knew is not where it was."""
    return LogDamaged(
        "the last record that was read here before is not here any more",
        where=f"{storage.uri}/{record_path(seq)}",
        remedy="See whether the file system of the run is mounted; if it is, put the records back "
        "from a copy of the run.",
        details={"readable_until": 0},
    )


def damaged(seq: int, what: str) -> LogDamaged:
    """A record is missing, torn, foreign or out of the chain."""
    return LogDamaged(
        what,
        where=record_path(seq),
        remedy=f"Put the file back from a copy of the run{_readable(seq - 1)}.",
        details={"readable_until": seq - 1},
    )


def missing(seq: int) -> LogDamaged:
    """A record is not there, and later ones are."""
    return damaged(seq, "the record is missing, but later ones exist")


def out_of_place(refused: RecordRefused) -> LogDamaged:
    """A record does not follow from those before it."""
    return damaged(refused.seq, f"the record does not belong here: {refused}")


def _readable(until: int) -> str:
    """Return in words which records are not in question, to go on a sentence."""
    if until < 2:
        return "; record 1 can be read" if until else ""
    return f"; records 1 to {until} can be read"


def not_signed(seq: int, what: str) -> NotSigned:
    """A record is not signed with the key that was given."""
    return NotSigned(
        what,
        where=record_path(seq),
        remedy="A run is signed from its first record on, with one key, or not at all. If the key "
        "is right, somebody else wrote this: put the log back from a copy that you trust.",
        details={"readable_until": seq - 1},
    )


def newer(seq: int, what: str) -> NewerLog:
    """A later version of this software wrote a record."""
    return NewerLog(
        what,
        where=record_path(seq),
        remedy="Use the version of coherent-ray that wrote it. If only this version was ever used "
        f"here, the file is damaged: put it back from a copy of the run{_readable(seq - 1)}.",
        details={"readable_until": seq - 1},
    )


def fenced(attempt: int, history: History) -> Fenced:
    """A later attempt has opened."""
    current = history.attempt
    return Fenced(
        f"attempt {attempt} is over: attempt {current} has opened",
        where=f"run {history.run_id}",
        remedy="Let this process end; the later attempt goes on from what is published.",
        details={"attempt": attempt, "current": current},
    )


def wrong_run(stored: str, wanted: str) -> WrongRun:
    """The log is another run's."""
    return WrongRun(
        f"the log belongs to run {stored!r}, not to run {wanted!r}",
        where=DIRECTORY,
        remedy="Give each run a root of its own, or name the run that is stored here.",
        details={"stored": stored, "wanted": wanted},
    )
