"""The end of a commit log: what a reader of the latest generation needs, in a few reads.

They are as many however long the log is.

`latest.json` says where the end was a while ago. It is not believed: a record of that number and
digest must be there, later ones are looked for, and from the last one the chain is followed back,
digest by digest, to the newest publish that no record behind it retires. So every record that is
used is verified as in a whole reading. What is not looked at is what lies before it, which says
nothing about the latest generation: whoever opens an attempt, and `verify`, read all of it.

Anything unexpected (no hint, a record that is not there, a number behind a gap) is answered by
None: then the whole log is read, and tells what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from coherent_ray import canonical
from coherent_ray.commit.history import GenerationKey, History, RecordRefused
from coherent_ray.commit.records import AttemptBody, PublishBody, Record, RetireBody
from coherent_ray.errors import NotFound
from coherent_ray.storage.base import Storage
from coherent_ray.storage.bounded import read_bounded

HINT = "latest.json"
#: A longer hint is not read, and hints nothing.
_HINT_BYTES = 64 * 2**10
#: Records that are read one by one before reading all of them, together, is the better way.
_MOST = 256
#: Behind the end, at distances of 2, 4, 8, ... up to 2 to this power, it is looked for more.
_PROBES = 16
#: Seconds for an answer from which on a storage is asked for the others at once.
_QUICK_S = 0.005


def read_hint(storage: Storage) -> dict[str, object]:
    """Return what `latest.json` says; nothing where it is missing or torn."""
    try:
        hint = canonical.load(read_bounded(storage, HINT, _HINT_BYTES))
    except (NotFound, ValueError):
        return {}
    return hint if isinstance(hint, dict) else {}


def end_of(
    hint: dict[str, object], read: Callable[[int], Record], exists: Callable[[int], bool]
) -> History | None:
    """Return the end of a log, from the publish of its latest generation on.

    Args:
        hint: What `latest.json` said.
        read: Returns the record of a number, checked by itself.
        exists: Whether there is a file of a record's number.

    Returns:
        The history; None: read the whole log.

    Raises:
        NotFound: A record that must be there is not: read the whole log.
        RecordRefused: A record does not follow from the one before it.
        LogDamaged: A record is damaged.
        StorageError: The storage failed.
    """
    seq = hint.get("seq")
    if type(seq) is not int or seq < 1:
        return None
    records = [read(seq)]
    if records[0].digest != hint.get("digest") or not _forward(records, read, exists):
        return None
    base = _base_of(records)
    while base is None and records[0].seq > 1 and len(records) < _MOST:
        records.insert(0, read(records[0].seq - 1))
        base = _base_of(records)
    if records[0].seq == 1:
        return History.of(records)
    return None if base is None else History.of_end(records[base:], _run_id(records, read))


def _forward(
    records: list[Record], read: Callable[[int], Record], exists: Callable[[int], bool]
) -> bool:
    """Add what was appended since; False: too much, or records are missing."""
    while len(records) < _MOST:
        try:
            records.append(read(records[-1].seq + 1))
        except NotFound:
            return not gap_behind(records[-1].seq, exists)
    return False


def _run_id(records: list[Record], read: Callable[[int], Record]) -> str:
    """Return whose log it is, by a record that opens an attempt: the first one always does."""
    opened = [record.body for record in records if isinstance(record.body, AttemptBody)]
    body = opened[-1] if opened else read(1).body
    if not isinstance(body, AttemptBody):
        raise RecordRefused(1, "it opens no attempt, and the first record must")
    return body.run_id


def gap_behind(seq: int, exists: Callable[[int], bool]) -> bool:
    """Return whether there are records behind the one that seems to be the last.

    One that is lost is found, and many in a row, if about as many are left behind them.

    Args:
        seq: Number of the last record; the next one is known to be absent.
        exists: Whether there is a file of a record's number.
    """
    nearest, *numbers = (seq + 2**power for power in range(1, _PROBES + 1))
    begun = time.monotonic()
    if exists(nearest):
        return True
    if time.monotonic() - begun < _QUICK_S:
        return any(map(exists, numbers))
    with ThreadPoolExecutor(_PROBES // 2, "coherent-ray-log") as pool:
        return any(pool.map(exists, numbers))


def _base_of(records: list[Record]) -> int | None:
    """Return the place of the newest publish that no record behind it retires."""
    retired: set[GenerationKey] = set()
    for place in reversed(range(len(records))):
        body = records[place].body
        if isinstance(body, RetireBody):
            retired.add((body.number, body.attempt))
        elif isinstance(body, PublishBody) and (body.number, body.attempt) not in retired:
            return place
    return None
