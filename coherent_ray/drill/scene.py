"""One drilled run: the product's supervisor over held processes, and a drill that strikes.

Everything happens in the thread that hears the run's events, the main one: while the drill strikes,
nothing else of it happens. What is seen is written down at once; whether it is right is judged
afterwards (`verdicts`).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ray.exceptions import RayError

from coherent_ray.commit.generations import Generations
from coherent_ray.commit.log import CommitLog
from coherent_ray.commit.records import PublishBody
from coherent_ray.config import Config
from coherent_ray.drill.acts import DEEDS
from coherent_ray.drill.clusters import Ground
from coherent_ray.drill.disks import Disk
from coherent_ray.drill.injections import Injected, Injection
from coherent_ray.drill.stage import Held, Stage
from coherent_ray.drill.victims import Victim
from coherent_ray.errors import ClusterError, CoherentRayError, Interrupted, NoGeneration
from coherent_ray.storage import Storage, open_storage
from coherent_ray.storage.testing.faults import flipped
from coherent_ray.train import coordinators
from coherent_ray.train.events import Event
from coherent_ray.train.identity import run_id_of
from coherent_ray.train.supervisor import Outcome, Supervisor

DRIVER = (sys.executable, "-m", "coherent_ray.drill.driver")
#: Seconds that a generation may take to be published, once its update is done.
PUBLISH_S = 120.0


class Scene:
    """A drilled run, from its first process to its last."""

    def __init__(
        self,
        config: Config,
        ground: Ground,
        stage: Stage,
        injections: Sequence[Injection],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Set the scene; nothing runs yet.

        Args:
            config: The run, on the cluster of `ground`.
            ground: The cluster, that this process is connected to.
            stage: Armed with the injections' holds.
            injections: What is done to it.
            tell: Gets a line for each thing that is done.
        """
        self._tell = tell
        self.config = config
        self.ground = ground
        self.run_id = run_id_of(config)
        self.done: list[Injected] = []
        self.notes: list[str] = []
        self.frozen: list[Victim] = []
        self.driver = 0
        """Process id of the newest driver."""
        self.job = ""
        """Ray's hex id of its job."""
        self.coordinator = 0
        """Process id of a coordinator whose last words count."""
        self.late: Held | None = None
        """Who was frozen in the middle of a save."""
        self.error: CoherentRayError | None = None
        """What the struck command ended with; None: it completed the run."""
        self.failed_saves: list[str] = []
        """Of the whole run: which, and why."""
        self.last_words = ""
        """What the coordinator above has written."""
        self._stage = stage
        self._plan = {injection.hold.name: injection for injection in injections}
        self._sleepers: list[Victim] = []
        self._disk: Disk | None = None
        self._status: dict[str, Any] = {}
        self._resumed: dict[int, int] = {}
        self._begun = time.monotonic()
        self._struck_at: list[float] = []
        self._ending = False
        self._waiting: list[Held] = []

    @property
    def left(self) -> tuple[str, ...]:
        """Holds whose strike found no moment."""
        return (*self._stage.left, *(held.name for held in self._waiting))

    # --- life -------------------------------------------------------------------------------------

    def play(self, *, ends: str | None = None) -> float:
        """Run it to its end, and return the seconds that it took.

        Args:
            ends: Name of the error that the command must end with; None: it must complete.

        Raises:
            Interrupted: Somebody asked to stop.
            CoherentRayError: The run did not reach its end.
        """
        self._begun = time.monotonic()
        try:
            outcome = Supervisor(self.config, self._listen, command=DRIVER).run()
            self.require_complete(outcome)
            self.failed_saves = [
                f"{save['name']} at update {save['update']}: {save['reason']}"
                for save in outcome.facts["saves"]
                if save["fate"] != "published"
            ]
        except CoherentRayError as error:
            if self._ending and not isinstance(error, Interrupted):
                # What a run that is stopped in the middle of a strike ends with is no verdict.
                raise _interrupted() from error
            if type(error).__name__ != ends:
                raise
            self.error = error
        finally:
            self._clean_up()
        return time.monotonic() - self._begun

    def require_complete(self, outcome: Outcome) -> None:
        """Raise `Interrupted` where a run was stopped before its end."""
        if outcome.stopped:
            raise _interrupted()

    def _clean_up(self) -> None:
        self._let_go()
        if self.coordinator:
            self.last_words = self.ground.said(self.coordinator) or ""
        # Ray's job server would end the rest with the driver's job; the coordinator is detached.
        with contextlib.suppress(CoherentRayError):
            coordinators.stop(self.run_id, timeout_s=20.0)

    def _let_go(self) -> None:
        """Leave nobody stopped, held, or to be held."""
        self.thaw()
        self.wake_last()
        with contextlib.suppress(CoherentRayError):
            self._stage.release_all()

    # --- what is heard ----------------------------------------------------------------------------

    def _listen(self, event: Event) -> None:
        match event.kind:
            case "started":
                self.driver, self.job = int(event.facts["pid"]), str(event.facts["job"])
            case "progress":
                self._status = event.facts
                self._note_progress(event.facts.get("progress") or {})
            case "note" | "restarting":
                self.notes.append(event.text)
                if event.text.startswith("stopping:"):
                    self._ending = True
                    self._let_go()
        if event.kind == "progress" and not self._ending:
            waiting, self._waiting = self._waiting, []
            for held in (*waiting, *self._stage.reached()):
                if self._is_due(held):
                    self._strike(held)
                else:
                    self._waiting.append(held)

    def _is_due(self, held: Held) -> bool:
        """Whether a strike can be carried out now: another one may have ended who is held."""
        if not self._plan[held.name].or_later or Victim(held.pid, held.node).alive:
            return True
        progress = self._status.get("progress") or {}
        return int(progress.get("attempt", 0)) > held.attempt

    def _note_progress(self, progress: dict[str, Any]) -> None:
        if "attempt" not in progress:
            return
        attempt, update = int(progress["attempt"]), int(progress["update"])
        resumed = self._resumed.setdefault(attempt, int(progress["resumed_at"]))
        for seen, struck_at in zip(self.done, self._struck_at, strict=True):
            if seen.next_update_s is not None or not seen.disturbs:
                continue
            later = attempt > seen.attempt and update > resumed
            same = attempt == seen.attempt and update > seen.update and not seen.ends_attempt
            if later or same:
                seen.next_update_s = round(time.monotonic() - struck_at, 2)
                seen.lost = max(0, seen.update - resumed) if later else 0

    def _newest(self) -> tuple[int, int]:
        """Return the attempt and the update that were heard of last."""
        progress = self._status.get("progress") or {}
        attempt = progress.get("attempt") or self._status.get("attempt") or 0
        return int(attempt), int(progress.get("update") or 0)

    # --- what is done -----------------------------------------------------------------------------

    def _strike(self, held: Held) -> None:
        injection = self._plan[held.name]
        attempt, update = self._newest()
        said = len(self.notes)
        struck_at = time.monotonic()
        if injection.let_go:
            self._stage.release(held.name)
        try:
            victim = DEEDS[injection.act](self, injection, held)
        except (RayError, OSError) as error:
            raise ClusterError(
                f"the strike could not be carried out: {type(error).__name__}: {error}",
                where=f"{injection.act} {injection.target}, at {held.point}",
            ) from error
        publish, damages = self._selected()
        self.done.append(
            Injected(
                injection=injection,
                victim=victim,
                update=max(update, held.update),
                attempt=held.attempt or attempt,
                after_s=round(struck_at - self._begun, 2),
                selected=publish.name if publish else None,
                selected_update=publish.update if publish else 0,
                damages=damages,
                says="; ".join(self.notes[said:]),
            )
        )
        self._struck_at.append(struck_at)
        what = f"{injection.act} {injection.target} ({victim})"
        self._tell(f"  update {held.update}, at {held.point}: {what}")
        self._stage.release(held.name)

    def _selected(self) -> tuple[PublishBody | None, int]:
        """Return what a reader selects now, and how much is wrong with it."""
        generations = Generations(self.storage)
        try:
            found = generations.select()
        except NoGeneration:
            return None, 1
        if found is None:
            return None, 0
        return found.publish, len(generations.verify(found.publish))

    def say(self, text: str) -> None:
        """Write down what was seen beside."""
        if text:
            self.notes.append(text)

    @property
    def storage(self) -> Storage:
        """The run's root."""
        return open_storage(self.config.run.root, self.config.storage.options)

    @property
    def disk(self) -> Disk:
        """The run's storage, where it can be filled."""
        assert self._disk is not None
        return self._disk

    def put_on(self, disk: Disk) -> None:
        """Lay the run on a storage that can be filled."""
        self._disk = disk
        self.say(disk.kind)

    def freeze(self, victim: Victim, *, wakes_last: bool = False) -> None:
        """Stop a process, and remember it."""
        if victim.send(signal.SIGSTOP):
            (self._sleepers if wakes_last else self.frozen).append(victim)

    def thaw(self) -> list[Victim]:
        """Let all that was stopped go on, and return those that were still there."""
        alive = [victim for victim in self.frozen if _sent(victim)]
        self.frozen.clear()
        return alive

    def wake_last(self) -> None:
        """Let those go on that must not wake with the others."""
        for victim in self._sleepers:
            _sent(victim)
        self._sleepers.clear()

    def await_publish(self, update: int, attempt: int) -> None:
        """Wait until the last generation that is due by an update is published.

        Args:
            update: Done by now.
            attempt: Not before this attempt.

        Raises:
            ClusterError: It was not, within `PUBLISH_S`.
        """
        due = update - update % (self.config.checkpoint.updates_apart or 1)
        log = CommitLog(self.storage)
        until = time.monotonic() + PUBLISH_S
        while (latest := log.read_on().latest) is None or (
            latest.update < due or latest.attempt < attempt
        ):
            if time.monotonic() > until:
                raise ClusterError(f"update {due} was not published within {PUBLISH_S:g} s")
            time.sleep(0.05)

    def flip_newest(self) -> str:
        """Flip a bit in the middle of the newest generation's last shard; return where."""
        generations = Generations(self.storage)
        shard = generations.manifest(generations.find("latest")).shards[-1]
        bit = 8 * (shard.size // 2)
        self.storage.replace(shard.path, flipped(self.storage.read(shard.path), bit))
        return f"{shard.path}, byte {shard.size // 2}"


def _interrupted() -> Interrupted:
    return Interrupted("the drill was interrupted", remedy="start it again")


def _sent(victim: Victim) -> bool:
    try:
        return victim.send(signal.SIGCONT)
    except (CoherentRayError, RuntimeError):
        return False
