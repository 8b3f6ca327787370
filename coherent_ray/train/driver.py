"""The driver process: one connection to Ray, one training run after the other until it is done.

Started by `coherent_ray.train.supervisor`, which restarts it when it dies. What happens inside Ray
(a worker dies, a node is lost) Ray Train handles. Handled here: the Train controller dies, and the
run goes on under a new one. What this process cannot survive (the head is gone for good) ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.train import ControllerError, TrainingFailedError

from coherent_ray import config as config_
from coherent_ray.commit.log import CommitLog
from coherent_ray.config import Config
from coherent_ray.errors import ClusterError, CoherentRayError, Interrupted, TrainingFailed
from coherent_ray.storage import open_storage
from coherent_ray.train import coordinators, deaths, events, ownership, placements, preflight
from coherent_ray.train.actor import CoordinatorActor
from coherent_ray.train.events import Event
from coherent_ray.train.local_ray import connected, logs_of
from coherent_ray.train.loop import train
from coherent_ray.train.memory import keepers
from coherent_ray.train.ownership import Owner
from coherent_ray.train.preflight import Preflight
from coherent_ray.train.trainer import make_trainer, set_environment
from coherent_ray.train.watch import Watch

POLL_S = 0.2
#: Seconds between two requests to stop: an attempt that opens in between forgets the first.
ASK_AGAIN_S = 1.0
#: Exit status by which a driver says that a new one should take over.
RESTART = 75
#: Seconds without any answer from Ray after which this driver gives up.
SILENCE_S = 90.0
#: Seconds that the coordinator may owe an answer before it counts as hung, and is started again.
HUNG_S = 20.0
#: Seconds that one question waits for its answer.
_ANSWER_S = 5.0


class StopNow(BaseException):
    """Somebody asked to stop, and nothing is trained yet that a generation could be made of.

    No `Exception`: what is interrupted (the task's own code, Ray's start) must not keep it.
    """


class Driver:
    """One driver's life."""

    #: What the workers run.
    function: Callable[[dict[str, Any]], None] = staticmethod(train)
    #: What its coordinator is made from; None: the product's own.
    actor: type[CoordinatorActor] | None = None

    def __init__(self, config: Config, tell: Any) -> None:
        self._config = config
        self._tell = tell
        self._unanswered_since: float | None = None
        self._stop_asked = threading.Event()
        self._asked_at = 0.0
        self._interruptible = False
        self._me: Owner | None = None
        self._watch = Watch(config.cluster, 0)
        self._saves: dict[str, dict[str, Any]] = {}
        self._skipped: dict[int, int] = {}
        self._cadence: dict[str, Any] | None = None
        self._last_notes: list[str] = []
        self._ended = 0
        self._incarnation: str | None = None

    def listen(self) -> None:
        """Let SIGTERM and SIGINT ask for a stop. For the main thread."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask the run to publish one more generation and end; a signal handler."""
        self._stop_asked.set()
        if self._interruptible:
            self._interruptible = False
            raise StopNow

    def run(self) -> None:
        """Train until the run is complete or was asked to stop.

        Raises:
            CoherentRayError: It cannot go on.
        """
        try:
            self._run()
        except StopNow:
            raise Interrupted("stopped before the training began") from None

    def _run(self) -> None:
        config = self._config
        self._interruptible = not self._stop_asked.is_set()
        before = preflight.check(config)
        self._note(before.notes)
        self._tell(Event("found", facts=_facts(before)))
        if before.complete:
            self._interruptible = False
            self._finished(before, stopped=False)
            return
        set_environment(config.cluster)
        where = config.cluster.address
        self._tell(Event("note", f"connecting to Ray at {where}" if where else "starting Ray"))
        with connected(config.cluster) as address:
            self._interruptible = False
            self.listen()  # again: Ray has just put a handler of its own there
            try:
                self._own(before.run_id)
                job = ray.get_runtime_context().get_job_id()
                own = {"address": address, "pid": os.getpid(), "job": job}
                self._tell(Event("started", facts={**own, **_facts(before)}))
                self._train(before)
            finally:
                self._end_coordinator(before.run_id)

    def _own(self, run_id: str) -> None:
        """Become the run's owner, and see to it that it has a coordinator.

        Raises:
            OwnedElsewhere: Another driver of this cluster trains the run.
            ClusterError: There is no coordinator to be had.
        """
        me = ownership.this_driver()
        # First: a coordinator that has other options is replaced, but not under a living driver.
        ownership.take(run_id, me)
        coordinators.connect_for(self._config, run_id, self.actor)
        ownership.take(run_id, me)
        self._me = me

    def _train(self, before: Preflight) -> None:
        failures = 0
        while not self._fit(before.run_id):
            failures += 1
            if failures > self._config.cluster.max_failures >= 0:
                raise TrainingFailed(
                    f"Ray Train's controller died {failures} times",
                    remedy="see the logs of the head node; cluster.max_failures allows more",
                )
            self._tell(Event("restarting", "Ray Train's controller is gone; starting another"))
            self._restarted("controller")
            placements.release_all()
            if self._stop_asked.is_set():
                break
        if self._stop_asked.is_set() and not self._watch.training:
            after = self._as_published(before)
        else:
            after = preflight.check(self._config)
            self._note(after.notes)
        self._finished(after, stopped=not after.complete)

    def _as_published(self, before: Preflight) -> Preflight:
        """Return what is known of the run, with what the log now says of it."""
        storage = open_storage(self._config.run.root, self._config.storage.options)
        latest = CommitLog(storage).read_end().latest
        if latest is None:
            return before
        return replace(before, done=latest.update, latest=latest.name)

    def _fit(self, run_id: str) -> bool:
        """Run Ray Train once; False: its controller died and another should go on.

        Where somebody asks to stop and no worker trains, nothing is waited for. `fit` blocks, and
        in a main thread would take the signals: so it has a thread of its own.
        """
        handle = coordinators.connect_for(self._config, run_id, self.actor)
        attempt = int(coordinators.answer(handle.ping.remote())["attempt"])
        stale = coordinators.answer(handle.status.remote())["failures"]
        self._watch, self._ended = Watch(self._config.cluster, attempt, stale=stale), 0
        trainer = make_trainer(self._config, self.function)
        outcome: list[BaseException | None] = []

        def fit() -> None:
            try:
                trainer.fit()
            except BaseException as error:
                outcome.append(error)
            else:
                outcome.append(None)

        thread = threading.Thread(target=fit, name="ray-train-fit", daemon=True)
        thread.start()
        heard = time.monotonic()
        while thread.is_alive():
            thread.join(POLL_S)
            if self._look(run_id):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENCE_S and not ray.is_initialized():
                raise ClusterError("Ray does not answer any more", remedy="is the head node up?")
            if self._stop_asked.is_set() and not self._watch.training:
                return True
        self._look(run_id)
        return _judge(outcome[0], self._watch)

    def _look(self, run_id: str) -> bool:
        """Pass on the coordinator's status, and a request to stop; False: no answer."""
        try:
            handle = coordinators.find(run_id)
            if handle is None:
                self._say(self._watch.look(None))
                return True
            if self._stop_asked.is_set() and time.monotonic() - self._asked_at > ASK_AGAIN_S:
                handle.request.remote("stop")
                self._asked_at = time.monotonic()
            held = handle.hold.remote(asdict(self._me)) if self._me else None
            status = ray.get(handle.status.remote(), timeout=_ANSWER_S)
            owner = ray.get(held, timeout=_ANSWER_S)["owner"] if held else None
        except GetTimeoutError:
            self._require_answer(run_id)
            return False
        except (RayError, RuntimeError, ConnectionError, TimeoutError):
            return False
        self._unanswered_since = None
        if self._me and owner and owner["job"] != self._me.job:
            self._me = None
            raise ownership.lost(run_id, Owner(**owner))
        for save in status["progress"].get("saves", []):
            self._saves[save["name"]] = save
        self._note_cadence(status["progress"])
        notes = [*(status.get("notes") or []), *(status["progress"].get("notes") or [])]
        self._note(notes)
        self._say(self._watch.look(status))
        self._count(status)
        self._tell(Event("progress", facts=status))
        return True

    def _note_cadence(self, progress: dict[str, Any]) -> None:
        """Take down which saves were left out, by attempt, and the interval that was chosen."""
        if "attempt" in progress:
            self._skipped[progress["attempt"]] = progress.get("skipped", 0)
            self._cadence = progress.get("cadence")

    def _note(self, notes: Iterable[str]) -> None:
        """Tell what was not told just before: preflight and admission find the same damage."""
        now = list(notes)
        for note in now:
            if note not in self._last_notes:
                self._tell(Event("note", note))
        self._last_notes = now or self._last_notes

    def _count(self, status: dict[str, Any]) -> None:
        """Tell what was started again: the workers, of which `Watch` has words; the coordinator."""
        if self._watch.ends > self._ended:
            self._restarted("worker group", self._watch.ends - self._ended)
            self._ended = self._watch.ends
        before, self._incarnation = self._incarnation, status.get("incarnation")
        if before not in {None, self._incarnation}:
            text = "the coordinator ended; Ray has started it again, and saves go on with it"
            self._tell(Event("note", text))
            self._restarted("coordinator")

    def _restarted(self, what: str, times: int = 1) -> None:
        self._tell(Event("restarted", facts={"what": what, "times": times}))

    def _say(self, words: Iterable[str]) -> None:
        try:
            for text in words:
                self._tell(Event("note", text))
        except (RayError, RuntimeError, ConnectionError):
            return  # Ray could not say what it has; the next look asks again

    def _require_answer(self, run_id: str) -> None:
        """Start a coordinator again that hangs: the ranks' saves would wait for it for ever.

        It answers from an event loop that waits for no storage, so silence means that its process
        is stopped or stuck. What it owed is asked again of the new one.
        """
        now = time.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = now - _ANSWER_S
        if now - self._unanswered_since < HUNG_S:
            return
        self._unanswered_since = None
        text = f"the coordinator has not answered for {HUNG_S:g} s; it is started again"
        self._tell(Event("note", text))
        with contextlib.suppress(RayError, RuntimeError, ConnectionError):
            coordinators.restart(run_id)

    def _end_coordinator(self, run_id: str) -> None:
        """End the coordinator, unless it serves another driver by now."""
        if self._me is None:
            return
        for stop in (keepers.stop, coordinators.stop):
            try:
                stop(run_id, timeout_s=20.0)
            except (RayError, RuntimeError, CoherentRayError):
                continue  # it goes with its cluster, or `coherent-ray stop` ends it

    def _finished(self, after: Preflight, *, stopped: bool) -> None:
        facts = {
            **_facts(after),
            "stopped": stopped,
            "saves": list(self._saves.values()),
            "skipped": sum(self._skipped.values()),
            "cadence": self._cadence,
        }
        self._tell(Event("finished", facts=facts))


def _facts(found: Preflight) -> dict[str, Any]:
    return {
        "run_id": found.run_id,
        "updates": found.updates,
        "done": found.done,
        "latest": found.latest,
        "complete": found.complete,
    }


def _judge(error: BaseException | None, watch: Watch) -> bool:
    """Turn what ``fit`` ended with into: done (True), another controller (False), or an error."""
    if error is None:
        return True
    cause = error.controller_failure if isinstance(error, ControllerError) else error
    if isinstance(cause, RayTaskError) and isinstance(cause.cause, CoherentRayError):
        cause = cause.cause
    if isinstance(cause, CoherentRayError):
        raise cause
    if isinstance(error, RayActorError):
        return False
    if isinstance(error, TrainingFailedError):
        raise _given_up(error, watch) from error
    raise error


def _given_up(error: TrainingFailedError, watch: Watch) -> TrainingFailed:
    """Return the error of a worker group that failed more often than it may."""
    workers = dict(getattr(error, "worker_failures", {}))
    if not workers:
        return TrainingFailed(str(error).strip() or type(error).__name__)
    count = watch.failures["count"] or 1
    pid = deaths.pid_of(workers)
    times = f"{count} time{'s' if count > 1 else ''}"
    logs = f"{logs_of()}/worker-*{f'-{pid}' if pid else ''}.err"
    return TrainingFailed(
        f"the workers failed {times}; the last time {deaths.in_words(workers)}",
        remedy=f"see its last words in {logs}, on its node; "
        "cluster.max_failures says how many failures a run survives",
        details={"failures": count, "ranks": sorted(workers)},
    )


def main(kind: type[Driver] = Driver) -> int:
    """Read the configuration from standard input and run; events go to the given descriptor."""
    values = config_.build(json.loads(sys.stdin.buffer.read()))
    pipe = int(sys.argv[1])
    # Only this process may hold it open: the supervisor reads until it is closed.
    os.set_inheritable(pipe, False)
    stream = os.fdopen(pipe, "w", encoding="utf-8")

    def tell(event: Event) -> None:
        events.write(stream, event)

    driver = kind(values, tell)
    driver.listen()
    try:
        driver.run()
    except CoherentRayError as error:
        tell(events.from_error(error))
        return error.exit_code
    except (RayError, ConnectionError) as error:
        tell(Event("restarting", f"the driver lost Ray: {error}"))
        return RESTART
    return 0


if __name__ == "__main__":
    sys.exit(main())
