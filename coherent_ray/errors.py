"""Every error that a user can meet: what happened, where, and what to do next.

One tree. Each error carries three plain sentences and survives pickling (Ray carries errors between
processes). Code below the command line raises these and never prints; the command line prints
them and never shows a traceback of one.
"""

from __future__ import annotations

from typing import ClassVar

_TO_DO = "\nWhat to do: "


class CoherentRayError(Exception):
    """The root of the tree.

    Attributes:
        what: What happened, in one sentence.
        where: The file, rank, key or address that it happened to; may be empty.
        remedy: What to do next; may be empty.
        details: Machine-readable facts, JSON values only.
    """

    #: 1: the answer is bad (damage, refusal, failure); 2: misuse (configuration, arguments).
    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        remedy: str = "",
        details: dict[str, object] | None = None,
    ) -> None:
        # An error is often told by another: then what to do is said once, by the one that knows.
        what, *inner = what.split(_TO_DO)
        remedy = inner[0] if inner else remedy
        super().__init__(what)
        self.what = what
        self.where = where
        self.remedy = remedy
        self.details = details or {}

    def __str__(self) -> str:
        named = not self.where or _begins_with(self.what, self.where)
        text = self.what if named else f"{self.where}: {self.what}"
        return f"{text}{_TO_DO}{self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.what, self.where, self.remedy, self.details)


def _begins_with(what: str, where: str) -> bool:
    """Whether a sentence names its place already."""
    return what.startswith(where) and not what[len(where) : len(where) + 1].isalnum()


def _rebuild(
    cls: type[CoherentRayError], what: str, where: str, remedy: str, details: dict[str, object]
) -> CoherentRayError:
    return cls(what, where=where, remedy=remedy, details=details)


# --- misuse ---------------------------------------------------------------------------------------


class ConfigError(CoherentRayError):
    """The configuration, or a command's arguments, cannot be used as they are."""

    exit_code = 2


class TaskError(ConfigError):
    """The task factory cannot be found, or what it made does not follow the task protocol."""


class DataError(ConfigError):
    """The data named by the configuration is missing, empty or lacks a column."""


class NotARun(ConfigError):
    """The place that was named holds no run."""


# --- storage --------------------------------------------------------------------------------------


class StorageError(CoherentRayError):
    """The storage refused or failed; `where` is the path."""


class NotFound(StorageError):
    """Nothing is stored under this path."""


class NotAFile(NotFound):
    """Something that is no file has this name; ``details["found"]`` says what."""


class AlreadyExists(StorageError):
    """Exclusive creation met something that is stored already."""


class StorageFull(StorageError):
    """No space, or no quota, is left."""


# --- the commit protocol --------------------------------------------------------------------------


class LogDamaged(CoherentRayError):
    """A record of the commit log is missing, torn, foreign or out of the chain."""


class NotSigned(LogDamaged):
    """A record of the commit log lacks the signature of the key that was given, or has another."""


class NewerFormat(CoherentRayError):
    """A later version of this software wrote it, as far as it says; this one cannot read it."""


class NewerLog(LogDamaged, NewerFormat):
    """A record of the commit log says that a later version of this software wrote it."""


class Fenced(CoherentRayError):
    """A later attempt has opened: this writer must stop."""


class WrongRun(CoherentRayError):
    """What is stored belongs to another run."""


class NoGeneration(CoherentRayError):
    """The run has published no generation that can be read."""


class Damage(CoherentRayError):
    """A published generation does not hold what its digests say."""


class ManifestDamaged(Damage):
    """The manifest is missing, torn, foreign or does not hash to what the log says."""


class ShardDamaged(Damage):
    """A shard is missing, has the wrong size, or a block of it has the wrong digest."""


class ReceiptsDamaged(Damage):
    """A segment of the receipts is missing, torn, foreign, or breaks the chain."""


class SaveFailed(CoherentRayError):
    """A generation was not published; the one before it is still latest."""


class ReplicaDiverged(SaveFailed):
    """Ranks that must hold the same state do not."""


# --- resume ---------------------------------------------------------------------------------------


class AdmissionRefused(CoherentRayError):
    """A rank does not agree with the others or with the stored history. Never retried."""


class AdmissionTimeout(CoherentRayError):
    """A rank did not answer in time. Retried."""


class ClaimRefused(AdmissionRefused):
    """What was asked for would break the run's claim."""


class StateMismatch(AdmissionRefused):
    """The model, optimizer or scheduler does not fit the stored state."""


# --- running --------------------------------------------------------------------------------------


class TrainingFailed(CoherentRayError):
    """The training function, or the machinery round it, ended the run."""


class NotFinite(TrainingFailed):
    """A loss, gradient or parameter is NaN or infinite: every rank stops before it is saved."""


class ClusterError(CoherentRayError):
    """Ray is not reachable, or has not what the run needs."""


class PeerLost(ClusterError):
    """A collective failed because another rank is gone. Cured by a restart of the group."""


class OwnedElsewhere(CoherentRayError):
    """Another driver trains this run. Never retried: two would only take it from each other."""


class Interrupted(CoherentRayError):
    """The run was asked to stop, and did, at a published generation."""
