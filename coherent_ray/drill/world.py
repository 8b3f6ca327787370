"""The protocol as a world of values: what may happen next, and the world that it makes.

Two places for coordinators, the ranks of each attempt, a network that loses and doubles, a storage.
Nothing is modelled twice: acknowledgements go to the product's `Coordinator`, what that asks for is
done by the product's `perform` and `CommitLog` over files in memory, and attempts are opened by
`CommitLog.open_attempt`. Only time, chance and the network are this module's, and they are choices:
`World.next` lists them all. A publish is two of them, since another may act between the reading of
the log and the creation of the record.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from coherent_ray.commit.ballot import Acknowledged, Checked, Stage, Staged
from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    Answer,
    AppendPublish,
    AskReadBack,
    CheckShards,
    Event,
    HistoryRead,
    Key,
    RefreshHint,
    StorageAction,
    Tick,
    WriteManifest,
)
from coherent_ray.commit.generations import Generations
from coherent_ray.commit.history import History
from coherent_ray.commit.leftovers import survey
from coherent_ray.commit.log import CommitLog, record_path
from coherent_ray.commit.manifest import Acknowledgement
from coherent_ray.commit.performer import perform
from coherent_ray.commit.read_back import read_back
from coherent_ray.commit.records import RetireBody
from coherent_ray.drill.miniature import RUN, Line, header_of_generation, write_and_word
from coherent_ray.storage.base import Entry
from coherent_ray.storage.testing.faults import flipped
from coherent_ray.storage.testing.memory import MemoryStorage

COORDINATORS = 2
LATE = 1e9


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may happen, all in all."""

    ranks: int = 2
    attempts: int = 2
    crashes: int = 1
    losses: int = 1
    doubles: int = 1
    timeouts: int = 1
    reads_back: bool = False
    """Whether ranks read one another's shards before anything is published."""
    flips: int = 0
    """Bits that turn between a rank and the storage."""
    refers: bool = False
    """Whether what a later attempt saves refers to what is latest when it opens."""
    prunes: int = 0
    """Generations that are given up, whichever, and whose files go."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of one attempt, with one generation to save."""

    attempt: int
    number: int
    rank: int
    phase: str = "computes"
    """``computes``, ``waits``, ``reads``, or the fate that it heard."""
    has_read: bool = False
    """Whether it has read another's shard, and says so from then on."""
    earlier: tuple[tuple[int, int], ...] = ()
    """Generations that its one refers to, by number and attempt: the base last."""

    @property
    def key(self) -> Key:
        """Its generation."""
        return Key(self.attempt, self.number)

    @property
    def line(self) -> Line:
        """Its generation, and what that came from."""
        return (*self.earlier, (self.number, self.attempt))


@dataclass(frozen=True, slots=True, eq=False)
class Office:
    """A live coordinator; never changed, only replaced."""

    machine: Coordinator
    todo: tuple[StorageAction, ...] = ()
    seen: int | None = None
    """Where it has just read the log to its end, for the record that it is about to create."""
    words: frozenset[tuple[Key, int]] = frozenset()
    """What ranks have told it: generation and rank."""

    @property
    def identity(self) -> tuple[object, ...]:
        """All that decides what it will do."""
        machine = self.machine
        stages = [
            (
                key,
                type(stage).__name__,
                tuple(sorted(getattr(stage, "votes", ()))),
                tuple(sorted(getattr(stage, "read", ()))),
            )
            for key, stage in sorted(machine._stages.items())
        ]
        return (
            machine.attempt,
            tuple(sorted(machine._published.items())),
            tuple(sorted((key, fate.kind) for key, fate in machine._refused.items())),
            tuple(stages),
            tuple((key, tuple(sorted(calls))) for key, calls in sorted(machine._waiting.items())),
            tuple((type(a).__name__, getattr(a, "key", None)) for a in self.todo),
            self.seen,
        )


Message = tuple[str, int, object]
"""``("word", member, office)``, ``("read", member, office)`` where it has read a shard before, or
``("answer", member, kind)``, where the kind of a request to read is `READ`."""
READ = "read"


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """One moment."""

    bounds: Bounds
    files: dict[str, bytes] = field(default_factory=dict)
    history: History = field(default_factory=History)
    offices: tuple[Office | None, ...] = (None,) * COORDINATORS
    members: tuple[Member, ...] = ()
    network: tuple[Message, ...] = ()
    told: frozenset[tuple[Key, str]] = frozenset()
    """Fates that left a coordinator, by generation."""
    asked: tuple[str, ...] = ()
    """What was asked for that must not be, in words; the machine's own rules."""

    doomed: tuple[str, ...] | None = ()
    """Files that a prune has found and is about to delete; None: it has given up a generation, and
    has not looked yet."""

    turned: frozenset[tuple[Key, int]] = frozenset()
    """Shards, by generation and rank, of which a bit turned on the way to the storage."""

    @property
    def damaged(self) -> set[Key]:
        """The generations of which a bit has turned."""
        return {key for key, _ in self.turned}

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes this world another one; the hint, which nobody believes, does not."""
        named = tuple(path for path in sorted(self.files) if path != "latest.json")
        records = tuple(record.digest for record in self.history.records)
        offices = tuple(office.identity if office else None for office in self.offices)
        network = tuple(sorted(self.network, key=repr))
        seen = (self.told, self.asked, self.turned, self.doomed)
        return (self.bounds, named, records, offices, self.members, network, seen)

    def next(self) -> Iterator[tuple[str, World]]:
        """Yield everything that may happen now: in words, and what the world is then."""
        for index in range(COORDINATORS):
            yield from self._of_office(index)
        for index in range(len(self.members)):
            yield from self._of_member(index)
        for message in dict.fromkeys(self.network):
            yield from self._of_message(message)
        yield from self._of_prunes()

    # --- prunes -----------------------------------------------------------------------------------

    def _of_prunes(self) -> Iterator[tuple[str, World]]:
        """Yield the steps of a prune, between any two of which others may act.

        Any live generation may be given up, also those that retention would never choose.
        """
        if self.doomed is None:
            yield "a prune looks at what is left over", replace(self, doomed=self._left_over())
        elif self.doomed:
            files = {path: data for path, data in self.files.items() if path not in self.doomed}
            yield "a prune deletes what it found", replace(self, files=files, doomed=())
        if self.doomed is None or not self.bounds.prunes:
            return
        for publish in self.history.live:
            storage, log = self._reached(None)
            log.append(RetireBody(publish.number, publish.attempt), self.history.attempt)
            bounds = replace(self.bounds, prunes=self.bounds.prunes - 1)
            given_up = replace(
                self, bounds=bounds, files=storage.files, history=log.read_on(), doomed=None
            )
            yield f"a prune gives up {publish.name}", given_up

    def _left_over(self) -> tuple[str, ...]:
        storage, log = self._reached(None)
        generations = Generations(storage, log)
        found = survey(storage, generations, self.history, self.history.retired, [])
        return tuple(entry.path for entry in found.files)

    # --- coordinators -----------------------------------------------------------------------------

    def _of_office(self, index: int) -> Iterator[tuple[str, World]]:
        office, bounds = self.offices[index], self.bounds
        if office is None:
            if index and self.offices[0] is None:
                return  # the two places are alike
            machine = Coordinator(RUN, self.history, read_back=bounds.reads_back)
            yield f"coordinator {index} starts", self._seat(index, Office(machine))
            return
        if bounds.crashes:
            fewer = replace(self, bounds=replace(bounds, crashes=bounds.crashes - 1))
            yield f"coordinator {index} is killed", fewer._seat(index, None)
        if bounds.attempts:
            yield f"an attempt opens at {index}", self._open(index, office)
        if office.machine.attempt < self.history.attempt:
            read_on = self._hear(index, office, HistoryRead(self.history))
            yield f"coordinator {index} reads on", read_on
        if bounds.timeouts and office.machine.deadline is not None:
            later = replace(self, bounds=replace(bounds, timeouts=bounds.timeouts - 1))
            later = later._hear(index, office, HistoryRead(self.history))
            waiting = later.offices[index]
            assert waiting is not None
            yield f"time runs out at {index}", later._hear(index, waiting, Tick())
        if office.todo:
            yield from self._work(index, office)

    def _open(self, index: int, office: Office) -> World:
        storage, log = self._reached(None)
        token = f"token-{self.bounds.attempts}"
        attempt = CommitLog(storage, f"opens-{index}").open_attempt(RUN, token).seq
        history = log.read_on()
        attempt = history.attempt
        bounds = replace(self.bounds, attempts=self.bounds.attempts - 1)
        earlier = self._latest_line() if bounds.refers else ()
        joined = tuple(
            Member(attempt, history.next_number, rank, earlier=earlier)
            for rank in range(bounds.ranks)
        )
        opened = replace(
            self, bounds=bounds, files=storage.files, history=history,
            members=self.members + joined,
        )  # fmt: skip
        return opened._hear(index, office, HistoryRead(history))

    def _work(self, index: int, office: Office) -> Iterator[tuple[str, World]]:
        action, *rest = office.todo
        what = type(action).__name__
        if isinstance(action, AppendPublish) and office.seen is None:
            looked = replace(office, seen=self.history.seq)
            yield f"coordinator {index} reads the log to append", self._seat(index, looked)
            return
        storage, log = self._reached(office.seen)
        event = perform(action, storage, log)
        storage.fresh = True
        done = replace(self, files=storage.files, history=log.read_on())
        after = replace(office, todo=tuple(rest), seen=None)
        heard = done._seat(index, after) if event is None else done._hear(index, after, event)
        yield f"coordinator {index}: {what}", heard
        if self.bounds.crashes and not isinstance(action, CheckShards | RefreshHint):
            bounds = replace(self.bounds, crashes=self.bounds.crashes - 1)
            dead = replace(done, bounds=bounds)._seat(index, None)
            yield f"coordinator {index} is killed after {what}", dead

    def _hear(self, index: int, office: Office, event: Event) -> World:
        """Hand a copy of the machine an event, and take in what it answers and asks for."""
        machine = _copied(office.machine)
        now = LATE if isinstance(event, Tick) else 0.0
        todo, network, told = list(office.todo), list(self.network), set(self.told)
        asked = list(self.asked)
        for action in machine.handle(event, now):
            if isinstance(action, Answer):
                told.add((Key(action.fate.attempt, action.fate.number), action.fate.kind))
                network.append(("answer", action.call, action.fate.kind))
                continue
            if isinstance(action, AskReadBack):
                network.append(("answer", action.call, READ))
                continue
            todo.append(action)
            if isinstance(action, WriteManifest) and self.bounds.reads_back:
                asked += self._unread(action.key)
            if isinstance(action, CheckShards):
                asked += self._too_early(machine, action.key, office)
        seated = replace(office, machine=machine, todo=tuple(todo))
        changed = replace(self, network=tuple(network), told=frozenset(told), asked=tuple(asked))
        changed = changed._seat(index, seated)
        return changed if self.bounds.losses else changed._all_heard()

    def _all_heard(self) -> World:
        """Let every answer arrive: where none can be lost, when it does makes no difference."""
        world = replace(self, network=tuple(m for m in self.network if m[0] != "answer"))
        for kind, member, what in self.network:
            if kind == "answer":
                world = world._answered(member, str(what))
        return world

    def _answered(self, index: int, what: str) -> World:
        """Let a rank hear an answer; one to a call that it has repeated since tells it nothing."""
        member = self.members[index]
        if member.phase != "waits" or (what == READ and member.has_read):
            return self
        return self._now(index, "reads" if what == READ else what)

    def _unread(self, key: Key) -> Iterator[str]:
        unread = [m.rank for m in self.members if m.key == key and not m.has_read]
        if unread:
            yield f"unread: {key} is written down before ranks {unread} have read"

    def _too_early(self, machine: Coordinator, key: Key, office: Office) -> Iterator[str]:
        if key.attempt < machine.attempt:
            yield f"fenced: {key} is worked on in attempt {machine.attempt}"
        missing = [r for r in range(self.bounds.ranks) if (key, r) not in office.words]
        if missing:
            yield f"early: {key} is decided without ranks {missing}"

    # --- ranks and what is between ----------------------------------------------------------------

    def _of_member(self, index: int) -> Iterator[tuple[str, World]]:
        member = self.members[index]
        who = f"rank {member.rank} of {member.key}"
        if member.phase == "computes":
            files = _shard(member.rank, member.line, self.bounds.ranks)[1]
            written = replace(self, files=self.files | files)
            yield from written._calls(index, f"{who} writes and calls")
            if self.bounds.flips:
                bounds = replace(self.bounds, flips=self.bounds.flips - 1)
                wrong = {path: flipped(data, -3) for path, data in files.items()}
                turned = self.turned | {(member.key, member.rank)}
                spoilt = replace(self, files=self.files | wrong, bounds=bounds, turned=turned)
                yield from spoilt._calls(index, f"{who} writes, a bit turns, it calls")
        elif member.phase == "reads":
            members = list(self.members)
            members[index] = replace(member, has_read=True)
            read = replace(self, members=tuple(members))
            yield from read._calls(index, f"{who} reads and calls")
        elif self._forgotten(index):
            yield from self._calls(index, f"{who} calls again")

    def _calls(self, index: int, what: str) -> Iterator[tuple[str, World]]:
        for place, office in enumerate(self.offices):
            if office is not None:
                kind = "read" if self.members[index].has_read else "word"
                word: Message = (kind, index, place)
                sent = replace(self, network=(*self.network, word))
                yield f"{what} {place}", sent._now(index, "waits")

    def _forgotten(self, index: int) -> bool:
        """Whether a rank waits, and nobody will ever answer: its call is made again."""
        if self.members[index].phase != "waits":
            return False
        on_its_way = any(message[1] == index for message in self.network)
        kept = any(
            index in {call.number for call in calls}
            for office in self.offices
            if office is not None
            for calls in office.machine._waiting.values()
        )
        return not on_its_way and not kept

    def _of_message(self, message: Message) -> Iterator[tuple[str, World]]:
        kind, index, what = message
        network = list(self.network)
        network.remove(message)
        left = replace(self, network=tuple(network))
        bounds = self.bounds
        if bounds.losses:
            fewer = replace(bounds, losses=bounds.losses - 1)
            yield f"a lost {kind}", replace(left, bounds=fewer)
        if kind == "answer":
            yield f"rank hears {what}", left._answered(index, str(what))
            return
        assert isinstance(what, int)
        office = self.offices[what]
        if office is None:
            yield "a word reaches nobody", left
            return
        member = self.members[index]
        ack = self._word(member, has_read=kind == "read")
        told = replace(office, words=office.words | {(member.key, member.rank)})
        if ack.attempt > told.machine.attempt:  # as the service does
            left = left._hear(what, told, HistoryRead(self.history))
            told = left.offices[what] or told
        heard = left._hear(what, told, AckReceived(ack, index))
        yield f"word of rank {member.rank} at {what}", heard
        if bounds.doubles:
            fewer = replace(bounds, doubles=bounds.doubles - 1)
            again = replace(left, network=self.network, bounds=fewer)
            heard = again._hear(what, told, AckReceived(ack, index))
            yield f"doubled word at {what}", heard

    # --- leaves -----------------------------------------------------------------------------------

    def _word(self, member: Member, *, has_read: bool) -> Acknowledgement:
        ranks = self.bounds.ranks
        ack = _shard(member.rank, member.line, ranks)[0]
        if not has_read:
            return ack
        storage = MemoryStorage()
        storage.files = self.files
        shard = _shard((member.rank - 1) % ranks, member.line, ranks)[0].shard
        header = header_of_generation(member.number, member.attempt, ranks)
        return replace(ack, read_back=read_back(storage, header, shard))

    def _latest_line(self) -> Line:
        latest = self.history.latest
        key = Key(latest.attempt, latest.number) if latest else None
        return next((member.line for member in self.members if member.key == key), ())

    def _seat(self, index: int, office: Office | None) -> World:
        offices = list(self.offices)
        offices[index] = office
        return replace(self, offices=tuple(offices))

    def _now(self, index: int, phase: str) -> World:
        members = list(self.members)
        members[index] = replace(members[index], phase=phase)
        return replace(self, members=tuple(members))

    def _reached(self, seen: int | None) -> tuple[_Stale, CommitLog]:
        """Return a copy of the storage, and a view of the log that has read up to some record."""
        storage = _Stale(self.history.seq if seen is None else seen)
        storage.files = dict(self.files)
        log = CommitLog(storage, "writer")
        log._known = History.of(self.history.records[: storage.seen])
        return storage, log


def word_of(rank: int, attempt: int, number: int, ranks: int) -> Acknowledgement:
    """Return what a rank says when it has written its shard."""
    return _shard(rank, ((number, attempt),), ranks)[0]


class _Stale(MemoryStorage):
    """A storage whose log ends where it was read to, until its reader tries to write."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen
        self.fresh = False
        """Whether all is seen by now."""

    def create(self, path: str, data: bytes | bytearray | memoryview) -> None:
        """As in memory; from now on all is seen."""
        self.fresh = True
        super().create(path, data)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """As in memory, without what is not seen."""
        yield from (entry for entry in super().list(prefix) if not self._hides(entry.path))

    def _file(self, path: str) -> bytes:
        return super()._file("unseen" if self._hides(path) else path)

    def _hides(self, path: str) -> bool:
        return not self.fresh and path.startswith("log/") and path > record_path(self.seen)


def _copied(machine: Coordinator) -> Coordinator:
    made = copy.copy(machine)
    made._published = dict(machine._published)
    made._refused = dict(machine._refused)
    made._stages = {key: _copied_stage(stage) for key, stage in machine._stages.items()}
    made._waiting = {key: list(calls) for key, calls in machine._waiting.items()}
    return made


def _copied_stage(stage: Stage) -> Stage:
    match stage:
        case Staged():
            return replace(stage, votes=dict(stage.votes), read=dict(stage.read))
        case Acknowledged() | Checked():
            return replace(stage, read=dict(stage.read))
        case _:
            return stage


@functools.cache
def _shard(rank: int, line: Line, ranks: int) -> tuple[Acknowledgement, dict[str, bytes]]:
    storage = MemoryStorage()
    base = _shard(rank, line[:-1], ranks)[0].shard if len(line) > 1 else None
    ack = write_and_word(storage, rank, line, ranks, base)
    return ack, storage.files
