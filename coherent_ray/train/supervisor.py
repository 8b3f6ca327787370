"""The supervisor: the process that the user typed, which outlives the driver and everything in Ray.

It imports neither Ray nor torch, so it starts at once and cannot be taken down with them. It
starts a driver process, passes on its events and the user's signals, and starts another when that
one dies. If the supervisor itself is killed, its driver ends too, and the same command resumes
the run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from coherent_ray.config import Config
from coherent_ray.errors import ClusterError, CoherentRayError, Interrupted, TrainingFailed
from coherent_ray.train import driver_log, events, published
from coherent_ray.train.events import Event
from coherent_ray.train.starting import Starting

OnEvent = Callable[[Event], None]

DRIVER = (sys.executable, "-m", "coherent_ray.train.driver")
#: Drivers in a row that may end without one update.
BARREN_LIVES = 3
#: Drivers in a row that may fail to bring up Ray.
RAYLESS_LIVES = 3
#: Seconds between two drivers at most.
LONGEST_PAUSE_S = 10.0
#: Seconds between two looks at whether somebody asks to stop.
_LOOK_S = 0.1
_READ_BYTES = 65_536
#: Linux: the signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1
#: Looked up here: between fork and exec, nothing may be that takes a lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    stopped: bool
    """It was asked to stop, and has updates left."""
    facts: dict[str, Any]
    """``run_id``, ``updates`` (None: it ended before they could be counted), ``done``, ``latest``,
    ``complete``, ``saves``."""
    restarts: int
    """Drivers that died and were replaced."""
    log: Path
    """Where the drivers' own output lies; a driver that said nothing leaves none."""
    restarted: dict[str, int] = field(default_factory=dict)
    """How often a ``controller``, ``worker group`` or ``coordinator`` was, as drivers told it."""


@dataclass(slots=True)
class _Life:
    """What one driver said."""

    status: int = 0
    finished: Event | None = None
    error: CoherentRayError | None = None
    found: Event | None = None
    """What it found in the root before it started anything."""
    started: bool = False
    cause: str = ""
    """The last line that it wrote, where it ended by itself."""
    progressed: bool = False
    updates: set[int] = field(default_factory=set)


class Supervisor:
    """Runs one configuration to its end."""

    def __init__(
        self,
        config: Config,
        on_event: OnEvent,
        *,
        verbose: bool = False,
        command: Sequence[str] = DRIVER,
    ) -> None:
        """Make a supervisor.

        Args:
            config: The run.
            on_event: Called with everything that happens, in this thread.
            verbose: Let Ray's and the driver's own output through to standard error.
            command: Starts a driver. It gets the configuration as JSON on standard input, and as
                its last argument the descriptor that its events go to.
        """
        self._config = config.resolved()
        self._on_event = on_event
        self._verbose = verbose
        self._command = [*command]
        self._child: subprocess.Popen[str] | None = None
        self._signals = 0
        self._said = False
        self._restarts = 0
        self._restarted: Counter[str] = Counter()
        self._barren = 0
        self._rayless = 0
        self._hints: set[str] = set()
        self._seen_cluster = False
        self._alive_at = time.monotonic()
        self._deaths = 0
        self._latest: str | None = None
        self._training = False
        self._starting = Starting(self._config.cluster, self._alive_at)
        self._log = driver_log.place(self._config.run.root)

    def run(self) -> Outcome:
        """Train until the run is complete, or was asked to stop.

        Raises:
            CoherentRayError: It cannot go on; says why.
        """
        previous = {s: signal.signal(s, self._pass_on) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        except CoherentRayError as error:
            self._explain(error)
            raise
        finally:
            driver_log.leave(self._log)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._end_child()

    def _run(self) -> Outcome:
        while True:
            life = self._one_life()
            if life.finished is not None:
                facts = life.finished.facts
                return self._outcome(facts)
            if self._was_asked(life):
                return self._stopped(life)
            if life.error is not None and not self._may_return(life.error):
                raise life.error
            self._restarts += 1
            self._deaths += life.started
            reason = _reason(life)
            self._require_patience(life, reason)
            self._on_event(Event("restarting", reason))
            self._hint(life)
            self._pause(min(2.0**self._barren, LONGEST_PAUSE_S))
            if self._signals:
                return self._stopped(None)

    def _explain(self, error: CoherentRayError) -> None:
        """Add to an error what only this process knows: where the log is, and what is published."""
        if self._latest is not None:
            error.details.setdefault("latest", self._latest)
        elif (known := published.in_root(self._config)) is not None:
            # Where nothing is known, nothing is said: that there is none is another matter.
            error.details.setdefault("latest", known["latest"])
        if driver_log.has_words(self._log):
            error.details.setdefault("log", str(self._log))
            if isinstance(error, TrainingFailed | ClusterError):
                error.details.setdefault("last_words", driver_log.last_words(self._log))

    def _was_asked(self, life: _Life) -> bool:
        """Whether a driver that did not finish ended because somebody asked to stop.

        A Ray that starts may get the signal, too, and fail by it.
        """
        if isinstance(life.error, Interrupted):
            return True
        return self._signals > 0 and (life.error is None or isinstance(life.error, ClusterError))

    def _stopped(self, life: _Life | None) -> Outcome:
        """Return how a run ended that was stopped where nothing trained.

        Args:
            life: The driver that ended by it; None: there was none.

        Raises:
            Interrupted: It trained, and what it did since the last generation is lost.
        """
        if life is not None and self._training:
            raise Interrupted("stopped before one more generation could be published")
        facts = life.found.facts if life and life.found else published.in_root(self._config)
        if facts is None:
            raise Interrupted("stopped before the training began", where=self._config.run.root)
        return self._outcome({**facts, "stopped": True, "saves": []})

    def _outcome(self, facts: dict[str, Any]) -> Outcome:
        restarted = dict(self._restarted)
        return Outcome(bool(facts["stopped"]), facts, self._restarts, self._log, restarted)

    def _pause(self, seconds: float) -> None:
        """Wait between two drivers, but not once somebody asks to stop."""
        until = time.monotonic() + seconds
        while not self._signals and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))

    def _may_return(self, error: CoherentRayError) -> bool:
        """Whether what failed is a cluster that was there before, or one that may yet start."""
        passing = self._seen_cluster or error.details.get("may_pass") is True
        return passing and isinstance(error, ClusterError)

    def _hint(self, life: _Life) -> None:
        """Say, once, where a driver's words are, and what to do about its end."""
        hints = []
        if driver_log.has_words(self._log):
            hints.append(f"the driver's log: {self._log}")
        if life.error is not None and life.error.remedy:
            hints.append(f"what to do: {life.error.remedy}")
        for hint in hints:
            if hint not in self._hints:
                self._hints.add(hint)
                self._on_event(Event("note", hint))

    def _require_patience(self, life: _Life, reason: str) -> None:
        """Count deaths, and lives that led to nothing, and give up after some.

        A cluster that was there before gets time to come back; a local one does not go away, so
        what kills its driver again and again is something else.
        """
        now = time.monotonic()
        allowed = self._config.cluster.max_failures
        if life.started and self._deaths > allowed >= 0:
            raise TrainingFailed(
                f"{self._deaths} driver{'s' if self._deaths > 1 else ''} died, and "
                f"cluster.max_failures is {allowed}; the last one: {reason}",
                where=str(self._log),
                remedy="see its last words there; cluster.max_failures allows more",
            )
        self._rayless = self._rayless + 1 if life.found and not life.started else 0
        if life.progressed:
            self._barren = 0
            self._alive_at = now
            return
        self._barren += 1
        cluster = self._config.cluster
        if cluster.address is not None and self._seen_cluster:
            if now - self._alive_at < cluster.reconnect_timeout_s:
                return
        elif self._rayless >= RAYLESS_LIVES:
            raise self._no_ray(life, reason)
        elif self._barren <= BARREN_LIVES:
            return
        raise TrainingFailed(
            f"{self._barren} drivers in a row ended without one update; the last one: {reason}",
            where=str(self._log),
            remedy="the log named here has their last words",
        )

    def _no_ray(self, life: _Life, reason: str) -> ClusterError:
        """Return the error of drivers that could not bring up Ray."""
        return ClusterError(
            f"{self._rayless} drivers in a row ended before Ray was up; the last one: {reason}",
            where=self._config.cluster.address or "local",
            remedy=life.error.remedy if life.error else "the log named here has their last words",
        )

    def _one_life(self) -> _Life:
        """Start a driver, pass on what it says, and return when it has ended."""
        reading, writing = os.pipe()
        self._training = False
        self._starting = Starting(self._config.cluster, time.monotonic())
        written = driver_log.size(self._log)
        with self._log.open("ab") as log:
            self._child = child = subprocess.Popen(
                [*self._command, str(writing)],
                stdin=subprocess.PIPE,
                stdout=None if self._verbose else log,
                stderr=None if self._verbose else log,
                encoding="utf-8",
                pass_fds=(writing,),
                preexec_fn=_end_with(os.getpid()),  # noqa: PLW1509 - it takes no lock
            )
        os.close(writing)
        if self._signals:
            child.terminate()  # asked while it was being started
        life = _Life()
        try:
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it died at once; its status says so
                child.stdin.write(self._config.model_dump_json())
                child.stdin.close()
            for event in events.read(self._lines(reading, child)):
                self._note(life, event)
        finally:
            os.close(reading)
        life.status = child.wait()
        if life.status > 0:  # killed, it had no time to say by what
            life.cause = driver_log.cause(self._log, written)
        return life

    def _lines(self, pipe: int, child: subprocess.Popen[str]) -> Iterator[str]:
        """Yield the lines that a driver sends, until it ends.

        Not until the pipe is closed: a process that it left behind may hold it open.
        """
        rest = b""
        while True:
            self._say_that_it_stops()
            self._say_what_is_late()
            # Asked in this order: what it sent before it ended is read.
            ended = child.poll() is not None
            if not select.select([pipe], [], [], 0.0 if ended else _LOOK_S)[0]:
                if ended:
                    break
                continue
            data = os.read(pipe, _READ_BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        yield rest.decode(errors="replace")

    def _note(self, life: _Life, event: Event) -> None:
        self._starting.note(event.kind, time.monotonic())
        match event.kind:
            case "finished":
                life.finished = event
            case "error":
                life.error = events.to_error(event)
            case "found":
                life.found = event
                self._latest = event.facts.get("latest") or self._latest
            case "started":
                life.started = self._seen_cluster = True
                self._latest = event.facts.get("latest") or self._latest
                self._alive_at = time.monotonic()
                self._on_event(event)
            case "progress":
                generation = event.facts.get("generation")
                self._latest = generation["name"] if generation else self._latest
                update = event.facts.get("progress", {}).get("update")
                self._training = self._training or update is not None
                if update is not None:
                    life.updates.add(int(update))
                    life.progressed = len(life.updates) > 1
                self._on_event(event)
            case "restarted":
                self._restarted[str(event.facts["what"])] += int(event.facts["times"])
            case _:
                self._on_event(event)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Ask the driver to stop; the third time, do not ask."""
        self._signals += 1
        child = self._child
        if child is None or child.poll() is not None:
            # Between two drivers. Who waits there looks; but nobody is held here for ever.
            if self._signals > 2:
                raise KeyboardInterrupt
            return
        if self._signals > 2:
            child.kill()
            return
        child.send_signal(signal.SIGTERM)

    def _say_that_it_stops(self) -> None:
        # Not said by the handler: it may have interrupted a display in the middle of a line.
        if self._signals and not self._said:
            self._said = True
            does = "publishing one more generation" if self._training else "nothing trains yet"
            text = f"stopping: {does} (twice more to stop at once)"
            self._on_event(Event("note", text))

    def _say_what_is_late(self) -> None:
        if not self._signals:
            for words in self._starting.words(time.monotonic()):
                self._on_event(Event("note", words))

    def _end_child(self) -> None:
        child = self._child
        if child is not None and child.poll() is None:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def supervise(config: Config, on_event: OnEvent, *, verbose: bool = False) -> Outcome:
    """Run a configuration to its end, whatever dies on the way.

    Args:
        config: The run.
        on_event: Called with everything that happens.
        verbose: Let Ray's own output through.

    Raises:
        CoherentRayError: It cannot go on; says why.
    """
    return Supervisor(config, on_event, verbose=verbose).run()


def _end_with(parent: int) -> Callable[[], None]:
    """Return what makes a child be asked to stop when its parent is gone; runs in the child."""

    def end_with_parent() -> None:
        if _prctl is not None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)  # it went before it could be asked

    return end_with_parent


def _reason(life: _Life) -> str:
    """Return how a driver ended that did not finish, in one line."""
    if life.error is not None:
        return life.error.what
    died = f"the driver died ({_status(life.status)})"
    return f"{died}: {life.cause}" if life.cause else died


def _status(status: int) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}"
