"""What the coordinator hears (events) and what it asks for (actions).

The machine in `coherent_ray.commit.coordinator` lives between these two lists. An event is
something that has happened, an action is something that a shell must do; every action but `Answer`,
`AskReadBack` and `RefreshHint` is followed by exactly one event about the same generation. Both are
values: a test can write them down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import History
from coherent_ray.commit.manifest import Acknowledgement, ShardRecord, generation_name
from coherent_ray.commit.records import PublishBody


class Key(NamedTuple):
    """Which generation; sorts by number within an attempt, attempts first."""

    attempt: int
    number: int

    def __str__(self) -> str:
        return generation_name(self.number, self.attempt)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HistoryRead:
    """The commit log has been read to its end, or a record of it was just appended."""

    history: History


@dataclass(frozen=True, slots=True)
class AckReceived:
    """A rank says that its shard is durable; the call waits for an `Answer`."""

    ack: Acknowledgement
    call: int


@dataclass(frozen=True, slots=True)
class AckWithdrawn:
    """A rank says that it will never acknowledge: its shard could not be written."""

    key: Key
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class ShardsChecked:
    """The storage has been asked about every shard."""

    key: Key
    problems: tuple[str, ...]
    """One sentence for each shard that isn't as its rank said; empty: all are."""


@dataclass(frozen=True, slots=True)
class ManifestWritten:
    """The manifest is durable, with the bytes that were asked for."""

    key: Key


@dataclass(frozen=True, slots=True)
class ManifestFailed:
    """The manifest is not known to be durable."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class PublishAppended:
    """The commit log holds the publish record: the generation is committed."""

    key: Key
    seq: int


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """The commit log is not known to hold the publish record.

    | outcome | the record |
    |---|---|
    | fenced | is not there and never will be: a later attempt has opened |
    | refused | is not there: the log's rules forbid it |
    | unknown | may be there: the storage failed in the middle |
    """

    key: Key
    reason: str
    outcome: Literal["fenced", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class StorageSilent:
    """The storage has owed an answer for too long; whatever is asked of it may never be done."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened but time."""


Event = (
    HistoryRead
    | AckReceived
    | AckWithdrawn
    | ShardsChecked
    | ManifestWritten
    | ManifestFailed
    | PublishAppended
    | AppendFailed
    | StorageSilent
    | Tick
)

# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckShards:
    """Ask the storage for every shard's size."""

    key: Key
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True)
class WriteManifest:
    """Make the manifest durable; the same bytes under its name already are a success."""

    key: Key
    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class AppendPublish:
    """Append the publish record. The commit point."""

    key: Key
    body: PublishBody


@dataclass(frozen=True, slots=True)
class RefreshHint:
    """Rewrite ``latest.json``; failing is harmless."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Let a waiting call return."""

    call: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class AskReadBack:
    """Let a waiting call return without a fate: its rank must read a shard, and call again."""

    call: int
    shard: ShardRecord


StorageAction = CheckShards | WriteManifest | AppendPublish | RefreshHint
Action = StorageAction | Answer | AskReadBack
