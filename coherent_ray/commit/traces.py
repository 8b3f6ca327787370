"""Traces: what the other files of a root say about a commit log that is gone, or lost its end.

The log is the only source of truth, and nothing here is ever believed in its stead. But an attempt
is in the log before any other file of it exists, and a record is durable before `latest.json` tells
of it. So files of a run without a log, or a hint of a record that is not there, were left by no
crash: somebody lost records, or put an older copy back. A run that went on from there would take
back what it has published.
"""

from __future__ import annotations

from coherent_ray import canonical
from coherent_ray.commit.history import History
from coherent_ray.commit.inventory import item_of
from coherent_ray.commit.log import DIRECTORY, HINT, CommitLog
from coherent_ray.errors import LogDamaged, NotFound
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import read_bounded

#: Where files lie that only a run with a log can have made.
_MADE_LATER = ("generations", "receipts", "holds")
#: A longer hint is not read, and hints nothing.
_HINT_BYTES = 64 * 2**10


def read_whole(storage: Storage) -> History:
    """Read a run's commit log, and refuse one that other files show to be gone or cut off.

    Args:
        storage: The run's root.

    Returns:
        The history; empty only where no run ever was.

    Raises:
        LogDamaged: The log cannot be trusted, is gone, or has lost its end.
        StorageError: The storage failed.
    """
    hint = read_hint(storage)  # before the log, which is always at least as new
    history = CommitLog(storage).read()
    if damage := cut_off(hint, history) or (None if history.records else log_gone(storage)):
        raise damage
    return history


def read_hint(storage: Storage) -> dict[str, object]:
    """Return what `latest.json` says; nothing where it is missing or torn."""
    try:
        hint = canonical.load(read_bounded(storage, HINT, _HINT_BYTES))
    except (NotFound, ValueError):
        return {}
    return hint if isinstance(hint, dict) else {}


def cut_off(hint: dict[str, object], history: History) -> LogDamaged | None:
    """Return what is wrong with a log of which the end is missing; None: nothing is known to be.

    Args:
        hint: What `latest.json` said before the log was read.
        history: The log.
    """
    seq, digest = hint.get("seq"), hint.get("digest")
    if not history.records or not isinstance(seq, int) or seq < 1:
        return None
    if hint.get("run_id") != history.run_id:
        return None
    if seq <= history.seq and history.records[seq - 1].digest == digest:
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
