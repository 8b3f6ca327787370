"""One rank's saves: snapshot now, everything else behind training, the fate at the next boundary.

`Saver.begin` stalls training for one copy of this rank's part of the state (and for the last
save, if that is still in flight). The thread behind writes the shard, and meanwhile seals the
boundary: completes the fingerprint from the copy, and with it receipts and header. It acknowledges
the shard, reads another rank's back where it is asked to, and so learns the generation's fate.
Ranks act on a fate only where all of them look at it: at the next save, or at the end. So all of
them count the same failures and stop at the same boundary.

A storage that does not answer holds the thread, not the training: after
``checkpoint.storage_timeout_s`` the save is given up, which is a failed save like any other. The
thread still reads the snapshot, so until it comes back the next saves fail at once, without a copy;
then all is as before. A save is given up only while its word is not out: so a generation that this
rank counts as failed is never published by a word that came late.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from coherent_ray.commit import manifest as records
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.findings import read_findings
from coherent_ray.commit.log import DIRECTORY, CommitLog
from coherent_ray.commit.manifest import (
    RECEIPTS_BYTES,
    Acknowledgement,
    GenerationHeader,
    ShardRecord,
    generation_name,
)
from coherent_ray.commit.prints import prints_of
from coherent_ray.commit.read_back import Reply, Request, read_back
from coherent_ray.commit.timings import PARTS, Timings
from coherent_ray.config.sections import Checkpoint
from coherent_ray.digests import digest_of
from coherent_ray.errors import AlreadyExists, CoherentRayError, SaveFailed, StorageError
from coherent_ray.state.capture import State
from coherent_ray.state.reuse import Known, Previous, previous_of
from coherent_ray.state.shards import ShardTimes, write_shard
from coherent_ray.state.snapshot import Snapshot
from coherent_ray.state.writer import BackgroundWriter
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.storage.base import Storage
from coherent_ray.train.hooks import Hook, reach
from coherent_ray.train.sealing import Boundary, Sealed

#: Seconds between two looks at a storage whose time is over while a rank's word is out.
_LOOK_AGAIN_S = 0.02


class Coordination(Protocol):
    """A rank's line to whoever decides what is published."""

    def acknowledge(self, word: Acknowledgement) -> Reply:
        """Hand in that a shard is durable, and wait for the generation's fate.

        Or for the request to read another rank's shard back first, and to call again.
        """

    def withdraw(self, number: int, reason: str) -> None:
        """Say that this rank will never acknowledge a generation, and why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """How one save went."""

    name: str
    number: int
    update: int
    fate: Fate
    stall_s: float
    """Seconds that training stood still."""
    durable_s: float
    """Seconds from the snapshot until this rank knew the fate."""
    shard_bytes: int
    """Bytes that this rank wrote."""
    times: dict[str, float]
    """Seconds by name: those of `Timings`, and ``acknowledge_s``, from this rank's word to the
    generation's fate. What was not come to is not there."""


class _Flight:
    """One save in flight: either its word goes out, or it is given up."""

    def __init__(self, boundary: Boundary, stall_s: float, snapshot_s: float = 0.0) -> None:
        self.boundary = boundary
        self.stall_s = stall_s
        self.times = {
            "stall_s": stall_s,
            "wait_s": boundary.wait_s,
            "fingerprint_s": boundary.fingerprint_s,
            "snapshot_s": snapshot_s,
        }
        self.begun = time.monotonic()
        self._lock = threading.Lock()
        self._speaking = self.given_up = False

    def speak(self) -> bool:
        """Take the right to acknowledge; False: the save was given up."""
        with self._lock:
            self._speaking = not self.given_up
            return self._speaking

    def heard(self) -> None:
        """Say that the acknowledgement will not be answered: from here on the log is asked."""
        self._speaking = False

    def give_up(self) -> bool:
        """Take back the right to acknowledge; False: the word is out, and its answer decides."""
        with self._lock:
            self.given_up = not self._speaking
            return self.given_up

    def saved(self, fate: Fate, shard_bytes: int = 0) -> Saved:
        """Return how it went, now that its fate is known."""
        header = self.boundary.header
        name = records.generation_name(header.number, header.attempt)
        durable_s = time.monotonic() - self.begun + self.stall_s
        facts = name, header.number, header.update, fate
        return Saved(*facts, self.stall_s, durable_s, shard_bytes, dict(self.times))


class Saver:
    """Makes one rank's part of generations. For the training thread."""

    def __init__(
        self,
        storage: Storage,
        rank: int,
        options: Checkpoint,
        line: Coordination,
        hook: Hook | None = None,
        *,
        log: CommitLog | None = None,
        previous: Previous | None = None,
    ) -> None:
        """Make a saver; nothing is allocated before the first save.

        Args:
            storage: The run's root.
            rank: This rank.
            options: The configuration's checkpoint section.
            line: To the coordinator.
            hook: Called at named points, for drills.
            log: The commit log as this rank has read it: before each save its last record is looked
                for again. None: it is not.
            previous: The generation that the first save may refer to, verified; None: none.
        """
        self._storage = AttendedStorage(storage)
        self._log = log
        self._rank = rank
        self._options = options
        self._line = line
        self._hook = hook
        self._previous = [previous] if previous else []  # the thread's, once there is one
        """The newest published generations, two at most, if no save has failed since."""
        self._writer = BackgroundWriter()
        self._snapshot: Snapshot | None = None
        self._pending: Future[Saved] | None = None
        self._flight: _Flight | None = None
        self._stuck: Future[Saved] | None = None
        """A save that was given up, and whose thread may not have come back."""
        self._failures = 0
        self.last: Saved | None = None
        """The newest save whose fate is known and was looked at."""
        self.stalls_s: list[float] = []
        """Seconds that training stood still, a save."""

    def settle(self) -> Saved | None:
        """Wait for the save in flight and act on its fate; all ranks do so at the same boundary.

        Waits for the storage no longer than ``checkpoint.storage_timeout_s`` for any one answer.

        Returns:
            The save; None where none was in flight.

        Raises:
            ReplicaDiverged: The ranks hold different states: training must not go on.
            Fenced: A later attempt has opened.
            SaveFailed: One more save failed than `max_failed_saves` allows.
        """
        if self._pending is None:
            return None
        saved = self._landed(self._pending)
        self._pending = None
        self.last = saved
        fate = saved.fate
        if fate.kind in {"diverged", "fenced"}:
            fate.raise_for_error()
        self._failures = self._failures + 1 if fate.kind == "failed" else 0
        if self._failures > self._options.max_failed_saves:
            raise SaveFailed(
                f"{self._failures} saves in a row failed, one more than "
                f"checkpoint.max_failed_saves allows; the last one because {fate.reason}",
                where=f"generation {fate.name}",
                remedy="mend what is named here and run again; what is published is untouched",
                details=dict(fate.details),
            )
        return saved

    def begin(self, state: State, boundary: Boundary, since: float) -> float:
        """Take the snapshot of a boundary and let the rest happen behind training.

        Call `settle` first.

        Args:
            state: References to the live state.
            boundary: What the generation will say.
            since: When training stopped for this save, on `time.monotonic`.

        Returns:
            Seconds that training stood still.
        """
        header = boundary.header
        if self._is_stuck():
            stall = time.monotonic() - since
            self._pending = Future()
            self._pending.set_result(self._given_up(_Flight(boundary, stall)))
            self.stalls_s.append(stall)
            return stall
        begun = time.monotonic()
        if self._snapshot is None or self._snapshot.layout != header.layout:
            self._snapshot = Snapshot(header.layout, self._rank, header.ranks)
        self._snapshot.take(state.tensors, state.parts)
        now = time.monotonic()
        stall = now - since
        self.stalls_s.append(stall)
        flight = self._flight = _Flight(boundary, stall, now - begun)
        self._pending = self._writer.submit(lambda: self._save(flight))
        return stall

    def wait_for_storage(self) -> None:
        """Let a save that was given up come back, if it does before the storage's time is over.

        For the last generation of a run: behind it there is no training to go on with.
        """
        if self._stuck is not None:
            wait([self._stuck], timeout=self._options.storage_timeout_s)

    @property
    def busy(self) -> bool:
        """Whether a save is in flight or its fate was not looked at."""
        return self._pending is not None

    @property
    def in_flight(self) -> bool:
        """Whether the fate of a save is not known yet."""
        return self._pending is not None and not self._pending.done()

    @property
    def patient(self) -> bool:
        """Whether a save is in flight that need not be given up: its storage answers in time."""
        silence = self._storage.silence() if self.in_flight else None
        silent_s = silence.lasted_s if silence else 0.0
        return self.in_flight and silent_s < self._options.storage_timeout_s

    @property
    def landed(self) -> Saved | None:
        """The newest save whose fate is known, whether or not it was looked at."""
        pending = self._pending
        if pending is not None and pending.done() and pending.exception() is None:
            return pending.result()
        return self.last

    def close(self) -> None:
        """Let the save in flight finish, and end the thread, as far as the storage answers."""
        if self._pending is not None:
            self._give_up_or_wait(self._pending)
        self._writer.close(timeout=0 if self._is_stuck() else None)

    # --- a storage that does not answer -----------------------------------------------------------

    def _landed(self, pending: Future[Saved]) -> Saved:
        if self._give_up_or_wait(pending):
            assert self._flight is not None
            return self._given_up(self._flight)
        return pending.result()

    def _give_up_or_wait(self, pending: Future[Saved]) -> bool:
        """Wait for a save, and return whether it was given up."""
        while not pending.done():
            silence = self._storage.silence()
            left = self._options.storage_timeout_s - (silence.lasted_s if silence else 0.0)
            if left <= 0 and self._flight is not None and self._flight.give_up():
                self._stuck = pending
                return True
            wait([pending], timeout=max(left, _LOOK_AGAIN_S))
        return False

    def _is_stuck(self) -> bool:
        """Whether the thread has not come back from a save that was given up."""
        if self._stuck is not None and self._stuck.done():
            self._stuck = None
        return self._stuck is not None

    def _given_up(self, flight: _Flight) -> Saved:
        silence = self._storage.silence()
        error = silence.error() if silence else SaveFailed("the save before it has not ended")
        return flight.saved(self._failed(flight.boundary.header, error))

    # --- behind training --------------------------------------------------------------------------

    def _save(self, flight: _Flight) -> Saved:
        header = flight.boundary.header
        fate, size = Fate("failed", header.number, header.attempt, "it was given up"), 0
        shard: ShardRecord | None = None
        known: Known | None = None
        try:
            known = self._known(header)
            shard, sealed = self._write(flight, known)
            size = shard.own_file.size
            fate = self._acknowledge(flight, self._word(flight, shard, sealed)) or fate
        except Exception as error:
            flight.heard()
            if not flight.given_up:
                fate = self._published(header) or self._failed(header, error)
        # After a save that failed, for whatever reason, the next one refers to nothing.
        if shard is not None and fate.kind == "published":
            latest = previous_of(header, shard, known.found if known else None)
            self._previous = [*self._previous[-1:], latest]
        else:
            self._previous = []
        # What was given up is said by whoever gave it up; nobody looks at this fate.
        return flight.saved(fate, size)

    def _write(self, flight: _Flight, known: Known | None) -> tuple[ShardRecord, Sealed]:
        assert self._snapshot is not None
        header, memory, times = flight.boundary.header, self._snapshot.memory, ShardTimes()
        reach(self._hook, "save:begin")
        if self._log is not None:
            with self._storage.attending("reading", DIRECTORY):
                self._log.confirm()
        with ThreadPoolExecutor(1, "coherent-ray-sealing") as beside:
            sealing = beside.submit(flight.boundary.sealed, memory)
            shard = write_shard(
                self._storage,
                header.directory,
                self._rank,
                header.ranks,
                header.layout,
                memory,
                self._options.digest,
                self._options.block_bytes,
                hooks=self._hook,
                known=known,
                times=times,
            )
            sealed = sealing.result()
        flight.times |= asdict(times)
        flight.times["hash_s"] += sealed.sealing_s
        if self._rank == 0 and sealed.header.receipts is not None:
            self._write_receipts(sealed.header.receipts.path, sealed.receipts)
        reach(self._hook, "save:acknowledge")
        return shard, sealed

    def _known(self, header: GenerationHeader) -> Known | None:
        """Return what a generation may refer to; None: it is written whole."""
        options = self._options
        # Where two are kept, they share no file: what damages one leaves the other whole. So each
        # refers to the last but one, which is kept until this one is published.
        back = 1 if options.keep == 1 else 2
        if len(self._previous) < back or not options.reuse_generations:
            return None
        previous = self._previous[-back]
        if options.scrub_every_s is not None:
            # A note, and not believed: it may be old. But what is known to be damaged is not used.
            damaged = {name for name, found in read_findings(self._storage).items() if found.faults}
            needed = {generation_name(*file.key) for file in previous.shard.files}
            if damaged & {*needed, previous.base.name}:
                return None
        return previous.known(
            header, options.digest, options.block_bytes, options.reuse_generations
        )

    def _acknowledge(self, flight: _Flight, word: Acknowledgement) -> Fate | None:
        """Hand in the word, read back what is asked for, and return the fate; None: given up."""
        if not flight.speak():
            return None
        begun = time.monotonic()
        reply = self._line.acknowledge(word)
        if isinstance(reply, Request):
            # Nothing is published without the word of this reading, so it may be given up as well.
            flight.heard()
            reach(self._hook, "save:read_back")
            read = read_back(self._storage, flight.boundary.header, reply.shard)
            if not flight.speak():
                return None
            # The same word with more in it: a coordinator that knows nothing needs no other.
            reply = self._line.acknowledge(replace(word, read_back=read))
        if isinstance(reply, Request):
            raise SaveFailed(
                "the coordinator asked for the same read-back twice",
                where=f"generation {records.generation_name(word.number, word.attempt)}",
            )
        flight.times["acknowledge_s"] = time.monotonic() - begun
        return reply

    def _write_receipts(self, path: str, data: bytes) -> None:
        if len(data) > RECEIPTS_BYTES:
            raise SaveFailed(
                f"the receipts have {len(data)} bytes, and readers take {RECEIPTS_BYTES} at most",
                where=path,
                remedy="Save more often: set a smaller checkpoint.every_updates or every_seconds.",
            )
        try:
            self._storage.create(path, data)
        except AlreadyExists:
            # Only this attempt writes under this name: an answer that was lost, or a fault.
            if self._storage.read(path, 0, len(data) + 1) != data:
                raise StorageError(
                    "the receipts are there already, and differ", where=path
                ) from None

    def _word(self, flight: _Flight, shard: ShardRecord, sealed: Sealed) -> Acknowledgement:
        header, prints = sealed.header, sealed.prints
        return Acknowledgement(
            attempt=header.attempt,
            number=header.number,
            rank=self._rank,
            ranks=header.ranks,
            shard=shard,
            header_digest=digest_of(records.dump(header)),
            fingerprint=prints.digest,
            tensor_fingerprints=prints_of(prints.tensors, header.ranks),
            header=header if self._rank == 0 else None,
            timings=Timings(**{n: flight.times[n] for n in PARTS}, about=flight.boundary.about),
        )

    def _published(self, header: GenerationHeader) -> Fate | None:
        """Return the fate that the log tells, where the coordinator could not tell it any more.

        Ranks must count the same failures: one that lost an answer must not call failed what the
        others know to be published.
        """
        try:
            log = CommitLog(self._storage)
            history = log.read_end()
            newest = history.standing.newest
            if newest and (newest.attempt, newest.number) > (header.attempt, header.number):
                history = log.read()  # it may lie before the end
        except CoherentRayError:
            return None
        body = history.publish_of(header.number, header.attempt)
        record = history.record_of(body) if body is not None else None
        if record is None:
            return None
        return Fate("published", header.number, header.attempt, seq=record.seq)

    def _failed(self, header: GenerationHeader, error: Exception) -> Fate:
        """Tell the others that this rank will not acknowledge, so that none waits for it."""
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, CoherentRayError):
            reason = f"{error.where}: {error.what}" if error.where else error.what
        reason = f"rank {self._rank} could not save: {reason}"
        try:
            self._line.withdraw(header.number, reason)
        except Exception as lost:
            reason += f" (and the coordinator could not be told: {lost})"
        return Fate("failed", header.number, header.attempt, reason)


def describe(saved: Saved) -> dict[str, Any]:
    """Return a save as JSON values, for progress displays."""
    return {
        "name": saved.name,
        "update": saved.update,
        "fate": saved.fate.kind,
        "reason": saved.fate.reason,
        "stall_s": saved.stall_s,
        "durable_s": saved.durable_s,
        "shard_bytes": saved.shard_bytes,
        "times": saved.times,
    }
