"""Traces: what the other files of a root say about a commit log that is gone, or lost its end.

The log is the only source of truth, and nothing here is ever believed in its stead. But an attempt
is in the log before any other file of it exists, and a record is durable before `latest.json` tells
of it. So files of a run without a log, or a hint of a record that is not there, were left by no
crash: somebody lost records, or put an older copy back. A run that went on from there would take
back what it has published, and give its attempts and generations names that others have.

So does a file of an attempt that is later than any the log knows, even where the hint is lost with
the records. That is asked of names alone, and of no more than one listing of each directory. What
an attempt that the log knows has left, published or not, is no trace: crashes leave such files.

Whoever looks, looks *before* he reads the log: then the log knows the attempt of each name that he
saw, however busy the run is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from coherent_ray.commit.history import History
from coherent_ray.commit.inventory import generation_of, item_of
from coherent_ray.commit.log import DIRECTORY, CommitLog
from coherent_ray.commit.log_end import HINT, read_hint
from coherent_ray.errors import LogDamaged
from coherent_ray.storage.base import Storage
from coherent_ray.storage.housekeeping import Foldered

#: Where files lie that only a run with a log can have made.
_MADE_LATER = ("generations", "receipts", "holds")
#: Files of generations that are looked at where a storage cannot name directories alone.
_FILES = 10_000
#: Places that a message names before it only counts them.
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Traces:
    """What other files said about a log, before it was read."""

    hint: Mapping[str, object] = field(default_factory=dict)
    """What `latest.json` said."""
    made: tuple[tuple[int, str], ...] = ()
    """Generations' directories, receipts and holds, each with the attempt that made it."""

    def damage(self, history: History) -> LogDamaged | None:
        """Return what is wrong with the log that was read next; None: nothing is known to be."""
        if not history.records:
            return None  # `log_gone` tells
        return cut_off(self.hint, history) or self._of_later_attempts(history)

    def _of_later_attempts(self, history: History) -> LogDamaged | None:
        unknown = [path for attempt, path in self.made if attempt > history.attempt]
        if not unknown:
            return None
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        return LogDamaged(
            f"there are files of attempts later than {history.attempt}, the last that the log "
            f"knows: {', '.join(unknown[:_SHOWN])}{more}; records are missing at its end",
            where=DIRECTORY,
            remedy="An attempt is in the log before any file of it. Put the missing records back "
            "from a copy of the run. If the log is right as it is, the files are another run's or "
            "given up: move them out of the root.",
            details={"readable_until": history.seq, "unknown": unknown},
        )


def look(storage: Storage) -> Traces:
    """Look at what other files say about the log, which must be read afterwards.

    Raises:
        StorageError: The storage failed.
    """
    return Traces(read_hint(storage), tuple(_made(storage)))


def _made(storage: Storage) -> Iterator[tuple[int, str]]:
    above = "generations"
    if isinstance(storage, Foldered):
        names = storage.directories(above)
    else:
        paths = (entry.path.split("/") for entry in islice(storage.list(above), _FILES))
        names = list(dict.fromkeys(parts[1] for parts in paths if len(parts) > 2))
    for name in names:
        if key := generation_of(name):
            yield key[1], f"{above}/{name}"
    for directory in ("receipts", "holds"):
        for entry in storage.list(directory):
            item = item_of(entry.path)
            if item is not None and item.generation is not None:
                yield item.generation[1], entry.path


def read_whole(storage: Storage, log: CommitLog | None = None) -> History:
    """Read a run's commit log, and refuse one that other files show to be gone or cut off.

    Args:
        storage: The run's root.
        log: A view of its commit log, which then knows what was read; None: one of its own.

    Returns:
        The history; empty only where no run ever was.

    Raises:
        LogDamaged: The log cannot be trusted, is gone, or has lost its end.
        StorageError: The storage failed.
    """
    traces = look(storage)
    history = (log or CommitLog(storage)).read()
    if damage := traces.damage(history) or (None if history.records else log_gone(storage)):
        raise damage
    return history


def cut_off(hint: Mapping[str, Any], history: History) -> LogDamaged | None:
    """Return what is wrong with a log of which the end is missing; None: nothing is known to be.

    | the hint's record | outcome |
    |---|---|
    | is in the log, under any number | no damage |
    | has a number that the log does not reach | records are missing |
    | has another's number, and tells of a generation or attempt that the log never had | likewise |
    | has another's number, and tells of nothing new | the hint is wrong, and is not believed |

    Args:
        hint: What `latest.json` said before the log was read.
        history: The log.
    """
    seq, digest = hint.get("seq"), hint.get("digest")
    if not history.records or not isinstance(seq, int) or seq < 1 or not isinstance(digest, str):
        return None
    if hint.get("run_id") != history.run_id:
        return None
    if any(record.digest == digest for record in history.records):
        return None
    if seq <= history.seq and not _tells_of_more(hint, history):
        return None
    published = f", after {hint['generation']}" if hint.get("generation") else ""
    return LogDamaged(
        f"{HINT} tells of record {seq}{published}, which the log does not have: records are "
        "missing at its end",
        where=HINT,
        remedy="Put the missing records back from a copy of the run. If the log is right as it "
        f"is, remove {HINT}.",
        details={"readable_until": history.seq},
    )


def _tells_of_more(hint: Mapping[str, Any], history: History) -> bool:
    """Whether a hint names a generation or an attempt that the log never had."""
    generation, attempt = hint.get("generation"), hint.get("attempt")
    known = {publish.name for publish in history.publishes}
    later = isinstance(attempt, int) and attempt > history.attempt
    return later or (isinstance(generation, str) and generation not in known)


def log_gone(storage: Storage) -> LogDamaged | None:
    """Return what is wrong with a root that has files of a run and no record; None: nothing.

    Raises:
        StorageError: The storage failed.
    """
    left = [
        entry.path
        for directory in _MADE_LATER
        for entry in storage.list(directory)
        if item_of(entry.path) is not None
    ]
    if not left and not read_hint(storage).get("run_id"):
        return None
    named = f"{left[0]} and {len(left) - 1:,} more files" if len(left) > 1 else (left or [HINT])[0]
    return LogDamaged(
        f"the commit log is gone, but there are files of a run: {named}",
        where=f"{storage.uri}/{DIRECTORY}",
        remedy=f"Put the directory {DIRECTORY} back from a copy: without it nobody can tell what "
        "was published. To begin anew, take another run.root.",
        details={"readable_until": 0, "files": len(left)},
    )
