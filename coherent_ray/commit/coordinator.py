"""The coordinator: a pure machine that collects acknowledgements and decides what is published.

It does no I/O, asks no clock and draws no randomness: `Coordinator.handle` takes what has happened
and the time, and returns what a shell must do. So every order of events, every loss and every
restart can be written down in a test. What must outlive the machine is in the commit log, and only
there: a new machine made from the log, together with the ranks' repeated calls, ends where the old
one would have.

The protocol's text, step by step, is ``docs/protocol.md``.
"""

from __future__ import annotations

from typing import NamedTuple

from coherent_ray.commit.ballot import (
    Acknowledged,
    Checked,
    Sealed,
    Stage,
    Staged,
    Verified,
    quoted,
)
from coherent_ray.commit.events import (
    AckReceived,
    AckWithdrawn,
    Action,
    Answer,
    AppendFailed,
    AppendPublish,
    AskReadBack,
    CheckShards,
    Event,
    HistoryRead,
    Key,
    ManifestFailed,
    ManifestWritten,
    PublishAppended,
    RefreshHint,
    ShardsChecked,
    StorageAction,
    StorageSilent,
    Tick,
    WriteManifest,
)
from coherent_ray.commit.fates import Fate, Kind, name_ranks
from coherent_ray.commit.history import History
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.records import PublishBody

#: Seconds from the first acknowledgement of a generation to the last, unless the user chooses.
ACK_TIMEOUT_S = 300.0


class Call(NamedTuple):
    """An acknowledgement call that waits."""

    number: int
    rank: int


class Coordinator:
    """Decides the fate of one run's generations.

    Attributes:
        run_id: The run.
        attempt: The newest attempt that the machine knows of; 0: none has opened.
    """

    def __init__(
        self,
        run_id: str,
        history: History | None = None,
        *,
        ack_timeout_s: float = ACK_TIMEOUT_S,
        read_back: bool = False,
    ) -> None:
        """Make the machine of a run, as its commit log leaves it.

        Args:
            run_id: The run.
            history: The log, read to its end; None: nothing has been written.
            ack_timeout_s: Seconds from a generation's first acknowledgement to its last, and again
                to the last read-back.
            read_back: Have each shard read again, by the rank after its own, before its generation
                is published.
        """
        self.run_id = run_id
        self.attempt = 0
        self._ack_timeout_s = ack_timeout_s
        self._read_back = read_back
        self._published: dict[Key, int] = {}
        self._refused: dict[Key, Fate] = {}
        self._stages: dict[Key, Stage] = {}
        self._waiting: dict[Key, list[Call]] = {}
        if history is not None:
            self._read(history)

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in what has happened, and return what must be done, in order.

        Args:
            event: What has happened. An event about a generation that is already settled is
                welcome and changes nothing.
            now: Seconds, from a clock that never goes back.

        Returns:
            Actions, to be done one after the other.
        """
        match event:
            case AckReceived(ack, call):
                actions = self._acknowledged(ack, call, now)
            case AckWithdrawn(key, rank, reason):
                actions = self._withdrawn(key, rank, reason)
            case ShardsChecked(key, problems):
                actions = self._checked(key, problems, now)
            case ManifestWritten(key):
                actions = self._manifest_written(key)
            case ManifestFailed(key, reason):
                actions = self._settle(key, "failed", f"the manifest was not written: {reason}")
            case PublishAppended(key, seq):
                actions = self._publish(key, seq)
            case AppendFailed():
                actions = self._append_failed(event)
            case HistoryRead(history):
                actions = self._read(history)
            case StorageSilent(reason):
                actions = self._give_up(reason)
            case Tick():
                actions = self._time_out(now)
        return actions

    @property
    def deadline(self) -> float | None:
        """When a `Tick` can next change something, on the shell's clock; None: never."""
        stages = self._stages.values()
        begun = [stage.since for stage in stages if isinstance(stage, Staged | Checked)]
        return min(begun) + self._ack_timeout_s if begun else None

    def wants(self, action: StorageAction) -> bool:
        """Return whether an action is still to be done: its generation may be settled since."""
        return isinstance(action, RefreshHint) or action.key in self._stages

    def in_flight(self) -> dict[str, str]:
        """Return each unsettled generation's name and what it waits for, in words."""
        return {str(key): _waits_for(self._stages[key]) for key in sorted(self._stages)}

    # --- acknowledgements -------------------------------------------------------------------------

    def _acknowledged(self, ack: Acknowledgement, call: int, now: float) -> list[Action]:
        key = Key(ack.attempt, ack.number)
        known = self._known(key)
        if known is not None:
            return [Answer(call, known)]
        self._waiting.setdefault(key, []).append(Call(call, ack.rank))
        stage = self._stages.setdefault(key, Staged(key, self.run_id, ack.ranks, now))
        match stage:
            case Staged():
                return self._stage(key, stage, ack)
            case Acknowledged() | Checked() | Verified():
                return self._repeated(key, stage, ack)
            case Sealed():
                # Its append is on its way, and only the log can tell its fate now.
                return []

    def _known(self, key: Key) -> Fate | None:
        """Return the fate that is certain whatever the ranks say: the log first, then fencing."""
        if key in self._published:
            return self._published_fate(key)
        if key in self._refused:
            return self._refused[key]
        if key.attempt < self.attempt:
            return self._fenced_fate(key)
        if key.attempt > self.attempt:
            return _fate(key, "failed", f"attempt {key.attempt} has not been opened in the log")
        return None

    def _stage(self, key: Key, stage: Staged, ack: Acknowledgement) -> list[Action]:
        contradiction = stage.add(ack)
        if contradiction is not None:
            return self._refuse(contradiction)
        if not stage.complete:
            return []
        decision = stage.decide()
        if isinstance(decision, Fate):
            return self._refuse(decision)
        later = self._overtaken_by(key)
        if later is not None:
            # In the log the later record wins, so this one would take the run back.
            return self._settle(key, "failed", f"the later generation {later} was complete first")
        self._stages[key] = decision
        return [CheckShards(key, decision.manifest.shards)]

    def _repeated(
        self, key: Key, stage: Acknowledged | Checked | Verified, ack: Acknowledgement
    ) -> list[Action]:
        manifest = stage.manifest
        same = ack.rank < len(manifest.shards) and ack.shard == manifest.shards[ack.rank]
        if not same or ack.fingerprint != manifest.fingerprint:
            return self._settle(
                key, "failed", f"rank {ack.rank} acknowledged twice, the second time something else"
            )
        if isinstance(stage, Verified):
            return []
        if ack.read_back is not None:
            stage.read[ack.rank] = ack.read_back
        if not isinstance(stage, Checked):
            return []
        if ack.rank in stage.read:
            return self._read_so_far(key, stage, ack.rank)
        # Of those who call, this one alone has not been asked before.
        return self._ask(stage, [self._waiting[key].pop()])

    def _withdrawn(self, key: Key, rank: int, reason: str) -> list[Action]:
        """Settle a generation that a rank cannot complete; later acknowledgements get this fate."""
        # Without read-backs nobody needs a rank any more that has acknowledged.
        needed = (Staged, Acknowledged, Checked) if self._read_back else (Staged,)
        stage = self._stages.get(key)
        if self._known(key) is not None or not (stage is None or isinstance(stage, needed)):
            return []
        return self._refuse(_fate(key, "failed", reason, rank=rank))

    def _overtaken_by(self, key: Key) -> Key | None:
        begun = [k for k, stage in self._stages.items() if not isinstance(stage, Staged)]
        later = [
            other
            for other in (*begun, *self._published)
            if other.attempt == key.attempt and other.number > key.number
        ]
        return max(later, default=None)

    # --- the storage's answers --------------------------------------------------------------------

    def _checked(self, key: Key, problems: tuple[str, ...], now: float) -> list[Action]:
        stage = self._stages.get(key)
        if not isinstance(stage, Acknowledged):
            return []
        if problems:
            return self._settle(key, "failed", quoted(problems), problems=list(problems))
        if not self._read_back:
            return self._write(key, stage.verified())
        self._stages[key] = checked = stage.checked(now)
        return self._read_so_far(key, checked)

    def _read_so_far(self, key: Key, stage: Checked, new: int | None = None) -> list[Action]:
        match stage.decide(new):
            case Fate() as fate:
                return self._refuse(fate)
            case Verified() as verified:
                return self._write(key, verified)
            case None if new is None:
                calls = self._waiting.get(key, [])
                self._waiting[key] = [call for call in calls if call.rank in stage.read]
                return self._ask(stage, [call for call in calls if call.rank not in stage.read])
            case None:
                return []

    def _ask(self, stage: Checked, calls: list[Call]) -> list[Action]:
        """Answer the calls of those who must read before they can hear a fate."""
        return [AskReadBack(call.number, stage.shard_for(call.rank)) for call in calls]

    def _write(self, key: Key, verified: Verified) -> list[Action]:
        self._stages[key] = verified
        return [WriteManifest(key, verified.path, verified.data)]

    def _manifest_written(self, key: Key) -> list[Action]:
        stage = self._stages.get(key)
        if not isinstance(stage, Verified):
            return []
        sealed = stage.sealed()
        self._stages[key] = sealed
        return [AppendPublish(key, sealed.publish)]

    def _append_failed(self, event: AppendFailed) -> list[Action]:
        if event.outcome == "fenced":
            return self._settle(event.key, "fenced", event.reason)
        # After "unknown" the record may be in the storage all the same. If it is, the generation is
        # whole, and the next one's receipts take over from it: too careful an answer hurts nobody.
        reason = f"the commit log was not written: {event.reason}"
        return self._settle(event.key, "failed", reason, uncertain=event.outcome == "unknown")

    # --- the log ----------------------------------------------------------------------------------

    def _read(self, history: History) -> list[Action]:
        self.attempt = max(self.attempt, history.attempt)
        for record in history.records:
            body = record.body
            if isinstance(body, PublishBody):
                self._published[Key(body.attempt, body.number)] = record.seq
        actions: list[Action] = []
        for key in list(self._stages):
            if key in self._published:
                # Another process of the same attempt, killed since, finished what this one began.
                actions += self._publish(key, self._published[key])
            elif key.attempt < self.attempt:
                # Not in the log before the attempt that fences it, so never.
                actions += self._refuse(self._fenced_fate(key))
        return actions

    def _publish(self, key: Key, seq: int) -> list[Action]:
        self._published[key] = seq
        self._stages.pop(key, None)
        fate = self._published_fate(key)
        # Ranks first: they wait, and the hint is only a hint.
        return [*self._answers(key, fate), RefreshHint()]

    def _answers(self, key: Key, fate: Fate) -> list[Action]:
        return [Answer(call.number, fate) for call in self._waiting.pop(key, [])]

    # --- fates ------------------------------------------------------------------------------------

    def _time_out(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for key, stage in list(self._stages.items()):
            if isinstance(stage, Staged | Checked) and now - stage.since >= self._ack_timeout_s:
                missing, omission = _omitted(stage)
                reason = f"{name_ranks(missing)} {omission} within {self._ack_timeout_s:g} s"
                actions += self._settle(key, "failed", reason, missing=missing)
        return actions

    def _give_up(self, reason: str) -> list[Action]:
        """Settle all that waits for the storage, so that no rank waits with it.

        An append that is on its way may yet come through: too careful an answer hurts nobody, as
        after an append that failed.
        """
        actions: list[Action] = []
        for key, stage in list(self._stages.items()):
            if not isinstance(stage, Staged):
                uncertain = isinstance(stage, Sealed)
                actions += self._settle(key, "failed", reason, uncertain=uncertain)
        return actions

    def _settle(self, key: Key, kind: Kind, reason: str, **details: object) -> list[Action]:
        if key not in self._stages:
            return []
        return self._refuse(_fate(key, kind, reason, **details))

    def _refuse(self, fate: Fate) -> list[Action]:
        key = Key(fate.attempt, fate.number)
        self._refused[key] = fate
        self._stages.pop(key, None)
        return self._answers(key, fate)

    def _published_fate(self, key: Key) -> Fate:
        return Fate("published", key.number, key.attempt, seq=self._published[key])

    def _fenced_fate(self, key: Key) -> Fate:
        reason = f"attempt {key.attempt} is over: attempt {self.attempt} has opened"
        return _fate(key, "fenced", reason, attempt=self.attempt)


def _fate(key: Key, kind: Kind, reason: str, **details: object) -> Fate:
    return Fate(kind, key.number, key.attempt, reason, None, details)


def _omitted(stage: Staged | Checked) -> tuple[list[int], str]:
    """Return who is waited for, and what he did not do."""
    if isinstance(stage, Staged):
        return stage.missing, "did not acknowledge"
    return stage.unread, "did not read back the shard of the rank before"


def _waits_for(stage: Stage) -> str:
    match stage:
        case Staged():
            return f"the acknowledgement of {name_ranks(stage.missing)}"
        case Acknowledged():
            return "the check of its shards"
        case Checked():
            return f"the read-back by {name_ranks(stage.unread)}"
        case Verified():
            return "its manifest"
        case Sealed():
            return "its record in the commit log"
