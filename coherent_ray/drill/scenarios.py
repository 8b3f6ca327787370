"""The scenarios: which failure, at which point of a run, and what must hold.

Each is a record that only plans. What must hold for all of them: every injection finds its moment;
what a reader selects right after is whole and never older than what it selected before; the run
ends with every receipt and every byte of its final state as in the reference run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from coherent_ray.config import Config
from coherent_ray.config.sections import WorkerRange
from coherent_ray.drill.injections import Injection, Target
from coherent_ray.drill.stage import Hold
from coherent_ray.errors import ConfigError

#: Generations that a drilled run has at least.
FEWEST_SAVES = 4
#: Seconds between two looks for a node that has joined.
RESIZE_INTERVAL_S = 2.0
#: Seconds until a collective is given up, where a drill stops a worker.
HUNG_COLLECTIVE_S = 15.0


@dataclass(frozen=True, slots=True)
class Course:
    """What a scenario must know of the run."""

    updates: int
    every: int
    """Updates between two generations."""
    workers: int
    kills: int = 10
    seed: int = 0

    def save(self, index: int) -> int:
        """Return the update that the generation of an index, from 1, holds."""
        return min(index * self.every, self.updates)

    def between(self, index: int) -> int:
        """Return an update after that generation and before the next, if there is one."""
        return self.save(index) + (1 if self.every > 1 else 0)

    @property
    def last_rank(self) -> int:
        """The highest rank."""
        return self.workers - 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A failure on purpose."""

    name: ClassVar[str] = ""
    apart: ClassVar[bool] = False
    """It needs a cluster of the drill's own, with each worker on a node of its own."""
    own: ClassVar[bool] = False
    """It needs a cluster on this machine that the drill started."""
    attempts: ClassVar[int | None] = None
    """Attempts of the whole run; None: as many as it takes."""
    settings: ClassVar[dict[str, dict[str, object]]] = {}
    """Settings of the run that the scenario changes, by section."""
    ends: ClassVar[str | None] = None
    """The error that the struck command must end with; None: it completes the run."""
    small_disk: ClassVar[bool] = False
    """The run lies on a storage of its own that can be filled."""

    def plan(self, course: Course) -> list[Injection]:
        """Return what is injected, in order."""
        raise NotImplementedError

    def settings_for(self, config: Config) -> dict[str, dict[str, object]]:
        """Return the settings of a run that the scenario changes, by section."""
        return self.settings

    def why_not(self, config: Config) -> str:
        """Return why a run cannot suffer it; empty: it can."""
        return ""


class WorkerMidShard(Scenario):
    """The last rank is killed when half of its shard of the second generation is written.

    The first generation stays latest, the torn shard belongs to nothing, and the group starts
    again from there: two attempts.
    """

    name, attempts = "worker-mid-shard", 2

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        hold = Hold("kill", "shard:half-written", course.save(2), course.last_rank)
        return [Injection(hold, "worker", selects=course.save(1))]


class CoordinatorBeforePublish(Scenario):
    """The coordinator is killed when all ranks have acknowledged, and nothing is published.

    The generation before stays latest until Ray has started the coordinator again; then the same
    generation completes, and no worker notices: one attempt.
    """

    name, attempts = "coordinator-before-publish", 1

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        hold = Hold("kill", "publish:begin", course.save(2))
        return [Injection(hold, "coordinator", selects=course.save(1))]


class CoordinatorAfterPublish(Scenario):
    """The coordinator is killed when its record is in the log, and no rank has heard of it.

    The new generation is latest at once, and the ranks are told of it by the next coordinator: one
    attempt.
    """

    name, attempts = "coordinator-after-publish", 1

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        hold = Hold("kill", "publish:end", course.save(2))
        return [Injection(hold, "coordinator", selects=course.save(2))]


class Controller(Scenario):
    """Ray Train's controller is killed between the second and the third generation.

    All workers die with it. The driver gives back what it held and starts another: two attempts.
    """

    name, attempts = "controller", 2

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        return [Injection(Hold("kill", "update", course.between(2), 0), "controller")]


class Driver(Scenario):
    """The driver process is killed between the second and the third generation.

    Ray ends its job and all workers. The supervisor starts another driver, which finds the
    coordinator by its name: two attempts.
    """

    name, attempts = "driver", 2

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        return [Injection(Hold("kill", "update", course.between(2), 0), "driver")]


class Node(Scenario):
    """The last rank's node is removed, with all its processes; another node joins.

    The group starts again on the nodes that are left: two attempts.
    """

    name, apart, own = "node", True, True

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        hold = Hold("remove", "update", course.between(2), course.last_rank)
        return [Injection(hold, "node", "remove")]


class Elastic(Scenario):
    """The last rank's node is removed, and later another joins, of a run that follows its cluster.

    The group goes on with one worker less, from the latest generation. When the other node is
    there, it saves one more generation and starts again with one worker more: no update is lost by
    that. Three attempts, and none of it is a failure.
    """

    name, apart, own, attempts = "elastic", True, True, 3

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        lost = Hold("lose", "update", course.between(2), course.last_rank)
        joined = Hold("join", "update", course.between(3), 0, attempt=2)
        return [Injection(lost, "node", "lose"), Injection(joined, "node", "join")]

    def settings_for(self, config: Config) -> dict[str, dict[str, object]]:
        """See `Scenario.settings_for`."""
        workers = WorkerRange(min=1, max=config.cluster.most)
        settings: dict[str, object] = {
            "workers": workers, "resize_interval_s": RESIZE_INTERVAL_S, "max_failures": 0,
        }  # fmt: skip
        return {"cluster": settings}

    def why_not(self, config: Config) -> str:
        """See `Scenario.why_not`."""
        if config.run.claim == "exact":
            return "run.claim is exact, which promises nothing at another rank count"
        return "one worker cannot become fewer" if config.cluster.most == 1 else ""


class NodeFrozen(Scenario):
    """The last rank's node freezes in the middle of a shard, and goes on when it is given up.

    Ray counts the node as lost, and the group starts again on another. Once that one has
    published, the frozen worker goes on: it writes its shard to the end and acknowledges it, late.
    It is told that its attempt is over; its shard belongs to nothing.
    """

    name, apart, own = "node-frozen", True, True

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        half = Hold("freeze", "shard:half-written", course.save(2), course.last_rank)
        later = Hold("go on", "update", course.between(3), 0, attempt=2)
        return [
            Injection(half, "node", "freeze", selects=course.save(1)),
            Injection(later, "node", "go on"),
        ]


class Head(Scenario):
    """The head's service (GCS) is killed between two generations, and started again.

    It stores what it knows (Ray's RocksDB), so actors keep their names. Workers train on without
    it, and nobody is restarted: one attempt.
    """

    name, apart, own, attempts = "head", True, True, 1

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        return [Injection(Hold("restart", "update", course.between(2), 0), "head", "restart")]


class StorageFull(Scenario):
    """The storage is full from after the first generation until after the third is due.

    The saves in between fail with place and reason, training goes on, the first generation stays
    latest; the next save works as soon as there is room: one attempt.
    """

    name, attempts, small_disk = "storage-full", 1, True
    settings: ClassVar[dict[str, dict[str, object]]] = {"checkpoint": {"max_failed_saves": 1000}}

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        full = Hold("fill", "update", course.between(1), 0)
        free = Hold("free", "update", course.between(3), 0)
        return [
            Injection(full, "storage", "fill", selects=course.save(1)),
            Injection(free, "storage", "free", selects=course.save(1)),
        ]


class BitFlip(Scenario):
    """One byte of the newest generation's last shard is flipped, and a worker is killed.

    Readers select the generation before, and so does the resume: two attempts. What was flipped is
    still named by `verify` when the run is over.
    """

    name, attempts = "bit-flip", 2
    settings: ClassVar[dict[str, dict[str, object]]] = {"checkpoint": {"on_damage": "fall_back"}}

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        hold = Hold("flip", "update", course.between(2), course.last_rank)
        return [Injection(hold, "shard", "flip", selects=course.save(1))]


class Hang(Scenario):
    """The last rank is stopped by SIGSTOP, and goes on when a new attempt has published.

    The others give up their collective, and the group starts again: two attempts. Ray itself ends
    what is left of the old one; if it did not, the log would fence it.
    """

    name, attempts = "hang", 2
    settings: ClassVar[dict[str, dict[str, object]]] = {
        "cluster": {"collective_timeout_s": HUNG_COLLECTIVE_S}
    }

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        stop = Hold("stop", "update", course.between(2), course.last_rank)
        later = Hold("go on", "update", course.between(3), 0, attempt=2)
        return [Injection(stop, "worker", "stop"), Injection(later, "worker", "go on")]


class HangCoordinator(Scenario):
    """The coordinator is stopped by SIGSTOP before it publishes the second generation.

    The driver sees that it does not answer and lets Ray start it again; the same generation
    completes, and no worker notices: one attempt.
    """

    name, attempts = "hang-coordinator", 1

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        stop = Hold("stop", "publish:begin", course.save(2))
        later = Hold("go on", "update", course.between(3), 0)
        return [
            Injection(stop, "coordinator", "stop", selects=course.save(1)),
            Injection(later, "coordinator", "go on"),
        ]


class Partition(Scenario):
    """Everything of the run is stopped, and the same command completes it in another Ray.

    Then the old ones go on: workers in mid-history, a coordinator that believes in its attempt, a
    controller and a driver. Two live coordinators on one root: the log fences the old one, which
    says so in its log; its workers and its driver end with that error, and nothing of theirs is
    published.
    """

    name, attempts, own, ends = "partition", 2, True, "Fenced"

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        return [Injection(Hold("part", "update", course.between(2), 0), "run", "part")]


class Storm(Scenario):
    """Kills from a seed, one after the other: workers, coordinator, controller, driver.

    Each comes at a random point of a save or between updates, in a stretch of the run of its own;
    half of them fall anywhere behind that point, on processes that run.
    """

    name = "storm"
    #: Where a worker can be held, and where the coordinator.
    POINTS: ClassVar[tuple[str, ...]] = (
        "update", "save:begin", "shard:half-written", "shard:unsynced", "shard:written",
        "save:acknowledge",
    )  # fmt: skip
    PUBLISH: ClassVar[tuple[str, ...]] = ("publish:begin", "publish:end")
    TARGETS: ClassVar[tuple[Target, ...]] = ("worker", "coordinator", "controller", "driver")
    WEIGHTS: ClassVar[tuple[int, ...]] = (5, 3, 1, 1)

    def plan(self, course: Course) -> list[Injection]:
        """See `Scenario.plan`."""
        draw = random.Random(course.seed)
        stretch = (course.updates - course.every) / max(course.kills, 1)
        result = []
        for index in range(course.kills):
            update = max(1, int((index + draw.random()) * stretch))
            (target,) = draw.choices(self.TARGETS, self.WEIGHTS)
            at_publish = target == "coordinator" and draw.random() < 0.7
            point = draw.choice(self.PUBLISH if at_publish else self.POINTS)
            rank = None if at_publish else draw.randrange(course.workers)
            hold = Hold(f"kill-{index + 1:03}", point, update, rank)
            let_go = draw.random() < 0.5
            result.append(Injection(hold, target, let_go=let_go, or_later=True))
        return result


SCENARIOS: dict[str, Scenario] = {
    kind.name: kind()
    for kind in (
        WorkerMidShard, CoordinatorBeforePublish, CoordinatorAfterPublish, Controller, Driver,
        Node, Elastic, NodeFrozen, Head, StorageFull, BitFlip, Hang, HangCoordinator, Partition,
        Storm,
    )
}  # fmt: skip


def course_of(config: Config, updates: int, kills: int, seed: int) -> Course:
    """Return what scenarios must know of a run.

    Args:
        config: The run.
        updates: Of the whole run.
        kills: Of a storm.
        seed: Of a storm.

    Raises:
        ConfigError: The run has too few generations for a failure between two, or makes them when
            a clock says so.
    """
    every = config.checkpoint.updates_apart
    if every is None or config.checkpoint.on_busy == "skip":
        raise ConfigError(
            "a drill strikes between generations, and this run does not say in which updates they "
            "are",
            where="checkpoint",
            remedy="--set checkpoint.every=null --set checkpoint.every_seconds=null --set "
            "checkpoint.mtbf_s=null --set checkpoint.every_updates="
            f"{max(1, updates // (FEWEST_SAVES + 1))} --set checkpoint.on_busy=wait",
        )
    if updates <= FEWEST_SAVES * every - every + 1:
        raise ConfigError(
            f"{updates} updates with a generation every {every} are too few for a drill: it needs "
            f"{FEWEST_SAVES} generations",
            where="checkpoint.every_updates",
            remedy=f"--set checkpoint.every_updates={max(1, updates // (FEWEST_SAVES + 1))}",
            details={"updates": updates, "every_updates": every},
        )
    return Course(updates, every, config.cluster.most, kills, seed)
