"""The coordinator at work in an asyncio loop: storage, clock, and the calls that wait.

`Service` gives the machine of `coherent_ray.commit.coordinator` what it must not have itself. It
knows no Ray: the actor in the training layer is a list of methods round it. It never fails to
start: a log that cannot be read makes it *degraded*, which it says in every answer, until a later
call can read it. Thousands of calls may wait; no thread waits with them. The storage is asked from
a thread, one request at a time, so publishes have one order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from coherent_ray.commit.coordinator import Coordinator
from coherent_ray.commit.events import (
    AckReceived,
    AckWithdrawn,
    Answer,
    AppendFailed,
    AppendPublish,
    AskReadBack,
    CheckShards,
    Event,
    HistoryRead,
    Key,
    PublishAppended,
    RefreshHint,
    StorageAction,
    StorageSilent,
    Tick,
)
from coherent_ray.commit.fates import Fate
from coherent_ray.commit.history import History
from coherent_ray.commit.log import DIRECTORY, CommitLog
from coherent_ray.commit.manifest import Acknowledgement, load
from coherent_ray.commit.performer import perform
from coherent_ray.commit.profiles import Profile, Timekeeper, write_profile
from coherent_ray.commit.read_back import Reply, Request
from coherent_ray.commit.records import PublishBody
from coherent_ray.commit.retention import Policy
from coherent_ray.commit.rounds import Rounds
from coherent_ray.commit.scrubbing import Schedule
from coherent_ray.commit.upkeep import Upkeep
from coherent_ray.errors import CoherentRayError, LogDamaged, StorageError, WrongRun
from coherent_ray.storage.attended import AttendedStorage
from coherent_ray.storage.base import Storage

#: Seconds that the storage may owe the answer to one call, unless the user chooses.
STORAGE_TIMEOUT_S = 300.0
#: Seconds between two looks at a storage that owes one for longer.
LOOK_AGAIN_S = 0.5
#: Seconds between two tries to read a log that could not be read.
RETRY_S = 1.0
#: Seconds that somebody who can go on without the log waits for it.
LOG_WAIT_S = 5.0
#: Seconds that the opening of an attempt may take before it is said why: callers wait for longer.
OPEN_WAIT_S = 45.0
#: Seconds that `close` lets a piece of I/O take that is on its way.
CLOSE_WAIT_S = 10.0

#: Of a profile, what the coordinator itself has measured.
_TIMES = ("acknowledged_s", "checked_s", "appended_s", "published_s")

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Service:
    """One run's coordinator, alive. All methods belong to one event loop.

    Attributes:
        degraded: Why the log cannot be read; None: it can.
        generation: The newest published generation as JSON, with its timings where this service
            published it; None: there is none, or it is not known yet.
        last_error: What went wrong last, in words; None: nothing has.
        upkeep: What prunes behind publishes; None: nothing does.
        rounds: What reads published generations again; None: nothing does.
        saving: Whether ranks have said that they are writing a generation.
    """

    def __init__(
        self,
        run_id: str,
        open_root: Callable[[], Storage],
        *,
        retention: Policy | None = None,
        scrub: Schedule | None = None,
        hook: Callable[[str], None] | None = None,
        storage_timeout_s: float = STORAGE_TIMEOUT_S,
        **options: Any,
    ) -> None:
        """Remember the arguments; the log is read by the first call that needs it.

        Args:
            run_id: The run.
            open_root: Opens the run's root; may raise.
            retention: What to keep; None: nothing is ever pruned.
            scrub: When to read published generations again; None: never.
            hook: Called in the storage's thread at ``publish:begin@UPDATE`` and
                ``publish:end@UPDATE``; None: nobody listens.
            storage_timeout_s: Seconds that the storage may owe the answer to one call; then what
                waits for it fails.
            options: The machine's, see `Coordinator`.
        """
        self._run_id = run_id
        self._open_root = open_root
        self._hook = hook
        self._storage_timeout_s = storage_timeout_s
        self._options = options
        self._attended: AttendedStorage | None = None
        self.degraded: CoherentRayError | None = StorageError("the commit log is not read yet")
        self.generation: dict[str, Any] | None = None
        self.last_error: str | None = None
        self.upkeep = Upkeep(retention, self._note_error) if retention else None
        self.rounds = self._rounds(scrub) if scrub else None
        self.saving = False
        self._machine: Coordinator | None = None
        self._retry_at = 0.0
        self._start: asyncio.Task[None] | None = None
        self._io = asyncio.Lock()
        self._todo: asyncio.Queue[StorageAction] = asyncio.Queue()
        self._worker: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._times = Timekeeper()
        self._unwritten: deque[Profile] = deque()
        self._closed = False

    @property
    def attempt(self) -> int:
        """The newest attempt that is known; 0 where none is."""
        return self._machine.attempt if self._machine else 0

    def in_flight(self) -> dict[str, str]:
        """Return each unsettled generation's name and what it waits for, in words."""
        return self._machine.in_flight() if self._machine else {}

    async def settle_in(self) -> None:
        """Wait until the log is read or cannot be, but not for ever: `LOG_WAIT_S` at most."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ready(), LOG_WAIT_S)

    async def open_attempt(self, token: str, known: int = 0) -> int:
        """Open the run's next attempt, or find the one that this token has opened.

        Args:
            token: Unique to this opening.
            known: The newest attempt that the caller knows of: a log without it is not the run's.

        Raises:
            LogDamaged: The log cannot be trusted, or has lost an attempt.
            WrongRun: The root holds another run.
            StorageError: The storage failed.
        """
        opening = asyncio.create_task(self._open_attempt(token, known))
        await asyncio.wait([opening], timeout=OPEN_WAIT_S)
        if not opening.done() and self._attended and (silence := self._attended.silence()):
            raise silence.error()  # asked again, the same token finds what comes of it
        return await opening

    async def _open_attempt(self, token: str, known: int) -> int:
        if await self._ready() is None and self.degraded is not None:
            raise self.degraded
        attempt, history = await self._blocking(self._append_attempt, token, known)
        self._handle(HistoryRead(history))
        return attempt

    async def acknowledge(self, data: bytes) -> Reply:
        """Take an `Acknowledgement`'s JSON, and return its generation's fate when it is known.

        Where shards are read back, a `Request` comes first: its rank reads, and calls again.
        """
        try:
            ack = load(Acknowledgement, data)
        except ValueError as error:
            return self._failed(0, 0, f"the acknowledgement is damaged: {error}")
        machine = None
        with contextlib.suppress(TimeoutError):
            machine = await asyncio.wait_for(self._ready(), self._storage_timeout_s)
        if machine is not None and ack.attempt > machine.attempt:
            await self._read_on_within(self._storage_timeout_s)
        if machine is None:
            if self._attended and (silence := self._attended.silence()):
                self.degraded = silence.error()
            return self._failed(ack.number, ack.attempt, f"there is no commit log: {self.degraded}")
        if self._closed:
            return self._failed(ack.number, ack.attempt, "the coordinator was stopped")
        number = next(self._numbers)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._times.acknowledged(ack)
        self._handle(AckReceived(ack, number))
        try:
            reply = await future
        except asyncio.CancelledError:
            if not self._closed:
                raise
            return self._failed(ack.number, ack.attempt, "the coordinator was stopped")
        if isinstance(reply, Fate) and reply.kind == "fenced":
            logger.warning("rank %d is too late with %s: %s", ack.rank, reply.name, reply.reason)
        return reply

    async def withdraw(self, attempt: int, number: int, rank: int, reason: str) -> None:
        """Take a rank's word that it will never acknowledge a generation."""
        await self._ready()
        self._handle(AckWithdrawn(Key(attempt, number), rank, reason))

    async def close(self) -> None:
        """Let the piece of I/O that is on its way end, do no more, and answer all who wait."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._io.acquire(), CLOSE_WAIT_S)
        self._closed = True
        for task in (self._worker, self._start, self._ticking, self._timer):
            if task is not None:
                task.cancel()
        for future in self._calls.values():
            future.cancel()
        await asyncio.sleep(0)
        if self.upkeep is not None:
            await self.upkeep.close()
        if self.rounds is not None:
            await asyncio.to_thread(self.rounds.close)

    # --- the log ----------------------------------------------------------------------------------

    async def _ready(self) -> Coordinator | None:
        """Return the machine; None while the log cannot be read."""
        if self._machine is not None:
            return self._machine
        idle = self._start is None or self._start.done()
        if idle and time.monotonic() >= self._retry_at:
            self._start = asyncio.create_task(self._rebuild())
        if self._start is not None:
            # One reading serves all who wait, and outlives those who give up.
            await asyncio.shield(self._start)
        return self._machine

    async def _rebuild(self) -> None:
        try:
            history = await self._blocking(self._open)
        except CoherentRayError as error:
            self._degrade(error)
        except Exception as error:
            self._degrade(StorageError(f"{type(error).__name__}: {error}"))
        else:
            self._machine = Coordinator(self._run_id, history, **self._options)
            self.degraded = None
            self._note_latest(history)
            self._worker = asyncio.create_task(self._work())
            if self.rounds is not None:
                self.rounds.begin(self._storage)

    def _open(self) -> History:
        self._storage = self._open_root()
        self._attended = AttendedStorage(self._storage)
        self._log = CommitLog(self._attended)
        history = self._log.settled()
        if history.run_id not in {None, self._run_id}:
            raise WrongRun(
                f"the root holds run {history.run_id!r}, not {self._run_id!r}",
                where=self._storage.uri,
                remedy="give each run a root of its own, or name the run that is stored here",
            )
        return history

    def _degrade(self, error: CoherentRayError) -> None:
        self.degraded = error
        self.last_error = str(error)
        self._retry_at = time.monotonic() + RETRY_S

    def _append_attempt(self, token: str, known: int = 0) -> tuple[int, History]:
        found = self._log.read_on().attempt
        if found < known:
            raise LogDamaged(
                f"attempt {known} has been opened, and the log ends with attempt {found}",
                where=f"{self._storage.uri}/{DIRECTORY}",
                remedy="See whether the file system of the run is mounted; if it is, put the log "
                "back from a copy of the run.",
                details={"found": found, "known": known},
            )
        self._log.open_attempt(self._run_id, token)
        history = self._log.settled()
        self._log.refresh_hint(history)
        return next(a.attempt for a in history.attempts if a.token == token), history

    async def _read_on_within(self, seconds: float) -> None:
        """Read on, but wait no longer; the reading itself goes on, and keeps its place in line."""
        await asyncio.wait([asyncio.create_task(self._read_on())], timeout=seconds)

    async def _read_on(self) -> None:
        try:
            history = await self._blocking(self._log.settled)
        except CoherentRayError as error:
            self.last_error = str(error)
        else:
            self._handle(HistoryRead(history))

    # --- the machine's hands ----------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if self._machine is None or self._closed:
            return
        for action in self._machine.handle(event, time.monotonic()):
            match action:
                case Answer(call, fate):
                    self._settled(fate)
                    self._answer(call, fate)
                case AskReadBack(call, shard):
                    self._answer(call, Request(shard))
                case _:
                    self._todo.put_nowait(action)
        self._arm()

    def _settled(self, fate: Fate) -> None:
        if fate.kind != "published":
            self.last_error = f"{fate.name}: {fate.reason}"
        self._times.settled(Key(fate.attempt, fate.number))

    def _answer(self, call: int, reply: Reply) -> None:
        future = self._calls.pop(call)
        if not future.done():  # its caller may be gone
            future.set_result(reply)

    async def _work(self) -> None:
        """Do what the machine asks of the storage, one thing after the other, for ever."""
        while True:
            action = await self._todo.get()
            assert self._machine is not None
            if not self._machine.wants(action):
                continue  # given up while it waited here: it must not be published any more
            begun = time.monotonic()
            event = await self._attending(self._perform, action)
            if event is not None:
                self._note(action, event, begun)
                self._handle(event)
            if isinstance(event, PublishAppended):
                self._published(event.key)
            if isinstance(event, AppendFailed) and event.outcome == "fenced":
                # Nobody may be left to hear the answers; the process's own log is.
                logger.warning("fenced, and publishes nothing more: %s", event.reason)
                await self._read_on()

    def _published(self, key: Key) -> None:
        if self.rounds is not None:
            self.rounds.published(key)
        if self.upkeep is not None:
            read_back = bool(self._options.get("read_back"))
            self.upkeep.published(key, self._storage, read_back=read_back)

    def _rounds(self, schedule: Schedule) -> Rounds:
        upkeep = self.upkeep
        return Rounds(
            schedule,
            attempt=lambda: self.attempt,
            busy=lambda: self.saving or bool(self.in_flight()),
            tell=self._note_error,
            doubt=upkeep.doubt if upkeep else lambda key: None,
        )

    def _perform(self, action: StorageAction) -> Event | None:
        """Do one thing; a drill may strike before and after the one that counts."""
        if isinstance(action, RefreshHint):
            perform(action, self._hands, self._log)
            # Last, behind all that somebody waits for or reads by.
            while self._unwritten:
                write_profile(self._hands, self._unwritten.popleft())
            return None
        if self._hook is None or not isinstance(action, AppendPublish):
            return perform(action, self._hands, self._log)
        self._hook(f"publish:begin@{action.body.update}")
        event = perform(action, self._hands, self._log)
        if isinstance(event, PublishAppended):
            self._hook(f"publish:end@{action.body.update}")
        return event

    @property
    def _hands(self) -> Storage:
        assert self._attended is not None
        return self._attended

    async def _attending(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Do something in the storage's thread; while it owes an answer for too long, say so."""
        doing = asyncio.create_task(self._blocking(function, *arguments))
        try:
            while not doing.done():
                left = self._storage_timeout_s
                if self._attended and (silence := self._attended.silence()):
                    left -= silence.lasted_s
                if left <= 0 and (error := self._silence()):
                    # Also what has come to wait since the last look.
                    self._handle(StorageSilent(f"{error.where}: {error.what}"))
                    left = LOOK_AGAIN_S
                await asyncio.wait([doing], timeout=max(left, 0.01))
        finally:
            doing.cancel()
        return doing.result()

    def _silence(self) -> StorageError | None:
        """Return what the storage owes for too long; None: nothing."""
        silence = self._attended.silence() if self._attended else None
        late = silence is not None and silence.lasted_s >= self._storage_timeout_s
        return silence.error() if silence and late else None

    async def _blocking(self, function: Callable[..., Result], *arguments: Any) -> Result:
        async with self._io:
            return await asyncio.to_thread(function, *arguments)

    # --- time -------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.deadline if self._machine else None
        if deadline is not None:
            wait_s = max(0.0, deadline - time.monotonic())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._begin_tick)

    def _begin_tick(self) -> None:
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        # Ranks that seem to be missing may have been answered by another process, which then
        # published: ask the log before calling it a failure, but do not hang where it hangs.
        await self._read_on_within(LOG_WAIT_S)
        self._handle(Tick())

    # --- what a progress display shows ------------------------------------------------------------

    def _note(self, action: StorageAction, event: Event, begun: float) -> None:
        if isinstance(action, CheckShards):
            self._times.checked(action.key, begun)
        if not isinstance(action, AppendPublish) or not isinstance(event, PublishAppended):
            return
        profile = self._times.published(action.body, begun)
        if profile is None:  # settled meanwhile
            return
        times = {name: getattr(profile, name) for name in _TIMES}
        self.generation = _described(action.body, event.seq, times)
        if profile.parts:
            self._unwritten.append(profile)

    def _note_latest(self, history: History) -> None:
        latest = history.latest
        record = history.record_of(latest) if latest else None
        if latest and record:
            self.generation = _described(latest, record.seq, {})

    def _note_error(self, words: str) -> None:
        self.last_error = words

    def _failed(self, number: int, attempt: int, reason: str) -> Fate:
        self.last_error = reason
        return Fate("failed", number, attempt, reason)


def _described(body: PublishBody, seq: int, timings: dict[str, float]) -> dict[str, Any]:
    return {
        "name": body.name,
        "number": body.number,
        "attempt": body.attempt,
        "update": body.update,
        "epoch": body.epoch,
        "seq": seq,
        "timings": dict(timings),
    }
